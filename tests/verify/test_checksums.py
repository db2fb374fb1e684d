"""Sums of records and of whole files from one reading of their bytes, in parts that are put together."""

from __future__ import annotations

import random
import threading
import zlib
from pathlib import Path

import pytest

from fsdpckpt.ir.checkpoint import Checksums
from fsdpckpt.progress import NoProgress
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify import checksums
from fsdpckpt.verify.blocks import for_each, raise_if_cancelled
from fsdpckpt.verify.checksums import ChecksummedRanges, check_ranges, ranges_of


@pytest.fixture(autouse=True)
def _small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "READ_BYTES", 64)
    monkeypatch.setattr(checksums, "LARGEST_GAP", 16)


Row = tuple[int, int, int, int]


def record(data: bytes, begin: int, end: int) -> Row:
    return 0, begin, end - begin, zlib.crc32(data[begin:end])


def ranges(path: Path, rows: list[Row], whole: list[Row] | None = None) -> ChecksummedRanges:
    files = [(str(path), nbytes, crc) for _, _, nbytes, crc in whole or []]
    return ranges_of([str(path)], Checksums.of(rows), files)


def drawn(data: bytes, seed: int) -> tuple[list[Row], list[Row]]:
    """Records that touch, nest, overlap, lie far apart or are empty; of some files the whole is listed, too."""
    draw = random.Random(seed)
    own = []
    for _ in range(draw.randrange(1, 12)):
        begin = draw.randrange(len(data) + 1)
        end = min(begin + draw.choice([0, 1, 5, 63, 64, 65, 200, 1000]), len(data))
        own.append(record(data, begin, end))
        if draw.random() < 0.5:
            own.append(record(data, end, min(end + draw.randrange(90), len(data))))
    return own, [record(data, 0, len(data))] if seed % 2 else []


class Counted(NoProgress):
    """Counts what a stage announces, and what it reads."""

    def __init__(self) -> None:
        self.announced = self.read = 0

    def begin(self, stage: str, total_bytes: int) -> None:
        assert stage == "checksums"
        self.announced += total_bytes

    def advance(self, nbytes: int) -> None:
        self.read += nbytes


@pytest.mark.parametrize("seed", range(60))
def test_every_record_is_judged_by_its_own_bytes_however_it_lies_among_others(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "file"
    data = bytearray(random.Random(seed).randbytes(900))
    path.write_bytes(data)
    own, listed = drawn(bytes(data), seed)
    wanted = ranges(path, own, listed)
    seen = Counted()
    with Sources() as sources:
        assert check_ranges(wanted, sources=sources, threads=1, progress=seen) == []
    assert seen.read == seen.announced <= len(data)
    place = random.Random(seed).randrange(len(data))
    data[place] ^= 4
    path.write_bytes(data)
    hit = [f"{crc:08x}" for _, offset, nbytes, crc in (*own, *listed) if offset <= place < offset + nbytes]
    with Sources() as sources:
        results = check_ranges(wanted, sources=sources)
    assert [problem.message.split()[-1] for problem in results] == hit
    assert all(problem.kind == "checksum" and problem.file == str(path) for problem in results)


def test_an_empty_record_has_the_checksum_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"data")
    with Sources() as sources:
        results = check_ranges(ranges(tmp_path / "file", [(0, 4, 0, crc) for crc in (0, 7)]), sources=sources)
        assert check_ranges(ranges(tmp_path / "file", []), sources=sources) == []
    assert [problem.message.split()[-1] for problem in results] == ["00000007"]


def test_a_file_that_ends_early_is_a_problem_and_its_other_records_are_judged(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = bytearray(random.Random(1).randbytes(600))
    wanted = ranges(path, [record(bytes(data), begin, begin + 100) for begin in (0, 200, 500)])
    data[10] ^= 1
    path.write_bytes(data[:550])
    with Sources() as sources:
        results = check_ranges(wanted, sources=sources)
    assert sorted({problem.kind for problem in results}) == ["checksum", "truncated"]
    assert len([problem for problem in results if problem.kind == "checksum"]) == 1


def test_the_error_that_stopped_the_others_is_raised_and_their_threads_can_work_again() -> None:
    started = threading.Barrier(3)

    def work(_: object, item: int) -> int:
        started.wait(timeout=30)
        if item == 2:
            raise ValueError("the reason")
        for _moment in range(10**9):
            raise_if_cancelled()
        return item

    def failing(_: object, _item: int) -> None:
        raise ValueError("the reason")

    for items, function in (([0, 1, 2], work), ([0], failing)):
        with pytest.raises(ValueError, match="the reason"):
            for_each(items, function, make_reader=object, threads=len(items))  # type: ignore[arg-type]
        raise_if_cancelled()  # this thread was never called off
    assert for_each([1, 2], lambda _, item: item, make_reader=object, threads=1) == [1, 2]
