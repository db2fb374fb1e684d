"""Target files while they are written, or compared with the planned output, window by window."""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32

from fsdpckpt.errors import TargetExistsError
from fsdpckpt.execute.checks import Part, combine, patch_effect
from fsdpckpt.execute.window import Assembler
from fsdpckpt.plan import FilePlan, Range
from fsdpckpt.storage.local import WritableFile, target_errors

Bytes: TypeAlias = npt.NDArray[np.uint8]


class OutputState(NamedTuple):
    """What is written of one target file: its ``parts``, and the result of ``TargetChecks.unfinished``."""

    parts: Sequence[Part]
    rows: Sequence[tuple[int, int, int, int]]
    late: Sequence[tuple[int, bytes]]

    @property
    def ranges(self) -> list[Range]:
        return [Range(begin, begin + nbytes) for begin, nbytes, _ in self.parts]


@dataclass(eq=False)
class Output:
    """This rank's windows of one target file, in any order: the first window creates it, the last one commits it.

    ``left``: the number of windows still to come. ``first``: this rank creates the file; ``alone``: no other rank
    writes to it. ``expect_silence(nbytes)`` is called before something that may take long. ``resumed``: what an
    interrupted run left of the file; None for a new one.
    """

    plan: FilePlan
    path: str
    left: int
    first: bool
    alone: bool
    expect_silence: Callable[[int], None]
    resumed: OutputState | None

    def __post_init__(self) -> None:
        self.checks = TargetChecks(self.plan)
        self.parts: list[Part] = []
        self._lock = threading.Lock()
        self._file: WritableFile | None = None
        self._patched = 0
        if self.resumed is not None:
            self._absorb(self.resumed)

    def _absorb(self, state: OutputState) -> None:
        self.parts.extend(state.parts)
        self.checks.absorb(state.rows, state.late)

    @property
    def crc(self) -> int:
        """The CRC-32 of the whole file, once it is finished."""
        return combine(self.parts) ^ self._patched

    def open(self) -> WritableFile:
        with self._lock:
            if self._file is None:
                self._file = self._create()
            return self._file

    def _create(self) -> WritableFile:
        """Open the file: a new one, another rank's, or the one an interrupted run left with its full length."""
        if not self.first:
            return WritableFile(self.path, self.plan.nbytes, existing=True)
        self.expect_silence(self.plan.nbytes)
        directory = os.path.dirname(self.path)
        if not os.path.isdir(directory):
            os.makedirs(directory, exist_ok=True)
        left = self.resumed is not None and os.path.isfile(self.path)
        if left and os.path.getsize(self.path) != self.plan.nbytes:
            os.unlink(self.path)
            left = False
        return WritableFile(self.path, self.plan.nbytes, existing=left)

    def finished(self, part: Part) -> None:
        """One window is written. The last window of a file that only this rank writes makes the file durable."""
        with self._lock:
            self.parts.append(part)
            self.left -= 1
            if self.left > 0 or not self.alone:
                return
        self._complete()

    def _complete(self) -> None:
        """All windows are written: patch the checksums, make the file durable and close it."""
        if self._file is None:
            return
        self.expect_silence(self.plan.nbytes)
        for begin, values, here in _close_together(self.checks.patches()):
            self._patch(self._file, begin, values, here)
            self._patched ^= patch_effect(values.tobytes(), self.plan.nbytes - begin - len(values))
        self._file.commit()

    def _patch(self, file: WritableFile, begin: int, values: Bytes, here: npt.NDArray[np.bool_]) -> None:
        """Write the checksums in ``values`` marked by ``here``, beginning at offset ``begin``."""
        if not here.all():
            existing = _read(file, begin, len(values))
            values = np.where(here, values, existing)
        file.write(begin, values.tobytes())

    def state(self) -> OutputState:
        """Make this rank's finished windows durable; return what the rank that finishes the file needs."""
        if not self.first:
            self.open().commit()
        return OutputState(self.parts, *self.checks.unfinished())

    def finish(self, others: Iterable[OutputState]) -> None:
        """On the rank that created the file: take the ``state`` of all other parts, patch the checksums and make the
        file durable.
        """
        for state in others:
            self._absorb(state)
        self._complete()

    def abandon(self) -> None:
        if self._file is not None:
            self._file.close()


def write_window(output: Output, assembler: Assembler, begin: int, end: int) -> Part:
    """Assemble, checksum and write the bytes [begin, end) of one target file. An empty window still opens the file."""
    target = output.open()
    part = (begin, 0, 0)
    if begin < end:
        view = assembler.assemble(output.plan, begin, end)
        output.checks.window(begin, view)
        part = (begin, len(view), crc32(view))
        target.write(begin, view)
    output.finished(part)
    return part


