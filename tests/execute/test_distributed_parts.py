"""The small parts of a run by several workers, each on its own."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from fsdpckpt.comm.exchanger import SEND_BUFFERS
from fsdpckpt.comm.liveness import kill_stopped, process_identity
from fsdpckpt.comm.protocol import encode_error, original_error
from fsdpckpt.errors import SourceCorruptError, UsageError, WorkerError
from fsdpckpt.execute.job import choose_settings, for_worker, make_budget, threads_for
from fsdpckpt.execute.send_recv import ReceiveBuffers
from fsdpckpt.execute.window import CopyPool
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.plan import Plan
from fsdpckpt.plan.transfer import Window

# errors


@pytest.mark.parametrize(
    "error",
    [
        SourceCorruptError("bad", details=("a", "b"), why="w", file="f", key="k", expected="1", found="2"),
        OSError(28, "No space left on device", "/x/y"),
    ],
)
def test_an_error_arrives_as_what_it_was(error: SourceCorruptError | OSError) -> None:
    lost = WorkerError("worker 3 failed", rank=3)
    lost.step, lost.original = "copy", encode_error(error)
    found = original_error(lost)
    assert type(found) is type(error)
    names = ("errno", "filename") if isinstance(error, OSError) else ("what", "why", "file", "key", "expected", "found")
    assert [getattr(found, name) for name in names] == [getattr(error, name) for name in names]
    if isinstance(found, SourceCorruptError):
        assert found.details == ("a", "b", "raised by worker 3 in step 'copy'")


@pytest.mark.parametrize("record", [None, {}, {"type": "eval", "what": "x"}, {"type": "annotations", "what": "x"}])
def test_any_other_cause_stays_a_failure_of_a_worker(record: dict[str, object] | None) -> None:
    lost = WorkerError("worker 1 failed", rank=1)
    lost.cause, lost.original = "RuntimeError: x", record
    assert original_error(lost) is lost
    assert encode_error(UsageError("no")) is not None
    assert encode_error(ZeroDivisionError()) is encode_error(WorkerError("lost")) is None


# memory


@pytest.mark.parametrize("mebibytes", [1, 3, 16, 128, 1000])
@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("casts", [(), (("float64", "float8_e4m3fn"),)])
def test_all_buffers_of_a_worker_fit_its_memory(mebibytes: int, threads: int, casts) -> None:
    memory = mebibytes << 20
    plan = Plan((), tuple((DTYPES[source], DTYPES[target]) for source, target in casts), 0)
    budget = make_budget(max_memory=memory, threads=threads)
    for exchanging in (False, True):
        settings = choose_settings(plan, budget, memory, exchanging=exchanging)
        count = threads_for(settings, budget)
        chunk = settings.exchange_bytes // SEND_BUFFERS
        rounds = settings.rounds_held * settings.round_bytes
        used = count * 2 * settings.window + rounds + settings.exchange_bytes + 2 * chunk
        assert used <= memory
        growth = 8 if casts else 1
        assert not exchanging or settings.window * growth <= settings.round_bytes


def test_workers_that_share_a_machine_share_its_threads() -> None:
    budget = make_budget(max_memory=1 << 27, threads=8)
    assert for_worker(budget, 4, max_memory=1 << 27, chosen=False).threads == 2
    assert for_worker(budget, 4, max_memory=1 << 27, chosen=True).threads == 8


# what has arrived


def buffers(rounds: int, held: int) -> ReceiveBuffers:
    """Rounds of 100 + n bytes from worker 0 and 7 from worker 3, for two windows each but the last, which has none."""
    receives = {0: 100 + np.arange(rounds), 3: np.full(rounds, 7)}
    for column in receives.values():
        column[-1] = 0
    return ReceiveBuffers(receives, dict.fromkeys(range(rounds - 1), 2), rounds, held)


def test_a_round_has_room_once_both_windows_of_an_earlier_one_are_written() -> None:
    found = buffers(6, 2)
    assert [found.reserve(number) for number in (0, 1, 0, 2)] == [True, True, True, False]
    found.written(1)
    assert not found.reserve(2)
    found.written(1)
    assert found.reserve(2)
    assert not found.reserve(3)
    assert found.reserve(5), "a round that brings this worker nothing needs no room"


def test_the_room_that_was_given_back_last_is_taken_first() -> None:
    found = buffers(9, 4)
    for number in range(3):
        assert found.reserve(number)
    rooms = [found.part(0, number, 0, 1).ctypes.data for number in range(3)]
    for number in (0, 0, 2, 2):
        found.written(number)
    assert found.reserve(3)
    assert found.reserve(4)
    assert [found.part(0, number, 0, 1).ctypes.data for number in (3, 4)] == [rooms[2], rooms[0]]


def test_a_stream_is_read_from_the_round_it_came_in(tmp_path) -> None:
    found, data = buffers(5, 3), {0: random.Random(1).randbytes(1000), 3: random.Random(2).randbytes(1000)}
    begins = {0: [0, 100, 201, 303], 3: [0, 7, 14, 21]}
    for number in (0, 1, 2):
        assert found.reserve(number)
        for sender, count in ((0, 100 + number), (3, 7)):
            begin = begins[sender][number]
            for part in range(2):  # in two chunks
                at, end = (count * each // 2 for each in (part, part + 1))
                place = found.part(sender, number, at, end - at)
                place[:] = np.frombuffer(data[sender][begin + at : begin + end], np.uint8)
    for sender, offset, nbytes in ((0, 3, 90), (0, 100, 101), (0, 250, 53), (3, 0, 7), (3, 15, 6)):
        into = bytearray(nbytes)
        found.read_into(sender, offset, memoryview(into))
        assert into == data[sender][offset : offset + nbytes]


# threads


def test_windows_of_a_round_wait_until_it_has_arrived() -> None:
    windows = [Window(0, number, number + 1, number % 3 - 1) for number in range(30)]
    done: list[int] = []
    pool = CopyPool(windows, 2, lambda _, window: done.append(window.round))
    pool.start()
    pool.wait(lambda: None, lambda: len(done) == 10)
    assert set(done) == {-1}
    pool.received(0)
    pool.wait(lambda: None, lambda: len(done) == 20)
    assert set(done) == {-1, 0}
    pool.received(1)
    pool.wait(lambda: None)
    assert len(done) == 30
    pool.stop()


def test_a_pool_that_goes_in_order_waits_for_the_bytes_of_the_next_window_and_holds_what_came_for_later_ones() -> None:
    rounds = [-1, 0, -1, 1, 1, -1, 2, -1]
    windows = [Window(0, number, number + 1, each) for number, each in enumerate(rounds)]
    done: list[int] = []
    pool = CopyPool(windows, 1, lambda _, window: done.append(window.begin), in_order=True)
    pool.start()
    for came, expected in ((2, 1), (1, 1), (0, 8)):
        pool.received(came)
        pool.wait(lambda: None, lambda least=expected: len(done) >= least)  # type: ignore[misc]
        assert done == list(range(expected))
    pool.wait(lambda: None)
    pool.stop()


def test_what_a_thread_raises_the_main_thread_raises() -> None:
    def copy(_: int, window: Window) -> None:
        raise UsageError(f"window {window.begin}")

    pool = CopyPool([Window(0, 5, 6, -1)], 2, copy)
    pool.start()
    with pytest.raises(UsageError, match="window 5"):
        pool.wait(lambda: None)
    pool.stop()


def test_a_pool_moves_when_a_window_is_written_and_while_it_said_it_would_be_silent() -> None:
    go = threading.Event()
    pool = CopyPool([Window(0, 0, 1, -1)], 1, lambda *_: void(go.wait(5)))
    pool.start()
    assert not pool.moved()
    pool.expect_silence(10_000_000)
    assert pool.moved()
    go.set()
    pool.wait(lambda: None)
    pool.stop()
    time.sleep(0.6)
    assert pool.moved()
    assert not pool.moved()


def void(_: object) -> None:
    """A result that nobody needs."""


# processes


def test_a_stopped_worker_is_ended_and_a_running_one_is_not() -> None:
    code = "from fsdpckpt.comm.liveness import process_identity as p; import json, time; "
    code += "print(json.dumps(p()), flush=True); time.sleep(60)"
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        peers = [__import__("json").loads(process.stdout.readline()) for process in started]
        os.kill(started[0].pid, signal.SIGSTOP)
        os.waitid(os.P_PID, started[0].pid, os.WSTOPPED | os.WNOWAIT)
        other_life = [peers[1][0], started[0].pid, "another start"]
        kill_stopped([other_life, process_identity()])
        assert started[0].poll() is None, "another process of that id was ended"
        kill_stopped([*peers, process_identity()])
        assert started[0].wait(10) == -signal.SIGKILL
        assert started[1].poll() is None
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("open_files", "expected"), [(20, 2), (24, 3), (64, 8), (1024, 8), (resource.RLIM_INFINITY, 8)]
)
def test_fewer_files_take_turns_where_few_may_be_open(
    open_files: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (open_files, open_files))
    plan, budget = Plan((), (), 0), make_budget(max_memory=1 << 20, threads=2)
    for exchanging in (False, True):
        assert choose_settings(plan, budget, 1 << 20, exchanging=exchanging).files_at_once == expected
