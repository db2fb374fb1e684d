"""Target files while they are written, or compared with the planned output, window by window."""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32

from fsdpckpt import flags
from fsdpckpt.errors import SourceMissingError, TargetExistsError
from fsdpckpt.execute.checks import Part, combine, patch_effect
from fsdpckpt.execute.staged import StagedFile
from fsdpckpt.execute.window import Assembler
from fsdpckpt.execute.window_sums import WindowSums
from fsdpckpt.plan import FilePlan
from fsdpckpt.storage import ByteSource, ByteTarget
from fsdpckpt.storage.local import WritableFile, target_errors
from fsdpckpt.storage.object_file import ObjectFile
from fsdpckpt.storage.remote_store import RemoteStore

Bytes: TypeAlias = npt.NDArray[np.uint8]


class OutputState(NamedTuple):
    """What one rank has written of a target file: its ``parts``, and what ``TargetChecks.pending`` returns.

    ``patched``: what the checksums that it has written since change in the CRC-32 of the file.
    """

    parts: Sequence[Part]
    rows: Sequence[tuple[int, int, int, int]]
    deferred: Sequence[tuple[int, bytes]]
    patched: int = 0


@dataclass(eq=False)
class Output:
    """This rank's windows of one target file, in any order: the first window creates it, the last one commits it.

    ``own``: where the bytes that this rank writes begin and end. ``may_exist``: an interrupted run may have left the
    file. ``expect_silence(nbytes)`` is called before something that may take long.
    ``windows_left``: how many windows are still to be read back, and then to be written.
    """

    plan: FilePlan
    path: str
    own: tuple[int, int]
    may_exist: bool
    expect_silence: Callable[[int], None]
    windows_left: int = 0

    def __post_init__(self) -> None:
        self.checks = TargetChecks(self.plan)
        self._staged = StagedFile(self.plan, self.path)
        self.parts: list[Part] = []
        self._lock = threading.Lock()
        self._file: ByteTarget | None = None
        self._deferred: DeferredChecksums | None = None
        self._patched = 0

    @property
    def creates_file(self) -> bool:
        return self.own[0] == 0

    @property
    def sole_writer(self) -> bool:
        """Whether no other rank writes to the file."""
        return self.own == (0, self.plan.nbytes)

    @property
    def crc(self) -> int:
        """The CRC-32 of the whole file, once it is finished."""
        return combine(self.parts) ^ self._patched

    def read_back(
        self,
        begin: int,
        end: int,
        crc: int,
        buffer: memoryview,
        prove: Callable[[StagedFile, memoryview], None] | None = None,
    ) -> bool:
        """Keep the window [begin, end) that an interrupted run has written, if its CRC-32 is ``crc``. Thread-safe.

        ``prove`` is called for a window that is kept. Raises TargetUnwritableError if its bytes are not the plan's.
        """
        with self._lock:
            if self._file is None and self._is_left_over():
                self._file = WritableFile(self.path, self.plan.nbytes, existing=True)
                self._deferred = DeferredChecksums(self.plan)
            file, deferred = self._file, self._deferred
        kept = False
        if file is not None and deferred is not None:
            view = buffer[: end - begin]
            file.read_into(begin, view)
            deferred.clear(begin, view)
            kept = crc32(view) == crc
            if kept:
                self._staged.require_literals(begin, view)
                self.checks.window(begin, view, WindowSums(begin, view, ()))
                self._staged.require_checksums(crc, view)
                if prove is not None:
                    prove(self._staged, view)
        with self._lock:
            if kept:
                self.parts.append((begin, end - begin, crc))
            self.windows_left -= 1
            if not self.windows_left and self._file is not None:  # a run may have more files than it can keep open
                self._file.close()
                self._file = self._deferred = None
        return kept

    def _is_left_over(self) -> bool:
        """Whether an interrupted run has left the file, with its full length."""
        return self.may_exist and os.path.isfile(self.path) and os.path.getsize(self.path) == self.plan.nbytes

    def open(self) -> ByteTarget:
        with self._lock:
            if self._file is None:
                self._file = self._create()
            return self._file

    def _create(self) -> ByteTarget:
        """Open the file: a new one, another rank's, or the one that an interrupted run left."""
        if not self.creates_file:
            return WritableFile(self.path, self.plan.nbytes, existing=True)
        self.expect_silence(self.plan.nbytes)
        directory = os.path.dirname(self.path)
        if not os.path.isdir(directory):
            os.makedirs(directory, exist_ok=True)
        existing = self._is_left_over()
        if self.may_exist and not existing and os.path.isfile(self.path):
            os.unlink(self.path)
        return WritableFile(self.path, self.plan.nbytes, existing=existing)

    def window_done(self, part: Part) -> None:
        """One window is written. The last window of a file that only this rank writes makes the file durable."""
        with self._lock:
            self.parts.append(part)
            self.windows_left -= 1
            if self.windows_left > 0 or not self.sole_writer:
                return
        self._complete()

    def _complete(self) -> None:
        """All windows are written: patch the checksums, make the file durable and close it."""
        file = self.open()
        self.expect_silence(self.plan.nbytes)
        for begin, values, is_patch in _group_neighbours(self.checks.patches()):
            self._patch(file, begin, values, is_patch)
            self._patched ^= patch_effect(values.tobytes(), self.plan.nbytes - begin - len(values))
        file.commit()

    def _patch(self, file: ByteTarget, begin: int, values: Bytes, is_patch: npt.NDArray[np.bool_]) -> None:
        """Write the bytes of ``values`` marked by ``is_patch``, beginning at offset ``begin``."""
        if not is_patch.all():
            existing = _read(file, begin, len(values))
            values = np.where(is_patch, values, existing)
        file.write(begin, values.tobytes())

    def export(self) -> OutputState:
        """Make this rank's windows durable; return what the rank that finishes the file needs."""
        if not self.creates_file:
            self.open().commit()
        return OutputState(self.parts, *self.checks.pending())

    def begin_shared(self) -> str:
        """On the rank that creates the file: do it. Returns what the other ranks ``join``, if it is an object."""
        self.open()
        return ""

    def join(self, upload: str) -> None:
        """On all ranks that write an object: it can be sent now."""

    def send_held(self, others: Iterable[OutputState]) -> dict[int, str]:
        """On all ranks that write an object: take the ``export`` of all other ranks, and send what waited for that.
        Returns what the store said of each part.
        """
        return {}

    def finish_shared(self, others: Iterable[OutputState], tags: Mapping[int, str]) -> None:
        """On the rank that created the file: take the ``export`` of all other ranks, patch the checksums and make the
        file durable. ``tags``: what ``send_held`` returned, of all ranks.
        """
        for state in others:
            self.parts += state.parts
            self.checks.absorb(state.rows, state.deferred)
        self._complete()

    def abandon(self) -> None:
        if self._file is not None:
            self._file.close()


