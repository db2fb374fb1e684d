"""The checksums that a target file stores of its own bytes: computed from its windows, and written into them.

Archives and safetensors files with checksums have them, each at one or two places. A checksum whose range and place are
in one window is written with it. All others are zeros until every window is there, and are then patched.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fsdpckpt.execute.checks import combine
from fsdpckpt.execute.window_sums import WindowSums
from fsdpckpt.plan import FilePlan

Bytes: TypeAlias = npt.NDArray[np.uint8]

_MAX_GAP = 4096  # bytes between two patches: up to so many are read, and written with them
_MAX_PATCH = 1 << 20  # bytes in one write: patches and the gaps between them


class StoredChecksums:
    """The checksums that one target file stores, computed from its windows; a few are written when it is complete."""

    def __init__(self, file: FilePlan) -> None:
        self._file = file
        self._parts: list[tuple[int, int, int, int]] = []  # number of the checksum, then a Part
        self._deferred: list[tuple[int, bytes]] = []  # offset, and the checksum to write there
        self._lock = threading.Lock()

    def window(self, begin: int, view: memoryview, sums: WindowSums) -> None:
        """Take the window [begin, begin + len(view)); writes into ``view`` the checksums stored inside it."""
        end = begin + len(view)
        table = self._file.checksums
        first = max(int(table[:, 0].searchsorted(begin, side="right")) - 1, 0)
        rows = table[first : int(table[:, 0].searchsorted(end))].tolist()
        parts: list[tuple[int, int, int, int]] = []
        deferred: list[tuple[int, bytes]] = []
        for index, (low, high, *stored_at) in enumerate(rows, first):
            if low < begin or high > end:
                start, stop = max(low, begin), min(high, end)
                if start < stop:
                    parts.append((index, start, stop - start, sums.of(start, stop)))
            elif low < high:
                value = sums.of(low, high).to_bytes(4, "little")
                for offset in stored_at:
                    if begin <= offset <= end - 4:
                        view[offset - begin : offset - begin + 4] = value
                    elif offset >= 0:
                        deferred.append((offset, value))
        if parts or deferred:
            with self._lock:
                self._parts += parts
                self._deferred += deferred

    def pending(self) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, bytes]]]:
        """The arguments of ``absorb``: parts (checksum, offset, nbytes, crc), and checksums stored in other windows."""
        return self._parts, self._deferred

    def absorb(self, rows: Iterable[tuple[int, int, int, int]], deferred: Iterable[tuple[int, bytes]]) -> None:
        """Take what is ``pending`` on another worker, which wrote other windows of the same file."""
        self._parts += rows
        self._deferred += deferred

    def take(self) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, bytes]]]:
        """``pending`` of the windows taken since the last call."""
        with self._lock:
            parts, self._parts = self._parts, []
            deferred, self._deferred = self._deferred, []
        return parts, deferred

    def patches(self) -> list[tuple[int, bytes]]:
        """What remains to be written after every window: (file offset, 4 bytes)."""
        patches = list(self._deferred)
        for index, parts in groupby(sorted(self._parts), key=lambda row: row[0]):
            value = combine([row[1:] for row in parts]).to_bytes(4, "little")
            patches += [(offset, value) for offset in self._file.checksums[index, 2:].tolist() if offset >= 0]
        return patches


class DeferredChecksums:
    """Where one file stores checksums that depend on other windows: zeros until the file is complete.

    A window that is read back may hold them already; ``clear`` restores what it was when it was summed.
    """

    def __init__(self, file: FilePlan) -> None:
        ranges = file.checksums.tolist()
        self._rows = sorted(
            (offset, low, high) for low, high, *stored_at in ranges for offset in stored_at if offset >= 0
        )

    def clear(self, begin: int, view: memoryview) -> None:
        """Zero the deferred checksums in the window ``view``, which begins at ``begin``."""
        end, rows = begin + len(view), self._rows
        for offset, low, high in rows[bisect_left(rows, (begin - 3,)) : bisect_left(rows, (end,))]:
            if begin <= min(offset, low) and max(offset + 4, high) <= end:
                continue  # summed and stored within this window
            start, stop = max(offset - begin, 0), min(offset + 4, end) - begin
            view[start:stop] = bytes(stop - start)


def group_neighbours(
    patches: Sequence[tuple[int, bytes]],
) -> Iterator[tuple[int, Bytes, npt.NDArray[np.bool_]]]:
    """Group neighbouring ``patches``: where each group begins, its bytes, and which of them belong to a patch rather
    than a gap. The directory of an archive with many records is full of checksums.
    """
    if not patches:
        return
    offsets = np.array([offset for offset, _ in patches], np.int64)
    values = np.frombuffer(b"".join([value for _, value in patches]), np.uint8).reshape(len(patches), 4)
    order = np.argsort(offsets, kind="stable")
    offsets, values = offsets[order], values[order]
    apart = (np.diff(offsets) > _MAX_GAP) | (np.diff(offsets // _MAX_PATCH) > 0)
    for rows in np.split(np.arange(len(offsets)), np.flatnonzero(apart) + 1):
        begin = int(offsets[rows[0]])
        inside = offsets[rows][:, None] - begin + np.arange(4)
        group = np.zeros(int(inside[-1, -1]) + 1, np.uint8)
        is_patch = np.zeros(len(group), np.bool_)
        group[inside], is_patch[inside] = values[rows], True
        yield begin, group, is_patch
