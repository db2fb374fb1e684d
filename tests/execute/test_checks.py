"""Source records against their checksums, when they are read in parts, twice, or by several workers."""

from __future__ import annotations

import random
import zlib
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fsdpckpt
from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.execute.checks import SourceCheck
from fsdpckpt.ir.checkpoint import Checksums
from fsdpckpt.ir.files import Stored
from tests.oracle.compare import require_parts

DATA = random.Random(7).randbytes(1013)
AT = 77  # where the record begins


def check(*crcs: int) -> SourceCheck:
    rows = [(0, AT, len(DATA), crc) for crc in crcs or (zlib.crc32(DATA),)]
    return SourceCheck([Stored("s", AT + len(DATA))], Checksums.of(rows))


def see(found: SourceCheck, begin: int, end: int, data: bytes = DATA) -> None:
    found.add_bytes(0, AT + begin, memoryview(data)[begin:end])


def test_a_record_read_twice_in_different_parts_is_judged_once_and_sound() -> None:
    found = check()
    for begin, end in [(0, 400), (400, 1013), (0, 700), (700, 1013), (100, 900)]:
        see(found, begin, end)
    found.finish()


@pytest.mark.parametrize("damaged", [None, 0, 4, 8])
def test_records_of_several_files_are_judged_apart_however_many_are_held_at_once(
    damaged: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdpckpt.execute.checks._RECORDS_AT_ONCE", 2)
    rng = random.Random(3)
    records = [rng.randbytes(rng.randrange(20, 60)) for _ in range(9)]
    places = [(number % 2, 100 * number, record) for number, record in enumerate(records)]
    rows = [(file, offset, len(record), zlib.crc32(record)) for file, offset, record in places]
    found = SourceCheck([Stored("a", 1000), Stored("b", 1000)], Checksums.of(rows))
    reads = [
        (file, offset + begin, record[begin:end])
        for file, offset, record in places
        for begin, end in [(0, 7), (7, 11), (11, len(record))]
    ]
    rng.shuffle(reads)
    for file, offset, data in reads:
        flipped = damaged is not None and offset == 100 * damaged + 7
        found.add_bytes(file, offset, memoryview(bytes([data[0] ^ 1, *data[1:]]) if flipped else data))
    assert not len(found.missing_parts({}))
    with nullcontext() if damaged is None else pytest.raises(SourceCorruptError, match=f"at offset {100 * damaged}"):
        found.finish()


def test_a_record_is_proved_by_the_parts_of_its_own_file_alone() -> None:
    sizes = [Stored(name, AT + len(DATA)) for name in ("a", "b")]
    found = SourceCheck(sizes, Checksums.of([(file, AT, len(DATA), zlib.crc32(DATA)) for file in (0, 1)]))
    for file, begin, end in [(1, 0, 400), (1, 400, 1013), (0, 0, 400)]:
        found.add_bytes(file, AT + begin, memoryview(DATA)[begin:end])
    assert found.missing_parts({}).tolist() == [[0, 0, AT + 400, 613]]
    inside = np.array([[AT + 10], [AT + 20]])
    assert found.missing_parts({0: inside, 1: inside}).tolist() == [[0, 0, AT + 400, 613]]


def test_a_record_of_which_nothing_was_summed_is_missing_whole_if_a_span_touches_it() -> None:
    whole = [[0, 0, AT, len(DATA)]]
    end = AT + len(DATA)
    for begin, stop, missing in [(AT + 10, AT + 20, whole), (0, AT, []), (0, AT + 1, whole), (end, end + 5, [])]:
        assert check().missing_parts({0: np.array([[begin], [stop]])}).tolist() == missing


FLIPPED = bytes([*DATA[:450], DATA[450] ^ 4, *DATA[451:]])


@pytest.mark.parametrize(
    ("sound", "damaged"),
    [
        ([(0, 400), (400, 1013)], [(400, 1013)]),  # the same part
        ([(0, 400), (400, 1013)], [(0, 700), (700, 1013)]),  # others that tile the record too
        ([(0, 400), (400, 600)], [(400, 600)]),  # of a record that is not needed whole
        ([(400, 600)], [(400, 600)]),
    ],
)
def test_bytes_that_were_not_the_same_each_time_they_were_read_are_damage(
    sound: list[tuple[int, int]], damaged: list[tuple[int, int]]
) -> None:
    for first, second in [((DATA, sound), (FLIPPED, damaged)), ((FLIPPED, damaged), (DATA, sound))]:
        one, other = check(), check()
        for data, parts in (first, second):
            for begin, end in parts:
                see(one if data is first[0] else other, begin, end, data)
        one.absorb([other.parts()])  # as of another worker
        with pytest.raises(SourceCorruptError, match=r"differed between two reads|does not match"):
            one.finish()


def test_two_checksums_for_the_same_bytes_are_damage_whichever_of_them_is_right() -> None:
    right = zlib.crc32(DATA)
    check(right, right)
    for crcs in [(right, right ^ 1), (right ^ 1, right)]:
        with pytest.raises(SourceCorruptError, match="two checksums for 1,013 bytes at offset 77"):
            check(*crcs)


@pytest.mark.parametrize(
    ("parts", "rest"),
    [
        ([(0, 400), (400, 1013)], []),
        ([(100, 400), (600, 700), (400, 500)], [(0, 100), (500, 600), (700, 1013)]),
        ([(0, 600), (400, 800)], [(0, 1013)]),  # no parts tile it
        ([(0, 600), (100, 300)], [(600, 1013)]),
    ],
)
def test_what_was_not_read_of_a_record_completes_its_sum(
    parts: list[tuple[int, int]], rest: list[tuple[int, int]]
) -> None:
    for data in (DATA, FLIPPED):
        found = check()
        for begin, end in parts:
            see(found, begin, end, data)
        if data is FLIPPED and not rest:
            continue  # finish() knows it
        found.finish()
        missing = found.missing_parts({}).tolist()
        assert missing == [[0, 0, AT + begin, end - begin] for begin, end in rest]
        read = [(*row, zlib.crc32(data[row[2] - AT : row[2] - AT + row[3]])) for row in missing]
        found.absorb([np.array(read, np.int64).reshape(-1, 5)])
        if data is DATA:
            found.finish()
            assert not len(found.missing_parts({}))
        else:
            with pytest.raises(SourceCorruptError, match="does not match"):
                found.finish()


@pytest.mark.parametrize("views", [((2, 7),), ((0, 7), (3, 12)), ((1, 3), (9, 20))], ids=str)
def test_a_flipped_bit_of_a_view_is_found_beside_bytes_that_no_tensor_needs(
    views: tuple[tuple[int, int], ...], tmp_path: Path
) -> None:
    whole = torch.arange(160.0).reshape(20, 8)
    content = {f"w{number}": whole[begin:end] for number, (begin, end) in enumerate(views)}
    path = tmp_path / "views.pt"
    torch.save(content, path)
    fsdpckpt.convert(path, tmp_path / "sound.safetensors")
    found = load_file(tmp_path / "sound.safetensors")
    require_parts(found, content)
    data = bytearray(path.read_bytes())
    data[data.index(whole.numpy().tobytes()) + 4 * 8 * views[0][0] + 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(SourceCorruptError, match="does not match its checksum"):
        fsdpckpt.convert(path, tmp_path / "damaged.safetensors")
    assert not (tmp_path / "damaged.safetensors").exists()
