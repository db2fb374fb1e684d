"""Proves that what workers receive is what was sent: each stream is summed on both sides, of sums that are at hand.

The sender knows the CRC-32 of the ranges that it reads, the receiver those of the ranges that it takes into windows.
Put together, both are the sum of the whole stream, and nothing is summed that was not before. Compared once all is
written: windows that an interrupted run has received are as good as the network was.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from fsdpckpt.errors import InternalError, WorkerError
from fsdpckpt.execute.checks import SourceCheck
from fsdpckpt.execute.crc import Part, combine, window_crc
from fsdpckpt.ir.checkpoint import Checksums, SourceFile

__all__ = ["Sent", "StreamCheck"]


class Sent:
    """What this worker has sent, by peer: the CRC-32 of all of it so far. Each stream in order."""

    def __init__(self) -> None:
        self.sums: dict[int, int] = {}

    def add(self, peer: int, begin: int, data: memoryview, known: Mapping[tuple[int, int], int]) -> None:
        """``data`` is next, at ``begin`` of the stream. ``known``: the sums of ranges (offset, nbytes) in it."""
        parts = [(0, begin, self.sums.get(peer, 0)), (begin, len(data), window_crc(begin, data, known))]
        self.sums[peer] = combine(parts)


class StreamCheck(SourceCheck):
    """A ``SourceCheck`` that also sums what comes by streams: source files from number ``len(files)`` on."""

    def __init__(self, files: Sequence[SourceFile], checksums: Checksums) -> None:
        super().__init__(files, checksums)
        self._first = len(files)
        self._came: dict[int, list[Part]] = {}
        self._taking = threading.Lock()

    def saw(self, file: int, offset: int, data: memoryview) -> int:
        crc = super().saw(file, offset, data)
        if file >= self._first:
            with self._taking:
                self._came.setdefault(file - self._first, []).append((offset, len(data), crc))
        return crc

    def require_what_was_sent(self, told: Mapping[int, int]) -> None:
        """Raises WorkerError when what came is not what ``told`` says: by sender the sum of its whole stream."""
        for sender in sorted(self._came.keys() | told.keys()):
            parts = sorted(self._came.get(sender, ()))
            at = 0
            for offset, nbytes, _ in parts:
                if offset != at:
                    raise InternalError(f"the stream of worker {sender} was not taken in once at {min(offset, at)}")
                at += nbytes
            found, expected = combine(parts), told.get(sender, 0)
            if found != expected:
                raise WorkerError(
                    f"the {at} bytes that came from worker {sender} are not those that it sent",
                    expected=f"CRC-32 {expected:08x}",
                    found=f"{found:08x}",
                    why="the memory of one of the two machines, or the network between them, damages data",
                    next_step="run the command again with --resume, best on other machines",
                )
