"""Publishes on a local disk: everything is written to a staging directory beside DST, and one rename makes it visible.

Staging is kept after a signal or a kill, and after an error of the disk or the operating system on either side (full,
I/O error, a source that went away), if a journal lists at least one window. After any other error it is removed,
because the staged data would be wrong or no command could finish it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Self, cast

import numpy as np

from fsdpckpt import flags
from fsdpckpt.converters.linking import Linking, make_links, require_linked, without_links
from fsdpckpt.converters.output.division import divide_work, files_in
from fsdpckpt.converters.output.overwrite import find_replaceable, still_replaceable
from fsdpckpt.converters.output.places import OutputPlaces, open_places
from fsdpckpt.converters.output.publisher import Holders, InterruptedWork, Request
from fsdpckpt.converters.output.resume import (
    is_resumable,
    journaled_windows,
    journals_of,
    resume_note,
    run_identity,
    source_copies,
)
from fsdpckpt.converters.prepare import Prepared
from fsdpckpt.converters.report import PlannedFile, Report, existing_manifest, put_manifest, replaced_files
from fsdpckpt.converters.union_sources import UnionSources
from fsdpckpt.errors import FsdpckptError, TargetExistsError
from fsdpckpt.execute.compared_output import ComparedOutput, target_differs
from fsdpckpt.execute.job import Budget, Job
from fsdpckpt.execute.journal import JournaledWindows, Record, Recorder, Recording, RunIdentity, read_records
from fsdpckpt.execute.output import Output
from fsdpckpt.ir.checkpoint import Note, NoteKind, SourceFile
from fsdpckpt.ir.targets import Target
from fsdpckpt.options import OutputScope
from fsdpckpt.plan import Plan, make_plan
from fsdpckpt.plan.written import NUMBER
from fsdpckpt.storage import is_url
from fsdpckpt.storage.hidden import Lock, journal_path, journal_paths, lock_as_writer
from fsdpckpt.storage.sources import Sources
from fsdpckpt.storage.staging import InterruptedRun, Staging, clear_leftover, restore_backup, was_interrupted
from fsdpckpt.storage.target_checks import (
    Contents,
    TargetState,
    check_target,
    refuse_links_into,
    require_outside_opened,
    require_source_apart,
)


class Rename:
    """See ``Publisher``. ``scope``: whether all ranks write to one DST, or those of each node to their own."""

    def __init__(self, request: Request) -> None:
        self.group = request.group
        self.source = request.source
        self.target = request.target
        self.options = request.options
        self.scope = request.scope
        self.warnings: list[Note] = []
        self.recorder: Recording | None = None
        self._unused_staging = request.options.staging is not None
        self._state = TargetState.ABSENT
        self._restored = False
        self._replaces: Contents = {}  # on rank 0: what was at DST
        self._places: OutputPlaces
        self._staging: Staging | None = None  # if this rank leads a place that is written
        self._staged_now = False  # the staged files are this run's, not an earlier run's
        self._lock: Lock | None = None  # of a rank that writes beside others
        self._journals: Sequence[Sequence[Sequence[Record]]] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()

    def restore(self) -> None:
        self._restored = not self.options.dry_run and restore_backup(self.target)

    def look(self) -> None:
        options = self.options
        self._state = self._allowed_state()
        if self.group.rank:
            return
        if self.scope is OutputScope.NODE and self.group.world_size > 1:
            self.options = options = without_links(options, "each node has a DST of its own")
        with _say_restored(self.target) if self._restored else nullcontext():
            check_target(self.target, self.source, state=self._state)
            if self._state is TargetState.REPLACEABLE:
                self._replaces = find_replaceable(self.target)

    def _allowed_state(self) -> TargetState:
        """DST may be the complete output of a run that was killed after the rename."""
        if self.options.overwrite:
            return TargetState.REPLACEABLE
        if self.options.resume is False or not (self.options.resume or was_interrupted(self.target)):
            return TargetState.ABSENT
        return TargetState.COMPLETE_TO_COMPARE

    def look_again(self, opened: Sequence[str]) -> None:
        if is_url(self.source):
            return
        require_outside_opened(self.target, self.source, opened)
        if self.options.overwrite:
            units = self.options.units
            local_units = units if units is not None and not is_url(units) else None
            refuse_links_into(self.target, self.source, opened, units=local_units)

    def find_work(self, prepared: Prepared, budget: Budget, sources: Sources) -> Note | None:
        """Raises what a run would raise. ``sources``: those from which ``prepared`` was read."""
        compares = self._state is TargetState.COMPLETE_TO_COMPARE
        if compares and os.path.lexists(os.path.realpath(self.target)):
            return None
        files = prepared.transformed.checkpoint.files
        interrupted = InterruptedRun.of(self.target, resume=self.options.resume is not False)
        places = OutputPlaces.of_one_process(interrupted.root)
        copies = source_copies(self.group, files, sources, [True] * len(files))
        journals = [read_records(path) for path in journal_paths(interrupted.root)] if interrupted.resumed else []
        windows, changed_sources = journaled_windows(
            [journals], places, lambda: run_identity(make_plan(prepared.output), prepared.options, copies), self.options
        )
        seen_by = np.ones((len(files), 1), bool)
        job = divide_work(prepared, places, seen_by, budget, windows, self.copy_memory)
        return self._note_on_work(job, interrupted, changed_sources)

    def open(self, *, directory: bool) -> OutputPlaces:
        if self.scope is OutputScope.NODE and self.group.world_size > 1:
            with self.group.step("look where each node writes"):
                if not is_url(self.source):
                    require_source_apart(self.target, self.source, overwrite=self.options.overwrite)
        self._places, self._staging = open_places(
            self.group,
            self.target,
            self.options,
            self.scope,
            directory=directory,
            replaces=self._replaces,
            state=self._state,
        )
        return self._places

    def gather_journals(self) -> None:
        self._journals = journals_of(self.group, self._staging)

    def interrupted(self, identity: Callable[[], RunIdentity]) -> InterruptedWork:
        return InterruptedWork(*journaled_windows(self._journals, self._places, identity, self.options))

    def resume_note(self, job: Job, changed_sources: Sequence[str]) -> Note | None:
        interrupted = None if self._staging is None else self._staging.interrupted
        return self._note_on_work(job, interrupted, changed_sources)

    def _note_on_work(
        self, job: Job, interrupted: InterruptedRun | None, changed_sources: Sequence[str], *, anew: bool = True
    ) -> Note | None:
        """``anew``: whether a run that starts from the beginning is worth a note."""
        return resume_note(job, self.target, interrupted, self.options, changed_sources, anew=anew)

    def budget_for(self, budget: Budget, plan: Plan | None) -> Budget:
        return budget

    @property
    def copy_memory(self) -> int:
        return self.options.max_memory

    def make_output(self) -> Callable[..., Output]:
        return ComparedOutput if self._places.seen_from(self.group.rank).complete else Output

    def output_sources(self) -> Sources:
        return UnionSources(self.group)

    def prepare(
        self, job: Job, identity: Callable[[], RunIdentity], journaled: JournaledWindows, *, links: int
    ) -> None:
        """``identity``, ``journaled``: as for ``Recorder``; of a run of several ranks, what is journaled stays in the
        journals of the ranks that wrote it.
        """
        group = self.group
        place = self._places.of_worker(group.rank)
        number = None if place is None else place.number
        with group.step("prepare staging"):
            staging = self._staging
            if staging is not None:
                files, nbytes = files_in(job, number)  # without what an earlier run has linked: links are made again
                if staging.interrupted.resumed:
                    segments = job.written[:, NUMBER].tolist()
                    if any(job.segments[segment].directory == number for segment in segments):
                        staging.keep_only(files)
                    else:
                        staging.restart()
                self._staged_now = True
                staging.require_space(nbytes, files=len(files) + links)
        with group.step("lock staging"):
            if place is None or place.complete:
                return
            if group.world_size == 1:
                self.recorder = Recorder(journal_path(place.root), identity, journaled)
            else:
                self._lock = lock_as_writer(place.root, group.rank)
                self.recorder = Recorder(journal_path(place.root, group.rank), identity, JournaledWindows())

    def link(self, output: Target, linking: Linking, files: Sequence[SourceFile], sources: Sources) -> None:
        if self._places.places[0].complete:
            require_linked(output, files, os.path.realpath(self.target))
        if self._staging is not None:
            make_links(output, linking, files, self._staging, sources)

    def require_files(self, paths: Iterable[str]) -> None:
        if self._staging is not None:
            self._staging.require_files(paths)

    def manifest(self) -> bytes | None:
        return existing_manifest(self.target) if self._staging is None else None

    def put_manifest(self, data: bytes) -> None:
        if self._staging is not None:
            put_manifest(self._staging, data)

    @property
    def final_path(self) -> str:
        return self._staging.final_path if self._staging is not None else os.path.realpath(self.target)

    def commit(self, job: Job, *, linked: bool) -> None:
        group, staging = self.group, self._staging
        warnings: list[Note] = []
        with group.step("commit"):
            if staging is None:
                if self._places.leads(group.rank):
                    warnings = clear_leftover(self.target)
            elif linked or files_in(job, self._places.seen_from(group.rank).number)[0]:
                if staging.replaces is not None:  # files that appeared there meanwhile must not be deleted
                    staging.replaces = still_replaceable(self.target, staging.replaces)
                staging.commit()
            else:
                staging.discard()
        self.close()
        warnings = warnings if staging is None else staging.warnings
        rows = [[note.kind, note.message] for note in warnings]
        for of_rank in group.all_gather_objects(rows, name="warnings"):
            self.warnings += [Note(*row, warning=True) for row in cast("list[tuple[NoteKind, str]]", of_rank)]

    def finish(self, report: Report, holders: Holders) -> Report:
        if not self._unused_staging:
            return report
        note = Note("unused", f"{flags.staging} had no effect: only a DST in an object store is staged there")
        return replace(report, notes=(*report.notes, note))

    def discard_useless(self, error: BaseException, *, several_journals: bool) -> None:
        """What an interrupted run left stays if this run has not begun to write there. ``several_journals``: other
        ranks may have journals in the directory too.
        """
        staging = self._staging
        if staging is None or (staging.interrupted.resumed and not self._staged_now):
            return
        nothing_recorded = not several_journals and self.recorder is not None and not self.recorder.nbytes
        journaled = not nothing_recorded and bool(journal_paths(staging.root))
        if staging.committed or not is_resumable(error) or not journaled:
            with suppress(OSError):  # a failing disk may not delete either
                staging.discard()

    def close(self) -> None:
        if self._staging is not None:
            self._staging.close()
            self._staging = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def differs(self) -> FsdpckptError | None:
        place = self._places.seen_from(self.group.rank)
        return target_differs(self.target) if place.complete else None  # the user knows DST as a whole

    @property
    def replaced(self) -> tuple[PlannedFile, ...]:
        return replaced_files(self._replaces)


@contextmanager
def _say_restored(target: str) -> Iterator[None]:
    """Make an error in the block say why there is something at ``target`` that was not there before the command."""
    try:
        yield
    except TargetExistsError as error:
        moved = f"an interrupted run that was to replace {target} had moved this aside; it was moved back now"
        error.details = (*error.details, moved)
        raise
