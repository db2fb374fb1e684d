"""Resumes interrupted runs: what their journals name is read back, if the source and the command are still the same.

Staging is kept for ``--resume`` after a signal or a kill, and after an error of the disk or of the operating system on
either side (full, I/O error, a source that went away), if a journal names at least one window. After any other error it
is removed: what is staged would be wrong, or no command could finish it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import numpy as np

from fsdpckpt.comm.protocol import Group
from fsdpckpt.converters.staging import Places
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
from fsdpckpt.execute.job import Job
from fsdpckpt.execute.journal import Finished, RunIdentity, joined, plan_digest, read_run, run_of
from fsdpckpt.ir.checkpoint import ZEROS, Note, SourceFile
from fsdpckpt.ir.tensors import Int64Array
from fsdpckpt.option_fields import identity as option_texts
from fsdpckpt.options import ConvertOptions
from fsdpckpt.plan.plan import Plan
from fsdpckpt.plan.transfer import Segment
from fsdpckpt.storage.journal import Record, read_records
from fsdpckpt.storage.protocols import FileIdentity, changed_error, is_url
from fsdpckpt.storage.sources import Sources
from fsdpckpt.storage.staging import Staging, journal_paths, staging_root
from fsdpckpt.version import __version__

__all__ = [
    "claim_rows",
    "finished_windows",
    "attach_staged",
    "is_resumable",
    "journals_of",
    "resume_note",
    "run_identity",
    "source_copies",
]

_LOOKUPS = 16  # at a time: a store answers in tens of milliseconds
_START_OVER = "run the command without --resume: what was staged is removed, and it starts over"


def run_identity(plan: Plan, options: ConvertOptions, sources: Sequence[Sequence[FileIdentity]]) -> RunIdentity:
    """What a later run has to be to resume this one. ``sources``: see ``source_copies``."""
    return RunIdentity(__version__, plan_digest(plan), option_texts(options), sources)


def source_copies(
    group: Group, files: Sequence[SourceFile], sources: Sources, visible: Sequence[bool]
) -> list[list[FileIdentity]]:
    """The distinct copies of each source file that the ranks see, the same list on every rank. Collective.

    ``visible[file]``: whether this rank sees it. ``sources`` knows what each file was when it was first opened. Raises
    SourceCorruptError when the length of a local file changed since the checkpoint was read.
    """
    data = [(file, see) for file, see in zip(files, visible, strict=True) if file.path != ZEROS]
    with group.step("identify the sources"), ThreadPoolExecutor(_LOOKUPS) as pool:
        rows = list(pool.map(lambda each: _row(each[0], sources) if each[1] else [], data))
    everyone = cast("list[list[list[object]]]", group.all_gather_objects(rows, name="copies of the sources"))
    return [
        [_identity(file.path, row) for row in dict.fromkeys(tuple(rows[number]) for rows in everyone) if row]
        for number, (file, _) in enumerate(data)
    ]


def _row(file: SourceFile, sources: Sources) -> list[object]:
    identity = sources.identity(file.path)
    if not is_url(file.path) and identity.nbytes != file.nbytes:
        raise changed_error(file.path, f"went from {file.nbytes} to {identity.nbytes} bytes")
    return [identity.nbytes, identity.mtime_ns, identity.inode, identity.tag]


def _identity(path: str, row: Sequence[object]) -> FileIdentity:
    nbytes, mtime_ns, inode, tag = row
    return FileIdentity(path, cast("int", nbytes), cast("int", mtime_ns), cast("int", inode), str(tag))


def journals_of(group: Group, staging: Staging | None) -> list[list[list[Record]]]:
    """By rank the records of each journal that an interrupted run left in its staging directory. Collective.

    ``staging``: this rank's, if it leads a place.
    """
    resumed = staging is not None and staging.resumed
    records = [read_records(path) for path in journal_paths(staging.root)] if staging is not None and resumed else []
    return cast("list[list[list[Record]]]", group.all_gather_objects(records, name="journals"))


def finished_windows(
    journals: Sequence[Sequence[Sequence[Record]]],
    places: Places,
    identity: Callable[[], RunIdentity],
    max_memory: int,
) -> dict[int, Finished]:
    """By place the windows that an interrupted run has written.

    A place is left out, and starts over, when no journal is readable or one window is longer than ``max_memory`` bytes.
    ``identity``: this run's. Raises SourceError or TargetError when a journal is another run's.
    """
    windows: dict[int, Finished] = {}
    for place, leader in enumerate(places.leaders):
        runs = [run for records in journals[leader] if (run := run_of(records)) is not None]
        for before, _ in runs:
            _require_same_run(before, identity(), places.roots[place])
        finished = joined([each for _, each in runs])
        if 0 < finished.longest <= max_memory:
            windows[place] = finished
    return windows


def _require_same_run(before: RunIdentity, now: RunIdentity, root: str) -> None:
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


def claim_rows(finished: Mapping[int, Finished], segments: Sequence[Segment]) -> Int64Array:
    """The rows of ``Job.claims``: the windows in ``finished`` that lie within one segment of their place."""
    bounds: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for segment in segments:
        bounds.setdefault((segment.place, segment.file), []).append((segment.begin, segment.end))
    rows = [
        (place, file, begin, end, crc)
        for place, windows in finished.items()
        for file, claims in windows.claims().items()
        for begin, end, crc in claims
        if any(low <= begin and end <= high for low, high in bounds.get((place, file), ()))
    ]
    return np.asarray(rows, np.int64).reshape(-1, 5)


def resume_note(job: Job, target: str, staging: Staging | None, *, asked: bool) -> Note | None:
    """What to report of an interrupted run's remains.

    ``staging``: None where DST exists and is complete. ``asked``: whether ``--resume`` was given.
    """
    if len(job.claims):
        total = sum(segment.end - segment.begin for segment in job.segments)
        nbytes = int((job.claims[:, 3] - job.claims[:, 2]).sum())
        return Note("resumed", f"{nbytes} of {total} bytes were there already, from an interrupted run")
    if staging is None:
        return Note("resumed", f"{target} was complete already: every byte was compared, nothing was written")
    if staging.resumed:
        return Note("cleared", f"{staging.root} held nothing to go on with: started from the beginning")
    if asked:
        return Note("cleared", "there was nothing to resume: started from the beginning")
    if not staging.leftover:
        return None
    hint = "; --resume would have gone on with it" if staging.journaled else ""
    return Note("cleared", f"what an interrupted run had left in {staging.root} was removed{hint}")


def is_resumable(error: BaseException) -> bool:
    """Whether the same command with ``--resume`` may finish after ``error``."""
    if not isinstance(error, FsdpckptError):
        return isinstance(error, (OSError, MemoryError)) or not isinstance(error, Exception)
    passing = type(error) is SourceError or isinstance(error, (SourceMissingError, TargetUnwritableError))
    return passing or isinstance(error, (WorkerError, InterruptedRunError))


def attach_staged(error: BaseException, target: str) -> None:
    """Add to ``error`` what workers left for ``target`` to resume, as far as this process sees it."""
    if isinstance(error, FsdpckptError) and not error.resumable:
        return
    root = staging_root(target)
    runs = [run[1] for path in journal_paths(root) if (run := read_run(path)) is not None]
    nbytes = joined(runs).nbytes
    if nbytes and is_resumable(error):
        attach_leftover(error, Leftover(f"{nbytes} bytes are kept in {root}"))
