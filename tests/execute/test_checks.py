"""Source records against their checksums, when they are read in parts, twice, or by several workers."""

from __future__ import annotations

import random
import zlib

import pytest

from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.execute.checks import SourceCheck
from fsdpckpt.ir.checkpoint import Checksums, SourceFile

DATA = random.Random(7).randbytes(1013)
AT = 77  # where the record begins


def check(*crcs: int) -> SourceCheck:
    rows = [(0, AT, len(DATA), crc) for crc in crcs or (zlib.crc32(DATA),)]
    return SourceCheck([SourceFile("s", AT + len(DATA))], Checksums.of(rows))


def see(found: SourceCheck, begin: int, end: int, data: bytes = DATA) -> None:
    found.saw(0, AT + begin, memoryview(data)[begin:end])


def test_a_record_read_twice_in_different_parts_is_judged_once_and_sound() -> None:
    found = check()
    for begin, end in [(0, 400), (400, 1013), (0, 700), (700, 1013), (100, 900)]:
        see(found, begin, end)
    found.finish()


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
        one.absorb(other.unfinished())  # as of another worker
        with pytest.raises(SourceCorruptError, match=r"not the same each time|does not match"):
            one.finish()


def test_two_checksums_for_the_same_bytes_are_damage_whichever_of_them_is_right() -> None:
    right = zlib.crc32(DATA)
    check(right, right)
    for crcs in [(right, right ^ 1), (right ^ 1, right)]:
        with pytest.raises(SourceCorruptError, match="two checksums for 1,013 bytes at offset 77"):
            check(*crcs)
