"""One target file while it is written, window by window, in any order.

``streamed_output`` has one that is sent to an object store meanwhile, ``compared_output`` one that exists already and
is compared.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32

from fsdpckpt.execute.checks import Part, combine, patch_effect
from fsdpckpt.execute.staged import StagedFile
from fsdpckpt.execute.stored_checksums import Bytes, DeferredChecksums, StoredChecksums, group_neighbours
from fsdpckpt.execute.window import Assembler
from fsdpckpt.execute.window_sums import WindowSums
from fsdpckpt.plan import FilePlan
from fsdpckpt.storage import ByteTarget
from fsdpckpt.storage.local_target import WritableFile


class OutputState(NamedTuple):
    """What one rank has written of a target file: its ``parts``, and what ``StoredChecksums.pending`` returns.

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
        self.checksums = StoredChecksums(self.plan)
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
                self.checksums.window(begin, view, WindowSums(begin, view, ()))
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
        for begin, values, is_patch in group_neighbours(self.checksums.patches()):
            self._patch(file, begin, values, is_patch)
            self._patched ^= patch_effect(values.tobytes(), self.plan.nbytes - begin - len(values))
        file.commit()

    def _patch(self, file: ByteTarget, begin: int, values: Bytes, is_patch: npt.NDArray[np.bool_]) -> None:
        """Write the bytes of ``values`` marked by ``is_patch``, beginning at offset ``begin``."""
        if not is_patch.all():
            existing = read_bytes(file, begin, len(values))
            values = np.where(is_patch, values, existing)
        file.write(begin, values.tobytes())

    def export(self) -> OutputState:
        """Make this rank's windows durable; return what the rank that finishes the file needs."""
        if not self.creates_file:
            self.open().commit()
        return OutputState(self.parts, *self.checksums.pending())

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
            self.checksums.absorb(state.rows, state.deferred)
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
        output.checksums.window(begin, view, sums)
        part = (begin, len(view), sums.of(begin, end))
        target.write(begin, view)
    output.window_done(part)
    return part


def read_bytes(file: ByteTarget, begin: int, nbytes: int) -> Bytes:
    content = bytearray(nbytes)
    file.read_into(begin, memoryview(content))
    return np.frombuffer(content, np.uint8)