class TargetChecks:
    """The checksums one target file needs: takes parts from the windows, returns values to write into the file."""

    def __init__(self, file: FilePlan) -> None:
        self._file = file
        self._parts: list[tuple[int, int, int, int]] = []  # number of the checksum, then a Part
        self._late: list[tuple[int, bytes]] = []
        self._lock = threading.Lock()

    def window(self, begin: int, view: memoryview) -> None:
        """Take the window [begin, begin + len(view)); writes into ``view`` the CRCs whose place is inside it."""
        end = begin + len(view)
        table = self._file.checksums
        first = max(int(table[:, 0].searchsorted(begin, side="right")) - 1, 0)
        rows = table[first : int(table[:, 0].searchsorted(end))].tolist()
        parts: list[tuple[int, int, int, int]] = []
        late: list[tuple[int, bytes]] = []
        for index, (low, high, *places) in enumerate(rows, first):
            if low < begin or high > end:
                first, last = max(low, begin), min(high, end)
                if first < last:
                    parts.append((index, first, last - first, crc32(view[first - begin : last - begin])))
            elif low < high:
                value = crc32(view[low - begin : high - begin]).to_bytes(4, "little")
                for place in places:
                    if begin <= place <= end - 4:
                        view[place - begin : place - begin + 4] = value
                    elif place >= 0:
                        late.append((place, value))
        if parts or late:
            with self._lock:
                self._parts += parts
                self._late += late

    def unfinished(self) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, bytes]]]:
        """The argument of ``absorb``: parts (checksum, offset, nbytes, crc), and values whose place is elsewhere."""
        return self._parts, self._late

    def absorb(self, rows: Iterable[tuple[int, int, int, int]], late: Iterable[tuple[int, bytes]]) -> None:
        """Take the ``unfinished`` of another worker, which wrote other windows of the same file."""
        self._parts += rows
        self._late += late

    def patches(self) -> list[tuple[int, bytes]]:
        """What remains to be written after every window: (file offset, 4 bytes)."""
        patches = list(self._late)
        for index, parts in groupby(sorted(self._parts), key=lambda row: row[0]):
            value = combine([row[1:] for row in parts]).to_bytes(4, "little")
            patches += [(place, value) for place in self._file.checksums[index, 2:].tolist() if place >= 0]
        return patches


_NEAR = 4096  # bytes between two late checksums that are read and written with them
_AT_ONCE = 1 << 20  # bytes of late checksums, and of the gaps between them, in one write


def _close_together(
    patches: Sequence[tuple[int, bytes]],
) -> Iterator[tuple[int, Bytes, npt.NDArray[np.bool_]]]:
    """Group neighbouring ``patches``: where each group begins, its bytes, and which of them belong to a patch rather
    than a gap. The directory of an archive with many records is full of checksums.
    """
    if not patches:
        return
    places = np.array([place for place, _ in patches], np.int64)
    values = np.frombuffer(b"".join([value for _, value in patches]), np.uint8).reshape(len(patches), 4)
    order = np.argsort(places, kind="stable")
    places, values = places[order], values[order]
    apart = (np.diff(places) > _NEAR) | (np.diff(places // _AT_ONCE) > 0)
    for rows in np.split(np.arange(len(places)), np.flatnonzero(apart) + 1):
        begin = int(places[rows[0]])
        inside = places[rows][:, None] - begin + np.arange(4)
        group = np.zeros(int(inside[-1, -1]) + 1, np.uint8)
        here = np.zeros(len(group), np.bool_)
        group[inside], here[inside] = values[rows], True
        yield begin, group, here


def _read(file: WritableFile, begin: int, nbytes: int) -> Bytes:
    content = bytearray(nbytes)
    file.read_into(begin, memoryview(content))
    return np.frombuffer(content, np.uint8)


class LatePlaces:
    """The places in one file of checksums that depend on other windows: zeros until the file is complete.

    A window that is read back may hold them already; ``clear`` restores what it was when it was summed.
    """

    def __init__(self, file: FilePlan) -> None:
        self._file = file
        self._rows: list[tuple[int, int, int]] | None = None  # place, begin and end of the range, sorted
        self._lock = threading.Lock()

    def clear(self, begin: int, view: memoryview) -> None:
        """Zero the late places of the window ``view``, which begins at ``begin``."""
        end = begin + len(view)
        rows = self._sorted()
        for place, low, high in rows[bisect_left(rows, (begin - 3,)) : bisect_left(rows, (end,))]:
            if begin <= min(place, low) and max(place + 4, high) <= end:
                continue  # summed and stored within this window
            start, stop = max(place - begin, 0), min(place + 4, end) - begin
            view[start:stop] = bytes(stop - start)

    def _sorted(self) -> list[tuple[int, int, int]]:
        with self._lock:
            if self._rows is None:  # only a resumed run needs them
                ranges = self._file.checksums.tolist()
                self._rows = sorted(
                    (place, low, high) for low, high, *places in ranges for place in places if place >= 0
                )
            return self._rows


def target_differs(path: str) -> TargetExistsError:
    """The error for an existing file that should not exist, or should have other content."""
    return TargetExistsError(
        f"{path} exists, and is not what this command writes",
        file=path,
        why="--resume continues an interrupted run of the same command, and another one wrote this",
        next_step="give another DST, or add --overwrite to replace it once the new one is complete",
    )


class ComparedOutput(Output):
    """A target file that exists: nothing is written, and a different byte raises TargetExistsError."""

    def _create(self) -> WritableFile:
        if not os.path.isfile(self.path):
            raise target_differs(self.path)
        return _ExistingFile(self.path, self.plan.nbytes, LatePlaces(self.plan))

    def _patch(self, file: WritableFile, begin: int, values: Bytes, here: npt.NDArray[np.bool_]) -> None:
        if (values != _read(file, begin, len(values)))[here].any():
            raise target_differs(self.path)


class _ExistingFile(WritableFile):
    """A file that is compared with what would be written to it."""

    def __init__(self, path: str, nbytes: int, late: LatePlaces) -> None:
        self.path = path
        self.nbytes = nbytes
        self._late = late
        self._direct = -1
        self._closing = threading.Lock()
        with target_errors(path):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if os.fstat(self._fd).st_size != nbytes:
                self.close()
                raise target_differs(path)

    def write(self, offset: int, data: memoryview | bytes) -> None:
        there = memoryview(bytearray(len(data)))
        self.read_into(offset, there)
        self._late.clear(offset, there)
        if not np.array_equal(np.frombuffer(there, np.uint8), np.frombuffer(data, np.uint8)):
            raise target_differs(self.path)

    def sync(self) -> None:
        """Nothing was written."""

    def commit(self) -> None:
        self.close()