def write_window(output: Output, assembler: Assembler, begin: int, end: int, *, into: memoryview | None = None) -> Part:
    """Assemble, checksum and write the bytes [begin, end) of one target file. An empty window still opens the file.

    ``into``: assemble them there, where most of them may be.
    """
    target = output.open()
    part = (begin, 0, 0)
    if begin < end:
        view = assembler.assemble(output.plan, begin, end, into=into)
        sums = assembler.sums(view)
        output.checks.window(begin, view, sums)
        part = (begin, len(view), sums.of(begin, end))
        target.write(begin, view)
    output.window_done(part)
    return part


class TargetChecks:
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


_MAX_GAP = 4096  # bytes between two patches: up to so many are read, and written with them
_MAX_PATCH = 1 << 20  # bytes in one write: patches and the gaps between them


def _group_neighbours(
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


def _read(file: ByteTarget, begin: int, nbytes: int) -> Bytes:
    content = bytearray(nbytes)
    file.read_into(begin, memoryview(content))
    return np.frombuffer(content, np.uint8)


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


def target_differs(path: str) -> TargetExistsError:
    """The error for an existing file that should not exist, or should have other content."""
    return TargetExistsError(
        f"{path} already exists, and is not what this command writes",
        file=path,
        why=f"{flags.resume} accepts what the same command wrote: a different command wrote this, or the files of SRC "
        "have changed since",
        next_step=f"give another DST, or add {flags.overwrite} to replace it once the new one is complete",
    )


class StreamedOutput(Output):
    """A target file that is sent to an object store while it is written: nothing of it is on a disk.

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
        parts, deferred = self.checks.take()
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
            self.checks.absorb(state.rows, state.deferred)
        for offset, value in self.checks.patches():
            self._store(offset, value)
        return dict(self._object.send_held())

    def finish_shared(self, others: Iterable[OutputState], tags: Mapping[int, str]) -> None:
        for state in others:
            self.parts += state.parts
            self._patched ^= state.patched
        self._object.complete(tags)

    def abandon(self) -> None:
        self._object.close()


class ComparedOutput(Output):
    """A target file that exists: nothing is written, and a different byte raises TargetExistsError."""

    def _create(self) -> ByteTarget:
        if not os.path.isfile(self.path):
            raise target_differs(self.path)
        return _ExistingFile(self.path, self.plan.nbytes, DeferredChecksums(self.plan))

    def _patch(self, file: ByteTarget, begin: int, values: Bytes, is_patch: npt.NDArray[np.bool_]) -> None:
        if (values != _read(file, begin, len(values)))[is_patch].any():
            raise target_differs(self.path)


class ComparedObject(ComparedOutput):
    """A target file in an object store that exists."""

    def _create(self) -> ByteTarget:
        try:
            source = RemoteStore().open(self.path)
        except SourceMissingError:
            raise target_differs(self.path) from None
        if source.nbytes != self.plan.nbytes:
            raise target_differs(self.path)
        return _ExistingObject(source, DeferredChecksums(self.plan))


class _ExistingObject:
    """An object that is compared with what would be written to it."""

    def __init__(self, source: ByteSource, deferred: DeferredChecksums) -> None:
        self.path = source.path
        self.nbytes = source.nbytes
        self._source = source
        self._deferred = deferred

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._source.read_into(offset, buffer)

    def write(self, offset: int, data: memoryview | bytes) -> None:
        _require_equal(self, self._deferred, offset, data)

    def sync(self) -> None:
        """Nothing was written."""

    def commit(self) -> None:
        self.close()

    def close(self) -> None:
        self._source.close()


def _require_equal(file: ByteTarget, deferred: DeferredChecksums, offset: int, data: memoryview | bytes) -> None:
    existing = memoryview(bytearray(len(data)))
    file.read_into(offset, existing)
    deferred.clear(offset, existing)
    if not np.array_equal(np.frombuffer(existing, np.uint8), np.frombuffer(data, np.uint8)):
        raise target_differs(file.path)


class _ExistingFile(WritableFile):
    """A file that is compared with what would be written to it."""

    def __init__(self, path: str, nbytes: int, deferred: DeferredChecksums) -> None:
        self.path = path
        self.nbytes = nbytes
        self._deferred = deferred
        self._direct = -1
        self._closing = threading.Lock()
        with target_errors(path):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if os.fstat(self._fd).st_size != nbytes:
                self.close()
                raise target_differs(path)

    def write(self, offset: int, data: memoryview | bytes) -> None:
        _require_equal(self, self._deferred, offset, data)

    def sync(self) -> None:
        """Nothing was written."""

    def commit(self) -> None:
        self.close()
