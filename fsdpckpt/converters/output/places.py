"""Where the output is written: in one place that all workers see, or in one on each node.

Places are numbered. Each is made and committed by its *leader*. Workers that do not see one write nothing: they send
what they see of the source to those that do. A single process is one worker, which leads the only place.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from dataclasses import dataclass
from typing import cast

from fsdpckpt.comm.protocol import Group
from fsdpckpt.converters.output.overwrite import still_replaceable
from fsdpckpt.errors import TargetUnwritableError, UsageError
from fsdpckpt.options import ConvertOptions, OutputScope
from fsdpckpt.storage.hidden import read_own_file, write_own_file
from fsdpckpt.storage.local_target import target_errors
from fsdpckpt.storage.staging import Staging
from fsdpckpt.storage.target_checks import Contents, TargetState, is_empty_directory

_MARKER = "marker"


@dataclass(frozen=True, slots=True)
class Place:
    """A directory that target files are written to, and that becomes DST.

    ``leader``: the worker that makes and commits it. ``workers``: those that see it and write there. ``path``: the
    directory itself; ``file``: the path in it of a target that is one file. ``complete``: it is DST itself, which
    exists and is compared with the planned output. ``part``: the files are objects that are sent in parts of so many
    bytes: none has two writers, each writes its own in order, and the leader the files that list others.
    """

    number: int
    leader: int
    workers: tuple[int, ...]
    path: str
    file: str
    complete: bool = False
    part: int = 0

    @property
    def root(self) -> str:
        """The staging directory around it, which has the journals."""
        return os.path.dirname(self.path)

    def locate(self, name: str) -> str:
        """The path of the target file ``name`` ("": the target is one file)."""
        return os.path.join(self.path, name) if name else self.file


@dataclass(frozen=True, slots=True)
class OutputPlaces:
    """All places by number, and the node of each worker, ``nodes[worker]``."""

    places: tuple[Place, ...]
    nodes: tuple[int, ...]

    @classmethod
    def of_one_process(cls, root: str) -> OutputPlaces:
        """The only place is in the staging directory ``root``."""
        return cls((Place(0, 0, (0,), os.path.join(root, ""), ""),), (0,))

    def of_worker(self, worker: int) -> Place | None:
        """The place that ``worker`` writes to; None if it writes nothing."""
        return next((place for place in self.places if worker in place.workers), None)

    def workers(self, number: int) -> tuple[int, ...]:
        """The workers that write to place ``number``."""
        return self.places[number].workers

    def leads(self, worker: int) -> bool:
        return any(place.leader == worker for place in self.places)

    def seen_from(self, worker: int) -> Place:
        """The place where ``worker`` looks for target files: its own, or the first."""
        return self.of_worker(worker) or self.places[0]

    def locate(self, worker: int, name: str) -> str:
        """Where ``worker`` finds the target file ``name`` ("": the target is one file)."""
        return self.seen_from(worker).locate(name)


def node_label() -> str:
    """The node this worker runs on, as numbered by torchrun or srun; empty without either."""
    return os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or ""


def open_places(
    group: Group,
    target: str,
    options: ConvertOptions,
    scope: OutputScope,
    *,
    directory: bool,
    replaces: Contents,
    state: TargetState,
) -> tuple[OutputPlaces, Staging | None]:
    """Make the staging directories, and find out which workers see which. Collective. Returns also the one that this
    rank made.

    A directory that an interrupted run left with a journal stays, unless ``--no-resume`` was given. None is made where
    DST exists and ``state`` says to compare it. ``directory``: whether the target is one. ``replaces``: what is at DST
    and may be deleted. Raises UsageError if a node's workers do not see their leader's directory.
    """
    labels = [str(label) for label in group.all_gather_objects(node_label(), name="nodes")]
    order = list(dict.fromkeys(labels))
    nodes = tuple(order.index(label) for label in labels)
    numbers = nodes if scope is OutputScope.NODE else (0,) * group.world_size
    leaders = tuple(numbers.index(number) for number in range(max(numbers) + 1))
    real = os.path.realpath(target)
    compared = state is TargetState.COMPLETE_TO_COMPARE and os.path.lexists(real) and not is_empty_directory(real)
    complete = group.rank in leaders and compared
    staging: Staging | None = None
    try:
        opened = ("", "", "")
        with group.step("make staging"):
            if complete:
                opened = (real, real, _state(real))
            elif group.rank in leaders:
                contents = still_replaceable(target, replaces) if options.overwrite else None
                resume = options.resume is not False
                staging = Staging(target, directory=directory, replaces=contents, resume=resume)
                with target_errors(staging.root):
                    opened = (staging.path, staging.locate(""), _write_marker(staging.root, group))
        completes = cast("list[bool]", group.all_gather_objects(complete, name="where DST exists"))
        paths = cast("list[tuple[str, str, str]]", group.all_gather_objects(opened, name="staging"))
        leader = leaders[numbers[group.rank]]
        sees = group.world_size == 1 or _sees_directory(paths[leader], complete=completes[leader])
        access = group.all_gather_objects(sees, name="who sees staging")
        with group.step("check access to staging"):
            if staging is not None and group.world_size > 1:
                with target_errors(staging.root):
                    os.unlink(os.path.join(staging.root, _MARKER))
            without = [worker for worker, sees in enumerate(access) if not sees]
            if without and scope is OutputScope.NODE and group.rank == 0:
                raise UsageError(
                    f"workers of one node do not see the same {target}",
                    details=[f"worker {each} does not see that of worker {leaders[nodes[each]]}" for each in without],
                    next_step="give a DST on a disk that all workers of a node share",
                )
    except BaseException:
        if staging is not None:
            if not staging.interrupted.resumed:
                with contextlib.suppress(OSError):
                    staging.discard()
            staging.close()
        raise
    places = []
    for number, leader in enumerate(leaders):
        workers = tuple(worker for worker in range(group.world_size) if numbers[worker] == number and access[worker])
        places.append(Place(number, leader, workers, *paths[leader][:2], complete=completes[leader]))
    return OutputPlaces(tuple(places), nodes), staging


def _write_marker(root: str, group: Group) -> str:
    """Write what the other workers recognise the directory ``root`` by, if there are any; return it."""
    token = uuid.uuid4().hex
    if group.world_size > 1:
        write_own_file(os.path.join(root, _MARKER), token.encode())
    return token


def _sees_directory(opened: tuple[str, str, str], *, complete: bool) -> bool:
    path, _, token = opened
    if complete:
        with contextlib.suppress(OSError):
            return _state(path) == token
        return False
    return read_text(os.path.join(os.path.dirname(path), _MARKER)) == token


def _state(path: str) -> str:
    status = os.stat(path)
    return f"{status.st_ino} {status.st_mtime_ns} {status.st_size}"


def read_text(path: str) -> str:
    """The content of the file ``path``; empty if there is none, or this process does not see it."""
    try:
        return read_own_file(path).decode()
    except (OSError, ValueError, TargetUnwritableError):  # the last one: it is a pipe or a link, and not ours
        return ""
