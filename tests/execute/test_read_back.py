"""What journals name, whoever wrote it and however it was cut, is taken up, and proved by its source's records."""

from __future__ import annotations

import os
import random
import resource
import zlib
from pathlib import Path

import numpy as np
import pytest

from fsdpckpt.converters.output.division import written_in_segments
from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.execute.job import Budget
from fsdpckpt.execute.journal import JournaledWindows, joined
from fsdpckpt.execute.output import Output
from fsdpckpt.execute.stored_checksums import DeferredChecksums
from fsdpckpt.ir.checkpoint import Checksums
from fsdpckpt.ir.files import Stored
from fsdpckpt.ir.targets import Target, TargetFile
from fsdpckpt.plan import make_plan, open_windows, rows_of
from fsdpckpt.plan import transfer as partitioning
from fsdpckpt.plan.transfer import partition, plan_transfers
from tests.execute.test_resume import Scene, scene


def _written(made: Scene, seed: int, *, all_of_it: bool = False) -> JournaledWindows:
    """Random windows of the target files, on the disk as a run of other workers would have left them."""
    rng = random.Random(seed)
    rows = []
    for number, file in enumerate(made.plan.files):
        data = bytearray(made.expected[file.path])
        deferred = DeferredChecksums(file)
        at = 0
        staged = bytearray(data) if all_of_it else bytearray(rng.randbytes(len(data)))
        while at < len(data):
            end = min(at + rng.randrange(1, 200), len(data))
            if all_of_it or rng.random() < 0.6:
                view = memoryview(data)[at:end]
                deferred.clear(at, view)
                rows.append((number, at, end, zlib.crc32(view), 0))
                if not all_of_it:  # else its deferred checksums are there already
                    staged[at:end] = view
            at = end
        path = Path(made.locate(file.path))
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(staged)
    return JournaledWindows(np.array(rows))


@pytest.mark.parametrize("seed", range(12))
def test_windows_of_any_cut_are_taken_up_by_a_run_that_cuts_otherwise(tmp_path: Path, seed: int) -> None:
    made = scene(str(tmp_path), seed, threads=2)
    made.budget = Budget(2, 256)
    journaled = _written(made, seed)
    made.require_expected(made.run(journaled))


def _output(made: Scene, number: int) -> Output:
    file = made.plan.files[number]
    return Output(file, made.locate(file.path), own=(0, file.nbytes), may_exist=True, expect_silence=lambda _: None)


def _kept(output: Output, windows: np.ndarray) -> list[tuple[int, int]]:
    """Those of ``windows``, which a journal says are written, that are kept."""
    output.windows_left = len(windows)
    buffer = memoryview(bytearray(512))
    return [(low, high) for _, low, high, crc, _ in windows.tolist() if output.read_back(low, high, crc, buffer)]


