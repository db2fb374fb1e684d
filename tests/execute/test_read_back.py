"""What journals name, whoever wrote it and however it was cut, is taken up, and proved by its source's records."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import numpy as np
import pytest

from fsdpckpt.comm.protocol import Solo
from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.execute import ReadBack, read_back
from fsdpckpt.execute.job import Budget
from fsdpckpt.execute.journal import Finished, joined
from fsdpckpt.execute.output import LatePlaces
from fsdpckpt.plan import open_windows
from fsdpckpt.plan import transfer as partitioning
from fsdpckpt.plan.transfer import partition, plan_transfers
from tests.execute.test_resume import Scene, scene


def _written(made: Scene, seed: int, *, all_of_it: bool = False) -> Finished:
    """Random windows of the target files, on the disk as a run of other workers would have left them."""
    rng = random.Random(seed)
    crcs = {}
    for number, file in enumerate(made.plan.files):
        data = bytearray(made.expected[file.path])
        late = LatePlaces(file)
        at = 0
        staged = bytearray(data) if all_of_it else bytearray(rng.randbytes(len(data)))
        while at < len(data):
            end = min(at + rng.randrange(1, 200), len(data))
            if all_of_it or rng.random() < 0.6:
                view = memoryview(data)[at:end]
                late.clear(at, view)
                crcs[number, at, end] = zlib.crc32(view)
                if not all_of_it:  # else its late checksums stand already
                    staged[at:end] = view
            at = end
        path = Path(made.locate(file.path))
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(staged)
    return Finished(crcs)


@pytest.mark.parametrize("seed", range(12))
def test_windows_of_any_cut_are_taken_up_by_a_run_that_cuts_otherwise(tmp_path: Path, seed: int) -> None:
    made = scene(str(tmp_path), seed, threads=2)
    made.budget = Budget(2, 256)
    finished = _written(made, seed)
    made.require_expected(made.run(finished))


def test_a_window_that_is_not_as_the_journal_says_is_copied_again(tmp_path: Path) -> None:
    made = scene(str(tmp_path), 4)
    finished = _written(made, 4, all_of_it=True)
    for number, file in enumerate(made.plan.files):
        path = Path(made.locate(file.path))
        data = bytearray(path.read_bytes())
        claims = finished.claims()[number]
        begin, end, _ = claims[len(claims) // 2]
        data[(begin + end) // 2] ^= 1
        path.write_bytes(data)
        back = ReadBack(file, str(path), claims)
        read_back(Solo(), {0: back}, 2, 512, advance=lambda _: None)
        assert back.close().ranges == [(low, high) for low, high, _ in claims if low != begin]
    made.require_expected(made.run(finished))


def test_a_file_of_another_length_is_not_taken_up(tmp_path: Path) -> None:
    made = scene(str(tmp_path), 5)
    finished = _written(made, 5, all_of_it=True)
    file = made.plan.files[0]
    path = Path(made.locate(file.path))
    path.write_bytes(path.read_bytes() + b"x")
    back = ReadBack(file, str(path), finished.claims()[0])
    read_back(Solo(), {0: back}, 1, 512, advance=lambda _: None)
    assert back.close().ranges == []


@pytest.mark.parametrize("seed", range(6))
def test_a_damaged_record_whose_sums_were_lost_with_a_worker_is_read_again(tmp_path: Path, seed: int) -> None:
    """Its bytes were sent to a worker that journaled the window; the one that read them said nothing any more."""
    made = scene(str(tmp_path), seed, damage=True)
    written = _written(made, seed, all_of_it=True)
    made.run(written)  # its own reader had proved what it read: nothing is read again
    received = Finished(written.crcs, (), frozenset(written.crcs))
    with pytest.raises(SourceCorruptError, match="does not match its checksum"):
        made.run(received)


@pytest.mark.parametrize("seed", range(6))
def test_a_sound_record_whose_sums_were_lost_changes_nothing(tmp_path: Path, seed: int) -> None:
    made = scene(str(tmp_path), seed)
    written = _written(made, seed)
    made.require_expected(made.run(Finished(written.crcs, (), frozenset(written.crcs))))


def test_of_windows_that_overlap_one_is_believed() -> None:
    both = joined([Finished({(0, 0, 10): 1, (0, 10, 30): 2, (1, 5, 5): 0}), Finished({(0, 0, 4): 3, (0, 4, 12): 4})])
    assert both.claims() == {0: [(0, 10, 1), (10, 30, 2)], 1: []}
    assert (both.nbytes, both.longest) == (30, 20)


@pytest.mark.parametrize("seed", range(10))
def test_however_work_is_divided_each_open_byte_has_one_window_and_no_claim_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(partitioning, "BLOCK", 16)
    rng = random.Random(seed)
    made = scene(str(tmp_path), seed)
    claims = _written(made, seed).claims()
    workers = rng.randrange(1, 5)
    segments = partition(made.plan, range(len(made.plan.files)), list(range(workers)), written=claims)
    written = {
        number: [(low, high) for low, high, _ in claims.get(s.file, ()) if s.begin <= low and high <= s.end]
        for number, s in enumerate(segments)
    }
    assert sum(map(len, written.values())) == sum(map(len, claims.values())), "a claim lies across a cut"
    visible = np.asarray([[rng.random() < 0.5 for _ in range(workers)]])
    visible[0, rng.randrange(workers)] = True
    found: dict[int, list[tuple[int, int]]] = {number: [] for number in range(len(made.plan.files))}
    for rank in range(workers):
        transfers = plan_transfers(
            made.plan, segments, visible, rank=rank, window=100, round_bytes=1000, written=written
        )
        assert {window.segment for window in transfers.windows} == set(transfers.files)
        for window in transfers.windows:
            found[segments[window.segment].file].append((window.begin, window.end))
    for number, file in enumerate(made.plan.files):
        taken = sorted([*found[number], *((low, high) for low, high, _ in claims.get(number, ()))])
        real = [(low, high) for low, high in taken if low < high]
        assert [low for low, _ in real] == [0, *(high for _, high in real[:-1])]
        assert real[-1][1] == file.nbytes


def test_open_windows_end_where_what_is_done_begins(tmp_path: Path) -> None:
    made = scene(str(tmp_path), 7)
    file = max(made.plan.files, key=lambda each: each.nbytes)
    middle = file.nbytes // 2
    windows = open_windows(file, made.plan, 64, written=[(10, 20), (20, 50), (middle, file.nbytes)])
    assert [windows[0], windows[1][0], windows[-1][1]] == [(0, 10), 50, middle]
    assert max(high - low for low, high in windows) <= 64
    assert open_windows(file, made.plan, 64, written=[(0, file.nbytes)]) == []
