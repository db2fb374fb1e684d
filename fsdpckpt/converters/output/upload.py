"""Publishes in an object store: converts to a local disk, checks the result there, and uploads it (``storage.upload``).

The output is staged rather than streamed because the check before publishing, ``--verify full`` and resuming need all
of it, and because a zip file has its checksums before the data. Staging needs as much local disk as DST will occupy.

All ranks take part. 1. Rank 0 looks at DST and locks the spool, the directory to upload from. If the other ranks see
that directory, all write to it; otherwise the leader of each node locks one. 2. They convert to it, as to any DST. 3.
Rank 0 announces the upload. 4. One rank that sees a file sends it. 5. Rank 0 sends the files that list the others, and
ends the upload. 6. The directories are removed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Self, TypeVar, cast

from fsdpckpt import flags
from fsdpckpt.comm.liveness import Background, kill_stopped, wait_for
from fsdpckpt.comm.protocol import Solo
from fsdpckpt.converters.linking import without_links
from fsdpckpt.converters.output.overwrite import (
    explain_why_overwrite_is_refused,
    find_replaceable,
    foreign_files_error,
)
from fsdpckpt.converters.output.places import node_label
from fsdpckpt.converters.output.publisher import Holders, Request
from fsdpckpt.converters.output.rename import Rename
from fsdpckpt.converters.output.resume import other_upload, staged_leftover
from fsdpckpt.converters.output.spool import Spool, is_sent
from fsdpckpt.converters.report import PlannedFile, Report, replaced_files
from fsdpckpt.converters.target.layout import check_flavor
from fsdpckpt.errors import (
    FsdpckptError,
    InternalError,
    Leftover,
    TargetExistsError,
    TargetUnwritableError,
    UsageError,
)
from fsdpckpt.execute.compared_output import target_differs
from fsdpckpt.execute.job import Job
from fsdpckpt.ir.checkpoint import Note
from fsdpckpt.options import ConvertOptions, LinkMode, OutputScope, VerifyLevel
from fsdpckpt.readers.protocol import MANIFEST
from fsdpckpt.storage import UPLOADING, is_url
from fsdpckpt.storage.hub import hub_target_kind, require_hub_place
from fsdpckpt.storage.remote_dst import open_target
from fsdpckpt.storage.remote_store import RemoteStore, filesystem_of
from fsdpckpt.storage.staging import InterruptedRun
from fsdpckpt.storage.target_checks import TargetState, require_apart
from fsdpckpt.storage.upload import RemoteTarget, UploadOptions

T = TypeVar("T")

BLOCK = 4 << 20  # bytes compared at once
CANCEL_SECONDS = 5.0  # to remove the parts of a cancelled upload


class Spooled(Rename):
    """One rank's part of a conversion to the object store at the request's target. As a context manager, holds the
    locks.

    ``target``, ``options`` and ``scope`` are those of the conversion to the local disk. After a failure the local
    output stays for the next run, and readers refuse what was uploaded so far.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._request = request
        self._requested = request.options
        # the local directory belongs to fsdpckpt
        self.options = replace(request.options, staging=None, overwrite=False, link=LinkMode.COPY)
        self._unused_staging = False
        self._url = request.target
        self._spool = Spool("", "")
        self._progress = request.progress
        self._begun = time.monotonic()
        self._locks = ExitStack()
        self._remote: RemoteTarget | None = None
        self._upload = ""
        self._owns_spool = self.group.rank == 0
        self._compares = False  # DST is complete, and is compared instead of written
        self._replaced: tuple[PlannedFile, ...] = ()

    def __enter__(self) -> Self:
        """Look at DST, and lock the spools. Raises what ``open_target`` raises."""
        try:
            self._open_store()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            kill_stopped(self._request.peers)
        self.close()
        self._locks.close()

    @property
    def _store(self) -> RemoteTarget:
        if self._remote is None:
            raise InternalError("an upload without a target")
        return self._remote

    def _allowed_state(self) -> TargetState:
        return TargetState.COMPLETE_TO_COMPARE  # what is in the spool may wait for its upload

    def differs(self) -> FsdpckptError | None:
        return other_upload(self.target)

    def _open_store(self) -> None:
        message: object = None
        with self.group.step("look at the target"):
            if self.group.rank == 0:
                message = self._run_watched(lambda _: self._check_store())
        url, root, names, self._upload, replaced, self._compares = cast(
            "tuple[str, str, list[str], str, list[tuple[str, int]], bool]",
            self.group.broadcast_object(message, name="the target"),
        )
        self._replaced = tuple(PlannedFile(*each) for each in replaced)
        with self.group.step("open the target"):
            filesystem = self._run_watched(lambda _: filesystem_of(url)[0])
            kind = hub_target_kind(filesystem, root, alone=isinstance(self.group, Solo))
            self._remote = kind(url, filesystem, root, tuple(names))
        self._choose_spool(Spool.of(url, self._requested.staging))
        self.target = self._spool.path

    def _check_store(self) -> list[object]:
        options = self._requested
        check_flavor(options)
        without_links(options, f"{self._url} is in an object store")
        if self.scope is OutputScope.NODE:
            raise UsageError(
                f"every node sees {self._url}: {flags.output_visibility('node')} is for nodes that write to their "
                "own disks",
                next_step=f"drop {flags.output_visibility}: nodes that share no {flags.staging} directory use their "
                "own",
            )
        spool = Spool.of(self._url.rstrip("/"), options.staging)
        state = TargetState.ABSENT
        if options.overwrite:
            state = TargetState.REPLACEABLE
        elif options.resume or (options.resume is None and spool.upload()):
            state = TargetState.COMPLETE_TO_COMPARE
        with explain_why_overwrite_is_refused(self._url):
            remote = open_target(self._url, self.source, state=state)
            require_hub_place(remote)
        if remote.interrupted:
            self._require_resumable_upload(remote, spool)
        replaced = replaced_files(find_replaceable(remote.url)) if options.overwrite and not remote.interrupted else ()
        upload = self._lock_spool(spool)
        sizes = [[file.path, file.nbytes] for file in replaced]
        compared = state is TargetState.COMPLETE_TO_COMPARE and remote.complete
        return [remote.url, remote.root, list(remote.names), upload, sizes, compared]

    def _require_resumable_upload(self, remote: RemoteTarget, spool: Spool) -> None:
        """Raises TargetExistsError if the upload interrupted there may belong to another run, or holds other files.

        An upload that this machine began and still has the output of is continued; any other only with ``--resume``, or
        replaced with ``--overwrite``.
        """
        options, (upload, names) = self._requested, remote.announced()
        is_ours = bool(upload) and upload == spool.upload()
        if not (is_ours or options.overwrite or options.resume):
            raise TargetExistsError(
                f"{remote.url} holds an upload that was not completed",
                file=f"{remote.url}/{UPLOADING}",
                why=f"it was interrupted, or still runs, on another machine or with another {flags.staging}",
                next_step=f"run the command there again; or add {flags.resume} to continue here, or {flags.overwrite} "
                "to start over",
            )
        foreign = sorted(set(remote.names) - names)
        if foreign:
            raise foreign_files_error(remote.url, foreign)

    def _lock_spool(self, spool: Spool) -> str:
        if not is_url(self.source):
            require_apart(spool.root, self.source)
        if self._requested.dry_run:
            return ""
        return self._locks.enter_context(spool.locked(resume=self._requested.resume is not False))

    def _choose_spool(self, spool: Spool) -> None:
        """Choose one spool for all ranks, or one for each node if not all ranks see rank 0's."""
        group = self.group
        everyone = group.all_gather_objects([node_label(), spool.root, spool.path], name="staging")
        rows = cast("list[tuple[str, str, str]]", everyone)
        labels = [label for label, _, _ in rows]
        self._spool = Spool(*rows[0][1:])
        sees = self._requested.dry_run or self._spool.upload() == self._upload
        if all(group.all_gather_objects(sees, name="who sees staging")) or len(set(labels)) == 1:
            self.scope = OutputScope.SHARED
            return
        self.scope = OutputScope.NODE
        leader = labels.index(labels[group.rank])
        self._spool = Spool(*rows[leader][1:])
        with group.step("lock staging"):
            if leader == group.rank != 0:
                self._owns_spool = True
                self._lock_spool(self._spool)

    def _note_on_work(
        self, job: Job, interrupted: InterruptedRun | None, changed_sources: Sequence[str], *, anew: bool = True
    ) -> Note | None:
        anew = anew and not self._compares  # what is compared with DST is made from the beginning
        return super()._note_on_work(job, interrupted, changed_sources, anew=anew)

    def finish(self, report: Report, holders: Holders) -> Report:
        """Upload the output and remove the spools. Collective. Returns the report of the whole run."""
        if not report.dry_run:
            self._send(report, holders)
        above = os.path.dirname(self._spool.root)
        notes = (*report.notes, Note("staged", f"converted in {above}, then uploaded"))
        if self._compares:
            notes = (*report.notes, self._compared_note())
        if not report.dry_run and self._owns_spool and os.path.lexists(self._spool.path):
            notes = (*notes, self._left_behind_note())
        seconds = time.monotonic() - self._begun
        report = report.uploaded_to(self._url)
        return replace(report, staged_in=above, notes=notes, replaced=self._replaced, seconds=seconds)

    def _compared_note(self) -> Note:
        return Note("resumed", f"{self._url} was already complete: every byte was compared, nothing was uploaded")

    def _left_behind_note(self) -> Note:
        left = f"{self._url} is complete, but {self._spool.root} could not be removed: remove it"
        return Note("left-behind", left, warning=True)

    def _send(self, report: Report, holders: Holders) -> None:
        group, remote = self.group, self._store
        files = {name: self._spool.locate(name) for name, ranks in holders.items() if group.rank in ranks}
        sizes = {file.path: file.nbytes for file in report.files if file.path != MANIFEST}
        with group.step("announce the upload"):
            if group.rank == 0 and not self._compares:
                lists = {name: os.path.getsize(path) for name, path in files.items() if name not in sizes}
                self._run_watched(lambda _: remote.abort_leftovers({*sizes, *lists}))
                self._run_watched(lambda _: remote.begin({**sizes, **lists}, self._upload))
        senders = assign_senders(sizes, holders)
        chosen = {name: path for name, path in files.items() if senders.get(name) == group.rank}
        if self._compares:
            self._compare(remote, chosen, lists=() if "" in sizes else (MANIFEST,))
            return
        earlier = self._sent_earlier()
        self._progress.begin("upload", sum(sizes[name] for name in chosen))
        with group.step("upload"):
            self._run_watched(lambda sent: remote.send(chosen, self._upload_options(sent, earlier)))
        with group.step("end the upload"):
            if group.rank == 0:
                self._run_watched(
                    lambda sent: remote.finish(files, holders, self._upload_options(sent, earlier), upload=self._upload)
                )
        self._progress.end()
        self._remove_staging()

    def _compare(self, remote: RemoteTarget, files: Mapping[str, str], lists: Sequence[str]) -> None:
        """Compare the objects of a complete DST with ``files``, this rank's share. Raises TargetExistsError if one
        differs. The ``lists`` have to be there; they may be another version's.
        """
        self._progress.begin("compare", sum(map(os.path.getsize, files.values())))

        def differing(sent: Callable[[int], None]) -> str | None:
            return remote.differing(files, lambda url, path: _first_difference(url, path, sent) is None)

        with self.group.step("compare the target"):
            name = self._run_watched(differing)
            if name is not None:
                raise target_differs(f"{self._url}/{name}" if name else self._url)
            if not remote.names or any(name not in remote.names for name in lists):
                raise target_differs(self._url)
        self._progress.end()
        self._remove_staging()

    def _remove_staging(self) -> None:
        with self.group.step("remove staging"):
            if self._owns_spool:
                self._spool.remove()

    def _sent_earlier(self) -> dict[str, str]:
        """What earlier runs of this upload sent, from the notes on all nodes."""
        noted = self._spool.sent(self._upload) if self._requested.resume is not False else {}
        tags: dict[str, str] = {}
        for each in self.group.all_gather_objects(noted, name="what was sent"):
            tags.update(cast("dict[str, str]", each))
        return tags

    def _upload_options(self, sent: Callable[[int], None], earlier: Mapping[str, str]) -> UploadOptions:
        return UploadOptions(
            memory=self._requested.max_memory,
            advance=sent,
            is_uploaded=partial(is_sent, earlier),
            on_uploaded=partial(self._spool.note_sent, self._upload, self.group.rank),
            check=_require_same_bytes if self._requested.verify is VerifyLevel.FULL else None,
            require_own=partial(self._store.require_own, self._upload),
        )

    def _run_watched(self, work: Callable[[Callable[[int], None]], T]) -> T:
        """Run ``work(sent)`` on another thread while this one stays in touch with the other ranks; return its result.

        If another rank fails, the work is cancelled. A store that hangs does not make this rank a lost one: its client
        library times out.
        """
        if isinstance(self.group, Solo):
            return work(self._progress.advance)
        stop = threading.Event()

        def sent(nbytes: int) -> None:
            if stop.is_set():
                raise _Cancelled
            self._progress.advance(nbytes)

        background = Background("fsdpckpt-upload")
        future = background.submit(lambda: work(sent))
        try:
            return wait_for(future, partial(self.group.watch, moving=True))
        except BaseException:
            stop.set()
            wait([future], CANCEL_SECONDS)
            raise
        finally:
            background.close(0.0)


