"""Resumes interrupted runs: reads back what their journals list, if the source and the command are still the same.

The same command resumes without being asked. What another command or another source has left is removed only with
``--no-resume``: that command could still finish it. If its source has changed since, no command can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from typing import Any, cast

from fsdpckpt import flags
from fsdpckpt.comm.protocol import Group
from fsdpckpt.converters.output.places import OutputPlaces
from fsdpckpt.credentials import without_credentials
from fsdpckpt.errors import (
    FsdpckptError,
    InterruptedRunError,
    Leftover,
    SourceError,
    SourceMissingError,
    TargetError,
    TargetUnwritableError,
    WorkerError,
)
from fsdpckpt.execute.job import Job
from fsdpckpt.execute.journal import (
    JournaledWindows,
    Record,
    RunIdentity,
    joined,
    read_records,
    read_run,
    run_of,
)
from fsdpckpt.ir.checkpoint import Note, SourceFile
from fsdpckpt.ir.files import Stored
from fsdpckpt.options import ConvertOptions
from fsdpckpt.options.declare import output_options
from fsdpckpt.plan import Plan
from fsdpckpt.plan.written import written_bytes
from fsdpckpt.storage import FileIdentity, changed_error, is_url
from fsdpckpt.storage.hidden import journal_paths, staging_root
from fsdpckpt.storage.sources import Sources
from fsdpckpt.storage.staging import InterruptedRun, Staging
from fsdpckpt.text import bytes_text, size_text
from fsdpckpt.version import __version__

_LOOKUPS = 16  # requests at a time: a store answers in tens of milliseconds


def run_identity(plan: Plan, options: ConvertOptions, sources: Sequence[Sequence[FileIdentity]]) -> RunIdentity:
    """What a later run must have in common with this one to resume it. ``sources``: see ``source_copies``."""
    shown = [list(map(_without_credentials, copies)) for copies in sources]
    given = {name: without_credentials(text) for name, text in output_options(options).items()}
    return RunIdentity(__version__, plan.digest(), given, shown, plan.bytes_written)


def _without_credentials(copy: FileIdentity) -> FileIdentity:
    return replace(copy, path=without_credentials(copy.path))


def source_copies(
    group: Group, files: Sequence[SourceFile], sources: Sources, seen_by: Sequence[bool]
) -> list[list[FileIdentity]]:
    """The distinct copies of each source file that the ranks see, the same list on every rank. Collective.

    ``seen_by[file]``: whether this rank sees it. ``sources`` knows the identity each file had when it was first opened.
    Raises SourceCorruptError if the length of a local file changed since the checkpoint was read.
    """
    data = [(file, see) for file, see in zip(files, seen_by, strict=True) if isinstance(file, Stored)]
    with group.step("identify the sources"), group.heartbeat(), ThreadPoolExecutor(_LOOKUPS) as pool:
        rows = list(pool.map(lambda each: _identity_row(each[0], sources) if each[1] else [], data))
    everyone = cast("list[list[list[Any]]]", group.all_gather_objects(rows, name="copies of the sources"))
    copies: list[list[FileIdentity]] = []
    for of_file in zip(*everyone, strict=True):  # what each rank sees of one file; nothing where it does not see it
        distinct = dict.fromkeys(tuple(row) for row in of_file if row)
        copies.append([FileIdentity(*row) for row in distinct])
    return copies


def _identity_row(file: Stored, sources: Sources) -> list[object]:
    identity = sources.identity(file.path)
    if not is_url(file.path) and identity.nbytes != file.nbytes:
        raise changed_error(file.path, f"went from {bytes_text(file.nbytes)} to {bytes_text(identity.nbytes)}")
    return list(astuple(identity))


def journals_of(group: Group, staging: Staging | None) -> list[list[list[Record]]]:
    """For each rank the records of every journal that an interrupted run left in its staging directory. Collective.

    ``staging``: this rank's, if it leads one.
    """
    records: list[list[Record]] = []
    if staging is not None and staging.interrupted.resumed:
        records = [read_records(path) for path in journal_paths(staging.root)]
    return cast("list[list[list[Record]]]", group.all_gather_objects(records, name="journals"))


def journaled_windows(
    journals: Sequence[Sequence[Sequence[Record]]],
    places: OutputPlaces,
    identity: Callable[[], RunIdentity],
    options: ConvertOptions,
) -> tuple[dict[int, JournaledWindows], list[str]]:
    """For each directory the windows that an interrupted run has written, and how the sources of a run that cannot be
    resumed have changed.

    A directory starts over if no journal is readable, a window is longer than ``max_memory`` bytes, or its source has
    changed since (unless ``--resume`` was given). ``identity``: this run's. Raises SourceError or TargetError if a
    journal is another run's.
    """
    windows: dict[int, JournaledWindows] = {}
    changed_sources: list[str] = []
    for place in places.places:
        runs = [run for records in journals[place.leader] if (run := run_of(records)) is not None]
        journaled = joined([each for _, each in runs])
        changes = [change for before, _ in runs for change in before.lost_sources(identity())]
        if changes and options.resume is None:
            changed_sources += changes
            continue
        for before, _ in runs:
            require_same_run(before, identity(), f"{place.root} holds {size_text(journaled.nbytes)}")
        if 0 < journaled.longest <= options.max_memory:
            windows[place.number] = journaled
    return windows, changed_sources


def require_same_run(before: RunIdentity, now: RunIdentity, content: str) -> None:
    """Raises the error for the first difference. ``content``: what the directory holds, the start of a sentence."""
    if changes := before.source_changes(now):
        raise SourceError(
            f"{content} of an interrupted run, but the source is not what that run read",
            details=changes,
            why="the output would mix two checkpoints",
            next_step=_START_OVER.format("source"),
            resumable=False,
        )
    if changes := before.other_changes(now):
        raise _other_command(f"{content} of an interrupted run of another command", changes)


def other_upload(path: str) -> TargetError:
    """The error for a converted checkpoint at ``path`` that waits for its upload and is not this run's output."""
    return _other_command(
        f"{path} holds what an interrupted run of another command has converted and not yet uploaded", file=path
    )


