"""What becomes of staging when a run ends: committed, kept for ``--resume``, or removed; and how it is taken up again.

Kept: after a signal or a kill, and after an error of the disk or of the operating system on either side (full, I/O
error, a source that went away), if at least one window is on the disk. Removed: after every other error, since what is
staged would be wrong, or no command could finish it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Self

from fsdpckpt.converters.options import ConvertOptions
from fsdpckpt.errors import (
    FsdpckptError,
    SourceError,
    SourceMissingError,
    TargetError,
    TargetUnwritableError,
    WorkerError,
)
from fsdpckpt.executor.budget import BUFFERS_PER_THREAD, Budget
from fsdpckpt.executor.recorder import Recorder
from fsdpckpt.executor.resume import Finished, RunIdentity, plan_digest, read_run
from fsdpckpt.ir.checkpoint import ZEROS, Note, SourceFile
from fsdpckpt.planner.plan import Plan
from fsdpckpt.storage.identity import FileIdentity, changed_error
from fsdpckpt.storage.sources import Sources, is_url
from fsdpckpt.storage.staging import Staging
from fsdpckpt.version import __version__

__all__ = ["StagedRun"]

# How it is written, not what: these may differ between the runs.
_FREE = frozenset({"max_memory", "threads", "verify", "dry_run", "overwrite", "resume", "launch"})
_LOOKUPS = 16  # at a time: a store answers in tens of milliseconds
_START_OVER = "run the command without --resume: what was staged is removed, and it starts over"


@dataclass(frozen=True, slots=True)
class _Run:
    """What identifies a run, looked up when it is needed."""

    plan: Plan
    options: ConvertOptions
    files: Sequence[SourceFile]
    sources: Sources

    def identity(self) -> RunIdentity:
        names = [field.name for field in fields(self.options) if field.name not in _FREE]
        values = {name: getattr(self.options, name) for name in names}
        options = {name: str(value) for name, value in values.items() if value not in (None, ())}
        with ThreadPoolExecutor(_LOOKUPS) as pool:
            found = list(pool.map(self.sources.identity, _paths(self.files)))
        return RunIdentity(__version__, plan_digest(self.plan), options, found)


def _paths(files: Sequence[SourceFile]) -> list[str]:
    return [file.path for file in files if file.path != ZEROS]


class StagedRun:
    """``staging`` to write to, ``recorder`` to tell of it, ``budget`` for it; as a context, what becomes of it.

    ``note``: what to say of an interrupted run's remains. Raises TargetError or SourceError when those are not this
    run's, and leaves them.
    """

    def __init__(
        self,
        target: str,
        plan: Plan,
        options: ConvertOptions,
        *,
        directory: bool,
        files: Sequence[SourceFile],
        budget: Budget,
        sources: Sources,
    ) -> None:
        _require_lengths(files, sources)
        self._run = _Run(plan, options, files, sources)
        self._total = plan.bytes_written
        self.note: Note | None = None
        self.staging = Staging(target, directory=directory, overwrite=options.overwrite, resume=options.resume)
        try:
            finished = self._take_up(budget)
        except BaseException:
            self.staging.close()
            raise
        self.budget = budget
        if finished.crcs:
            self.budget = Budget(min(budget.threads, _threads(budget, finished.window)), finished.window)
        self.recorder = Recorder(self.staging.journal, self._run.identity, finished)

    def _take_up(self, budget: Budget) -> Finished:
        """What is done already; staging is empty when that is nothing."""
        nothing = Finished(budget.window)
        if not self.staging.resumed:
            self.note = _note_of(self.staging, asked=self._run.options.resume)
            return nothing
        found = read_run(self.staging.journal)
        if found is not None:
            before, finished = found
            _refuse_changes(before, self._run.identity(), self.staging.root)
            if finished.crcs and _threads(budget, finished.window) > 0:
                share = f"{finished.nbytes} of {self._total} bytes"
                self.note = Note("resumed", f"{share} were there already, from an interrupted run")
                return finished
        self.staging.restart()
        self.note = Note("cleared", f"{self.staging.root} held nothing to go on with: started from the beginning")
        return nothing

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        try:
            if error is not None and not self.staging.committed and self._resumable(error):
                _say(error, f"{self.recorder.nbytes} of {self._total} bytes are kept in {self.staging.root}")
            else:
                self.staging.discard()
        finally:
            self.staging.close()

    def _resumable(self, error: BaseException) -> bool:
        if not self.recorder.nbytes or not os.path.isfile(self.staging.journal):
            return False
        if not isinstance(error, FsdpckptError):
            return isinstance(error, (OSError, MemoryError)) or not isinstance(error, Exception)
        passing = type(error) is SourceError or isinstance(error, (SourceMissingError, TargetUnwritableError))
        return passing or isinstance(error, WorkerError)


def _require_lengths(files: Sequence[SourceFile], sources: Sources) -> None:
    """Raises SourceCorruptError when a local file is not as long as when it was read."""
    for file in files:
        if file.path == ZEROS or is_url(file.path):
            continue
        now: FileIdentity = sources.identity(file.path)
        if now.nbytes != file.nbytes:
            raise changed_error(file.path, f"went from {file.nbytes} to {now.nbytes} bytes")


def _threads(budget: Budget, window: int) -> int:
    """How many threads with buffers of ``window`` bytes fit the budget."""
    return budget.nbytes // (BUFFERS_PER_THREAD * window) if window > 0 else 0


def _note_of(staging: Staging, *, asked: bool) -> Note | None:
    if asked:
        return Note("cleared", "there was nothing to resume: started from the beginning")
    if not staging.leftover:
        return None
    hint = "; --resume would have gone on with it" if staging.journaled else ""
    return Note("cleared", f"what an interrupted run had left in {staging.root} was removed{hint}")


def _refuse_changes(before: RunIdentity, now: RunIdentity, root: str) -> None:
    changes = before.source_changes(now)
    if changes:
        raise SourceError(
            f"the source is not what the interrupted run read, so {root} cannot be resumed",
            details=changes,
            why="the rest would come from another checkpoint than the beginning",
            next_step=_START_OVER,
        )
    changes = before.other_changes(now)
    if changes:
        raise TargetError(
            f"this is not the command that was interrupted, so {root} cannot be resumed",
            details=changes,
            next_step=f"give the options it was begun with; or {_START_OVER}",
        )


def _say(error: BaseException, kept: str) -> None:
    """Tell whoever shows ``error`` what is left to resume."""
    if isinstance(error, FsdpckptError):
        error.details = (*error.details, kept)
        first = f"{error.next_step}; then " if error.next_step else ""
        error.next_step = f"{first}the same command with --resume goes on from there"
    else:
        error.add_note(kept)
