"""Publishes in an object store without a local disk: target files are sent in parts as they are assembled.

For stores that take an object in parts, in any order (``storage.parts``). The order is that of any upload
(``storage.upload``): DST is announced, so that readers refuse it; the data is sent; the output is opened in the store
and checked; then the files that list the others follow, and the announcement is deleted. Those lists are small, and
are kept in the spool of rank 0 until then. A DST that is one object is sent under a hidden name beside it, checked
there, and moved by the store, so that it appears, or replaces an older one, at once. A store that has no such move
(Azure) gets one object from the spool (``Spooled``).

Of several workers each sends whole objects, or parts of one that is too large for that: none has two senders. A worker
assembles its parts in order, also where it waits for bytes that only other workers see, so that few are held at a time:
those with checksums of bytes that are not there yet. Those of other workers' bytes are known when all are copied; then
the worker that began the object completes it.

An older checkpoint in a directory has to stay whole until the new one is checked: it is replaced from the spool
(``Spooled``), as is everything where the user names a directory for it, or an earlier run has left its output there.

A journal of each worker, in the spool that it sees, lists the objects that it has completed, with the store's tag and
their CRC-32. The next run of the same command on the same source sends the others, with any number of workers.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, cast

from fsdpckpt.converters.linking import Linking
from fsdpckpt.converters.output.announced import AnnouncedSources
from fsdpckpt.converters.output.places import OutputPlaces, Place
from fsdpckpt.converters.output.publisher import (
    Holders,
    InterruptedWork,
    Request,
    StagingNeededError,
)
from fsdpckpt.converters.output.resume import is_resumable, require_same_run
from fsdpckpt.converters.output.sent_journal import SentJournal, SentObject, sent_objects
from fsdpckpt.converters.output.stream_memory import StreamMemory, divide_memory
from fsdpckpt.converters.output.upload import Spooled
from fsdpckpt.converters.prepare import Prepared
from fsdpckpt.converters.report import Report
from fsdpckpt.converters.union_sources import UnionSources
from fsdpckpt.errors import FsdpckptError
from fsdpckpt.execute.compared_output import ComparedObject, target_differs
from fsdpckpt.execute.job import Budget, Job
from fsdpckpt.execute.journal import JournaledWindows, Record, RunIdentity, joined, read_records, run_of
from fsdpckpt.execute.output import Output
from fsdpckpt.execute.streamed_output import StreamedOutput
from fsdpckpt.ir.checkpoint import Note, SourceFile
from fsdpckpt.ir.targets import Target
from fsdpckpt.plan import Plan
from fsdpckpt.plan.plan import FilePlan
from fsdpckpt.readers.protocol import MANIFEST
from fsdpckpt.storage.hidden import Lock, journal_path, lock_as_writer
from fsdpckpt.storage.local_target import replace_file, target_errors
from fsdpckpt.storage.object_file import ObjectFile
from fsdpckpt.storage.parts import renames_at_once
from fsdpckpt.storage.sources import Sources
from fsdpckpt.storage.upload import UPLOADED_LAST, RemoteTarget
from fsdpckpt.text import plural

_HIDDEN = ".{}.fsdpckpt-staging"  # the directory beside DST, in the store, where a DST of one object is checked


class Streamed(Spooled):
    """See ``Publisher``. ``target`` is the spool: only the files that list others are written there."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._found_journals: list[list[Record]] = []  # of interrupted runs
        self._journal: SentJournal | None = None
        self._writer: Lock | None = None  # of a rank that writes beside others
        self._directory = True
        self._lists: dict[str, int] = {}  # the files in the spool, with their sizes
        self._sizes: dict[str, int] = {}  # of the objects
        self._sent: dict[str, int] = {}  # on rank 0: the objects that an earlier run has completed, with their sizes
        self._source_files = 0
        self._staged = ""  # of a DST of one object: the name under which it is sent
        self._begun_there = False
        self._memory = StreamMemory(request.options.max_memory)
        self._published = False

    def look(self) -> None:
        """DST was looked at when it was opened."""

    def restore(self) -> None:
        """Nothing is moved aside in a store."""

    def budget_for(self, budget: Budget, plan: Plan | None) -> Budget:
        """Raises StagingNeededError for one object in a store that cannot move it into place."""
        one_object = False
        with self.group.step("divide the memory"):
            if plan is not None:
                one_object = [file.path for file in plan.files] == [""]
                self._memory = divide_memory(
                    plan, budget, max_memory=self.options.max_memory, workers=self.group.world_size
                )
        message = (asdict(self._memory), one_object)
        shared = self.group.broadcast_object(message, name="the memory")
        memory, one_object = cast("tuple[dict[str, Any], bool]", shared)
        self._memory = StreamMemory(**memory)
        if one_object and not self._compares and not renames_at_once(self._store.filesystem):
            raise StagingNeededError
        return self._memory.budget

    @property
    def copy_memory(self) -> int:
        return self._memory.for_copies

    def find_work(self, prepared: Prepared, budget: Budget, sources: Sources) -> Note | None:
        if not self._spool.journals():
            return None
        return Note("resumed", f"an interrupted upload to {self._url} is continued")

    def open(self, *, directory: bool) -> OutputPlaces:
        store = self._store
        self._directory = directory
        self._staged = "" if directory else self._hidden_name()
        path = store.url if directory or self._compares else f"{store.url.rpartition('/')[0]}/{self._staged}"
        workers = tuple(range(self.group.world_size))
        place = Place(0, 0, workers, path, path, complete=self._compares, part=self._memory.cut)
        self._places = OutputPlaces((place,), (0,) * len(workers))
        return self._places

    def _hidden_name(self) -> str:
        """Where a DST of one object is sent first, relative to the directory that DST is in."""
        name = posixpath.basename(self._store.root)
        return f"{_HIDDEN.format(name)}/{name}"

    def _objects(self) -> RemoteTarget:
        """The directory in the store that the objects are sent to."""
        store = self._store
        if self._directory:
            return store
        return replace(store, url=store.url.rpartition("/")[0], root=posixpath.dirname(store.root), names=())

    def _object_name(self, path: str) -> str:
        return path if self._directory else self._staged

    def gather_journals(self) -> None:
        reads = self._owns_spool and not self._compares
        found = [read_records(path) for path in self._spool.journals()] if reads else []
        gathered = cast("list[list[list[Record]]]", self.group.all_gather_objects(found, name="journals"))
        self._found_journals = [records for of_rank in gathered for records in of_rank]

    def interrupted(self, identity: Callable[[], RunIdentity]) -> InterruptedWork:
        """The objects that are complete, and in the state in which they were sent."""
        if self._compares:
            return InterruptedWork({}, ())
        runs = [run for records in self._found_journals if (run := run_of(records)) is not None]
        listed = [sent for records in self._found_journals for sent in sent_objects(records)]
        changed: list[str] = []
        if self._requested.resume is None:
            changed = [change for before, _ in runs for change in before.lost_sources(identity())]
        if not listed or changed:
            return InterruptedWork({}, changed)
        content = f"{self._spool.root} lists {plural(len(listed), 'object')}"
        for before, _ in runs:
            require_same_run(before, identity(), content)
        there = self._still_there(listed)
        self._sent = {sent.name: sent.nbytes for sent in there}
        return InterruptedWork(
            {},
            (),
            {sent.name: sent.crc for sent in there},
            joined([parts for _, parts in runs]) if there else JournaledWindows(),
            frozenset(sent.name for sent in there if sent.received),
        )

    def _still_there(self, listed: Iterable[SentObject]) -> list[SentObject]:
        """The objects that are still what was sent."""
        there: list[SentObject] = []
        objects = self._objects()
        for sent in listed:
            with suppress(FsdpckptError):  # it is gone: sent again
                if sent.tag and objects.tag_of(self._object_name(sent.name), sent.nbytes) == sent.tag:
                    there.append(sent)
        return there

    def resume_note(self, job: Job, changed_sources: Sequence[str]) -> Note | None:
        if self._compares:
            return self._compared_note()
        if self._sent:
            were = "was" if len(self._sent) == 1 else "were"
            count = plural(len(self._sent), "file")
            return Note("resumed", f"continued an interrupted upload: {count} {were} already there")
        if changed_sources:
            why = f"because its source has changed ({changed_sources[0]})"
            what = f"what an interrupted run had sent to {self._url} was sent again"
            return Note("cleared", f"{what}, {why}: started from the beginning")
        if any(self._found_journals) and self._requested.resume is not False:
            why = "none of its objects is there, complete"
            return Note("cleared", f"an interrupted upload to {self._url} was begun anew: {why}")
        if self._requested.resume:
            return Note("cleared", "there was nothing to resume: started from the beginning")
        return None

    def prepare(
        self, job: Job, identity: Callable[[], RunIdentity], journaled: JournaledWindows, *, links: int
    ) -> None:
        """Announce the upload, on rank 0: from now on readers refuse DST. Open this rank's journal."""
        if self._compares:
            return
        group = self.group
        kept = bool(group.broadcast_object(bool(self._sent), name="what is resumed"))
        with group.step("remove what is not resumed"):
            if self._owns_spool and not kept:
                self._spool.forget_sent()
        with group.step("open the journal"):
            if group.world_size > 1:
                self._writer = lock_as_writer(self._spool.root, group.rank)
            number = group.rank if group.world_size > 1 else None
            self._journal = SentJournal(journal_path(self._spool.root, number), identity)
            self.recorder = self._journal
            if group.rank == 0:  # another run has to know that this one has announced DST
                self._journal.begin()
        self._source_files = len(job.files)
        self._begun_there = True
        with group.step("announce the upload"), group.heartbeat():
            self._announce(job)

    def _announce(self, job: Job) -> None:
        names = {file.path: file.nbytes for file in job.plan.files}
        for name, nbytes in names.items():
            is_list = self._directory and name.endswith(UPLOADED_LAST)
            (self._lists if is_list else self._sizes)[name] = nbytes
        if self.group.rank:
            return
        with target_errors(self._spool.root):
            for name in self._lists:
                os.makedirs(os.path.dirname(self._spool.locate(name)), exist_ok=True)
                with suppress(FileNotFoundError):
                    os.unlink(self._spool.locate(name))
        if self._directory:
            self._store.abort_parts("", {*names, MANIFEST})
            self._store.begin({**names, **self._sent, MANIFEST: 0}, self._upload)
        else:
            self._objects().abort_parts(self._staged)

    def link(self, output: Target, linking: Linking, files: Sequence[SourceFile], sources: Sources) -> None:
        """Nothing can be linked in a store."""

    def make_output(self) -> Callable[..., Output]:
        objects, upload = self._objects(), self._upload
        require_own = partial(objects.require_own, upload) if self._directory else None

        def create(output: Output) -> ObjectFile:
            name = self._object_name(output.plan.path)
            return ObjectFile(
                objects,
                name,
                output.plan.nbytes,
                part=self._memory.part,
                checksums=output.plan.checksums,
                completed=lambda: self._note_sent(objects, name, output),
                before=require_own,
                own=output.own,
            )

        def make(plan: FilePlan, path: str, **keywords: Any) -> Output:
            if self._compares:
                return ComparedObject(plan, path, **keywords)
            if plan.path in self._lists:
                return Output(plan, self._spool.locate(plan.path), **keywords)
            return StreamedOutput(create, plan, path, **keywords)

        return make

    def _note_sent(self, objects: RemoteTarget, name: str, output: Output) -> None:
        plan = output.plan
        tag = objects.tag_of(name, plan.nbytes)
        streams = bool((plan.copies.file >= self._source_files).any())  # of other ranks, behind the source files
        received = streams or not output.sole_writer
        if self._journal is not None:
            self._journal.sent(SentObject(plan.path, plan.nbytes, tag, output.crc, received))

    def require_files(self, paths: Iterable[str]) -> None:
        """What is in the store was looked up when it was complete."""

    def manifest(self) -> bytes | None:
        if not self._compares:
            return None
        with Sources() as sources:
            path = f"{self._store.url}/{MANIFEST}"
            if sources.stat(path) is None:
                raise target_differs(self._url)
            file = sources.open(path)
            return file.read(0, file.nbytes)

    def put_manifest(self, data: bytes) -> None:
        path = self._spool.locate(MANIFEST)
        if self._compares or self.group.rank:
            return
        with target_errors(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            replace_file(path, data)
        self._lists[MANIFEST] = len(data)

    @property
    def final_path(self) -> str:
        return self._places.places[0].path

    def output_sources(self) -> Sources:
        if not self._directory:
            return UnionSources(self.group)
        local = {f"{self._store.url}/{name}": self._spool.locate(name) for name in self._lists}
        names = {**self._sizes, **self._sent, **self._lists}
        return AnnouncedSources(self.group, self._store.url, names, local)

    def commit(self, job: Job, *, linked: bool) -> None:
        with self.group.step("publish"), self.group.heartbeat():
            if self.group.rank == 0 and not self._compares:
                self._publish()
            elif self.group.rank == 0 and self._staged and self._spool.journals():
                self._objects().delete(self._staged)  # of this machine's run, which ended before it deleted it
        self._published = True
        self._remove_staging()

    def _publish(self) -> None:
        store = self._store
        if self._directory:
            files = {name: self._spool.locate(name) for name in self._lists}
            names = {*self._lists, *self._sizes, *self._sent}
            store.finish(files, names, self._upload_options(lambda _: None, {}), upload=self._upload)
        else:
            self._objects().move(self._staged, posixpath.basename(store.root))

    def finish(self, report: Report, holders: Holders) -> Report:
        notes = report.notes
        if not report.dry_run and os.path.lexists(self._spool.root):
            notes = (*notes, self._left_behind_note())
        return replace(
            report.uploaded_to(self._url),
            notes=notes,
            replaced=self._replaced,
            streamed=True,
            disk_free=None,
            peak_memory_planned=self._memory.peak,
        )

    def discard_useless(self, error: BaseException, *, several_journals: bool) -> None:
        """Delete what was sent, unless the same command may finish it."""
        if not self._begun_there or self._published:
            return
        kept = several_journals or self._sent or (self._journal is not None and self._journal.nbytes)
        if is_resumable(error) and kept:
            return
        with suppress(FsdpckptError, OSError):
            if self.group.rank == 0:
                self._withdraw()
            if self._owns_spool:
                self._spool.remove()

    def _withdraw(self) -> None:
        if self._directory and not self._store.is_own(self._upload):
            return  # another machine has begun an upload since: what is there may be what it sent
        objects = self._objects()
        for name in (*self._sizes, *self._sent):
            objects.delete(self._object_name(name))
        if self._directory:
            self._store.withdraw()

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close(complete=self._published)
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def differs(self) -> FsdpckptError | None:
        return target_differs(self._url)
