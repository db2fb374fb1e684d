"""Converts one checkpoint: read, transform, lay out, plan, execute, verify, publish; on one process or many.

All ranks of the group take part. 1. Rank 0 reads the source and plans; the others serve it the files that only they
see. 2. Each rank states which of these files it sees. 3. The leader of each staging directory makes it, or opens
what an interrupted run left there. 4. Rank 0 divides the work; every rank gets its part and executes it. 5. The output
is read back (``check``). 6. The leaders publish it by a rename. If DST is in an object store, the output is written to
a local disk in the same way and then uploaded (``publish``). With ``Solo``, a group of one process, nothing is
communicated and torch is never imported.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from fsdpckpt import flags
from fsdpckpt.comm.liveness import ProcessIdentity, kill_stopped, process_identity
from fsdpckpt.comm.protocol import Group, Solo, original_error
from fsdpckpt.converters.check import OutputCheck
from fsdpckpt.converters.linking import check_linked, make_links, require_linked, without_links
from fsdpckpt.converters.overwrite import explain_why_overwrite_is_refused, find_replaceable, still_replaceable
from fsdpckpt.converters.prepare import Prepared, make_report, prepare
from fsdpckpt.converters.publish import Upload
from fsdpckpt.converters.report import Report, encode_manifest, existing_manifest, put_manifest, replaced_files
from fsdpckpt.converters.resume import (
    StagedOutput,
    dry_run_note,
    journaled_windows,
    journals_of,
    other_upload,
    resume_note,
    run_identity,
    source_copies,
)
from fsdpckpt.converters.shared_sources import SeenSources, see_sources
from fsdpckpt.converters.staging import StagingDirectories, divide_work, files_in, holders_of, open_staging
from fsdpckpt.converters.target_mesh import check_mesh
from fsdpckpt.converters.target_spec import check_flavor
from fsdpckpt.converters.union_sources import UnionSources, serve_sources
from fsdpckpt.errors import InternalError, TargetExistsError, WorkerError
from fsdpckpt.execute import execute
from fsdpckpt.execute.job import MAX_THREADS, Budget, Job, for_worker, make_budget, pack_job, threads_for, unpack_job
from fsdpckpt.execute.journal import JournaledWindows, Record, RunIdentity, first_record, identity_of, joined
from fsdpckpt.execute.output import target_differs
from fsdpckpt.ir.checkpoint import Note, NoteKind, SourceFile
from fsdpckpt.ir.files import Stored, pack_files, unpack_files
from fsdpckpt.options import ConvertOptions, VerifyLevel, Visibility
from fsdpckpt.plan.transfer import Visible
from fsdpckpt.process import set_aside, without_collection
from fsdpckpt.progress import NoProgress, Progress
from fsdpckpt.storage import FileIdentity, is_url
from fsdpckpt.storage.sources import Sources
from fsdpckpt.storage.staging import clear_leftover, restore_backup, was_interrupted
from fsdpckpt.storage.target_checks import (
    Contents,
    check_target,
    refuse_links_into,
    require_outside_opened,
    require_source_apart,
)


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
        note = Note("unused", f"{flags.staging} had no effect: only a DST in an object store is staged there")
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
    _linked: list[str] = field(default_factory=list)  # the target files that are links, all in directory 0
    _prepared: Prepared | None = None  # on rank 0
    _sources: list[Sources] = field(default_factory=list)  # with each file's identity when it was first opened
    _opened: list[str] = field(default_factory=list)  # every file that rank 0 has read; later those without chunks
    _staged: StagedOutput = field(default_factory=StagedOutput)
    _note: Note | None = None
    _was_complete: bool = False
    _warnings: list[Note] = field(default_factory=list)  # of all ranks: what DST does not need and could not be done
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
                elif self._prepared is not None and self._single_rank and not (self._compares and self._exists()):
                    sources = self._sources[-1]
                    self._note = dry_run_note(self.group, self._prepared, self.target, self.options, budget, sources)
                return self._report(budget, begun)
        except BaseException as error:
            self._undo(error)
            raise

    def _exists(self) -> bool:
        return os.path.lexists(os.path.realpath(self.target))

    def _write(self, budget: Budget) -> None:
        """Write what is planned: every step from the visible sources to the visible DST."""
        files, directory = self._share_files()
        seen = self._see_sources(files)
        visible = seen.visible
        copies = source_copies(self.group, files, self._sources[-1], visible[:, self.group.rank].tolist())
        directories = self._open_staging(directory=directory)
        job, identity, journaled = self._divide(directories, copies, visible, budget)
        self._staged.prepare(self.group, job, directories, identity, journaled, links=len(self._linked))
        self._link(directories)
        self.holders = holders_of(job, directories, directory=directory) | dict.fromkeys(
            self._linked, directories.workers(0)
        )
        crcs = self._execute(job, directories, seen, budget, journaled)
        job = self._drop_columns(job)
        self._write_manifest(crcs, {}, directory=directory)
        if self.options.verify is not VerifyLevel.NONE and not all(directories.existing):
            digests = self._verify(job, directories, visible, crcs)
            if self.options.verify is VerifyLevel.FULL:
                self._write_manifest(crcs, digests, directory=directory)
        self._publish(job, directories)

    def _check_request(self, workers_here: int) -> Budget:
        options = self.options
        with self.group.step("check the request"):
            restored = self.group.rank == 0 and not options.dry_run and restore_backup(self.target)
            self._compares = self._may_be_complete()
            if self.group.rank == 0:
                check_flavor(options)
                check_mesh(options)
                if self.visibility is Visibility.NODE and not self._single_rank:
                    self.options = options = without_links(options, "each node has a DST of its own")
                with _say_restored(self.target) if restored else nullcontext():
                    check_target(self.target, self.source, overwrite=options.overwrite, compare=self._compares)
                    if options.overwrite:
                        self._replaces = find_replaceable(self.target)
            threads = options.threads
            if threads is None and self._single_rank and is_url(self.source):
                threads = MAX_THREADS  # a store answers slowly, and many requests at once: the threads mostly wait
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
                self.options = replace(self.options, dtype=self._prepared.spec.options.dtype)  # it may have been auto
                self._opened = list(files.opened)
                if not is_url(self.source):
                    require_outside_opened(self.target, self.source, self._opened)
                if self.options.overwrite and not is_url(self.source):
                    units = self.options.units
                    local_units = units if units is not None and not is_url(units) else None
                    refuse_links_into(self.target, self.source, self._opened, units=local_units)
            self.progress.end()

    def _share_files(self) -> tuple[list[SourceFile], bool]:
        """Tell every rank the source files of the plan, whether DST is a directory, and which target files
        are links.
        """
        message = None
        if self._prepared is not None:
            files = self._prepared.transformed.checkpoint.files
            planned = {file.path for file in files}
            others = [path for path in self._opened if path not in planned]
            links = [link.path for link in self._prepared.output.links]
            message = (pack_files(files), others, self._prepared.spec.directory, links)
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
            self._warnings += seen.notes([file.path for file in files])
        return seen

    def _open_staging(self, *, directory: bool) -> StagingDirectories:
        if self.visibility is Visibility.NODE and not self._single_rank:
            with self.group.step("look where each node writes"):
                if not is_url(self.source):
                    require_source_apart(self.target, self.source, overwrite=self.options.overwrite)
        directories, self._staged.staging = open_staging(
            *(self.group, self.target, self.options, self.visibility),
            directory=directory,
            replaces=self._replaces,
            compare=self._compares,
        )
        return directories

    def _divide(
        self,
        directories: StagingDirectories,
        copies: Sequence[Sequence[FileIdentity]],
        visible: Visible,
        budget: Budget,
    ) -> tuple[Job, Callable[[], RunIdentity], JournaledWindows]:
        """Decide which rank writes what. Also returns this run's identity and, on rank 0, what an interrupted run has
        written. ``copies``: those of each source file.
        """
        group, options, prepared, staging = self.group, self.options, self._prepared, self._staged.staging
        journals = journals_of(group, staging)
        message: object = None
        journaled = JournaledWindows()
        with group.step("divide the work"), group.heartbeat():
            if prepared is not None:
                identity = functools.cache(functools.partial(self._identity, copies))
                windows, changed_sources = journaled_windows(journals, directories, identity, options)
                job = divide_work(prepared, directories, visible, budget, windows)
                interrupted = None if staging is None else staging.interrupted
                self._was_complete = interrupted is None and not len(job.claims)
                self._note = resume_note(job, self.target, interrupted, options, changed_sources)
                journaled = joined(list(windows.values()))
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
        return run_identity(self._prepared.plan, self.options, copies)

    def _link(self, directories: StagingDirectories) -> None:
        """Make the links before anything is copied, so that a file system that refuses them does so at once."""
        with self.group.step("link"):
            if self._prepared is None:
                return
            output, files = self._prepared.output, self._prepared.transformed.checkpoint.files
            if directories.existing[0]:
                require_linked(output, files, os.path.realpath(self.target))
            if self._staged.staging is not None:
                make_links(output, self._prepared.linking, files, self._staged.staging, self._sources[-1])

    def _execute(
        self, job: Job, directories: StagingDirectories, seen: SeenSources, budget: Budget, journaled: JournaledWindows
    ) -> dict[str, int]:
        """Write the target files; return the CRC-32 of each."""
        rank = self.group.rank
        number = directories.of_worker[rank]
        with self._sources[-1] as sources:
            try:
                crcs = execute(
                    self.group,
                    job,
                    seen.visible,
                    apart=frozenset(np.flatnonzero(seen.apart).tolist()),
                    sources=sources,
                    locate=lambda path: directories.locate(rank, path),
                    threads=threads_for(job.settings, budget),
                    progress=self.progress,
                    recorder=self._staged.recorder,
                    journaled=journaled,
                    compare=directories.existing[number or 0],
                    reread=self.options.verify is VerifyLevel.FULL,
                )
            except TargetExistsError:
                if self.for_upload and self._single_rank:
                    raise other_upload(self.target) from None
                if self._single_rank and directories.existing[number or 0]:
                    raise target_differs(self.target) from None  # the user knows DST as a whole, not its single files
                raise
        with self.group.step("look for the output"):
            if self._staged.staging is not None:
                self._staged.staging.require_files([*files_in(job, number)[0], *self._linked])
        return crcs

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
            if prepared is not None and self._staged.staging is not None:
                data = encode_manifest(
                    *(prepared.output, prepared.transformed, prepared.spec),
                    link=prepared.linking.mode,
                    crcs=crcs,
                    digests=digests,
                )
            elif prepared is not None:
                data = existing_manifest(self.target)
        self._manifest = data = cast("bytes", self.group.broadcast_object(data, name="fsdpckpt.json"))
        with self.group.step("copy fsdpckpt.json"):
            if self._staged.staging is not None:
                put_manifest(self._staged.staging, data)

    def _verify(
        self, job: Job, directories: StagingDirectories, visible: Visible, crcs: Mapping[str, int]
    ) -> dict[str, str]:
        """Read the output back. Returns, on rank 0, the digests of its tensors."""
        staging = self._staged.staging
        check = OutputCheck(
            self.group,
            self._prepared.transformed if self._prepared is not None else None,
            self.options,
            self.progress,
            directories=directories,
            files=job.files,
            visible=visible,
            holders=self.holders,
            crcs=crcs,
            path=staging.visible if staging is not None else os.path.realpath(self.target),
            require_unchanged=self._require_unchanged,
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

    def _publish(self, job: Job, directories: StagingDirectories) -> None:
        """Rename every output to its final name; discard a staging directory without files."""
        with self.group.step("check that the sources did not change"), self.group.heartbeat():
            self._require_unchanged()
        with self.group.step("commit"):
            staging = self._staged.staging
            warnings: list[Note] = []
            if staging is None:
                if self.group.rank in directories.leaders:
                    warnings = clear_leftover(self.target)
            elif files_in(job, directories.of_worker[self.group.rank])[0] or self._linked:
                if staging.replaces is not None:  # files that appeared there meanwhile must not be deleted
                    staging.replaces = still_replaceable(self.target, staging.replaces)
                staging.commit()
            else:
                staging.discard()
        self._staged.close()
        warnings = warnings if staging is None else staging.warnings
        rows = [[note.kind, note.message] for note in warnings]
        for of_rank in self.group.all_gather_objects(rows, name="warnings"):
            self._warnings += [Note(*row, warning=True) for row in cast("list[tuple[NoteKind, str]]", of_rank)]

    def _undo(self, error: BaseException) -> None:
        """Kill ranks that are stopped, and remove the staged output unless it may be resumed."""
        kill_stopped(self.peers)
        original = original_error(error) if isinstance(error, WorkerError) else error
        lost = not self._raises_unchanged and (isinstance(original, WorkerError) or not isinstance(error, WorkerError))
        if not lost:
            self.group.all_stopped()
            self._staged.discard_useless(original, several_journals=not self._raises_unchanged)
        self._staged.close()

    def _report(self, budget: Budget, begun: float) -> Report:
        """Rank 0's report, on every rank. The note is not in ``fsdpckpt.json``, which is the same for a resumed run."""
        report = None
        if self._prepared is not None:
            report = make_report(
                *(self._prepared, self.target, budget, self.group.world_size, self._manifest),
                notes=[*([] if self._note is None else [self._note]), *dict.fromkeys(self._warnings)],
                replaced=replaced_files(self._replaces),
                was_complete=self._was_complete,
                seconds=time.monotonic() - begun,
            )
            if self._single_rank:
                return report
        document = None if report is None else json.loads(json.dumps(report.to_json()))
        return Report.from_json(cast("dict[str, object]", self.group.broadcast_object(document, name="report")))


@contextmanager
def _say_restored(target: str) -> Iterator[None]:
    """Make an error in the block say why there is something at ``target`` that was not there before the command."""
    try:
        yield
    except TargetExistsError as error:
        moved = f"an interrupted run that was to replace {target} had moved this aside; it was moved back now"
        error.details = (*error.details, moved)
        raise