class _Cancelled(Exception):
    """The upload was cancelled because another rank failed."""


def assign_senders(sizes: Mapping[str, int], holders: Holders) -> dict[str, int]:
    """Assign each file of ``sizes`` (bytes by name) to a rank that sees it, so that all send about the same amount."""
    load: dict[int, int] = {}
    senders: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        senders[name] = min(holders[name], key=lambda rank: (load.get(rank, 0), rank))
        load[senders[name]] = load.get(senders[name], 0) + sizes[name]
    return senders


def _require_same_bytes(url: str, path: str) -> None:
    """Raises TargetUnwritableError if the object at ``url`` differs from the file at ``path``."""
    difference = _first_difference(url, path)
    if difference is not None:
        raise TargetUnwritableError(
            f"{url} is not what was uploaded",
            file=url,
            found=f"other bytes within {BLOCK} from offset {difference}",
            why="another program wrote there, or the store lost data",
            run_again=True,
        )


def _first_difference(url: str, path: str, advance: Callable[[int], None] = lambda _: None) -> int | None:
    """The offset of the first block in which the object at ``url`` differs from the file at ``path``, as long as it."""
    remote = RemoteStore().open(url)
    with open(path, "rb") as file:
        offset = 0
        while data := file.read(BLOCK):
            if remote.read(offset, len(data)) != data:
                return offset
            offset += len(data)
            advance(len(data))
    return None


def spooled_leftover(target: str, options: ConvertOptions) -> Leftover | None:
    """What a failed run left for ``target``, a URL."""
    spool = Spool.of(target.rstrip("/"), options.staging)
    if spool.journals():
        return Leftover(f"{spool.root} lists what was sent", "uploads what is missing")
    if not os.path.lexists(spool.path):
        return staged_leftover(spool.path, options)
    return Leftover(f"the converted checkpoint is kept in {spool.path}", "uploads what is missing")
