"""A plan that is stopped anywhere and run again with its journal: the same bytes, checksums and proofs."""

from __future__ import annotations

import errno
import os
import random
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdpckpt.errors import SourceCorruptError, TargetExistsError, TargetUnwritableError
from fsdpckpt.execute import journal
from fsdpckpt.execute.job import Budget
from fsdpckpt.execute.journal import JournaledWindows, Recorder, RunIdentity, read_run
from fsdpckpt.execute.stored_checksums import DeferredChecksums
from fsdpckpt.ir.checkpoint import Checksums, SourceFile
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.files import Stored
from fsdpckpt.ir.targets import Target, TargetFile
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.plan import Plan, make_plan
from fsdpckpt.progress import NoProgress
from fsdpckpt.storage import FileIdentity
from fsdpckpt.storage.local_target import WritableFile
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import size_text
from tests.execute.running import run_plan

BYTES = DTYPES["uint8"]


class Stop(BaseException):
    """As a signal."""


class Stopping(NoProgress):
    """Stops the run once ``windows`` are copied."""

    def __init__(self, windows: int) -> None:
        self.left = windows
        self.copying = False

    def begin(self, stage: str, total_bytes: int) -> None:
        self.copying = stage == "copy"

    def advance(self, nbytes: int) -> None:
        self.left -= self.copying
        if self.left <= 0:
            raise Stop


@dataclass
class Scene:
    """Random tensors in one source file with checksums, and files that hold them with checksums before and behind."""

    folder: str
    plan: Plan
    files: tuple[SourceFile, ...]
    checksums: Checksums
    expected: dict[str, bytes]
    budget: Budget

    @property
    def journal(self) -> str:
        return os.path.join(self.folder, "journal")

    def locate(self, path: str) -> str:
        return os.path.join(self.folder, "out", path)

    def identity(self) -> RunIdentity:
        return RunIdentity("1", self.plan.digest(), {"to": "full"}, [[FileIdentity(self.files[0].path, 1, 2, 3)]])

    def run(self, journaled: JournaledWindows, progress: NoProgress | None = None) -> dict[str, int]:
        with Sources() as sources:
            return run_plan(
                self.plan,
                files=self.files,
                checksums=self.checksums,
                sources=sources,
                locate=self.locate,
                budget=self.budget,
                progress=progress,
                recorder=Recorder(self.journal, self.identity, journaled),
            )

    def stopped(self, windows: int) -> JournaledWindows:
        """Run until ``windows`` are done; what the journal says then."""
        with pytest.raises(Stop):
            self.run(JournaledWindows(), Stopping(windows))
        found = read_run(self.journal)
        assert found[0] == self.identity()
        return found[1]

    def require_expected(self, crcs: dict[str, int]) -> None:
        for path, data in self.expected.items():
            assert Path(self.locate(path)).read_bytes() == data
            assert crcs[path] == zlib.crc32(data)


def scene(folder: str, seed: int, *, threads: int = 1, damage: bool = False) -> Scene:
    rng = random.Random(seed)
    source = bytearray(rng.randbytes(rng.randrange(50)))
    rows, tensors, values = [], [], []
    for _ in range(rng.randrange(2, 7)):
        data = rng.randbytes(rng.choice([1, 63, 64, 65, 500, 3001]))
        offset = len(source)
        source += data + rng.randbytes(rng.randrange(20))
        rows.append((0, offset, len(data), zlib.crc32(data)))
        tensors.append(Tensor(BYTES, (len(data),), Chunks.whole(file=0, offset=offset, shape=(len(data),))))
        values.append(data)
    if damage:
        largest = max(rows, key=lambda row: row[2])
        source[largest[1] + largest[2] // 2] ^= 1
    path = os.path.join(folder, "source")
    Path(path).write_bytes(source)
    files, expected = [], {}
    for number in range(rng.randrange(1, 4)):
        file, data = TargetFile(f"out{number}"), bytearray()
        wanted: list[tuple[int, int, list[int]]] = []
        for index in rng.sample(range(len(tensors)), len(tensors)):
            before = file.add_literal(bytes(4) + rng.randbytes(rng.randrange(300)))
            data += bytes(file.nbytes - len(data))
            data[before:] = file.blob[len(file.blob) - (file.nbytes - before) :]
            begin = file.add_write_item(tensors[index])
            data += values[index]
            wanted.append((begin, file.nbytes, [before]))
        for begin, end, places in wanted:  # as a zip file's central directory
            places.append(file.add_literal(bytes(4)))
            data += bytes(4)
            file.add_checksum(begin, end, places)
        for begin, end, places in wanted:
            for place in places:
                data[place : place + 4] = zlib.crc32(data[begin:end]).to_bytes(4, "little")
        files.append(file)
        expected[file.path] = bytes(data)
    plan = make_plan(Target(files))
    budget = Budget(threads=threads, window=rng.choice([64, 100, 256]))
    return Scene(folder, plan, (Stored(path, len(source)),), Checksums.of(rows), expected, budget)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(1, 3))
