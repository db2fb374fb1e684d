"""Checksums of a window or a record, combined from those of the pieces that were summed when they were read."""

from __future__ import annotations

import random
import zlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from isal.isal_zlib import crc32

from fsdpckpt.execute.checks import combine
from fsdpckpt.execute.window_sums import WindowSums


@pytest.mark.parametrize("seed", range(20))
def test_the_sum_of_every_part_is_that_of_its_bytes(seed: int) -> None:
    chosen = random.Random(seed)
    begin, data = chosen.randrange(1 << 40), chosen.randbytes(chosen.randrange(1, 3000))
    edges = sorted(chosen.sample(range(len(data) + 1), min(len(data), 12)))
    pieces = [
        (begin + low, high - low, zlib.crc32(data[low:high])) for low, high in pairwise(edges) if chosen.random() < 0.6
    ]
    chosen.shuffle(pieces)
    sums = WindowSums(begin, memoryview(data), pieces)
    assert sums.of(begin, begin + len(data)) == zlib.crc32(data)
    for _ in range(50):
        low, high = sorted(chosen.choice([*edges, chosen.randrange(len(data) + 1)]) for _ in range(2))
        assert sums.of(begin + low, begin + high) == zlib.crc32(data[low:high])


def test_a_byte_that_memory_changes_after_it_was_read_does_not_get_a_fresh_checksum() -> None:
    data = bytearray(random.Random(1).randbytes(1000))
    piece, read = (100, 800, zlib.crc32(data[100:900])), zlib.crc32(data)
    data[500] ^= 1
    assert WindowSums(0, memoryview(data), [piece]).of(0, 1000) == read != zlib.crc32(data)
    data[950] ^= 1  # bytes between pieces are summed as they are: checksums are written there
    assert WindowSums(0, memoryview(data), [piece]).of(0, 1000) != read


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=6), st.randoms(use_true_random=False))
def test_parts_in_any_order_give_the_checksum_of_the_whole(data: bytes, cuts: list[int], rng: random.Random) -> None:
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    parts = [(7 + a, b - a, crc32(data[a:b])) for a, b in pairwise(edges)]
    rng.shuffle(parts)
    assert combine(parts) == zlib.crc32(data)
