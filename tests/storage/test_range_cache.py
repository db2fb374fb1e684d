"""The cache of ranges gives back what was fetched, and stays within its limit."""

from __future__ import annotations

import random

from fsdpckpt.storage.remote_file import RangeCache


def test_a_cached_range_is_what_was_added_and_no_more_is_cached_than_allowed() -> None:
    chance = random.Random(4)
    content = {path: chance.randbytes(5000) for path in ("a", "b", "c")}
    cache = RangeCache(limit=3000)
    hits = 0
    for _ in range(3000):
        path = chance.choice("abc")
        begin, nbytes = chance.randrange(4990), chance.randrange(1, 400)
        data = content[path][begin : begin + nbytes]
        cached = cache.get(path, begin, len(data))
        assert cached is None or cached == data
        hits += cached is not None
        if cached is None:
            cache.add(path, begin, data)
        assert sum(map(len, cache._ranges.values())) <= 3000
    assert hits > 20


def test_the_least_recently_used_range_goes_first() -> None:
    cache = RangeCache(limit=20)
    cache.add("a", 0, b"0123456789")
    cache.add("a", 100, b"abcdefghij")
    assert cache.get("a", 2, 3) == b"234"
    cache.add("b", 0, b"xyz")
    assert cache.get("a", 100, 1) is None
    assert cache.get("a", 9, 1) == b"9"


def test_a_range_that_is_cached_in_part_or_too_long_is_not_found() -> None:
    cache = RangeCache(limit=6)
    cache.add("a", 10, b"abc")
    cache.add("a", 13, b"def")
    cache.add("c", 0, b"abcdefg")
    assert [cache.get(*asked) for asked in (("a", 12, 2), ("a", 9, 2), ("b", 10, 1), ("c", 0, 1))] == [None] * 4
