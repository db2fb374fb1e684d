"""Publishes in an object store without a local disk: target files are sent in parts as they are assembled.

For stores that take an object in parts, in any order (S3), and one process. The order is that of any upload
(``storage.upload``): DST is announced, so that readers refuse it; the data is sent; the output is opened in the store
and checked; then the files that list the others follow, and the announcement is deleted. Those lists are small, and
are kept in the spool until then. A DST that is one object is sent under a hidden name beside it, checked there, and
moved by the store, so that it appears, or replaces an older one, at once.

An older checkpoint in a directory has to stay whole until the new one is checked: it is replaced from the spool
(``Spooled``), as is everything where the user names a directory for it, or an earlier run has left its output there.

The journal in the spool lists which objects are complete, with the store's tag and their CRC-32. The next run of the
same command on the same source sends the others.
"""

from __future__ import annotations

import os
import posixpath
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import numpy as np

from fsdpckpt import flags
from fsdpckpt.comm.protocol import Solo
from fsdpckpt.converters.linking import Linking
from fsdpckpt.converters.output.places import OutputPlaces, Place
from fsdpckpt.converters.output.publisher import Holders, InterruptedWork, Publisher, Request
from fsdpckpt.converters.output.rename import Rename
from fsdpckpt.converters.output.resume import is_resumable, require_same_run
from fsdpckpt.converters.output.spool import Spool
from fsdpckpt.converters.output.upload import Spooled
from fsdpckpt.converters.prepare import Prepared
from fsdpckpt.converters.report import Report
from fsdpckpt.errors import FsdpckptError, InternalError, SourceError, UsageError
from fsdpckpt.execute.job import BUFFERS_PER_THREAD, LARGEST_WINDOW, SMALLEST_WINDOW, Budget, Job
from fsdpckpt.execute.journal import (
    Journal,
    JournaledWindows,
    RunIdentity,
    first_record,
    read_records,
    run_of,
)
from fsdpckpt.execute.output import ComparedObject, Output, StreamedOutput, target_differs
from fsdpckpt.ir.checkpoint import Note, SourceFile
from fsdpckpt.ir.targets import Target
from fsdpckpt.ir.tensors import Int64Array
from fsdpckpt.plan import Plan
from fsdpckpt.plan.plan import FilePlan
from fsdpckpt.readers.protocol import MANIFEST
from fsdpckpt.storage import ByteSource, ByteTarget, Entry, is_url
from fsdpckpt.storage.local import LocalFile, replace_file, target_errors
from fsdpckpt.storage.object_file import ObjectFile
from fsdpckpt.storage.remote_store import filesystem_of, is_http
from fsdpckpt.storage.sources import Sources
from fsdpckpt.storage.target_checks import TargetState
from fsdpckpt.storage.upload import COPIES, MAX_PARTS, UPLOADED_LAST, RemoteTarget, takes_parts
from fsdpckpt.text import plural, size_text

PART = 5 << 20  # bytes: the smallest part that S3 takes
_HIDDEN = ".{}.fsdpckpt-staging"  # the directory beside DST, in the store, where a DST of one object is checked


def publisher_of(request: Request) -> Publisher:
    """How the output of ``request`` is written and published."""
    if not is_url(request.target):
        return Rename(request)
    return Streamed(request) if _streams(request) else Spooled(request)


def _streams(request: Request) -> bool:
    options = request.options
    if not isinstance(request.group, Solo) or options.staging is not None or is_http(request.target):
        return False
    try:
        filesystem, _ = filesystem_of(request.target.rstrip("/"))
    except SourceError:  # it is raised again where the target is opened
        return False
    spool = Spool.of(request.target.rstrip("/"), None)
    if not takes_parts(filesystem) or _holds_files(spool.path) or options.max_memory < _memory_for(PART):
        return False
    # A checkpoint in a directory is replaced by a run that has all of the new one.
    return not options.overwrite or os.path.lexists(spool.journal) or not _is_directory(request.target)


def _is_directory(url: str) -> bool:
    """Whether there are objects below ``url``, as far as the store says: an error is raised where it is opened."""
    with Sources() as sources:
        try:
            entry = sources.stat(url.rstrip("/"))
        except SourceError:
            return True
        return entry is not None and entry.directory


