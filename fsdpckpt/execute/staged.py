"""Proves what an interrupted run has staged, without believing its journal.

A journal lists windows with their CRC-32. That finds bits that flipped on the disk; the window is then copied again.
Whoever can write to the staging directory can change both. So three more comparisons are made with every window that is
kept; a difference means that somebody, or a disk that lies, changed what is staged, and the run ends.

1. Headers, pickles and other literal bytes, and the checksums inside the window, with the plan. Always.
2. Tensor bytes that are in the target as they are in the source, with the checksums of the source's records, combined
   from the staged parts and from those that this run reads. Always, where the source has checksums.
3. All bytes with the source, read once more, under ``--verify full``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from isal.isal_zlib import crc32

from fsdpckpt.errors import SourceCorruptError, TargetUnwritableError
from fsdpckpt.execute.checks import SourceCheck
from fsdpckpt.execute.window import Assembler
from fsdpckpt.ir.checkpoint import Checksums, SourceFile
from fsdpckpt.ir.tensors import Int64Array, distinct
from fsdpckpt.plan import FilePlan
from fsdpckpt.text import bytes_text


class StagedFile:
    """What proves the windows of one staged file, at ``path``. Thread-safe."""

    def __init__(self, plan: FilePlan, path: str) -> None:
        self._plan = plan
        self._path = path

    @cached_property
    def _stored(self) -> Int64Array:
        """The offsets of all bytes of checksums that the file stores: they depend on the bytes, not on the plan."""
        offsets = distinct(self._plan.checksums[:, 2:])
        return (offsets[offsets >= 0][:, None] + np.arange(4)).ravel()

    def require_literals(self, begin: int, view: memoryview) -> None:
        """Compare the literal bytes of the window ``view``, which begins at ``begin``, with the plan."""
        literals, end = self._plan.literals, begin + len(view)
        low = max(int(literals[:, 0].searchsorted(begin, side="right")) - 1, 0)
        high = int(literals[:, 0].searchsorted(end, side="left"))
        staged, blob = np.frombuffer(view, np.uint8), np.frombuffer(self._plan.blob, np.uint8)
        for at, start, nbytes in literals[low:high].tolist():
            first, last = max(at, begin), min(at + nbytes, end)
            if first < last:
                planned = blob[start + first - at : start + last - at]
                self._require_equal(first, staged[first - begin : last - begin], planned)

    def require_source(self, begin: int, view: memoryview, assembler: Assembler, step: int) -> None:
        """Compare the window ``view`` with what the source has, ``step`` bytes at a time."""
        staged = np.frombuffer(view, np.uint8)
        for at in range(begin, begin + len(view), step):
            end = min(at + step, begin + len(view))
            planned = np.frombuffer(assembler.assemble(self._plan, at, end), np.uint8)
            self._require_equal(at, staged[at - begin : end - begin], planned)

    def _require_equal(self, begin: int, staged: np.ndarray, planned: np.ndarray) -> None:
        differ = staged != planned
        low, high = np.searchsorted(self._stored, [begin, begin + len(staged)]).tolist()
        differ[self._stored[low:high] - begin] = False
        if differ.any():
            raise staged_error(self._path, f"another byte at offset {begin + int(differ.argmax()):,} than the source")

    def require_checksums(self, before: int, view: memoryview) -> None:
        """``view``: the window after the checksums in it were computed; its CRC-32 was ``before``."""
        if crc32(view) != before:
            raise staged_error(self._path, "checksums in it that do not fit its bytes")

    def sums(self, begin: int, view: memoryview) -> list[tuple[int, int, int, int]]:
        """Source file, offset, length and CRC-32 of the bytes in the window that are copies without a cast or gaps."""
        plan, end = self._plan, begin + len(view)
        low = max(int(plan.write_items[:, 0].searchsorted(begin, side="right")) - 1, 0)
        high = int(plan.write_items[:, 0].searchsorted(end, side="left"))
        rows = slice(int(plan.first_copy[low]), int(plan.first_copy[high]))
        copies = plan.copies
        plain = (copies.rows[rows] == 1) & (copies.cast[rows] < 0)
        file, source, target, width = (
            column[rows][plain] for column in (copies.file, copies.source, copies.target, copies.width)
        )
        first = np.maximum(target, begin)
        nbytes = np.minimum(target + width, end) - first
        table = np.stack([file, source + first - target, first - begin, nbytes])[:, nbytes > 0]
        return [
            (number, offset, length, crc32(view[at : at + length])) for number, offset, at, length in table.T.tolist()
        ]

    def sources(self, begin: int, end: int) -> Int64Array:
        """The source files from which the window [begin, end) is copied."""
        plan = self._plan
        low = max(int(plan.write_items[:, 0].searchsorted(begin, side="right")) - 1, 0)
        high = int(plan.write_items[:, 0].searchsorted(end, side="left"))
        return distinct(plan.copies.file[int(plan.first_copy[low]) : int(plan.first_copy[high])])


class StagedCheck(SourceCheck):
    """Compares staged bytes with the checksums of the source's records. ``wrong``: the first that does not match.

    ``SourceCheck`` compares what was read from the source, so a difference here is not the source's fault.
    """

    def __init__(self, files: Sequence[SourceFile], checksums: Checksums) -> None:
        super().__init__(files, checksums)
        self.wrong = ""

    def add_all(self, sums: Sequence[tuple[int, int, int, int]]) -> None:
        """``StagedFile.sums`` of one window."""
        for file, offset, nbytes, crc in sums:
            self.add_sum(file, offset, nbytes, crc)

    def _compare(self, file: int, index: int, crc: int) -> None:
        offset, nbytes, expected = self._record(file, index)
        if crc != expected:
            self.wrong = self.wrong or f"{bytes_text(nbytes)} at offset {offset:,} of {self._files[file]}"

    def find_wrong(self) -> str:
        """Compare all records of which every byte is known; returns where the first is that does not match."""
        try:
            self.finish()
        except SourceCorruptError as error:  # staged twice, and not the same
            self.wrong = self.wrong or (error.file or error.what)
        return self.wrong


def staged_error(path: str, found: str) -> TargetUnwritableError:
    """The error for staged bytes at ``path`` that are not what an interrupted run can have written."""
    return TargetUnwritableError(
        f"{path} was changed after an interrupted run had written it: it has {found}",
        file=path,
        why="its journal does not tell, so it was changed, too, by another program or user; or the disk returns other "
        "bytes than were written to it",
        next_step="find out who writes there (what was staged is removed, nothing of it was published)",
        run_again=True,
        resumable=False,
    )
