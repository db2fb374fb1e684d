"""Converts one checkpoint: read, transform, lay out, plan, execute, verify, publish; on one process or many.

All ranks of the group take part. 1. Rank 0 reads the source and plans; the others serve it the files that only they
see. 2. Each rank states which of these files it sees. 3. The leader of each staging directory makes it, or opens
what an interrupted run left there. 4. Rank 0 divides the work; every rank gets its part and executes it. 5. The output
is read back (``check``). 6. It is published. Where it is written, and how it is published, is the ``Publisher``'s
(``output``): by a rename, or by an upload to an object store. With ``Solo``, a group of one process, nothing is
communicated and torch is never imported.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from fsdpckpt.comm.liveness import ProcessIdentity, kill_stopped, process_identity
from fsdpckpt.comm.protocol import Group, Solo, original_error
from fsdpckpt.converters.check import OutputCheck
from fsdpckpt.converters.linking import check_linked
from fsdpckpt.converters.make_report import make_report
from fsdpckpt.converters.output import Publisher, Request, publisher_of
from fsdpckpt.converters.output.division import divide_work, files_in, holders_of
from fsdpckpt.converters.output.overwrite import explain_why_overwrite_is_refused
from fsdpckpt.converters.output.places import OutputPlaces
from fsdpckpt.converters.output.publisher import StagingNeededError
from fsdpckpt.converters.output.resume import run_identity, source_copies
from fsdpckpt.converters.prepare import Prepared, prepare
from fsdpckpt.converters.report import Report, encode_manifest
from fsdpckpt.converters.shared_sources import SeenSources, see_sources
from fsdpckpt.converters.target.layout import check_flavor
from fsdpckpt.converters.target.mesh import check_mesh
from fsdpckpt.converters.union_sources import UnionSources, serve_sources
from fsdpckpt.errors import InternalError, TargetExistsError, WorkerError
from fsdpckpt.execute import execute
from fsdpckpt.execute.checks import unverified_spans
from fsdpckpt.execute.job import MAX_THREADS, Budget, Job, for_worker, make_budget, pack_job, threads_for, unpack_job
from fsdpckpt.execute.journal import JournaledWindows, Record, RunIdentity, first_record, identity_of, joined
from fsdpckpt.ir.checkpoint import Note, SourceFile
from fsdpckpt.ir.files import Stored, pack_files, paths_in, unpack_files
from fsdpckpt.ir.tensors import Int64Array
from fsdpckpt.options import ConvertOptions, OutputScope, VerifyLevel
from fsdpckpt.plan import Plan
from fsdpckpt.plan.transfer import SeenBy
from fsdpckpt.process import gc_frozen, gc_paused
from fsdpckpt.progress import NoProgress, Progress
from fsdpckpt.storage import FileIdentity, is_url
from fsdpckpt.storage.sources import Sources


def convert(
    group: Group,
    source: str,
    target: str,
    options: ConvertOptions,
    progress: Progress,
    *,
    scope: OutputScope = OutputScope.SHARED,
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
    request = Request(group, source, target, options, progress, scope, peers)
    try:
        return _convert(request, publisher_of(request), workers_here)
    except StagingNeededError:  # what is written, one object or more, is known only from the plan
        return _convert(request, publisher_of(request, staged=True), workers_here)


def _convert(request: Request, publisher: Publisher, workers_here: int) -> Report:
    group, source, progress = request.group, request.source, request.progress
    with publisher:
        conversion = _Conversion(group, source, publisher, progress, request.peers)
        report = conversion.run(workers_here)
        return publisher.finish(report, conversion.holders)


@dataclass(slots=True, eq=False)
class _Conversion:
    """One rank's part of one conversion. ``peers``: the processes of all ranks. ``holders``: for each target file the
    ranks that see it.
    """

    group: Group
    source: str
    publisher: Publisher
    progress: Progress
    peers: Sequence[ProcessIdentity]
    holders: dict[str, Sequence[int]] = field(default_factory=dict)
    _linked: list[str] = field(default_factory=list)  # the target files that are links, all in directory 0
    _prepared: Prepared | None = None  # on rank 0
    _sources: list[Sources] = field(default_factory=list)  # with each file's identity when it was first opened
    _opened: list[str] = field(default_factory=list)  # every file that rank 0 has read; later those without chunks
    _note: Note | None = None
    _was_complete: bool = False
    _warnings: list[Note] = field(default_factory=list)  # of all ranks: what DST does not need and could not be done
    _complete: Mapping[str, int] = field(default_factory=dict)  # target files that an earlier run has written
    _unverified: Mapping[int, Int64Array] = field(default_factory=dict)  # what it read for them without checksums
    _manifest: bytes = b""  # fsdpckpt.json as it was written

    @property
    def _raises_unchanged(self) -> bool:
        """Whether errors are raised unchanged, not as a WorkerError."""
        return isinstance(self.group, Solo)

    @property
    def options(self) -> ConvertOptions:
        """The options as they apply to ``target``."""
        return self.publisher.options

    @property
    def target(self) -> str:
        """Where this conversion writes: DST, or what is uploaded there."""
        return self.publisher.target

    @property
    def _single_rank(self) -> bool:
        return self.group.world_size == 1

    def run(self, workers_here: int) -> Report:
        begun = time.monotonic()
        try:
            with explain_why_overwrite_is_refused(self.target):
                budget = self._check_request(workers_here)
                self._read_and_plan()
                budget = self.publisher.budget_for(budget, None if self._prepared is None else self._prepared.plan)
                if not self.options.dry_run:
                    with gc_frozen():
                        self._write(budget)
                elif self._prepared is not None and self._single_rank:
                    self._note = self.publisher.find_work(self._prepared, budget, self._sources[-1])
                return self._report(budget, begun)
        except BaseException as error:
            self._undo(error)
            raise

    def _write(self, budget: Budget) -> None:
        """Write what is planned: every step from the sources that are seen to the DST that appears."""
        files, directory = self._share_files()
        seen = self._see_sources(files)
        seen_by = seen.seen_by
        copies = source_copies(self.group, files, self._sources[-1], seen_by[:, self.group.rank].tolist())
        places = self.publisher.open(directory=directory)
        job, identity, journaled = self._divide(places, copies, seen_by, budget)
        self.publisher.prepare(job, identity, journaled, links=len(self._linked))
        self._link()
        self.holders = holders_of(job, places, directory=directory) | dict.fromkeys(self._linked, places.workers(0))
        crcs = self._execute(job, places, seen, budget, journaled)
        job = self._drop_columns(job)
        self._write_manifest(crcs, {}, directory=directory)
        if self.options.verify is not VerifyLevel.NONE and not all(place.complete for place in places.places):
            digests = self._verify(job, places, seen_by, crcs)
            if self.options.verify is VerifyLevel.FULL:
                self._write_manifest(crcs, digests, directory=directory)
        self._publish(job)

    def _check_request(self, workers_here: int) -> Budget:
        with self.group.step("check the request"):
            if self.group.rank == 0:
                self.publisher.restore()
                check_flavor(self.options)
                check_mesh(self.options)
            self.publisher.look()
            options = self.options  # links do not apply where each node has a DST of its own
            threads = options.threads
            if threads is None and self._single_rank and is_url(self.source):
                threads = MAX_THREADS  # a store answers slowly, and many requests at once: the threads mostly wait
            budget = make_budget(max_memory=options.max_memory, threads=threads)
            return for_worker(budget, workers_here, max_memory=options.max_memory, chosen=threads is not None)

    def _read_and_plan(self) -> None:
        with self.group.step("read and plan"):
            if self.group.rank:
                serve_sources(self.group)
                return
            self.progress.begin("read", 0)
            with self.group.heartbeat(), UnionSources(self.group) as files, gc_paused():
                self._sources.append(files)
                self._prepared = prepare(self.source, self.target, self.options, files)
                self._opened = list(files.opened)
                self.publisher.look_again(self._opened)
            self.progress.end()

    def _share_files(self) -> tuple[list[SourceFile], bool]:
        """Tell every rank the source files of the plan, whether DST is a directory, and which target files
        are links.
        """
        message = None
        if self._prepared is not None:
            files = self._prepared.transformed.checkpoint.files
            planned = set(paths_in(files))
            others = [path for path in self._opened if path not in planned]
            links = [link.path for link in self._prepared.output.links]
            message = (pack_files(files), others, self._prepared.decision.directory, links)
        shared = self.group.broadcast_object(message, name="sources")
        packed, self._opened, directory, self._linked = cast(
            "tuple[list[list[object]], list[str], bool, list[str]]", shared
        )
        return unpack_files(packed), directory

    def _see_sources(self, files: list[SourceFile]) -> SeenSources:
        """Which rank may read which of ``files``."""
        if self._single_rank:
            alone = np.ones((len(files), 1), bool)
            return SeenSources(alone, np.zeros(len(files), bool), ~alone)
        others = [Stored(path, 0) for path in self._opened]  # their content is compared, too; no chunk is in them
        with Sources() as sources:
            self._sources.append(sources)
            seen = see_sources(self.group, [*files, *others], sources).first(len(files))
        if self.group.rank == 0:
            self._warnings += seen.notes(list(map(str, files)))
        return seen

    def _divide(
        self,
        places: OutputPlaces,
        copies: Sequence[Sequence[FileIdentity]],
        seen_by: SeenBy,
        budget: Budget,
    ) -> tuple[Job, Callable[[], RunIdentity], JournaledWindows]:
        """Decide which rank writes what. Also returns this run's identity and, on rank 0, what an interrupted run has
        written. ``copies``: those of each source file.
        """
        group, publisher, prepared = self.group, self.publisher, self._prepared
        publisher.gather_journals()
        message: object = None
        journaled = JournaledWindows()
        with group.step("divide the work"), group.heartbeat():
            if prepared is not None:
                identity = functools.cache(functools.partial(self._identity, copies))
                work = publisher.interrupted(identity)
                if work.complete:
                    self._unverified = _unverified_of(prepared.plan.only(work.complete), work.received)
                    prepared = replace(prepared, plan=prepared.plan.without(work.complete))
                    self._complete = work.complete
                job = divide_work(prepared, places, seen_by, budget, work.windows, publisher.copy_memory)
                self._was_complete = places.places[0].complete and not len(job.written)
                self._note = publisher.resume_note(job, work.changed_sources)
                journaled = joined([work.parts, *work.windows.values()])
                if self._single_rank:
                    return job, identity, journaled
                message = [pack_job(job), first_record(identity())]
        packed, first = cast("tuple[object, Record]", group.broadcast_object(message, name="the plan"))
        shared_identity = identity_of(first)
        return unpack_job(packed), lambda: shared_identity, journaled

    def _identity(self, copies: Sequence[Sequence[FileIdentity]]) -> RunIdentity:
        """This run's identity. Only on rank 0, and before ``_drop_columns``."""
        if self._prepared is None:
            raise InternalError("only the first rank knows the plan")
        return run_identity(self._prepared.plan, self._prepared.options, copies)

    def _link(self) -> None:
        """Make the links before anything is copied, so that a file system that refuses them does so at once."""
        with self.group.step("link"):
            if self._prepared is not None:
                files = self._prepared.transformed.checkpoint.files
                self.publisher.link(self._prepared.output, self._prepared.linking, files, self._sources[-1])

    def _execute(
        self, job: Job, places: OutputPlaces, seen: SeenSources, budget: Budget, journaled: JournaledWindows
    ) -> dict[str, int]:
        """Write the target files; return the CRC-32 of each."""
        rank = self.group.rank
        place = places.seen_from(rank)
        with self._sources[-1] as sources:
            try:
                crcs = execute(
                    self.group,
                    job,
                    seen.seen_by,
                    apart=frozenset(np.flatnonzero(seen.apart).tolist()),
                    sources=sources,
                    locate=place.locate,
                    threads=threads_for(job.settings, budget),
                    progress=self.progress,
                    recorder=self.publisher.recorder,
                    journaled=journaled,
                    compare=place.complete,
                    reread=self.options.verify is VerifyLevel.FULL,
                    make_output=self.publisher.make_output(),
                    in_parts=bool(place.part),
                    unverified=self._unverified,
                )
            except TargetExistsError:
                error = self.publisher.differs() if self._single_rank and place.complete else None
                if error is not None:
                    raise error from None
                raise
        with self.group.step("look for the output"):
            here = places.of_worker(rank)
            written = [] if here is None else files_in(job, here.number)[0]
            self.publisher.require_files([*written, *self._linked])
        return {**crcs, **self._complete}

    def _drop_columns(self, job: Job) -> Job:
        """Free the memory of literals, write items and copies, which the check does not need."""
        if self._prepared is not None:
            self._prepared = self._prepared.outline()
        return replace(job, plan=job.plan.outline())

    def _write_manifest(self, crcs: Mapping[str, int], digests: Mapping[str, str], *, directory: bool) -> None:
        """Write the same ``fsdpckpt.json`` in every staging directory."""
        if not directory:
            return
        prepared, data = self._prepared, b""
        with self.group.step("write fsdpckpt.json"):
            existing = self.publisher.manifest() if prepared is not None else None
            if existing is not None:
                data = existing
            elif prepared is not None:
                data = encode_manifest(
                    prepared.output,
                    prepared.transformed,
                    prepared.decision,
                    link=prepared.linking.mode,
                    crcs=crcs,
                    digests=digests,
                )
        self._manifest = data = cast("bytes", self.group.broadcast_object(data, name="fsdpckpt.json"))
        with self.group.step("copy fsdpckpt.json"):
            self.publisher.put_manifest(data)

    def _verify(self, job: Job, places: OutputPlaces, seen_by: SeenBy, crcs: Mapping[str, int]) -> dict[str, str]:
        """Read the output back. Returns, on rank 0, the digests of its tensors."""
        check = OutputCheck(
            self.group,
            self._prepared.transformed if self._prepared is not None else None,
            self._prepared.options if self._prepared is not None else self.options,
            self.progress,
            places=places,
            files=job.files,
            seen_by=seen_by,
            holders=self.holders,
            crcs=crcs,
            path=self.publisher.final_path,
            require_unchanged=self._require_unchanged,
            open_output=self.publisher.output_sources,
            lost=self._prepared.output.lost if self._prepared is not None else (),
        )
        digests = check.run()
        if self.options.verify is VerifyLevel.FULL:
            with self.group.step("read the linked files"):
                if self._prepared is not None:  # they are compared with the checksums they carry, as copying would do
                    checkpoint = self._prepared.transformed.checkpoint
                    with self.group.heartbeat(), Sources() as sources:
                        check_linked(self._prepared.output, checkpoint, sources)
        return digests

    def _require_unchanged(self) -> None:
        for sources in self._sources:
            sources.require_unchanged()

    def _publish(self, job: Job) -> None:
        with self.group.step("check that the sources did not change"), self.group.heartbeat():
            self._require_unchanged()
        self.publisher.commit(job, linked=bool(self._linked))
        self._warnings += self.publisher.warnings

    def _undo(self, error: BaseException) -> None:
        """Kill ranks that are stopped, and remove the staged output unless it may be resumed."""
        kill_stopped(self.peers)
        original = original_error(error) if isinstance(error, WorkerError) else error
        lost = not self._raises_unchanged and (isinstance(original, WorkerError) or not isinstance(error, WorkerError))
        if not lost:
            self.group.all_stopped()
            self.publisher.discard_useless(original, several_journals=not self._raises_unchanged)
        self.publisher.close()

    def _report(self, budget: Budget, begun: float) -> Report:
        """Rank 0's report, on every rank. The note is not in ``fsdpckpt.json``, which is the same for a resumed run."""
        report = None
        if self._prepared is not None:
            report = make_report(
                self._prepared,
                self.target,
                budget=budget,
                workers=self.group.world_size,
                manifest=self._manifest,
                notes=[*([] if self._note is None else [self._note]), *dict.fromkeys(self._warnings)],
                replaced=self.publisher.replaced,
                was_complete=self._was_complete,
                seconds=time.monotonic() - begun,
            )
            if self._single_rank:
                return report
        document = None if report is None else json.loads(json.dumps(report.to_json()))
        return Report.from_json(cast("dict[str, object]", self.group.broadcast_object(document, name="report")))


def _unverified_of(plan: Plan, received: Collection[str]) -> dict[int, Int64Array]:
    """``unverified_spans`` of target files that are complete; ``received``: those with bytes from other workers."""
    numbered = [(number, file) for number, file in enumerate(plan.files) if file.path in received]
    rows = [(number, 0, file.nbytes) for number, file in numbered if file.nbytes]
    return unverified_spans(plan, np.asarray(rows, np.int64).reshape(-1, 3))
