"""CRC-32 of ranges whose parts are seen in any order: computed per part, combined at the end."""

from __future__ import annotations

from isal.isal_zlib import crc32, crc32_combine

__all__ = ["Part", "combine", "crc32", "patch_effect"]

Part = tuple[int, int, int]
"""(offset, nbytes, crc) of one part of a range."""


def combine(parts: list[Part]) -> int:
    """The CRC-32 of the range that ``parts`` tile, given in any order."""
    total = 0
    for _, nbytes, crc in sorted(parts):
        total = crc32_combine(total, crc, nbytes)
    return total


def patch_effect(value: bytes, following: int) -> int:
    """What writing ``value`` over zeros, ``following`` bytes before the end, changes in a range's CRC-32 (by XOR).

    CRC-32 is affine: the difference of two sums depends only on the difference of the bytes and its place.
    """
    return int(crc32_combine(crc32(value) ^ crc32(bytes(len(value))), 0, following))
