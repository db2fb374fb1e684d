"""The memory of fetched ranges gives back what was fetched, and stays within its limit."""

from __future__ import annotations

import random

from fsdpckpt.storage.remote_file import Extents


def test_what_is_found_is_what_lies_there_and_no_more_is_held_than_allowed() -> None:
    chance = random.Random(4)
    content = {path: chance.randbytes(5000) for path in ("a", "b", "c")}
    extents = Extents(limit=3000)
    found = 0
    for _ in range(3000):
        path = chance.choice("abc")
        begin, nbytes = chance.randrange(4990), chance.randrange(1, 400)
        data = content[path][begin : begin + nbytes]
        held = extents.find(path, begin, len(data))
        assert held is None or held == data
        found += held is not None
        if held is None:
            extents.add(path, begin, data)
        assert sum(map(len, extents._held.values())) <= 3000
    assert found > 20


def test_the_range_used_longest_ago_goes_first() -> None:
    extents = Extents(limit=20)
    extents.add("a", 0, b"0123456789")
    extents.add("a", 100, b"abcdefghij")
    assert extents.find("a", 2, 3) == b"234"
    extents.add("b", 0, b"xyz")
    assert extents.find("a", 100, 1) is None
    assert extents.find("a", 9, 1) == b"9"


def test_a_range_that_is_held_in_part_is_not_found() -> None:
    extents = Extents()
    extents.add("a", 10, b"abc")
    extents.add("a", 13, b"def")
    assert extents.find("a", 12, 2) is None
    assert extents.find("a", 9, 2) is None
    assert extents.find("b", 10, 1) is None


def test_a_range_longer_than_the_limit_is_not_held() -> None:
    extents = Extents(limit=4)
    extents.add("a", 0, b"abcde")
    assert extents.find("a", 0, 1) is None
