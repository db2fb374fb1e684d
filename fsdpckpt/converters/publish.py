"""Publishes the output: a rename on a local disk, an upload to an object store.

On a local disk, the output is written to a staging directory beside DST, and one rename makes it visible
(``storage.staging``).

For an object store, the same conversion writes to a local disk, is checked there, and is then uploaded
(``storage.upload``). The output is staged rather than streamed because the check before publishing, ``--verify full``
and resuming need all of it, and because a zip file has its checksums before the data. Staging needs as much local disk
as DST will occupy.

All ranks take part in an upload. 1. Rank 0 looks at DST and locks the directory to upload from. If the other ranks see
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
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Self, TypeAlias, TypeVar, cast

from fsdpckpt import flags
from fsdpckpt.comm.liveness import Background, ProcessIdentity, kill_stopped, wait_for
from fsdpckpt.comm.protocol import Group, Solo
from fsdpckpt.converters.linking import without_links
from fsdpckpt.converters.overwrite import explain_why_overwrite_is_refused, find_replaceable, foreign_files_error
from fsdpckpt.converters.report import PlannedFile, Report, replaced_files
from fsdpckpt.converters.resume import is_resumable, staged_leftover
from fsdpckpt.converters.staging import UploadDirectory, is_sent, node_label
from fsdpckpt.converters.target_spec import check_flavor
from fsdpckpt.errors import (
    InternalError,
    Leftover,
    TargetExistsError,
    TargetUnwritableError,
    UsageError,
    attach_leftover,
)
from fsdpckpt.execute.output import target_differs
from fsdpckpt.ir.checkpoint import Note
from fsdpckpt.options import ConvertOptions, LinkMode, VerifyLevel, Visibility
from fsdpckpt.progress import Progress
from fsdpckpt.readers.protocol import MANIFEST
from fsdpckpt.storage import UPLOADING, is_url
from fsdpckpt.storage.remote_store import RemoteStore, filesystem_of
from fsdpckpt.storage.target_checks import require_apart
from fsdpckpt.storage.upload import RemoteTarget, UploadOptions, open_target

T = TypeVar("T")

BLOCK = 4 << 20  # bytes compared at once
CANCEL_SECONDS = 5.0  # to remove the parts of a cancelled upload
_OTHER_DIRECTORY = f"add {flags.staging('DIR')}, a local directory that can be written to and has room for the output"

Holders: TypeAlias = "Mapping[str, Sequence[int]]"
"""By target file the ranks that see it in the directory that is uploaded from."""


class Upload:
    """One rank's part of a conversion to the object store at ``target``. As a context manager, holds the locks.

    ``path``, ``options`` and ``visibility``: those of the conversion to the local disk, set on entry. After a failure
    the local output stays for the next run, and readers refuse what was uploaded so far.
    """

    def __init__(
        self,
        group: Group,
        source: str,
        target: str,
        options: ConvertOptions,
        progress: Progress,
        visibility: Visibility,
        peers: Sequence[ProcessIdentity],
    ) -> None:
        # the local directory belongs to fsdpckpt
        self.options = replace(options, staging=None, overwrite=False, link=LinkMode.COPY)
        self.visibility = visibility
        self._directory = UploadDirectory("", "")
        self._group = group
        self._source = source
        self._target = target
        self._requested = options
        self._progress = progress
        self._begun = time.monotonic()
        self._peers = peers
        self._locks = ExitStack()
        self._remote: RemoteTarget | None = None
        self._upload = ""
        self._owns_directory = group.rank == 0
        self._compares = False  # whether DST is complete, and is compared with the output instead of written
        self._replaced: tuple[PlannedFile, ...] = ()

    @property
    def path(self) -> str:
        return self._directory.path

    def __enter__(self) -> Self:
        """Look at DST, and lock the directories to upload from. Raises what ``open_target`` raises."""
        try:
            self._open()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            kill_stopped(self._peers)
        self._locks.close()

    def _open(self) -> None:
        message: object = None
        with self._group.step("look at the target"):
            if self._group.rank == 0:
                message = self._run_watched(lambda _: self._check_target())
        url, root, names, self._upload, replaced, self._compares = cast(
            "tuple[str, str, list[str], str, list[tuple[str, int]], bool]",
            self._group.broadcast_object(message, name="the target"),
        )
        self._replaced = tuple(PlannedFile(*each) for each in replaced)
        with self._group.step("open the target"):
            filesystem = self._run_watched(lambda _: filesystem_of(url)[0])
            self._remote = RemoteTarget(url, filesystem, root, tuple(names))
        self._choose_directory(UploadDirectory.of(url, self._requested.staging))

    def _check_target(self) -> list[object]:
        options = self._requested
        check_flavor(options)
        without_links(options, f"{self._target} is in an object store")
        if self.visibility is Visibility.NODE:
            raise UsageError(
                f"every node sees {self._target}: {flags.output_visibility('node')} is for nodes that write to their "
                "own disks",
                next_step=f"drop {flags.output_visibility}: nodes that share no {flags.staging} directory use their "
                "own",
            )
        with explain_why_overwrite_is_refused(self._target):
            directory = UploadDirectory.of(self._target.rstrip("/"), options.staging)
            may_be_complete = options.resume or (options.resume is None and bool(directory.upload()))
            compare = may_be_complete and not options.overwrite
            remote = open_target(self._target, self._source, overwrite=options.overwrite, compare=compare)
        if remote.interrupted:
            self._require_resumable_upload(remote, directory)
        replaced = replaced_files(find_replaceable(remote.url)) if options.overwrite and not remote.interrupted else ()
        upload = self._lock(directory)
        sizes = [[file.path, file.nbytes] for file in replaced]
        return [remote.url, remote.root, list(remote.names), upload, sizes, compare and remote.complete]

    def _require_resumable_upload(self, remote: RemoteTarget, directory: UploadDirectory) -> None:
        """Raises TargetExistsError if the upload interrupted there may belong to another run, or holds other files.

        An upload that this machine began and still has the output of is continued; any other only with ``--resume``, or
        replaced with ``--overwrite``.
        """
        options, (upload, names) = self._requested, remote.announced()
        is_ours = bool(upload) and upload == directory.upload()
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

    def _lock(self, directory: UploadDirectory) -> str:
        if not is_url(self._source):
            require_apart(directory.root, self._source)
        if self._requested.dry_run:
            return ""
        return self._locks.enter_context(directory.locked(resume=self._requested.resume is not False))

    def _choose_directory(self, directory: UploadDirectory) -> None:
        """Choose one directory for all ranks, or one for each node if not all ranks see rank 0's."""
        group = self._group
        everyone = group.all_gather_objects([node_label(), directory.root, directory.path], name="staging")
        rows = cast("list[tuple[str, str, str]]", everyone)
        labels = [label for label, _, _ in rows]
        self._directory = UploadDirectory(*rows[0][1:])
        sees = self._requested.dry_run or self._directory.upload() == self._upload
        if all(group.all_gather_objects(sees, name="who sees staging")) or len(set(labels)) == 1:
            self.visibility = Visibility.SHARED
            return
        self.visibility = Visibility.NODE
        leader = labels.index(labels[group.rank])
        self._directory = UploadDirectory(*rows[leader][1:])
        with group.step("lock staging"):
            if leader == group.rank != 0:
                self._owns_directory = True
                self._lock(self._directory)

    def publish(self, report: Report, holders: Holders) -> Report:
        """Upload the output and remove the directories. Collective. Returns the report of the whole run."""
        if not report.dry_run:
            self._send(report, holders)
        above = os.path.dirname(self._directory.root)
        notes = (*report.notes, Note("staged", f"converted in {above}, then uploaded"))
        if self._compares:
            there = f"{self._target} was complete already: every byte was compared, nothing was uploaded"
            notes = (*(note for note in report.notes if note.kind != "cleared"), Note("resumed", there))
        if not report.dry_run and self._owns_directory and os.path.lexists(self._directory.path):
            left = f"{self._target} is complete, but {self._directory.root} could not be removed: remove it"
            notes = (*notes, Note("left-behind", left, warning=True))
        seconds = time.monotonic() - self._begun
        return replace(
            report, target=self._target, staged_in=above, notes=notes, replaced=self._replaced, seconds=seconds
        )

    def _send(self, report: Report, holders: Holders) -> None:
        group, remote = self._group, self._remote
        if remote is None:
            raise InternalError("an upload without a target")
        files = {name: self._directory.locate(name) for name, ranks in holders.items() if group.rank in ranks}
        sizes = {file.path: file.nbytes for file in report.files if file.path != MANIFEST}
        with group.step("announce the upload"):
            if group.rank == 0 and not self._compares:
                lists = {name: os.path.getsize(path) for name, path in files.items() if name not in sizes}
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
                self._run_watched(lambda sent: remote.finish(files, holders, self._upload_options(sent, earlier)))
        self._progress.end()
        self._remove_staging()

    def _compare(self, remote: RemoteTarget, files: Mapping[str, str], lists: Sequence[str]) -> None:
        """Compare the objects of a complete DST with ``files``, this rank's share. Raises TargetExistsError if one
        differs. The ``lists`` have to be there; they may be another version's.
        """
        self._progress.begin("compare", sum(map(os.path.getsize, files.values())))

        def differing(sent: Callable[[int], None]) -> str | None:
            return remote.differing(files, lambda url, path: _first_difference(url, path, sent) is None)

        with self._group.step("compare the target"):
            name = self._run_watched(differing)
            if name is not None:
                raise target_differs(f"{self._target}/{name}" if name else self._target)
            if not remote.names or any(name not in remote.names for name in lists):
                raise target_differs(self._target)
        self._progress.end()
        self._remove_staging()

    def _remove_staging(self) -> None:
        with self._group.step("remove staging"):
            if self._owns_directory:
                self._directory.remove()

    def _sent_earlier(self) -> dict[str, str]:
        """What earlier runs of this upload sent, from the notes on all nodes."""
        noted = self._directory.sent(self._upload) if self._requested.resume is not False else {}
        tags: dict[str, str] = {}
        for each in self._group.all_gather_objects(noted, name="what was sent"):
            tags.update(cast("dict[str, str]", each))
        return tags

    def _upload_options(self, sent: Callable[[int], None], earlier: Mapping[str, str]) -> UploadOptions:
        return UploadOptions(
            memory=self._requested.max_memory,
            advance=sent,
            is_uploaded=partial(is_sent, earlier),
            on_uploaded=partial(self._directory.note_sent, self._upload, self._group.rank),
            check=_require_same_bytes if self._requested.verify is VerifyLevel.FULL else None,
        )

    def _run_watched(self, work: Callable[[Callable[[int], None]], T]) -> T:
        """Run ``work(sent)`` on another thread while this one stays in touch with the other ranks; return its result.

        If another rank fails, the work is cancelled. A store that hangs does not make this rank a lost one: its client
        library times out.
        """
        if isinstance(self._group, Solo):
            return work(self._progress.advance)
        stop = threading.Event()

        def sent(nbytes: int) -> None:
            if stop.is_set():
                raise _Cancelled
            self._progress.advance(nbytes)

        background = Background("fsdpckpt-upload")
        future = background.submit(lambda: work(sent))
        try:
            return wait_for(future, partial(self._group.watch, moving=True))
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


def attach_leftovers(error: BaseException, target: str, options: ConvertOptions) -> None:
    """Add to ``error`` what a failed run left for ``target``, as far as this process sees it."""
    if isinstance(error, TargetUnwritableError) and is_url(target) and not is_url(error.file or target):
        error.next_step, error.run_again = _OTHER_DIRECTORY, False
    if is_resumable(error):
        with suppress(OSError):  # it must not hide the error
            leftover = _leftover(target, options)
            if leftover is not None:
                attach_leftover(error, leftover)


def _leftover(target: str, options: ConvertOptions) -> Leftover | None:
    if not is_url(target):
        return staged_leftover(target, options)
    directory = UploadDirectory.of(target.rstrip("/"), options.staging)
    if not os.path.lexists(directory.path):
        return staged_leftover(directory.path, options)
    return Leftover(f"the converted checkpoint is kept in {directory.path}", "uploads what is missing")