def _memory_for(part: int) -> int:
    """The least ``--max-memory`` with which parts of ``part`` bytes are sent: what one thread needs, less one part."""
    return COPIES * part + BUFFERS_PER_THREAD * SMALLEST_WINDOW


def _holds_files(path: str) -> bool:
    """Whether a run has staged its output at ``path``, beyond the lists that ``Streamed`` keeps there."""
    if os.path.isfile(path):
        return True
    names = (name for _, _, files in os.walk(path) for name in files)
    return any(not name.endswith(UPLOADED_LAST) for name in names)


class Streamed(Spooled):
    """See ``Publisher``. ``target`` is the spool: only the files that list others are written there."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._journal: SentJournal | None = None
        self._directory = True
        self._lists: dict[str, int] = {}  # the files in the spool, with their sizes
        self._sizes: dict[str, int] = {}  # of the objects
        self._sent: dict[str, int] = {}  # the objects that an earlier run has completed, with their sizes
        self._staged = ""  # of a DST of one object: the name under which it is sent
        self._begun_there = False
        self._budget = Budget(1, SMALLEST_WINDOW)
        self._part = PART
        self._published = False

    @property
    def _store(self) -> RemoteTarget:
        if self._remote is None:
            raise InternalError("an upload without a target")
        return self._remote

    @property
    def _compares(self) -> bool:
        """Whether DST is complete, and is compared instead of written."""
        return self._store_state is TargetState.COMPLETE_TO_COMPARE

    def look(self) -> None:
        """DST was looked at when it was opened."""

    def restore(self) -> None:
        """Nothing is moved aside in a store."""

    def budget_for(self, budget: Budget, plan: Plan) -> Budget:
        """Each thread has its windows, the part that it fills and the part that it sends, which the store's package
        copies. The whole may exceed ``--max-memory`` by one part.
        """
        longest = max((file.nbytes for file in plan.files), default=0)
        self._part = max(PART, -(-longest // MAX_PARTS))
        of_parts, needed = (COPIES + 1) * self._part, _memory_for(self._part)
        memory = self.options.max_memory + self._part
        if needed > self.options.max_memory:
            raise UsageError(
                f"{flags.max_memory} is too small to send parts of {size_text(self._part)}",
                expected=f"at least {size_text(needed)}",
                found=size_text(self.options.max_memory),
                why=f"a store takes at most {MAX_PARTS:,} parts of a file; the largest has {size_text(longest)}",
                next_step=f"{flags.max_memory(f'{-(-needed >> 20)}MiB')}, or {flags.staging('DIR')} with room for all "
                "of the output",
            )
        threads = max(min(budget.threads, memory // (of_parts + BUFFERS_PER_THREAD * (LARGEST_WINDOW // 2))), 1)
        window = (memory // threads - of_parts) // BUFFERS_PER_THREAD // SMALLEST_WINDOW * SMALLEST_WINDOW
        self._budget = Budget(threads, max(min(window, LARGEST_WINDOW), SMALLEST_WINDOW))
        return self._budget

    def find_work(self, prepared: Prepared, budget: Budget, sources: Sources) -> Note | None:
        if not os.path.lexists(self._spool.journal):
            return None
        return Note("resumed", f"an interrupted upload to {self._url} is continued")

    def open(self, *, directory: bool) -> OutputPlaces:
        store = self._store
        self._directory = directory
        self._staged = "" if directory else self._hidden_name()
        path = store.url if directory or self._compares else f"{store.url.rpartition('/')[0]}/{self._staged}"
        self._places = OutputPlaces((Place(0, 0, (0,), path, path, complete=self._compares),), (0,))
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
        """There is one journal, in the spool."""

    def interrupted(self, identity: Callable[[], RunIdentity]) -> InterruptedWork:
        """The objects that are complete, and in the state in which they were sent."""
        if self._compares:
            return InterruptedWork({}, ())
        records = read_records(self._spool.journal)
        run = run_of(records)
        changed: list[str] = []
        crcs: dict[str, int] = {}
        if run is not None:
            before, _ = run
            changed = before.lost_sources(identity()) if self._requested.resume is None else []
            if not changed:
                content = f"{self._spool.root} lists {plural(len(records) - 1, 'object')}"
                require_same_run(before, identity(), content)
                crcs = self._still_there(records)
        parts = run[1] if run is not None and crcs else JournaledWindows()
        if not crcs:
            with target_errors(self._spool.journal), suppress(FileNotFoundError):
                os.unlink(self._spool.journal)
        self._journal = SentJournal(self._spool.journal, identity)
        return InterruptedWork({}, changed, crcs, parts)

    def _still_there(self, records: Sequence[dict[str, object]]) -> dict[str, int]:
        """The CRC-32 of each object that is still what was sent. ``_sent`` gets their sizes."""
        crcs: dict[str, int] = {}
        objects = self._objects()
        for record in records[1:]:
            for name, nbytes, tag, crc in cast("list[tuple[str, int, str, int]]", record.get("sent", [])):
                with suppress(FsdpckptError):  # it is gone: sent again
                    if tag and objects.tag_of(self._object_name(name), nbytes) == tag:
                        crcs[name], self._sent[name] = crc, nbytes
        return crcs

    def resume_note(self, job: Job, changed_sources: Sequence[str]) -> Note | None:
        if self._compares:
            there = f"{self._url} was already complete: every byte was compared, nothing was uploaded"
            return Note("resumed", there)
        if self._sent:
            count = plural(len(self._sent), "file")
            return Note("resumed", f"continued an interrupted upload: {count} were already there")
        if changed_sources:
            why = f"because its source has changed ({changed_sources[0]})"
            what = f"what an interrupted run had sent to {self._url} was sent again"
            return Note("cleared", f"{what}, {why}: started from the beginning")
        if self._requested.resume:
            return Note("cleared", "there was nothing to resume: started from the beginning")
        return None

    def prepare(
        self, job: Job, identity: Callable[[], RunIdentity], journaled: JournaledWindows, *, links: int
    ) -> None:
        """Announce the upload. From now on readers refuse DST."""
        if self._compares:
            return
        self.recorder = self._journal
        names = {file.path: file.nbytes for file in job.plan.files}
        for name, nbytes in names.items():
            is_list = self._directory and name.endswith(UPLOADED_LAST)
            (self._lists if is_list else self._sizes)[name] = nbytes
        with target_errors(self._spool.root):
            for name in self._lists:
                os.makedirs(os.path.dirname(self._spool.locate(name)), exist_ok=True)
                with suppress(FileNotFoundError):
                    os.unlink(self._spool.locate(name))
        announced = {**names, **self._sent}
        if self._directory:
            announced[MANIFEST] = 0
        self._begun_there = True
        if self._directory:
            self._store.begin(announced, self._upload)
        else:
            self._objects().abort_parts(self._staged)

    def link(self, output: Target, linking: Linking, files: Sequence[SourceFile], sources: Sources) -> None:
        """Nothing can be linked in a store."""

    def make_output(self) -> Callable[..., Output]:
        objects = self._objects()

        def create(output: Output) -> ObjectFile:
            name = self._object_name(output.plan.path)
            return ObjectFile(
                objects,
                name,
                output.plan.nbytes,
                part=self._part,
                checksums=output.plan.checksums,
                completed=lambda: self._note_sent(objects, name, output),
            )

        def make(plan: FilePlan, path: str, **keywords: Any) -> Output:
            if self._compares:
                return ComparedObject(plan, path, **keywords)
            if plan.path in self._lists:
                return Output(plan, self._spool.locate(plan.path), **keywords)
            return StreamedOutput(create, plan, path, **keywords)

        return make

    def _note_sent(self, objects: RemoteTarget, name: str, output: Output) -> None:
        tag = objects.tag_of(name, output.plan.nbytes)
        if self._journal is not None:
            self._journal.sent(output.plan.path, output.plan.nbytes, tag, output.crc)

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
        if self._compares:
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
            return Sources()
        local = {f"{self._store.url}/{name}": self._spool.locate(name) for name in self._lists}
        names = {**self._sizes, **self._sent, **self._lists}
        return _Announced(self._store.url, names, local)

    def commit(self, job: Job, *, linked: bool) -> None:
        store = self._store
        if self._compares:
            self._spool.remove()
            return
        if self._directory:
            files = {name: self._spool.locate(name) for name in self._lists}
            names = {*self._lists, *self._sizes, *self._sent}
            store.finish(files, names, self._upload_options(lambda _: None, {}))
        else:
            self._objects().move(self._staged, posixpath.basename(store.root))
        self._published = True
        self._spool.remove()

    def finish(self, report: Report, holders: Holders) -> Report:
        notes = report.notes
        if not report.dry_run and os.path.lexists(self._spool.root):
            left = f"{self._url} is complete, but {self._spool.root} could not be removed: remove it"
            notes = (*notes, Note("left-behind", left, warning=True))
        memory = self._budget.nbytes + self._budget.threads * (COPIES + 1) * self._part
        return replace(
            report,
            target=self._url,
            loads=report.loads.replace(self.target, self._url),
            notes=notes,
            replaced=self._replaced,
            streamed=True,
            disk_free=None,
            peak_memory_planned=min(memory, self.options.max_memory + self._part),
        )

    def discard_useless(self, error: BaseException, *, several_journals: bool) -> None:
        """Delete what was sent, unless the same command may finish it."""
        if not self._begun_there or self._published:
            return
        kept = self._sent or (self._journal is not None and self._journal.nbytes)
        if is_resumable(error) and kept:
            return
        with suppress(FsdpckptError, OSError):
            objects = self._objects()
            for name in self._sizes:
                objects.delete(self._object_name(name))
            if self._directory:
                self._store.withdraw()
            self._spool.remove()

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close(complete=self._published)

    def differs(self) -> FsdpckptError | None:
        return target_differs(self._url)


class SentJournal:
    """The journal of an upload: a record for each object that is complete. See ``Recording``.

    An object is listed with what was read of the source until then, which has at least what it is made of.
    """

    def __init__(self, path: str, identity: Callable[[], RunIdentity]) -> None:
        self.nbytes = 0
        self._journal = Journal(path, lambda: first_record(identity()))
        self._new_parts: Callable[[], Int64Array] | None = None
        self._lock = threading.Lock()

    def start(self, new_parts: Callable[[], Int64Array]) -> None:
        self._new_parts = new_parts

    def wrote(self, number: int, file: ByteTarget, part: tuple[int, int, int], *, received: bool = False) -> None:
        """A window of an object can be lost until the object is complete."""

    def sent(self, name: str, nbytes: int, tag: str, crc: int) -> None:
        """The object for the target file ``name`` is complete; the store calls its state ``tag``."""
        with self._lock:
            parts = np.zeros((0, 5), np.int64) if self._new_parts is None else self._new_parts()
            record = {"sent": [[name, nbytes, tag, crc]], "windows": [], "parts": parts.tolist()}
            self._journal.append([cast("dict[str, object]", record)])
            self.nbytes += nbytes

    def retract(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._journal.path)

    def close(self, *, complete: bool, patience: float | None = None) -> None:
        self._journal.close()


class _Announced(Sources):
    """The files of a directory in a store whose upload is not complete, as they will be.

    ``names``: all of them, with sizes; those in ``local`` are not there yet, and are read from a disk.
    """

    def __init__(self, url: str, names: dict[str, int], local: dict[str, str]) -> None:
        super().__init__()
        self._url = url
        self._names = names
        self._local = local

    def list_directory(self, path: str) -> list[Entry]:
        below = path.rstrip("/")
        if below != self._url and not below.startswith(f"{self._url}/"):
            return super().list_directory(path)
        inside = below[len(self._url) :].lstrip("/")
        prefix = f"{inside}/" if inside else ""
        entries: dict[str, Entry] = {}
        for name, nbytes in self._names.items():
            if name.startswith(prefix):
                first, _, rest = name[len(prefix) :].partition("/")
                entries[first] = Entry(first, f"{below}/{first}", 0 if rest else nbytes, directory=bool(rest))
        return [entries[name] for name in sorted(entries)]

    def stat(self, path: str) -> Entry | None:
        below = path.rstrip("/")
        if below == self._url:
            return Entry(posixpath.basename(below), below, 0, directory=True)
        parent, _, name = below.rpartition("/")
        if not parent.startswith(self._url):
            return super().stat(path)
        return next((entry for entry in self.list_directory(parent) if entry.name == name), None)

    def open_new(self, path: str) -> ByteSource:
        return LocalFile(self._local[path]) if path in self._local else super().open_new(path)
