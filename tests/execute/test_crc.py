"""CRC-32 of a range from its parts."""

from __future__ import annotations

import random
import zlib
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from isal.isal_zlib import crc32

from fsdpckpt.execute.checks import combine


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=6), st.randoms(use_true_random=False))
def test_parts_in_any_order_give_the_checksum_of_the_whole(data: bytes, cuts: list[int], rng: random.Random) -> None:
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    parts = [(7 + a, b - a, crc32(data[a:b])) for a, b in pairwise(edges)]
    rng.shuffle(parts)
    assert combine(parts) == zlib.crc32(data)