_START_OVER = f"add {flags.resume.off} to remove it and start over, or give the {{}} that it was begun with"


def _other_command(what: str, details: Sequence[str] = (), file: str | None = None) -> TargetError:
    return TargetError(
        what,
        details=details,
        file=file,
        why="that command can still finish it",
        next_step=_START_OVER.format("options"),
        resumable=False,
    )


def resume_note(
    job: Job,
    target: str,
    interrupted: InterruptedRun | None,
    options: ConvertOptions,
    changed_sources: Sequence[str],
    *,
    anew: bool,
) -> Note | None:
    """The note on what an interrupted run left.

    ``interrupted``: None if DST exists and is complete. ``changed_sources``: from ``journaled_windows``. ``anew``:
    whether it says that nothing is continued.
    """
    if len(job.written):
        total = sum(segment.end - segment.begin for segment in job.segments)
        there = f"{size_text(written_bytes(job.written))} of {size_text(total)} were already there"
        return Note("resumed", f"continued an interrupted run: {there}")
    if interrupted is None:
        return Note("resumed", f"{target} was already complete: every byte was compared, nothing was written")
    return _cleared_note(interrupted, options, changed_sources) if anew else None


def _cleared_note(interrupted: InterruptedRun, options: ConvertOptions, changed_sources: Sequence[str]) -> Note | None:
    if changed_sources:
        what = f"what an interrupted run had left in {interrupted.root} was removed"
        why = f"because its source has changed ({changed_sources[0]})"
        return Note("cleared", f"{what}, {why}: started from the beginning")
    if interrupted.resumed or (interrupted.exists and options.resume is not False):
        return Note("cleared", f"{interrupted.root} held nothing to continue with: started from the beginning")
    if interrupted.exists:
        left = f"{size_text(interrupted.removed)} that an interrupted run had left in {interrupted.root}"
        return Note("cleared", f"{left} were removed ({flags.resume.off})")
    if options.resume:
        return Note("cleared", "there was nothing to resume: started from the beginning")
    return None


def is_resumable(error: BaseException) -> bool:
    """Whether, after ``error``, the same command may finish what was staged."""
    if not isinstance(error, FsdpckptError):
        return isinstance(error, (OSError, MemoryError)) or not isinstance(error, Exception)
    temporary = type(error) is SourceError or isinstance(error, (SourceMissingError, TargetUnwritableError))
    return error.resumable and (temporary or isinstance(error, (WorkerError, InterruptedRunError)))


def staged_leftover(target: str, options: ConvertOptions) -> Leftover | None:
    """What the journals in the staging directory of ``target`` list, as far as this process sees it; None if they list
    nothing.
    """
    root = staging_root(target)
    runs = [run for path in journal_paths(root) if (run := read_run(path)) is not None]
    nbytes = joined([journaled for _, journaled in runs]).nbytes
    if not nbytes:
        return None
    of_all = f" of {size_text(runs[0][0].nbytes)}" if runs[0][0].nbytes else ""
    resume = "continues from there" + (f" without {flags.resume.off}" if options.resume is False else "")
    return Leftover(f"{size_text(nbytes)}{of_all} done, kept in {root} (delete it to give up)", resume)
