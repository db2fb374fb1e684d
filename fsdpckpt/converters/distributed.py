"""One conversion by all workers of a group: rank 0 reads and plans, all copy and check, leaders commit.

The protocol, by all ranks: 1. Rank 0 reads the source and plans; the others answer what it asks of their disks. 2. Each
says which of the files that were read it sees. 3. The leader of each place makes its staging directory, or says what an
interrupted run left in it. 4. Rank 0 divides the work, all get it and run it. 5. The output is read back
(``checked_together``). 6. Leaders commit. A DST in an object store is then uploaded (``delivered_together``).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import cast

import numpy as np
import numpy.typing as npt

from fsdpckpt.comm.liveness import ProcessIdentity, kill_stopped, process_identity
from fsdpckpt.comm.protocol import Group, original_error
from fsdpckpt.converters.checked_together import CheckTogether
from fsdpckpt.converters.convert import Prepared, check_options, prepare, report_of
from fsdpckpt.converters.delivered_together import Holders, deliver_together
from fsdpckpt.converters.division import bytes_at, divide, holders_of, note_of
from fsdpckpt.converters.manifest_together import manifest_together
from fsdpckpt.converters.replaceable import require_replaceable
from fsdpckpt.converters.report import Report
from fsdpckpt.converters.resumption import is_resumable, run_identity
from fsdpckpt.converters.staged import Places, lead
from fsdpckpt.converters.taken_up import copies_known, journals_read
from fsdpckpt.errors import InternalError, WorkerError
from fsdpckpt.execute.budget import Budget, for_worker, make_budget, threads_for
from fsdpckpt.execute.executor import execute
from fsdpckpt.execute.job import Job, pack_job, unpack_job
from fsdpckpt.execute.journal import Finished, Recorder, first_record, run_of
from fsdpckpt.execute.shared_sources import content_identities, find_visible, serve_sources, union_sources
from fsdpckpt.garbage import set_aside
from fsdpckpt.ir.checkpoint import Note, SourceFile
from fsdpckpt.options import ConvertOptions, VerifyLevel, Visibility
from fsdpckpt.progress import NoProgress, Progress
from fsdpckpt.storage.journal import Record
from fsdpckpt.storage.protocols import FileIdentity, is_url
from fsdpckpt.storage.sources import Sources
from fsdpckpt.storage.staging import Staging, clear_leftover, journal_path, journal_paths, lock_as_writer
from fsdpckpt.storage.target_checks import check_target

__all__ = ["convert_together"]

Visible = npt.NDArray[np.bool_]


def convert_together(
    group: Group,
    source: str,
    target: str,
    options: ConvertOptions,
    progress: Progress,
    *,
    visibility: Visibility,
    workers_here: int,
) -> Report:
    """``converters.convert.convert`` by all workers of ``group``; every byte written is the same. All ranks.

    ``workers_here``: how many of them share this machine's processors. The report is rank 0's, on every rank. Raises
    WorkerError, whose cause is carried where it is an error that one process alone would end with.
    """
    if is_url(target):
        return deliver_together(
            group,
            source,
            target,
            options,
            progress,
            visibility=visibility,
            workers_here=workers_here,
            convert=_convert,
        )
    found = _convert(group, source, target, options, progress, visibility=visibility, workers_here=workers_here)
    return found[0]


def _convert(
    group: Group,
    source: str,
    target: str,
    options: ConvertOptions,
    progress: Progress,
    *,
    visibility: Visibility,
    workers_here: int,
) -> tuple[Report, Holders]:
    """The same for a DST on disks; and which workers see what of it."""
    run = _Conversion(group, source, target, options, progress if group.rank == 0 else NoProgress(), visibility)
    try:
        return run.run(workers_here), run.holders
    except BaseException as error:
        run.undo(error)
        raise


class _Conversion:
    """One rank's part of one conversion."""

    def __init__(
        self,
        group: Group,
        source: str,
        target: str,
        options: ConvertOptions,
        progress: Progress,
        visibility: Visibility,
    ) -> None:
        self._group = group
        self._source = source
        self._target = target
        self._options = options
        self._progress = progress
        self._visibility = visibility
        self._prepared: Prepared | None = None  # on rank 0
        self._opened: list[str] = []
        self._staging: list[Staging] = []
        self._peers: list[ProcessIdentity] = []
        self._met: list[Sources] = []  # which know what each file was when it was first opened
        self._settled = False  # what was staged is this run's
        self._holds: list[int] = []  # locks
        self._note: Note | None = None
        self.holders: Holders = {}

    def run(self, workers_here: int) -> Report:
        begun = time.monotonic()
        self._peers = cast(
            "list[ProcessIdentity]", self._group.all_gather_objects(process_identity(), name="who is who")
        )
        budget = self._check_request(workers_here)
        self._plan()
        if not self._options.dry_run:
            with set_aside():
                self._write(budget)
        return self._report(budget, begun)

    def undo(self, error: BaseException) -> None:
        """End workers that are stopped. Remove what was staged, unless this or another run may go on with it."""
        kill_stopped(self._peers)
        original = original_error(error) if isinstance(error, WorkerError) else error
        lost = isinstance(original, WorkerError) or not isinstance(error, WorkerError)
        if not lost:
            self._group.all_stopped()
        for staging in self._staging:
            others = staging.resumed and not self._settled
            if not (lost or others or (is_resumable(original) and journal_paths(staging.root))):
                with contextlib.suppress(OSError):  # a disk that takes nothing any more may not delete either
                    staging.discard()
        self._let_go()

    def _let_go(self) -> None:
        for staging in self._staging:
            staging.close()
        self._staging.clear()
        for lock in self._holds:
            os.close(lock)
        self._holds.clear()

    def _check_request(self, workers_here: int) -> Budget:
        with self._group.step("check the request"):
            if self._group.rank == 0:
                check_options(self._options)
                options = self._options
                check_target(self._target, self._source, overwrite=options.overwrite, resume=options.resume)
                if options.overwrite:
                    require_replaceable(self._target)
            memory, threads = self._options.max_memory, self._options.threads
            budget = make_budget(max_memory=memory, threads=threads)
            return for_worker(budget, workers_here, max_memory=memory, chosen=threads is not None)

    def _plan(self) -> None:
        with self._group.step("read and plan"):
            if self._group.rank:
                serve_sources(self._group)
                return
            with self._group.heartbeat(), union_sources(self._group) as files:
                self._met.append(files)
                self._prepared = prepare(self._source, self._target, self._options, files, self._progress)
                self._opened = list(files.opened)

    def _write(self, budget: Budget) -> None:
        group = self._group
        told = None
        if self._prepared is not None:
            files = self._prepared.transformed.checkpoint.files
            paths = list(dict.fromkeys([*(file.path for file in files), *self._opened]))
            told = (paths, [file.nbytes for file in files], self._prepared.spec.directory)
        found = group.broadcast_object(told, name="sources")
        paths, lengths, directory = cast("tuple[list[str], list[int], bool]", found)
        visible = self._visible(paths)[: len(lengths)]
        data = [SourceFile(*each) for each in zip(paths, lengths, strict=False)]
        copies = copies_known(group, data, self._met[-1], visible[:, group.rank].tolist())
        places = lead(
            group,
            self._target,
            self._visibility,
            self._staging,
            directory=directory,
            overwrite=self._options.overwrite,
            resume=self._options.resume,
        )
        journals = journals_read(group, self._staging)
        job, recorder, finished = self._job(budget, places, visible, copies, journals)
        with group.step("take up staging"):
            self._take_up(job, places)
        with group.step("hold staging"):
            if recorder is not None:
                self._holds.append(lock_as_writer(places.roots[places.place[group.rank] or 0], group.rank))
        self.holders = holders_of(job, places, directory=directory)
        threads = threads_for(job.settings, budget)
        with Sources() as sources:
            crcs = execute(
                group,
                job,
                visible,
                sources=sources,
                locate=lambda path: places.locate(group.rank, path),
                threads=threads,
                progress=self._progress,
                recorder=recorder,
                finished=finished,
                compare=places.there[places.place[group.rank] or 0],
            )
        at = self._staging[0] if self._staging else None
        if directory:
            manifest_together(group, self._prepared, self._target, at, crcs=crcs, digests={})
        if self._options.verify is not VerifyLevel.NONE and not all(places.there):
            digests = self._check(job, places, visible)
            if directory and self._options.verify is VerifyLevel.FULL:
                manifest_together(group, self._prepared, self._target, at, crcs=crcs, digests=digests)
        self._commit(job, places)

    def _visible(self, paths: list[str]) -> Visible:
        """Who sees which of the files that were read."""
        found: list[bytes] = []
        with Sources() as sources, self._group.step("look at the sources"):
            self._met.append(sources)
            for path in paths:
                found += content_identities([path], sources)
                self._group.beat()
        everyone = cast("list[list[bytes]]", self._group.all_gather_objects(found, name="who sees what"))
        with self._group.step("compare the sources"):
            if self._group.rank == 0:  # what is wrong all would find, and one says
                find_visible(paths, everyone)
        return find_visible(paths, everyone)

    def _job(
        self,
        budget: Budget,
        places: Places,
        visible: Visible,
        copies: list[list[FileIdentity]],
        journals: list[list[list[Record]]],
    ) -> tuple[Job, Recorder | None, Finished]:
        """What all do, as rank 0 has planned it; what keeps the journal of this one, if it writes; on rank 0 what was
        finished already.
        """
        data: object = None
        finished = Finished()
        with self._group.step("divide the work"):
            if self._prepared is not None:
                with self._group.heartbeat():
                    now = run_identity(self._prepared.plan, self._options, copies)
                    job, finished = divide(self._prepared, self._options, budget, places, visible, now, journals)
                    self._note = note_of(job, self._target, self._staging, asked=self._options.resume)
                    data = [pack_job(job), first_record(now)]
        plan, first = cast("tuple[object, Record]", self._group.broadcast_object(data, name="the plan"))
        job, rank = unpack_job(plan), self._group.rank
        own = places.place[rank]
        if own is None or places.there[own]:
            return job, None, finished
        identity = run_of([first])
        if identity is None:
            raise InternalError("a run's identity does not read back")
        return job, Recorder(journal_path(places.roots[own], rank), lambda: identity[0], Finished()), finished

    def _take_up(self, job: Job, places: Places) -> None:
        """Staging as this run needs it: without what nobody goes on with."""
        for staging in self._staging:
            place = places.place[self._group.rank]
            if staging.resumed and not (job.claims[:, 0] == place).any():
                staging.restart()
            elif staging.resumed:
                files = {segment.file for segment in job.segments if segment.place == place}
                staging.keep_only(job.plan.files[number].path for number in files)
            staging.require_space(bytes_at(job, places, self._group.rank))
        self._settled = True

    def _check(self, job: Job, places: Places, visible: Visible) -> dict[str, str]:
        """The output read back; on rank 0 the digests of its tensors."""
        check = CheckTogether(
            self._group,
            self._prepared,
            self._options,
            self._progress,
            places=places,
            files=job.files,
            visible=visible,
            holders=self.holders,
            written=self._staging[0].visible if self._staging else os.path.realpath(self._target),
        )
        return check.run()

    def _commit(self, job: Job, places: Places) -> None:
        """Every output appears under its name, or is discarded where it has no file."""
        with self._group.step("are the sources unchanged"):
            for sources in self._met:
                sources.require_unchanged()
        with self._group.step("commit"):
            for staging in self._staging:
                place = places.place[self._group.rank]
                if any(segment.place == place for segment in job.segments):
                    if self._options.overwrite:
                        require_replaceable(self._target)
                    staging.commit()
                else:
                    staging.discard()
            if self._group.rank in places.leaders and not self._staging:
                clear_leftover(self._target)
        self._let_go()

    def _report(self, budget: Budget, begun: float) -> Report:
        data: object = None
        if self._prepared is not None:
            seconds = time.monotonic() - begun
            workers = self._group.world_size
            if self._note is not None:
                self._prepared.output.notes.append(self._note)
            report = report_of(self._prepared, self._target, self._options, budget, seconds, workers=workers)
            data = json.loads(json.dumps(report.to_json()))
        return Report.from_json(cast("dict[str, object]", self._group.broadcast_object(data, name="report")))
