"""CRC-32 of ranges whose parts are seen in any order: computed per part, combined at the end."""

from __future__ import annotations

from isal.isal_zlib import crc32, crc32_combine

__all__ = ["Part", "combine", "crc32"]

Part = tuple[int, int, int]
"""(offset, nbytes, crc) of one part of a range."""


def combine(parts: list[Part]) -> int:
    """The CRC-32 of the range that ``parts`` tile, given in any order."""
    total = 0
    for _, nbytes, crc in sorted(parts):
        total = crc32_combine(total, crc, nbytes)
    return total
