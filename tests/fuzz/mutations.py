"""Damage for bytes: one, a few, a block, a number; the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

__all__ = ["mutated"]

_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 63, (1 << 64) - 1)
_PICKLE = b"(.0125FGIJKLMNPQRSTUVXabcdeghijlopqrstu}]\x80\x81\x82\x85\x86\x87\x88\x89\x8a\x8c\x8f\x90\x91\x92\x93\x94"
_JSON = (b"null", b"-1", b"1e999", b"[]", b"{}", b'""', b"true", b"99999999999999999999", b'"\\ud800"', b"NaN")


def mutated(random_: random.Random, corpus: Sequence[bytes]) -> bytes:
    """A copy of one of ``corpus``, damaged in one to four places."""
    data = bytearray(random_.choice(corpus))
    for _ in range(random_.randint(1, 4)):
        at = random_.randrange(len(data) + 1)
        kind = random_.randrange(8)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << random_.randrange(8)
        elif kind == 1 and at < len(data):
            data[at] = random_.choice(_PICKLE)
        elif kind == 2:
            del data[at : at + random_.randint(1, 16)]
        elif kind == 3:
            other = random_.choice(corpus)
            begin = random_.randrange(len(other) + 1)
            data[at:at] = other[begin : begin + random_.randint(1, 64)]
        elif kind == 4:
            size = random_.choice((1, 2, 4, 8))
            data[at : at + size] = (random_.choice(_NUMBERS) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        elif kind == 5:
            data[at:at] = random_.choice(_JSON)
        elif kind == 6:
            begin = random_.randrange(len(data) + 1)
            data[at:at] = data[begin : begin + random_.randint(1, 64)]
        else:
            del data[at:]
    return bytes(data)