def test_a_window_that_is_not_as_the_journal_says_is_copied_again(tmp_path: Path) -> None:
    made = scene(str(tmp_path), 4)
    journaled = _written(made, 4, all_of_it=True)
    for number, file in enumerate(made.plan.files):
        path = Path(made.locate(file.path))
        data = bytearray(path.read_bytes())
        windows = rows_of(journaled.written(), number)
        begin, end = windows[len(windows) // 2, 1:3].tolist()
        data[(begin + end) // 2] ^= 1
        path.write_bytes(data)
        output = _output(made, number)
        kept = _kept(output, windows)
        assert kept == [(low, high) for low, high in windows[:, 1:3].tolist() if low != begin]
        assert kept == [(low, low + nbytes) for low, nbytes, _ in output.parts]
    made.require_expected(made.run(journaled))


def test_a_file_of_another_length_is_not_taken_up(tmp_path: Path) -> None:
    made = scene(str(tmp_path), 5)
    journaled = _written(made, 5, all_of_it=True)
    path = Path(made.locate(made.plan.files[0].path))
    path.write_bytes(path.read_bytes() + b"x")
    assert _kept(_output(made, 0), rows_of(journaled.written(), 0)) == []


def test_more_files_are_read_back_than_a_process_may_open(tmp_path: Path) -> None:
    files = []
    for number in range(120):
        file = TargetFile(f"out{number}")
        file.add_literal(b"%d" % number)
        files.append(file)
    plan = make_plan(Target(files))
    rows = [(number, 0, file.nbytes, zlib.crc32(file.blob), 0) for number, file in enumerate(files)]
    Path(tmp_path / "out").mkdir()
    for file in files:
        (tmp_path / "out" / file.path).write_bytes(file.blob)
    expected = {file.path: bytes(file.blob) for file in files}
    made = Scene(str(tmp_path), plan, (Stored("none", 0),), Checksums.of([]), expected, Budget(2, 256))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 60, limits[1]))
    try:
        crcs = made.run(JournaledWindows(np.array(rows)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    made.require_expected(crcs)


@pytest.mark.parametrize("seed", range(6))
def test_a_damaged_record_whose_sums_were_lost_with_a_worker_is_read_again(tmp_path: Path, seed: int) -> None:
    """Its bytes were sent to a worker that journaled the window; the one that read them said nothing any more."""
    made = scene(str(tmp_path), seed, damage=True)
    written = _written(made, seed, all_of_it=True)
    made.run(written)  # its own reader had proved what it read: nothing is read again
    written.windows[:, 4] = 1
    with pytest.raises(SourceCorruptError, match="does not match its checksum"):
        made.run(written)


@pytest.mark.parametrize("seed", range(6))
def test_a_sound_record_whose_sums_were_lost_changes_nothing(tmp_path: Path, seed: int) -> None:
    made = scene(str(tmp_path), seed)
    written = _written(made, seed)
    written.windows[:, 4] = 1
    made.require_expected(made.run(written))


def test_of_windows_that_overlap_one_is_believed() -> None:
    one, other = (
        JournaledWindows(np.array(rows))
        for rows in (
            [(0, 0, 10, 1, 0), (0, 10, 30, 2, 0), (1, 5, 5, 0, 0)],
            [(0, 0, 4, 3, 0), (0, 4, 12, 4, 1), (0, 10, 30, 2, 1)],
        )
    )
    both = joined([one, other])
    assert both.written().tolist() == [[0, 0, 10, 1, 0], [0, 10, 30, 2, 1]]
    assert (both.nbytes, both.longest) == (30, 20)


@pytest.mark.parametrize("seed", range(10))
def test_however_work_is_divided_each_open_byte_has_one_window_and_no_claim_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(partitioning, "_BLOCK", 16)
    rng = random.Random(seed)
    made = scene(str(tmp_path), seed)
    claims = _written(made, seed).written()
    workers = rng.randrange(1, 5)
    segments = partition(made.plan, range(len(made.plan.files)), list(range(workers)), written=claims)
    written = written_in_segments({0: JournaledWindows(claims)}, segments)
    assert len(written) == len(claims), "a claim lies across a cut"
    seen_by = np.asarray([[rng.random() < 0.5 for _ in range(workers)]])
    seen_by[0, rng.randrange(workers)] = True
    found: dict[int, list[tuple[int, int]]] = {number: [] for number in range(len(made.plan.files))}
    for rank in range(workers):
        transfers = plan_transfers(
            made.plan, segments, seen_by, rank=rank, window=100, round_bytes=1000, written=written
        )
        assert {window.segment for window in transfers.windows} == set(transfers.files)
        for window in transfers.windows:
            found[segments[window.segment].file].append((window.begin, window.end))
    for number, file in enumerate(made.plan.files):
        taken = sorted([*found[number], *map(tuple, rows_of(claims, number)[:, 1:3].tolist())])
        real = [(low, high) for low, high in taken if low < high]
        assert [low for low, _ in real] == [0, *(high for _, high in real[:-1])]
        assert real[-1][1] == file.nbytes


def test_open_windows_end_where_what_is_done_begins(tmp_path: Path) -> None:
    made = scene(str(tmp_path), 7)
    file = max(made.plan.files, key=lambda each: each.nbytes)
    middle = file.nbytes // 2
    windows = open_windows(file, made.plan, 64, 0, file.nbytes, [(10, 20), (20, 50), (middle, file.nbytes)])
    assert [windows[0], windows[1][0], windows[-1][1]] == [(0, 10), 50, middle]
    assert max(high - low for low, high in windows) <= 64
    assert open_windows(file, made.plan, 64, 0, file.nbytes, [(0, file.nbytes)]) == []
