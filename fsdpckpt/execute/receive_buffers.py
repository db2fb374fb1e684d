"""What other workers sent: the rounds of their streams that are held, read like files."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from fsdpckpt.errors import InternalError
from fsdpckpt.ir.checkpoint import SourceFile
from fsdpckpt.ir.tensors import Int64Array
from fsdpckpt.storage.protocols import ByteSource
from fsdpckpt.storage.sources import Sources

__all__ = ["Arrivals", "SourcesAndStreams", "stream_file"]


def stream_file(sender: int) -> SourceFile:
    """The stream of a worker as a source file. No path of a file holds a NUL."""
    return SourceFile(f"\0worker {sender}", 0)


class Arrivals:
    """``receives[s]``: bytes of each round from worker s. ``held``: how many rounds there is room for at once.

    ``windows[n]``: how many windows want the bytes of round n.
    """

    def __init__(self, receives: Mapping[int, Int64Array], windows: Mapping[int, int], rounds: int, held: int) -> None:
        totals = np.zeros(rounds, np.int64)
        self._place: dict[int, Int64Array] = {}  # where in the buffer of its round the part of a sender begins
        self._begin: dict[int, Int64Array] = {}  # the offset in the stream of a sender at which a round begins
        for sender, counts in sorted(receives.items()):
            self._place[sender] = totals.copy()
            self._begin[sender] = np.cumsum(counts) - counts
            totals += counts
        size = int(totals.max()) if rounds else 0
        self._left = dict(windows)
        self._buffers: dict[int, npt.NDArray[np.uint8]] = {}
        # numpy copies without holding up other threads, which memoryviews do not.
        self._free = [np.empty(size, np.uint8) for _ in range(min(held, rounds))]
        self._lock = threading.Lock()

    def claim(self, number: int) -> bool:
        """Make room for round ``number``, unless it has some or needs none; False while all room is taken.

        What was given back last is taken first: the processor still has it at hand.
        """
        with self._lock:
            if number in self._left and number not in self._buffers:
                if not self._free:
                    return False
                self._buffers[number] = self._free.pop()
            return True

    def written(self, number: int) -> None:
        """One window of round ``number`` is written; with the last one its room is free."""
        with self._lock:
            self._left[number] -= 1
            if not self._left[number]:
                self._free.append(self._buffers.pop(number))

    def place(self, sender: int, number: int, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Where ``nbytes`` from ``sender`` belong that begin ``offset`` bytes into its part of round ``number``."""
        begin = int(self._place[sender][number]) + offset
        return self._buffers[number][begin : begin + nbytes]

    def read_into(self, sender: int, offset: int, buffer: memoryview) -> None:
        """Bytes of the stream of ``sender``, of a round that is held."""
        number = int(np.searchsorted(self._begin[sender], offset, side="right")) - 1
        place = int(self._place[sender][number] + offset - self._begin[sender][number])
        np.frombuffer(buffer, np.uint8)[:] = self._buffers[number][place : place + len(buffer)]

    def close(self) -> None:
        """Nothing is read any more: give the memory back."""
        self._buffers.clear()
        self._free.clear()


class _Stream:
    """One worker's stream as a source of bytes."""

    def __init__(self, arrivals: Arrivals, sender: int) -> None:
        file = stream_file(sender)
        self.path, self.nbytes = file.path, file.nbytes
        self._arrivals = arrivals
        self._sender = sender

    def read(self, offset: int, nbytes: int) -> bytes:
        raise InternalError(f"{nbytes} bytes at {offset} of a stream were to be read outside of a window")

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._arrivals.read_into(self._sender, offset, buffer)

    def close(self) -> None:
        return None


class SourcesAndStreams(Sources):
    """The files this worker sees, and the streams of the ``senders``."""

    def __init__(self, arrivals: Arrivals, senders: int) -> None:
        super().__init__()
        self._streams = {stream_file(sender).path: _Stream(arrivals, sender) for sender in range(senders)}

    def open_new(self, path: str) -> ByteSource:
        stream = self._streams.get(path)
        return super().open_new(path) if stream is None else stream
