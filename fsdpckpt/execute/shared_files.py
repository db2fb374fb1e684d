"""Target files that several workers write: made by the first of them, finished by it when all have written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

from fsdpckpt.execute.compare import Compared
from fsdpckpt.execute.crc import Part
from fsdpckpt.execute.kept import Kept
from fsdpckpt.execute.local import Output
from fsdpckpt.plan.plan import FilePlan
from fsdpckpt.storage.local import WritableFile

__all__ = ["ComparedWorkerOutput", "Share", "WorkerOutput"]

Share: TypeAlias = "list[object]"
"""What one worker knows of its part of a file, as plain values: see ``WorkerOutput.share``."""


class WorkerOutput(Output):
    """One worker's part of a target file, or all of it. ``first``: it makes the file; ``alone``: nobody else writes.

    ``expect_silence(nbytes)`` is told before something that may take long.
    """

    def __init__(
        self,
        file: FilePlan,
        path: str,
        windows: int,
        *,
        first: bool,
        alone: bool,
        expect_silence: Callable[[int], None],
        kept: Kept | None = None,
    ) -> None:
        super().__init__(file, path, windows, kept=kept)
        self.first = first
        self.alone = alone
        self._expect_silence = expect_silence

    def create(self) -> WritableFile:
        if not self.first:
            return WritableFile(self.path, self.plan.nbytes, existing=True)
        self._expect_silence(self.plan.nbytes)
        return super().create()

    def complete(self) -> None:
        if self.alone:
            self._expect_silence(self.plan.nbytes)
            super().complete()

    def share(self) -> Share:
        """For a part that is written: makes it durable, and says what the first worker has to know of it."""
        if not self.first:
            self.open().commit()
        rows, late = self.checks.unfinished()
        return [self.parts, rows, late]

    def finish(self, shares: Sequence[Share]) -> None:
        """On the first worker: all others' ``shares`` of this file; patches the checksums and makes it durable."""
        for parts, rows, late in shares:
            self.parts.extend(cast("list[Part]", parts))
            self.checks.absorb(cast("list[tuple[int, int, int, int]]", rows), cast("list[tuple[int, bytes]]", late))
        super().complete()


class ComparedWorkerOutput(Compared, WorkerOutput):
    """One worker's part of a target file that exists, be it the first or not: compared, not written."""
