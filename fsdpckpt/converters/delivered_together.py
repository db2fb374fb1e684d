"""A conversion by all workers of a group whose DST is in an object store: converted on local disks, uploaded by all.

The protocol, by all ranks: 1. Rank 0 looks at DST, and takes the staging directory. Where the others see it too, all
write to that one; else the leader of each node takes one of its own. 2. They convert to it, as to any DST. 3. Rank 0
announces the upload. 4. Each file is sent by one worker that has it. 5. Once all have come, rank 0 sends the lists that
name them, and ends the upload (``storage.remote_target``). 6. The staging directories are removed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Protocol, TypeAlias, TypeVar, cast

from fsdpckpt.comm.liveness import Background, ProcessIdentity, kill_stopped, process_identity
from fsdpckpt.comm.protocol import Group
from fsdpckpt.converters.delivery import compare, delivered, for_staging, open_for
from fsdpckpt.converters.delivery_stage import Stage, is_there
from fsdpckpt.converters.report import Report
from fsdpckpt.converters.staged import node_label
from fsdpckpt.errors import InternalError, UsageError
from fsdpckpt.options import ConvertOptions, Visibility
from fsdpckpt.progress import NoProgress, Progress
from fsdpckpt.storage.remote_store import filesystem_of
from fsdpckpt.storage.upload import RemoteTarget, Sending

__all__ = ["ConvertTogether", "Holders", "deliver_together", "sharing"]

T = TypeVar("T")

LOOK = 0.05  # seconds between two looks after the others while files go up
PATIENCE = 5.0  # seconds to take back the parts of an upload that is called off

Holders: TypeAlias = "dict[str, list[int]]"
"""By target file the workers that see it where it was staged."""


class ConvertTogether(Protocol):
    """The conversion to a local DST, which says who sees what of it; nobody, when nothing was written."""

    def __call__(
        self,
        group: Group,
        source: str,
        target: str,
        options: ConvertOptions,
        progress: Progress,
        *,
        visibility: Visibility,
        workers_here: int,
    ) -> tuple[Report, Holders]: ...


def deliver_together(
    group: Group,
    source: str,
    target: str,
    options: ConvertOptions,
    progress: Progress,
    *,
    visibility: Visibility,
    workers_here: int,
    convert: ConvertTogether,
) -> Report:
    """``converters.delivery.deliver`` by all workers of ``group``; every object is the same. All ranks.

    Raises WorkerError, whose cause is carried. The local output stays for ``--resume`` then.
    """
    begun = time.monotonic()
    run = _Delivery(group, source, target, options, progress if group.rank == 0 else NoProgress())
    peers = cast("list[ProcessIdentity]", group.all_gather_objects(process_identity(), name="who delivers"))
    try:
        with ExitStack() as locks:
            own = run.open(visibility, locks)
            report, holders = convert(
                group,
                source,
                run.stage.path,
                for_staging(options),
                progress,
                visibility=own,
                workers_here=workers_here,
            )
            if not options.dry_run:
                run.upload(report, holders)
        return delivered(report, target, run.stage, begun)
    except BaseException:
        kill_stopped(peers)
        raise


class _Delivery:
    """One rank's part of one delivery. ``stage``: where it writes, and what it uploads from, once ``open``."""

    def __init__(self, group: Group, source: str, target: str, options: ConvertOptions, progress: Progress) -> None:
        self.stage = Stage("", "")
        self._group = group
        self._source = source
        self._target = target
        self._options = options
        self._progress = progress
        self._remote: RemoteTarget | None = None
        self._upload = ""
        self._leads = group.rank == 0

    def open(self, visibility: Visibility, locks: ExitStack) -> Visibility:
        """Look at DST, and take the staging directories until ``locks`` end. Returns who sees them."""
        told: object = None
        with self._group.step("look at the target"):
            if self._group.rank == 0:
                told = self._attend(lambda _: self._look(visibility, locks))
        url, root, names, self._upload = cast(
            "tuple[str, str, list[str], str]", self._group.broadcast_object(told, name="the target")
        )
        with self._group.step("open the target"):
            filesystem = self._attend(lambda _: filesystem_of(url)[0])
            self._remote = RemoteTarget(url, filesystem, root, tuple(names))
        return self._take(Stage.of(url, self._options.staging), locks)

    def _look(self, visibility: Visibility, locks: ExitStack) -> list[object]:
        if visibility is Visibility.NODE:
            raise UsageError(
                f"every node sees {self._target}: --output-visibility node is for disks of their own",
                next_step="drop --output-visibility: nodes that share no --staging directory use their own",
            )
        remote = open_for(self._target, self._source, self._options)
        upload = self._lock(Stage.of(remote.url, self._options.staging), locks)
        return [remote.url, remote.root, list(remote.names), upload]

    def _lock(self, stage: Stage, locks: ExitStack) -> str:
        return "" if self._options.dry_run else locks.enter_context(stage.locked(resume=self._options.resume))

    def _take(self, own: Stage, locks: ExitStack) -> Visibility:
        """One staging directory for all, or one a node where they do not all see that of rank 0."""
        mine = [node_label(), own.root, own.path]
        told = cast("list[tuple[str, str, str]]", self._group.all_gather_objects(mine, name="staging"))
        self.stage = Stage(*told[0][1:])
        seen = self._options.dry_run or self.stage.upload() == self._upload
        everyone = self._group.all_gather_objects(seen, name="who sees staging")
        labels = [label for label, _, _ in told]
        if all(everyone) or len(set(labels)) == 1:
            return Visibility.SHARED
        leader = labels.index(labels[self._group.rank])
        self.stage = Stage(*told[leader][1:])
        with self._group.step("take staging"):
            if leader == self._group.rank != 0:
                self._leads = True
                self._lock(self.stage, locks)
        return Visibility.NODE

    def upload(self, report: Report, holders: Holders) -> None:
        """Send what was converted, and let go of it."""
        group, remote = self._group, self._remote
        if remote is None:
            raise InternalError("an upload without a target")
        here = {name: self.stage.locate(name) for name, workers in holders.items() if group.rank in workers}
        sizes = {file.path: file.nbytes for file in report.files}
        with group.step("announce the upload"):
            if group.rank == 0:
                there = {name: os.path.getsize(path) for name, path in here.items() if name not in sizes}
                self._attend(lambda _: remote.begin({**sizes, **there}))
        own = sharing(sizes, holders)
        mine = {name: path for name, path in here.items() if own.get(name) == group.rank}
        arrivals = self._arrivals()
        self._progress.begin("upload", sum(sizes[name] for name in mine))
        with group.step("upload"):
            self._attend(lambda sent: remote.send(mine, self._sending(sent, arrivals)))
        with group.step("end the upload"):
            if group.rank == 0:
                self._attend(lambda sent: remote.complete(here, holders, self._sending(sent, arrivals)))
        self._progress.end()
        with group.step("remove staging"):
            if self._leads:
                self.stage.remove()

    def _arrivals(self) -> dict[str, str]:
        """What earlier runs of this upload noted, on whichever node."""
        mine = self.stage.arrivals(self._upload) if self._options.resume else {}
        found: dict[str, str] = {}
        for theirs in self._group.all_gather_objects(mine, name="what has arrived"):
            found.update(cast("dict[str, str]", theirs))
        return found

    def _sending(self, sent: Callable[[int], None], arrivals: Mapping[str, str]) -> Sending:
        return Sending(
            memory=self._options.max_memory,
            sent=sent,
            there=partial(is_there, arrivals),
            arrived=partial(self.stage.arrived, self._upload, self._group.rank),
            check=compare(self._options),
        )

    def _attend(self, work: Callable[[Callable[[int], None]], T]) -> T:
        """What ``work(sent)`` returns, done on another thread while this one looks after the other workers.

        When one of them fails it is called off. A store that hangs is no worker that hangs: its package gives up by
        itself.
        """
        stop = threading.Event()

        def sent(nbytes: int) -> None:
            if stop.is_set():
                raise _CalledOff
            self._progress.advance(nbytes)

        background = Background("fsdpckpt-upload")
        job = background.submit(lambda: work(sent))
        try:
            while not job.done.wait(LOOK):
                self._group.watch(moving=True)
        except BaseException:
            stop.set()
            job.done.wait(PATIENCE)
            raise
        finally:
            background.close(0.0)
        return job.result()


class _CalledOff(Exception):
    """The upload is of no use any more."""


def sharing(sizes: Mapping[str, int], holders: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Who sends each file of ``sizes`` (bytes by name): one of those who see it, so that all have about as much."""
    load: dict[int, int] = {}
    found: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        found[name] = min(holders[name], key=lambda worker: (load.get(worker, 0), worker))
        load[found[name]] = load.get(found[name], 0) + sizes[name]
    return found
