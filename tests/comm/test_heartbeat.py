"""A failure of another rank interrupts a body that runs under a heartbeat, whatever it does."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from fsdpckpt.comm import TorchGroup
from fsdpckpt.comm.liveness import heartbeat
from fsdpckpt.errors import WorkerError
from fsdpckpt.process import pending_requests


def another_rank_failed(progress: bool) -> None:
    raise WorkerError("worker 1 failed")


@pytest.mark.parametrize("handler", [None, signal.SIG_IGN], ids=["as it is", "of a job in the background"])
def test_it_interrupts_a_call_that_blocks(handler: signal.Handlers | None) -> None:
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, handler or before)
    try:
        started = time.monotonic()
        with pytest.raises(WorkerError, match="worker 1"), heartbeat(another_rank_failed):
            time.sleep(20)
        assert time.monotonic() - started < 10
        assert signal.getsignal(signal.SIGINT) is (handler or before)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_python_cannot_restore_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patched:
        patched.setattr(signal, "getsignal", lambda _: None)
        with pytest.raises(WorkerError, match="worker 1"), heartbeat(another_rank_failed):
            time.sleep(1)
    assert signal.getsignal(signal.SIGINT) is before


def test_it_is_raised_after_a_body_on_another_thread() -> None:
    raised: list[BaseException] = []

    def work() -> None:
        try:
            with heartbeat(another_rank_failed):
                time.sleep(1)
        except WorkerError as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert [str(error) for error in raised] == [str(WorkerError("worker 1 failed"))]


def test_ctrl_c_stays_a_keyboard_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt), heartbeat(lambda _: None):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(20)


def test_it_reports_progress_for_a_body_that_computes_but_not_for_one_that_sleeps() -> None:
    reports: list[bool] = []
    with heartbeat(reports.append):
        time.sleep(1)
    assert not any(reports[1:])
    reports.clear()
    with heartbeat(reports.append):
        end = time.monotonic() + 1
        while time.monotonic() < end:
            pass
    assert reports and all(reports)


class TestAGroupOfOneRank:
    @pytest.fixture(autouse=True)
    def process_group(self) -> Iterator[None]:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()

    def test_a_rank_does_not_watch_itself(self) -> None:
        with TorchGroup.over(limit=0.3) as group:
            end = time.monotonic() + 0.8
            while time.monotonic() < end:
                group.watch(moving=False)
                time.sleep(0.05)

    def test_a_pending_request_counts_as_progress(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reports: list[bool] = []
        with TorchGroup.over() as group:
            monitor = group._monitor  # type: ignore[attr-defined]
            monkeypatch.setattr(monitor, "check_peers", lambda *, progress: reports.append(progress))
            group.watch(moving=False)
            with pending_requests:
                group.watch(moving=False)
            group.watch(moving=False)
            monkeypatch.undo()
        assert reports == [False, True, False]
