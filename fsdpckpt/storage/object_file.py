"""An object in a store that is written at positions, like a file, and sent in parts as they fill.

A part is held in memory until all of its bytes are there, and until every byte elsewhere that decides one of its own is
there too: a zip file has the checksum of a record before the record. Windows of a file are written nearly in order, so
that few parts are held at a time.

Several processes may send one object: each has a range of it that begins and ends with a part. One begins the upload,
the others join it. A part with a checksum of bytes that another one has is held to the end.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping

import numpy as np

from fsdpckpt.errors import InternalError
from fsdpckpt.ir.tensors import Int64Array
from fsdpckpt.storage.parts import PartsUpload
from fsdpckpt.storage.upload import RemoteTarget

CLOSE_SECONDS = 5.0  # for what is being sent when an upload is given up: the next run removes what comes later


class Coverage:
    """Which bytes of a file are there: disjoint ranges, in order."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def add(self, begin: int, end: int) -> None:
        low, high = bisect_left(self._ends, begin), bisect_right(self._begins, end)
        if low < high:  # it touches these ranges: they become one
            begin, end = min(begin, self._begins[low]), max(end, self._ends[high - 1])
        self._begins[low:high], self._ends[low:high] = [begin], [end]

    def has(self, begin: int, end: int) -> bool:
        """Whether every byte from ``begin`` to ``end`` is there."""
        if begin >= end:
            return True
        index = bisect_right(self._begins, begin) - 1
        return index >= 0 and self._ends[index] >= end


