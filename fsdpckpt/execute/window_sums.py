"""The CRC-32 of a window, and of any part of it, from those of the pieces that were summed when they were read.

Bytes that go to the target unchanged are thus summed once, while they are in the processor's cache: the sum is compared
with the source's checksum, and becomes part of the target's. If memory changes a byte in between, the target carries
the checksum of what was read, and verifying it fails.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from isal.isal_zlib import crc32, crc32_combine

from fsdpckpt.execute.checks import Part


class WindowSums:
    """Sums of the bytes in ``view``, which begin at offset ``begin`` of a file.

    ``pieces``: (offset in the file, nbytes, crc) of some ranges of ``view``, which do not overlap.
    """

    def __init__(self, begin: int, view: memoryview, pieces: Sequence[Part]) -> None:
        self._begin = begin
        self._view = view
        self._pieces = sorted(pieces)

    def of(self, low: int, high: int) -> int:
        """The CRC-32 of the bytes [low, high) of the file, as they are now in ``view``, or were when they were read."""
        pieces, crc, at = self._pieces, 0, low
        for offset, nbytes, known in pieces[bisect_left(pieces, (low,)) :]:
            if offset + nbytes > high:
                break
            crc = crc32_combine(self._sum(at, offset, crc), known, nbytes)
            at = offset + nbytes
        return self._sum(at, high, crc)

    def _sum(self, low: int, high: int, crc: int) -> int:
        """Continue ``crc`` with the bytes [low, high)."""
        return crc32(self._view[low - self._begin : high - self._begin], crc) if low < high else crc