def test_a_plan_stopped_after_any_window_goes_on_to_the_same_bytes(seed: int, windows: int, threads: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = scene(folder, seed, threads=threads)
        try:
            journaled = made.stopped(windows)
        except pytest.fail.Exception:  # there were fewer windows
            return
        assert journaled.nbytes > 0
        made.require_expected(made.run(journaled))


@pytest.mark.parametrize("seed", range(5))
def test_a_run_stopped_many_times_comes_to_its_end(tmp_path: Path, seed: int) -> None:
    made = scene(str(tmp_path), seed)
    journaled = made.stopped(3)
    counts = [journaled.nbytes]
    while True:
        try:
            crcs = made.run(journaled, Stopping(5))  # the first advance is what was there
            break
        except Stop:
            found = read_run(made.journal)
            journaled = found[1]
            counts.append(journaled.nbytes)
    made.require_expected(crcs)
    assert counts == sorted(set(counts))


@pytest.mark.parametrize("seed", range(8))
def test_a_file_of_which_all_is_written_but_the_deferred_checksums_is_finished(tmp_path: Path, seed: int) -> None:
    """Also when some of them are written already: a kill may come between."""
    made = scene(str(tmp_path), seed)
    made.run(JournaledWindows())
    rows = []
    for number, file in enumerate(made.plan.files):
        data, deferred = bytearray(made.expected[file.path]), DeferredChecksums(file)
        for begin in range(0, len(data), made.budget.window):
            view = memoryview(data)[begin : begin + made.budget.window]
            deferred.clear(begin, view)
            rows.append((number, begin, begin + len(view), zlib.crc32(view), 0))
    before = {path: Path(made.locate(path)).stat().st_ino for path in made.expected}
    made.require_expected(made.run(JournaledWindows(np.array(rows))))
    assert before == {path: Path(made.locate(path)).stat().st_ino for path in made.expected}


class Stages(NoProgress):
    """What was reported, stage by stage: its name, its total and the bytes that were done."""

    def __init__(self) -> None:
        self.stages: list[list[Any]] = []

    def begin(self, stage: str, total_bytes: int) -> None:
        self.stages.append([stage, total_bytes, 0])

    def advance(self, nbytes: int) -> None:
        self.stages[-1][2] += nbytes


def test_what_is_checked_has_a_bar_of_its_own(tmp_path: Path) -> None:
    made, stages = scene(str(tmp_path), 3), Stages()
    journaled = made.stopped(8)
    made.run(journaled, stages)
    total = sum(map(len, made.expected.values()))
    there = journaled.nbytes
    assert stages.stages == [
        [f"checking {size_text(there)} already written", there, there],
        ["copy", total - there, total - there],
    ]


def test_windows_that_are_on_the_disk_are_not_read_from_the_source_again(tmp_path: Path) -> None:
    made = scene(str(tmp_path), 3)
    journaled = made.stopped(8)
    source = Path(made.files[0].path)
    source.write_bytes(bytes(source.stat().st_size))  # zeros: whatever is read from it now is wrong
    with pytest.raises(SourceCorruptError):
        made.run(journaled)
    for number, begin, end, crc, _ in journaled.windows.tolist():
        file = made.plan.files[number]
        view = memoryview(bytearray(Path(made.locate(file.path)).read_bytes()[begin:end]))
        DeferredChecksums(file).clear(begin, view)
        assert zlib.crc32(view) == crc


@pytest.mark.parametrize("seed", range(6))
def test_a_damaged_record_is_found_whichever_run_read_which_part(tmp_path: Path, seed: int) -> None:
    made = scene(str(tmp_path), seed, damage=True)
    found = 0
    for windows in range(1, 12):
        for path in made.expected:
            Path(made.locate(path)).unlink(missing_ok=True)
        Path(made.journal).unlink(missing_ok=True)
        try:
            journaled = made.stopped(windows)
        except (SourceCorruptError, pytest.fail.Exception):
            continue
        found += 1
        with pytest.raises(SourceCorruptError, match="does not match its checksum"):
            made.run(journaled)
    assert found


def test_nothing_is_in_the_journal_before_its_file_and_its_name_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    path = str(tmp_path / "out")
    file = WritableFile(path, 10)
    monkeypatch.setattr(WritableFile, "sync", lambda self: events.append(f"data {os.path.basename(self.path)}"))
    monkeypatch.setattr(journal, "sync_directory", lambda path: events.append(f"names {path}"))
    monkeypatch.setattr(
        "fsdpckpt.execute.journal.Journal.append", lambda self, records: events.append(f"journal {len(records)}")
    )
    identity = RunIdentity("1", "plan", {}, [])
    recorder = Recorder(str(tmp_path / "journal"), lambda: identity, JournaledWindows())
    recorder.wrote(0, file, (0, 10, 123))
    recorder.close(complete=False)
    assert events == ["data out", f"names {tmp_path}", "journal 1"]
    file.close()


def test_a_failed_sync_ends_the_run_even_when_all_windows_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk reports a lost write once, and it reported it to the journal's sync."""
    made = scene(str(tmp_path), 1)
    monkeypatch.setattr(journal, "SYNC_SECONDS", 0.0)

    def lost(self: WritableFile) -> None:
        raise TargetUnwritableError("lost", file=self.path)

    monkeypatch.setattr(WritableFile, "sync", lost)
    recorder = Recorder(made.journal, made.identity, JournaledWindows())
    recorder.start(lambda: np.zeros((0, 5), np.int64))
    recorder.wrote(0, WritableFile(str(tmp_path / "one"), 5), (0, 5, 1))
    with pytest.raises(TargetUnwritableError, match="lost"):
        while True:
            recorder.wrote(0, WritableFile(str(tmp_path / f"{random.random()}"), 5), (0, 5, 1))
    with pytest.raises(TargetUnwritableError, match="lost"):
        recorder.close(complete=True)


def test_a_file_whose_sync_failed_once_is_not_in_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system tells of a lost write once: a second sync of the same file succeeds, and means nothing."""
    made = scene(str(tmp_path), 3)
    failed: list[str] = []

    def fsync(descriptor: int, real: Callable[[int], None] = os.fsync) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if "/out/" in name and os.path.isfile(name) and not failed:
            failed.append(os.path.basename(name))
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(TargetUnwritableError):
        made.run(JournaledWindows())
    assert failed
    assert not os.path.exists(made.journal) or read_run(made.journal)[1].nbytes == 0


def test_a_signal_while_the_threads_start_waits_for_the_window_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, signalled = threading.Event(), threading.Event()
    start, write = threading.Thread.start, WritableFile.write

    def interrupted(self: threading.Thread) -> None:
        if self.name == "fsdpckpt-copy-1":
            assert writing.wait(10)
            signalled.set()
            raise Stop
        start(self)

    def slow(self: WritableFile, offset: int, data: memoryview | bytes) -> None:
        writing.set()
        assert signalled.wait(10)
        time.sleep(0.2)
        write(self, offset, data)

    made = scene(str(tmp_path), 1, threads=2)
    with monkeypatch.context() as patched, pytest.raises(Stop):
        patched.setattr(threading.Thread, "start", interrupted)
        patched.setattr(WritableFile, "write", slow)
        made.run(JournaledWindows())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fsdpckpt-")]
    found = read_run(made.journal)
    assert found[1].nbytes > 0
    made.require_expected(made.run(found[1]))


def test_a_signal_while_the_thread_of_the_journal_starts_hangs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: threading.Thread) -> None:
        raise Stop

    made = scene(str(tmp_path), 1)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(Stop):
        made.run(JournaledWindows())
    assert not os.path.exists(made.journal)


def test_a_quick_run_leaves_no_journal(tmp_path: Path) -> None:
    made = scene(str(tmp_path), 2)
    made.require_expected(made.run(JournaledWindows()))
    assert not os.path.exists(made.journal)


@pytest.mark.parametrize("seed", range(5))
def test_finished_files_are_told_from_others_by_every_byte(tmp_path: Path, seed: int) -> None:
    made = scene(str(tmp_path), seed, threads=2)
    made.run(JournaledWindows())

    def written() -> bool:
        with Sources() as sources:
            try:
                run_plan(
                    made.plan,
                    files=made.files,
                    checksums=made.checksums,
                    sources=sources,
                    locate=made.locate,
                    budget=made.budget,
                    compare=True,
                )
            except TargetExistsError:
                return False
        return True

    assert written()
    rng = random.Random(seed)
    for path, data in made.expected.items():
        file = Path(made.locate(path))
        plan = next(each for each in made.plan.files if each.path == path)
        places = set(plan.checksums[:, 2:].ravel().tolist()) - {-1}
        for place in {*rng.sample(range(len(data)), 10), 0, len(data) - 1, *rng.sample(sorted(places), 2)}:
            changed = bytearray(data)
            changed[place] ^= 1
            file.write_bytes(changed)
            assert not written(), place
        file.write_bytes(data + b"x")
        assert not written()
        file.unlink()
        assert not written()
        file.write_bytes(data)
    assert written()


def test_every_column_of_a_plan_is_in_its_digest(tmp_path: Path) -> None:
    digests = {scene(str(tmp_path), seed).plan.digest() for seed in range(20)}
    assert len(digests) == 20
    one = scene(str(tmp_path), 5)
    assert one.plan.digest() == scene(str(tmp_path), 5).plan.digest()
    file = one.plan.files[0]
    for table in (
        file.literals,
        file.write_items,
        file.checksums,
        file.copies.source,
        file.copies.width,
        file.first_copy,
    ):
        before = one.plan.digest()
        table[0] += 1
        assert one.plan.digest() != before
        table[0] -= 1


def test_changes_are_told_one_by_one() -> None:
    a, b = FileIdentity("a", 1, 2, 3), FileIdentity("b", 5, 6, 7)
    before = RunIdentity("1", "plan", {"to": "full"}, [[a], [b]])
    now = RunIdentity("2", "other", {"to": "full", "dtype": "bfloat16"}, [[a], [FileIdentity("b", 5, 6, 8)]])
    assert before.source_changes(now) == ["b was replaced by another file"]
    assert before.other_changes(now) == [
        "it was begun by fsdpckpt 1, and this is fsdpckpt 2",
        "--dtype was - and is bfloat16",
    ]
    assert before.source_changes(RunIdentity("1", "plan", {}, [[a]])) == ["the source had 2 files and has 1 now"]
    same_options = RunIdentity("1", "other", {"to": "full"}, [[a], [b]])
    assert before.other_changes(same_options) == [
        "the output would differ from the one begun: the units or the reference changed"
    ]
    assert before.other_changes(RunIdentity("1", "plan", {"threads": "3"}, [a, b])) == []
