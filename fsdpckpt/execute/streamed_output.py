"""One target file that is sent to an object store while it is written."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fsdpckpt.execute.checks import Part, combine, patch_effect
from fsdpckpt.execute.output import Output, OutputState
from fsdpckpt.storage import ByteTarget
from fsdpckpt.storage.object_file import ObjectFile


class StreamedOutput(Output):
    """An ``Output`` of which nothing is on a disk.

    A checksum is written as soon as all of its range is there, and its part of the object is sent then. ``create``
    makes the object. Where other ranks send parts of it, too, those with checksums of their bytes are sent at the end.
    """

    def __init__(self, create: Callable[[Output], ObjectFile], *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._object = create(self)
        self._known: list[tuple[int, bytes]] = []  # checksums whose place is not written yet
        self._parts_of: dict[int, list[Part]] = {}  # of the ranges of which only parts are written
        self._bytes_of: Counter[int] = Counter()  # how many bytes of each
        self._settling = threading.Lock()

    def open(self) -> ByteTarget:
        return self._object

    def window_done(self, part: Part) -> None:
        begin, nbytes, _ = part
        with self._settling:
            self.parts.append(part)
            self._object.settle(begin, begin + nbytes)
            self._write_checksums()
            ready = self._object.ready()
        for number, data in ready:
            self._object.send(number, data)

    def _write_checksums(self) -> None:
        parts, deferred = self.checksums.take()
        table = self.plan.checksums
        for index, *of_range in parts:
            offset, nbytes, crc = of_range
            self._parts_of.setdefault(index, []).append((offset, nbytes, crc))
            self._bytes_of[index] += nbytes
            low, high, *stored_at = table[index].tolist()
            if self._bytes_of[index] == high - low:
                value = combine(self._parts_of.pop(index)).to_bytes(4, "little")
                deferred += [(offset, value) for offset in stored_at if offset >= 0]
        waiting = []
        for offset, value in (*self._known, *deferred):
            if self._object.coverage.has(offset, offset + len(value)):
                self._store(offset, value)
            else:
                waiting.append((offset, value))
        self._known = waiting

    def _store(self, offset: int, value: bytes) -> None:
        """Write a checksum, as far as this rank sends its bytes."""
        self._object.patch(offset, value)
        self._patched ^= patch_effect(value, self.plan.nbytes - offset - len(value))

    def begin_shared(self) -> str:
        return self._object.begin_shared()

    def join(self, upload: str) -> None:
        if not self.creates_file:
            self._object.join(upload)

    def export(self) -> OutputState:
        rows = [(index, *part) for index, parts in self._parts_of.items() for part in parts]
        return OutputState(self.parts, rows, self._known, self._patched)

    def send_held(self, others: Iterable[OutputState]) -> dict[int, str]:
        own = self.export()
        for state in (own, *others):
            self.checksums.absorb(state.rows, state.deferred)
        for offset, value in self.checksums.patches():
            self._store(offset, value)
        return dict(self._object.send_held())

    def finish_shared(self, others: Iterable[OutputState], tags: Mapping[int, str]) -> None:
        for state in others:
            self.parts += state.parts
            self._patched ^= state.patched
        self._object.complete(tags)

    def abandon(self) -> None:
        self._object.close()
