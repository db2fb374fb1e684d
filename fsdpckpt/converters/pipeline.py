"""Converts one checkpoint: read, transform, lay out, plan, execute, verify, publish; on one process or many.

All ranks of the group take part. 1. Rank 0 reads the source and plans; the others serve it the files that only they
see. 2. Each rank states which of these files it sees. 3. The leader of each place makes its staging directory, or opens
what an interrupted run left there. 4. Rank 0 divides the work; every rank gets its part and executes it. 5. The output
is read back (``check``). 6. The leaders publish it by a rename. If DST is in an object store, the output is written to
a local disk in the same way and then uploaded (``publish``). With ``Solo``, a group of one process, nothing is
communicated and torch is never imported.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import numpy.typing as npt

from fsdpckpt.comm.liveness import ProcessIdentity, kill_stopped, process_identity
from fsdpckpt.comm.protocol import Group, Solo, original_error
from fsdpckpt.converters import Report, encode_manifest, put_manifest, replaced_files
from fsdpckpt.converters.check import OutputCheck
from fsdpckpt.converters.linking import check_linked, make_links, require_linked, without_links
from fsdpckpt.converters.overwrite import explain_why_overwrite_is_refused, find_replaceable, still_replaceable
from fsdpckpt.converters.prepare import Prepared, make_report, prepare
from fsdpckpt.converters.publish import Upload
from fsdpckpt.converters.resume import (
    claim_rows,
    is_resumable,
    journaled_windows,
    journals_of,
    other_upload,
    resume_note,
    run_identity,
    source_copies,
)
from fsdpckpt.converters.shared_sources import UnionSources, content_identity, find_visible, serve_sources
from fsdpckpt.converters.staging import StagingDirectories, assign_segments, files_at, holders_of, open_staging
from fsdpckpt.converters.target_mesh import check_mesh
from fsdpckpt.converters.target_spec import check_flavor
from fsdpckpt.errors import InternalError, TargetExistsError, WorkerError
from fsdpckpt.execute import execute
from fsdpckpt.execute.job import (
    MOST_THREADS,
    Budget,
    Job,
    choose_settings,
    for_worker,
    make_budget,
    pack_job,
    threads_for,
    unpack_job,
)
from fsdpckpt.execute.journal import (
    JournaledWindows,
    Record,
    Recorder,
    RunIdentity,
    first_record,
    identity_of,
    joined,
    read_records,
)
from fsdpckpt.execute.output import target_differs
from fsdpckpt.ir.checkpoint import Note, SourceFile
from fsdpckpt.ir.targets import Target, TargetFile
from fsdpckpt.options import ConvertOptions, VerifyLevel, Visibility
from fsdpckpt.plan import make_plan
from fsdpckpt.process import set_aside, without_collection
from fsdpckpt.progress import NoProgress, Progress
from fsdpckpt.readers.protocol import MANIFEST
from fsdpckpt.storage import FileIdentity, is_url
from fsdpckpt.storage.sources import Sources
from fsdpckpt.storage.staging import (
    InterruptedRun,
    Staging,
    clear_leftover,
    journal_path,
    journal_paths,
    lock_as_writer,
    was_interrupted,
)
from fsdpckpt.storage.target_checks import Contents, check_target


def convert(
    group: Group,
    source: str,
    target: str,
    options: ConvertOptions,
    progress: Progress,
    *,
    visibility: Visibility = Visibility.SHARED,
    workers_here: int = 1,
) -> Report:
    """Convert ``source`` to ``target``. Collective; the output is the same for any number of ranks.

    DST appears complete or not at all; the source is never written to. With ``options.dry_run`` everything is planned
    and nothing is written. ``workers_here``: how many ranks share this machine's processors. Returns rank 0's report.

    Raises SourceError (exit code 3), NeedsInformationError (4), UsageError (2) and TargetError (5); on several ranks
    WorkerError with one of these as its ``original``, the same on all.
    """
    if group.rank:
        progress = NoProgress()
    peers = cast("list[ProcessIdentity]", group.all_gather_objects(process_identity(), name="processes"))
    if not is_url(target):
        report = _Conversion(group, source, target, options, progress, visibility, peers).run(workers_here)
        if options.staging is None:
            return report
        note = Note("unused", "--staging had no effect: only a DST in an object store is staged there")
        return replace(report, notes=(*report.notes, note))
    with Upload(group, source, target, options, progress, visibility, peers) as upload:
        conversion = _Conversion(
            group, source, upload.path, upload.options, progress, upload.visibility, peers, for_upload=True
        )
        report = conversion.run(workers_here)
        return upload.publish(report, conversion.holders)


@dataclass(slots=True, eq=False)
class _Conversion:
    """One rank's part of one conversion to a local disk. ``peers``: the processes of all ranks. ``holders``: for each
    target file the ranks that see it.

    ``for_upload``: DST is one of this program's own directories, and what is in it comes from an interrupted run.
    """

    group: Group
    source: str
    target: str
    options: ConvertOptions
    progress: Progress
    visibility: Visibility
    peers: Sequence[ProcessIdentity]
    for_upload: bool = False
    holders: dict[str, list[int]] = field(default_factory=dict)
    _linked: list[str] = field(default_factory=list)  # the target files that are links, all at place 0
    _prepared: Prepared | None = None  # on rank 0
    _sources: list[Sources] = field(default_factory=list)  # with each file's identity when it was first opened
    _opened: list[str] = field(default_factory=list)  # every file that rank 0 has read
    _staging: list[Staging] = field(default_factory=list)  # of the place that this rank leads: one or none
    _staged_now: bool = False  # the staged files are this run's, not an earlier run's
    _locks: list[int] = field(default_factory=list)
    _recorder: Recorder | None = None
    _note: Note | None = None
    _replaces: Contents = field(default_factory=dict)  # on rank 0: what was at DST
    _manifest: bytes = b""  # fsdpckpt.json as it was written
    _compares: bool = False  # whether DST may exist and is then compared with the planned output

    @property
    def _raises_unchanged(self) -> bool:
        """Whether errors are raised unchanged, not as a WorkerError."""
        return isinstance(self.group, Solo)

    @property
    def _single_rank(self) -> bool:
        return self.group.world_size == 1

    def run(self, workers_here: int) -> Report:
        begun = time.monotonic()
        try:
            with explain_why_overwrite_is_refused(self.target):
                budget = self._check_request(workers_here)
                self._read_and_plan()
                if not self.options.dry_run:
                    with set_aside():
                        self._write(budget)
                elif self._prepared is not None and self._single_rank:
                    self._note_interrupted(self._prepared, budget)
                return self._report(budget, begun)
        except BaseException as error:
            self._undo(error)
            raise

    def _note_interrupted(self, prepared: Prepared, budget: Budget) -> None:
        """Set the note on what a run would do with what an interrupted one left. Raises what that run would raise."""
        if self._compares and os.path.lexists(os.path.realpath(self.target)):
            return
        options, files = self.options, prepared.transformed.checkpoint.files
        interrupted = InterruptedRun.of(self.target, resume=options.resume is not False)
        places = StagingDirectories((0,), (0,), (0,), ((os.path.join(interrupted.root, ""), ""),), (False,))
        copies = source_copies(self.group, files, self._sources[-1], [True] * len(files))
        journals = [read_records(path) for path in journal_paths(interrupted.root)] if interrupted.resumed else []
        windows, changed_sources = journaled_windows(
            [journals], places, lambda: run_identity(make_plan(prepared.output), options, copies), options
        )
        job = _job(prepared, places, np.ones((len(files), 1), bool), budget, windows)
        self._note = resume_note(job, self.target, interrupted, options, changed_sources)

    def _write(self, budget: Budget) -> None:
        """Execute, verify, publish."""
        files, directory = self._share_files()
        visible = self._find_visible_sources(files)
        places, job, identity, journaled = self._divide(files, visible, budget, directory=directory)
        self._prepare_staging(job, places, identity, journaled)
        self._link(places)
        self.holders = holders_of(job, places, directory=directory) | dict.fromkeys(self._linked, places.workers(0))
        crcs = self._execute(job, places, visible, budget, journaled)
        job = self._drop_columns(job)
        self._write_manifest(crcs, {}, directory=directory)
        if self.options.verify is not VerifyLevel.NONE and not all(places.existing):
            digests = self._verify(job, places, visible)
            if self.options.verify is VerifyLevel.FULL:
                self._write_manifest(crcs, digests, directory=directory)
        self._publish(job, places)

    def _check_request(self, workers_here: int) -> Budget:
        options = self.options
        with self.group.step("check the request"):
            self._compares = self._may_be_complete()
            if self.group.rank == 0:
                check_flavor(options)
                check_mesh(options)
                if self.visibility is Visibility.NODE and not self._single_rank:
                    self.options = options = without_links(options, "each node has a DST of its own")
                check_target(self.target, self.source, overwrite=options.overwrite, compare=self._compares)
                if options.overwrite:
                    self._replaces = find_replaceable(self.target)
            threads = options.threads
            if threads is None and self._single_rank and is_url(self.source):
                threads = MOST_THREADS  # a store answers slowly, and many requests at once: the threads mostly wait
            budget = make_budget(max_memory=options.max_memory, threads=threads)
            return for_worker(budget, workers_here, max_memory=options.max_memory, chosen=threads is not None)

    def _may_be_complete(self) -> bool:
        """Whether DST may be the complete output of a run that was killed after the rename, or waits for its upload."""
        if self.for_upload:
            return True
        if self.options.overwrite or self.options.resume is False:
            return False
        return self.options.resume is True or was_interrupted(self.target)

    def _read_and_plan(self) -> None:
        with self.group.step("read and plan"):
            if self.group.rank:
                serve_sources(self.group)
                return
            self.progress.begin("read", 0)
            with self.group.heartbeat(), UnionSources(self.group) as files, without_collection():
                self._sources.append(files)
                self._prepared = prepare(self.source, self.target, self.options, files)
                self._opened = list(files.opened)
            self.progress.end()

    def _share_files(self) -> tuple[list[SourceFile], bool]:
        """Tell every rank the source files of the plan, whether DST is a directory, and which target files
        are links.
        """
        message = None
        if self._prepared is not None:
            files = self._prepared.transformed.checkpoint.files
            paths = list(dict.fromkeys([*(file.path for file in files), *self._opened]))
            links = [link.path for link in self._prepared.output.links]
            message = (paths, [file.nbytes for file in files], self._prepared.spec.directory, links)
        shared = self.group.broadcast_object(message, name="sources")
        self._opened, lengths, directory, self._linked = cast("tuple[list[str], list[int], bool, list[str]]", shared)
        return [SourceFile(*each) for each in zip(self._opened, lengths, strict=False)], directory

    def _find_visible_sources(self, files: list[SourceFile]) -> npt.NDArray[np.bool_]:
        """Which rank sees which of ``files``: ``[file, rank]``."""
        if self._single_rank:
            return np.ones((len(files), 1), bool)
        rows: list[bytes] = []
        with Sources() as sources, self.group.step("find visible sources"), self.group.heartbeat():
            self._sources.append(sources)
            for path in self._opened:
                rows.append(content_identity(path, sources))
                self.group.beat()
        everyone = cast("list[list[bytes]]", self.group.all_gather_objects(rows, name="who sees what"))
        with self.group.step("compare the sources"):
            if self.group.rank == 0:  # all would find the same errors; one rank reports them
                find_visible(self._opened, everyone)
        return find_visible(self._opened, everyone)[: len(files)]

    def _divide(
        self, files: list[SourceFile], visible: npt.NDArray[np.bool_], budget: Budget, *, directory: bool
    ) -> tuple[StagingDirectories, Job, Callable[[], RunIdentity], JournaledWindows]:
        """Decide which rank writes what, and where. Also returns this run's identity and, on rank 0, what an
        interrupted run has written.
        """
        group, options, prepared = self.group, self.options, self._prepared
        copies = source_copies(group, files, self._sources[-1], visible[:, group.rank].tolist())
        places, staging = open_staging(
            *(group, self.target, options, self.visibility),
            directory=directory,
            replaces=self._replaces,
            compare=self._compares,
        )
        if staging is not None:
            self._staging.append(staging)
        journals = journals_of(group, staging)
        message: object = None
        with group.step("divide the work"), group.heartbeat():
            if prepared is not None:
                identity = functools.cache(functools.partial(self._identity, copies))
                windows, changed_sources = journaled_windows(journals, places, identity, options)
                job = _job(prepared, places, visible, budget, windows)
                interrupted = None if staging is None else staging.interrupted
                self._note = resume_note(job, self.target, interrupted, options, changed_sources)
                journaled = joined(list(windows.values()))
                if self._single_rank:
                    return places, job, identity, journaled
                message = [pack_job(job), first_record(identity())]
        plan, first = cast("tuple[object, Record]", group.broadcast_object(message, name="the plan"))
        now = identity_of(first)
        return places, unpack_job(plan), lambda: now, journaled if prepared is not None else JournaledWindows()

    def _identity(self, copies: Sequence[Sequence[FileIdentity]]) -> RunIdentity:
        """This run's identity. Only on rank 0, and before ``_drop_columns``."""
        if self._prepared is None:
            raise InternalError("only the first rank knows the plan")
        return run_identity(self._prepared.plan, self.options, copies)

    def _prepare_staging(
        self, job: Job, places: StagingDirectories, identity: Callable[[], RunIdentity], journaled: JournaledWindows
    ) -> None:
        """Remove what is not resumed from staging, check the free space, and open the journal of a rank that writes."""
        group = self.group
        place = places.place[group.rank]
        with group.step("prepare staging"):
            for staging in self._staging:
                files, nbytes = files_at(job, place)  # without what an earlier run has linked: links are made again
                if staging.interrupted.resumed and not any(
                    job.segments[number].place == place for number in job.claims[:, 0].tolist()
                ):
                    staging.restart()
                elif staging.interrupted.resumed:
                    staging.keep_only(files)
                self._staged_now = True
                staging.require_space(nbytes, files=len(files) + len(self._linked))
        with group.step("lock staging"):
            if place is None or places.existing[place]:
                return
            root = places.roots[place]
            writer = None if self._single_rank else group.rank
            if writer is not None:
                self._locks.append(lock_as_writer(root, writer))
            self._recorder = Recorder(
                journal_path(root, writer), identity, journaled if self._single_rank else JournaledWindows()
            )

    def _link(self, places: StagingDirectories) -> None:
        """Make the links before anything is copied, so that a file system that refuses them does so at once."""
        with self.group.step("link"):
            if self._prepared is None:
                return
            output, files = self._prepared.output, self._prepared.transformed.checkpoint.files
            if places.existing[0]:
                require_linked(output, files, os.path.realpath(self.target))
            for staging in self._staging:
                make_links(output, self._prepared.linking, files, staging, self._sources[-1])

    def _execute(
        self,
        job: Job,
        places: StagingDirectories,
        visible: npt.NDArray[np.bool_],
        budget: Budget,
        journaled: JournaledWindows,
    ) -> dict[str, int]:
        """Write the target files; return the CRC-32 of each."""
        rank = self.group.rank
        place = places.place[rank]
        with self._sources[-1] as sources:
            try:
                crcs = execute(
                    self.group,
                    job,
                    visible,
                    sources=sources,
                    locate=lambda path: places.locate(rank, path),
                    threads=threads_for(job.settings, budget),
                    progress=self.progress,
                    recorder=self._recorder,
                    journaled=journaled,
                    compare=places.existing[place or 0],
                )
            except TargetExistsError:
                if self.for_upload and self._single_rank:
                    raise other_upload(self.target) from None
                if self._single_rank and places.existing[place or 0]:
                    raise target_differs(self.target) from None  # the user knows DST as a whole, not its single files
                raise
        with self.group.step("look for the output"):
            for staging in self._staging:
                staging.require_files([*files_at(job, place)[0], *self._linked])
        return crcs

    def _drop_columns(self, job: Job) -> Job:
        """Free the memory of literals, write items and copies, which the check does not need."""
        if self._prepared is not None:
            output = self._prepared.output
            files = [TargetFile(file.path, nbytes=file.nbytes) for file in output.files]
            output = Target(files, output.notes, output.links)
            self._prepared = replace(self._prepared, output=output, plan=self._prepared.plan.outline())
        return replace(job, plan=job.plan.outline())

    def _write_manifest(self, crcs: Mapping[str, int], digests: Mapping[str, str], *, directory: bool) -> None:
        """Write the same ``fsdpckpt.json`` at every place."""
        if not directory:
            return
        prepared, data = self._prepared, b""
        with self.group.step("write fsdpckpt.json"):
            if prepared is not None and self._staging:
                data = encode_manifest(
                    *(prepared.output, prepared.transformed, prepared.spec),
                    link=prepared.linking.mode,
                    crcs=crcs,
                    digests=digests,
                )
            elif prepared is not None:
                data = _existing_manifest(self.target)
        self._manifest = data = cast("bytes", self.group.broadcast_object(data, name="fsdpckpt.json"))
        with self.group.step("copy fsdpckpt.json"):
            for staging in self._staging:
                put_manifest(staging, data)

    def _verify(self, job: Job, places: StagingDirectories, visible: npt.NDArray[np.bool_]) -> dict[str, str]:
        """Read the output back. Returns, on rank 0, the digests of its tensors."""
        check = OutputCheck(
            self.group,
            self._prepared.transformed if self._prepared is not None else None,
            self.options,
            self.progress,
            places=places,
            files=job.files,
            visible=visible,
            holders=self.holders,
            path=self._staging[0].visible if self._staging else os.path.realpath(self.target),
            require_unchanged=self._require_unchanged,
        )
        digests = check.run()
        if self.options.verify is VerifyLevel.FULL:
            self._read_linked()
        return digests

    def _read_linked(self) -> None:
        """Compare linked files with the checksums they carry, as copying would."""
        with self.group.step("read the linked files"):
            if self._prepared is not None:
                checkpoint = self._prepared.transformed.checkpoint
                with self.group.heartbeat(), Sources() as sources:
                    check_linked(self._prepared.output, checkpoint, sources)

    def _require_unchanged(self) -> None:
        for sources in self._sources:
            sources.require_unchanged()

    def _publish(self, job: Job, places: StagingDirectories) -> None:
        """Rename every output to its final name; discard the staging directory of a place without files."""
        with self.group.step("check that the sources did not change"), self.group.heartbeat():
            self._require_unchanged()
        with self.group.step("commit"):
            for staging in self._staging:
                if files_at(job, places.place[self.group.rank])[0] or self._linked:
                    if staging.replaces is not None:  # files that appeared there meanwhile must not be deleted
                        staging.replaces = still_replaceable(self.target, staging.replaces)
                    staging.commit()
                else:
                    staging.discard()
            if self.group.rank in places.leaders and not self._staging:
                clear_leftover(self.target)
        self._release()

    def _undo(self, error: BaseException) -> None:
        """Kill ranks that are stopped. Remove the staged output, unless this or another run may resume it."""
        kill_stopped(self.peers)
        original = original_error(error) if isinstance(error, WorkerError) else error
        lost = not self._raises_unchanged and (isinstance(original, WorkerError) or not isinstance(error, WorkerError))
        if not lost:
            self.group.all_stopped()
        for staging in self._staging:
            if lost or (staging.interrupted.resumed and not self._staged_now):
                continue
            if staging.committed or not is_resumable(original) or not self._is_journaled(staging):
                with contextlib.suppress(OSError):  # a failing disk may not delete either
                    staging.discard()
        self._release()

    def _is_journaled(self, staging: Staging) -> bool:
        unused = self._raises_unchanged and self._recorder is not None and not self._recorder.nbytes
        return not unused and bool(journal_paths(staging.root))

    def _release(self) -> None:
        for staging in self._staging:
            staging.close()
        self._staging.clear()
        for lock in self._locks:
            os.close(lock)
        self._locks.clear()

    def _report(self, budget: Budget, begun: float) -> Report:
        """Rank 0's report, on every rank. The note is not in ``fsdpckpt.json``, which is the same for a resumed run."""
        report = None
        if self._prepared is not None:
            report = make_report(
                *(self._prepared, self.target, budget, self.group.world_size, self._manifest),
                notes=[] if self._note is None else [self._note],
                replaced=replaced_files(self._replaces),
                seconds=time.monotonic() - begun,
            )
            if self._single_rank:
                return report
        document = None if report is None else json.loads(json.dumps(report.to_json()))
        return Report.from_json(cast("dict[str, object]", self.group.broadcast_object(document, name="report")))


def _job(
    prepared: Prepared,
    places: StagingDirectories,
    visible: npt.NDArray[np.bool_],
    budget: Budget,
    windows: Mapping[int, JournaledWindows],
) -> Job:
    checkpoint, max_memory = prepared.transformed.checkpoint, prepared.spec.options.max_memory
    segments = assign_segments(prepared.plan, prepared.spec, places, windows)
    writers = sorted({segment.owner for segment in segments})
    exchanging = not bool(visible[:, writers].all())
    settings = choose_settings(prepared.plan, budget, max_memory, exchanging=exchanging)
    claims = claim_rows(windows, segments)
    return Job(prepared.plan, checkpoint.files, checkpoint.checksums, tuple(segments), settings, claims)


def _existing_manifest(target: str) -> bytes:
    path = os.path.join(os.path.realpath(target), MANIFEST)
    if not os.path.isfile(path):
        raise target_differs(target)
    with open(path, "rb") as file:
        return file.read()
