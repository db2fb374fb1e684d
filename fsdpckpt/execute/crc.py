"""CRC-32 of ranges whose parts are seen in any order: computed per part, combined at the end."""

from __future__ import annotations

from collections.abc import Mapping

from isal.isal_zlib import crc32, crc32_combine

__all__ = ["Part", "combine", "crc32", "patch_effect", "window_crc"]

FEW = 64  # ranges: beyond, summing all bytes again costs less than putting the parts together

Part = tuple[int, int, int]
"""(offset, nbytes, crc) of one part of a range."""


def combine(parts: list[Part]) -> int:
    """The CRC-32 of the range that ``parts`` tile, given in any order."""
    total = 0
    for _, nbytes, crc in sorted(parts):
        total = crc32_combine(total, crc, nbytes)
    return total


def window_crc(begin: int, view: memoryview, known: Mapping[tuple[int, int], int]) -> int:
    """The CRC-32 of ``view``, which lies at ``begin``; ``known`` ranges (offset, nbytes) in it are not summed again."""
    if len(known) > FEW:
        return crc32(view)
    parts: list[Part] = []
    at = begin
    for (offset, nbytes), crc in sorted(known.items()):
        if offset > at:
            parts.append((at, offset - at, crc32(view[at - begin : offset - begin])))
        parts.append((offset, nbytes, crc))
        at = offset + nbytes
    parts.append((at, begin + len(view) - at, crc32(view[at - begin :])))
    return combine(parts)


def patch_effect(value: bytes, following: int) -> int:
    """What writing ``value`` over zeros, ``following`` bytes before the end, changes in a range's CRC-32 (by XOR).

    CRC-32 is affine: the difference of two sums depends only on the difference of the bytes and its place.
    """
    return int(crc32_combine(crc32(value) ^ crc32(bytes(len(value))), 0, following))
