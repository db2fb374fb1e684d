"""What becomes of staging when a run ends: committed, kept for ``--resume``, or removed; and how it is taken up again.

Kept: after a signal or a kill, and after an error of the disk or of the operating system on either side (full, I/O
error, a source that went away), if at least one window is on the disk. Removed: after every other error, since what is
staged would be wrong, or no command could finish it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from fsdpckpt.errors import (
    FsdpckptError,
    InterruptedRunError,
    Leftover,
    SourceError,
    SourceMissingError,
    TargetError,
    TargetUnwritableError,
    WorkerError,
    attach_leftover,
)
from fsdpckpt.execute.budget import Budget
from fsdpckpt.execute.journal import Finished, Recorder, RunIdentity, joined, plan_digest, read_run
from fsdpckpt.ir.checkpoint import ZEROS, Note, SourceFile
from fsdpckpt.option_fields import identity
from fsdpckpt.options import ConvertOptions
from fsdpckpt.plan.plan import Plan
from fsdpckpt.storage.protocols import FileIdentity, changed_error, is_url
from fsdpckpt.storage.sources import Sources
from fsdpckpt.storage.staging import Staging, journal_paths, staging_root
from fsdpckpt.version import __version__

__all__ = [
    "StagedRun",
    "data_files",
    "fresh_note",
    "is_resumable",
    "resumed_note",
    "run_identity",
    "same_run",
    "say_staged",
    "started_over_note",
]

_LOOKUPS = 16  # at a time: a store answers in tens of milliseconds
_START_OVER = "run the command without --resume: what was staged is removed, and it starts over"


def run_identity(plan: Plan, options: ConvertOptions, sources: Sequence[Sequence[FileIdentity]]) -> RunIdentity:
    """What a later run has to be to go on with this one. ``sources``: the copies of each of ``data_files``."""
    return RunIdentity(__version__, plan_digest(plan), identity(options), sources)


def data_files(files: Sequence[SourceFile]) -> list[str]:
    """The paths of ``files`` that a run must find unchanged."""
    return [file.path for file in files if file.path != ZEROS]


class StagedRun:
    """``staging`` to write to, ``recorder`` to tell of it; as a context, what becomes of it.

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
        self._plan = plan
        self._options = options
        self._files = data_files(files)
        self._sources = sources
        self._total = plan.bytes_written
        self.note: Note | None = None
        self.staging = Staging(target, directory=directory, overwrite=options.overwrite, resume=options.resume)
        try:
            finished = self._take_up(budget)
        except BaseException:
            self.staging.close()
            raise
        self.recorder = Recorder(self.staging.journal, self._identity, finished)

    def _identity(self) -> RunIdentity:
        with ThreadPoolExecutor(_LOOKUPS) as pool:
            found = list(pool.map(self._sources.identity, self._files))
        return run_identity(self._plan, self._options, [[copy] for copy in found])

    def _take_up(self, budget: Budget) -> Finished:
        """What is done already; staging is empty when that is nothing."""
        nothing = Finished()
        if not self.staging.resumed:
            self.note = fresh_note(self.staging, asked=self._options.resume)
            return nothing
        runs = [run for path in journal_paths(self.staging.root) if (run := read_run(path)) is not None]
        if runs:
            finished = same_run(runs, self._identity(), self.staging.root)
            if 0 < finished.longest <= budget.nbytes:
                self.staging.keep_only(file.path for file in self._plan.files)
                self.note = resumed_note(finished.nbytes, self._total)
                return finished
        self.staging.restart()
        self.note = started_over_note(self.staging.root)
        return nothing

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        try:
            if error is not None and not self.staging.committed and self._is_kept(error):
                kept = f"{self.recorder.nbytes} of {self._total} bytes are kept in {self.staging.root}"
                attach_leftover(error, Leftover(kept))
            else:
                self.staging.discard()
        finally:
            self.staging.close()

    def _is_kept(self, error: BaseException) -> bool:
        return bool(self.recorder.nbytes and journal_paths(self.staging.root)) and is_resumable(error)


def is_resumable(error: BaseException) -> bool:
    """Whether the same command may get to its end after ``error``."""
    if not isinstance(error, FsdpckptError):
        return isinstance(error, (OSError, MemoryError)) or not isinstance(error, Exception)
    passing = type(error) is SourceError or isinstance(error, (SourceMissingError, TargetUnwritableError))
    return passing or isinstance(error, (WorkerError, InterruptedRunError))


def _require_lengths(files: Sequence[SourceFile], sources: Sources) -> None:
    """Raises SourceCorruptError when a local file is not as long as when it was read."""
    for file in files:
        if file.path == ZEROS or is_url(file.path):
            continue
        now: FileIdentity = sources.identity(file.path)
        if now.nbytes != file.nbytes:
            raise changed_error(file.path, f"went from {file.nbytes} to {now.nbytes} bytes")


def fresh_note(staging: Staging, *, asked: bool) -> Note | None:
    """What to say of a run that found nothing to resume, or was not ``asked`` to."""
    if asked:
        return Note("cleared", "there was nothing to resume: started from the beginning")
    if not staging.leftover:
        return None
    hint = "; --resume would have gone on with it" if staging.journaled else ""
    return Note("cleared", f"what an interrupted run had left in {staging.root} was removed{hint}")


def resumed_note(nbytes: int, total: int) -> Note:
    return Note("resumed", f"{nbytes} of {total} bytes were there already, from an interrupted run")


def started_over_note(root: str) -> Note:
    return Note("cleared", f"{root} held nothing to go on with: started from the beginning")


def same_run(runs: Sequence[tuple[RunIdentity, Finished]], now: RunIdentity, root: str) -> Finished:
    """What ``runs``, from the journals in ``root``, have finished. Raises SourceError, TargetError: not ``now``'s."""
    for before, _ in runs:
        _refuse_changes(before, now, root)
    return joined([finished for _, finished in runs])


def _refuse_changes(before: RunIdentity, now: RunIdentity, root: str) -> None:
    changes = before.source_changes(now)
    if changes:
        raise SourceError(
            f"the source is not what the interrupted run read, so {root} cannot be resumed",
            details=changes,
            why="the rest would come from another checkpoint than the beginning",
            next_step=_START_OVER,
            resumable=False,
        )
    changes = before.other_changes(now)
    if changes:
        raise TargetError(
            f"this is not the command that was interrupted, so {root} cannot be resumed",
            details=changes,
            next_step=f"give the options it was begun with; or {_START_OVER}",
            resumable=False,
        )


def say_staged(error: BaseException, target: str) -> None:
    """Tell whoever shows ``error`` of what workers left for ``target`` to resume, as far as it is seen from here."""
    if isinstance(error, FsdpckptError) and not error.resumable:
        return
    root = staging_root(target)
    found = [run[1] for path in journal_paths(root) if (run := read_run(path)) is not None]
    nbytes = joined(found).nbytes
    if nbytes and is_resumable(error):
        attach_leftover(error, Leftover(f"{nbytes} bytes are kept in {root}"))
