"""Sums of records and of whole files from one reading of their bytes, in parts that are put together."""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify import checksums
from fsdpckpt.verify.checksums import Record, bytes_to_read, check_records
from fsdpckpt.verify.parallel import Cancelled, for_each, raise_if_cancelled


@pytest.fixture(autouse=True)
def _small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "READ_BYTES", 64)
    monkeypatch.setattr(checksums, "READ_THROUGH", 16)


def record(path: Path, data: bytes, begin: int, end: int, by: str = "") -> Record:
    return Record(str(path), begin, end - begin, zlib.crc32(data[begin:end]), by)


def drawn(path: Path, data: bytes, seed: int) -> list[Record]:
    """Records that touch, nest, overlap, lie far apart or are empty; of some files the whole is one too."""
    draw = random.Random(seed)
    results = []
    for _ in range(draw.randrange(1, 12)):
        begin = draw.randrange(len(data) + 1)
        end = min(begin + draw.choice([0, 1, 5, 63, 64, 65, 200, 1000]), len(data))
        results.append(record(path, data, begin, end))
        if draw.random() < 0.5:
            results.append(record(path, data, end, min(end + draw.randrange(90), len(data))))
    if seed % 2:
        results.append(record(path, data, 0, len(data), "fsdpckpt.json"))
    return results


@pytest.mark.parametrize("seed", range(60))
def test_every_record_is_judged_by_its_own_bytes_however_it_lies_among_others(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "file"
    data = bytearray(random.Random(seed).randbytes(900))
    path.write_bytes(data)
    wanted = drawn(path, bytes(data), seed)
    seen: list[int] = []
    with Sources() as sources:
        assert check_records(wanted, sources=sources, advance=seen.append) == []
    assert sum(seen) == bytes_to_read(wanted) <= len(data)
    place = random.Random(seed).randrange(len(data))
    data[place] ^= 4
    path.write_bytes(data)
    hit = {one for one in wanted if one.offset <= place < one.end}
    with Sources() as sources:
        results = check_records(wanted, sources=sources)
    assert len(results) == len([one for one in wanted if one in hit])
    for problem in results:
        assert problem.kind == "checksum"
        assert problem.file == str(path)
        assert any(f"{one.crc:08x}" in problem.message for one in hit)


def test_a_file_that_ends_early_is_a_problem_and_its_other_records_are_judged(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = bytearray(random.Random(1).randbytes(600))
    wanted = [
        record(path, bytes(data), 0, 100),
        record(path, bytes(data), 200, 300),
        record(path, bytes(data), 500, 600),
    ]
    data[10] ^= 1
    path.write_bytes(data[:550])
    with Sources() as sources:
        results = check_records(wanted, sources=sources)
    assert sorted({problem.kind for problem in results}) == ["checksum", "truncated"]
    assert len([problem for problem in results if problem.kind == "checksum"]) == 1


def test_the_error_that_stopped_the_others_is_raised_and_not_theirs() -> None:
    started = threading.Barrier(3)

    def work(_: object, item: int) -> int:
        started.wait(timeout=30)
        if item == 2:
            raise ValueError("the reason")
        for _moment in range(10**9):
            raise_if_cancelled()
        return item

    with pytest.raises(ValueError, match="the reason"):
        for_each([0, 1, 2], work, make_reader=object, threads=3)
    raise_if_cancelled()  # this thread was never called off


def test_a_thread_that_was_called_off_can_work_again() -> None:
    def failing(_: object, _item: int) -> Iterator[None]:
        raise ValueError("the reason")

    with pytest.raises(ValueError, match="the reason"):
        for_each([0], failing, make_reader=object, threads=1)
    raise_if_cancelled()
    assert for_each([1, 2], lambda _, item: item, make_reader=object, threads=1) == [1, 2]
    assert issubclass(Cancelled, Exception)