def needs_of_parts(nbytes: int, part: int, checksums: Int64Array) -> Int64Array:
    """The range of the file that has to be there before each part may be sent: (part, 2), begin and end.

    ``checksums``: as in ``FilePlan``: the range that each covers, and the offsets where it is stored, -1 for none.
    """
    begins = np.arange(0, max(nbytes, 1), part, dtype=np.int64)
    needs = np.stack([begins, np.minimum(begins + part, nbytes)], axis=1)
    rows = checksums[checksums[:, 0] < checksums[:, 1]]
    for column in range(2, rows.shape[1]):
        stored = rows[rows[:, column] >= 0]
        place = stored[:, column]
        for at in (place, place + 3):  # it may lie in two parts, and is written into both at once
            np.minimum.at(needs[:, 0], at // part, np.minimum(stored[:, 0], place))
            np.maximum.at(needs[:, 1], at // part, np.maximum(stored[:, 1], place + 4))
    return needs


def parts_held(needs: Int64Array, part: int, begin: int, end: int) -> int:
    """How many parts of the range [begin, end) wait for bytes outside of it; ``needs``: from ``needs_of_parts``."""
    own = needs[begin // part : -(-end // part)]
    return int(((own[:, 0] < begin) | (own[:, 1] > end)).sum())


class ObjectFile:
    """A ``ByteTarget`` for the object ``name`` of ``remote``, of ``nbytes`` bytes, sent in parts of ``part`` bytes.

    ``settle(begin, end)`` says that a range is written for good, apart from bytes that ``patch`` changes while their
    part is held. ``before``: called before the request that completes the object; ``completed``: after it. Nothing is
    visible before.

    ``own``: the range that this process writes and sends, by default all of it. Else the object is not complete with
    its last byte: ``begin_shared`` or ``join`` come before the first, ``send_held`` after it, and then, on the process
    that began, ``complete``.
    """

    def __init__(
        self, remote: RemoteTarget, name: str, nbytes: int, *, part: int, checksums: Int64Array,
        completed: Callable[[], None], before: Callable[[], None] | None = None, own: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        self.path = f"{remote.url}/{name}" if name else remote.url
        self.nbytes = nbytes
        self.coverage = Coverage()
        self._remote = remote
        self._name = name
        self._part = part
        self._before = before
        self._completed = completed
        self._needs = needs_of_parts(nbytes, part, checksums)
        self._held: dict[int, bytearray] = {}
        self._own = (0, nbytes) if own is None else own
        self._shared = self._own != (0, nbytes)
        self._left = max(-(-self._own[1] // part) - self._own[0] // part, 1)  # parts that were not sent
        self._parts: PartsUpload | None = None
        self._complete = False  # all parts may have been sent without that: its own request can fail
        self._closed = False
        self._sending = 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def write(self, offset: int, data: memoryview | bytes) -> None:
        view = memoryview(data)
        done = 0
        while done < len(view):
            number, at = divmod(offset + done, self._part)
            buffer = self._buffer(number)
            count = min(len(view) - done, len(buffer) - at)
            buffer[at : at + count] = view[done : done + count]
            done += count

    def patch(self, offset: int, data: bytes) -> None:
        """Change bytes that were written, of those that this process sends. Raises InternalError if their part was
        sent.
        """
        begin, end = max(offset, self._own[0]), min(offset + len(data), self._own[1])
        if begin >= end:
            return
        offset, data = begin, data[begin - offset : end - offset]
        for number in {offset // self._part, (offset + len(data) - 1) // self._part}:
            if number not in self._held:
                raise InternalError(f"{self.path}: part {number + 1} was sent before it was complete")
        self.write(offset, data)

    def _buffer(self, number: int) -> bytearray:
        with self._lock:
            if number not in self._held:
                self._held[number] = bytearray(min(self._part, self.nbytes - number * self._part))
            return self._held[number]

    def settle(self, begin: int, end: int) -> None:
        self.coverage.add(begin, end)

    def ready(self) -> list[tuple[int, bytearray]]:
        """The parts that may be sent, which are no longer held."""
        with self._lock:
            if not self.nbytes:
                return [(0, bytearray())]
            numbers = [number for number in self._held if self.coverage.has(*self._needs[number].tolist())]
            return [(number, self._held.pop(number)) for number in numbers]

    def send(self, number: int, data: bytearray) -> None:
        """Send one part. The last one completes an object that no other process sends. Does nothing after ``close``."""
        with self._lock:
            if self._closed:
                return
            self._sending += 1
        try:
            if len(self._needs) == 1:
                self._prepare_last()
                self._remote.put(self._name, data)
            else:
                self._upload().send(number, data)
            with self._lock:
                self._left -= 1
                last = not self._left and not self._closed
            if last and not self._shared:
                self._end()
        finally:
            with self._lock:
                self._sending -= 1
                self._changed.notify_all()

    def begin_shared(self) -> str:
        """Begin an object that others send, too. Returns what they ``join``."""
        return self._upload().upload

    def join(self, upload: str) -> None:
        """Send parts of the object that another process has begun."""
        with self._lock:
            self._parts = self._remote.in_parts(self._name, upload)

    def send_held(self) -> Mapping[int, str]:
        """Send what is held, now that all of its checksums are known. Returns what the store said of all parts."""
        with self._lock:
            held, self._held = self._held, {}
        for number, data in held.items():
            self.send(number, data)
        self.commit()
        return self._upload().tags

    def complete(self, tags: Mapping[int, str]) -> None:
        """Make the object of the parts that all processes have sent; ``tags``: what the store said of each."""
        if len(tags) != len(self._needs):
            raise InternalError(f"{self.path}: {len(tags)} of {len(self._needs)} parts were sent")
        self._upload().tags.update(tags)
        self._end()

    def _end(self) -> None:
        """All has been sent. What was sent in parts has to be made an object."""
        if self._parts is not None:
            self._prepare_last()
            self._parts.complete()
        self._complete = True
        self._completed()

    def _prepare_last(self) -> None:
        if self._before is not None:
            self._before()

    def _upload(self) -> PartsUpload:
        with self._lock:
            if self._parts is None:
                self._parts = self._remote.in_parts(self._name)
            return self._parts

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Only of parts that are held: what was sent cannot be read before the object is complete."""
        done = 0
        while done < len(buffer):
            number, at = divmod(offset + done, self._part)
            data = self._held[number][at : at + len(buffer) - done]
            buffer[done : done + len(data)] = data
            done += len(data)

    def sync(self) -> None:
        """Nothing of an object is durable before all of it is."""

    def commit(self) -> None:
        if self._left:
            raise InternalError(f"{self.path}: {self._left} parts were not sent")

    def close(self) -> None:
        """Unless the object is complete, remove the parts that were sent, once no thread sends one any more: the store
        keeps a part that arrives later. May be called twice.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._changed.wait_for(lambda: not self._sending, CLOSE_SECONDS)
        if self._parts is not None and not self._complete:
            self._parts.abort()
