"""Divides the output among workers: in one staging directory that all of them see, or in one on each node.

Staging directories are numbered. Each is made and committed by its *leader*. Workers that do not see one write nothing:
they send what they see of the source to those that do. A single process is one worker, which leads the only one.

``UploadDirectory`` holds the output for one DST in an object store, and notes of what is already there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from fsdpckpt import flags
from fsdpckpt.comm.protocol import Group
from fsdpckpt.converters.overwrite import still_replaceable
from fsdpckpt.converters.prepare import Prepared
from fsdpckpt.converters.target_spec import TargetSpec
from fsdpckpt.errors import TargetExistsError, TargetUnwritableError, UsageError
from fsdpckpt.execute.job import Budget, Job, choose_settings
from fsdpckpt.execute.journal import JournaledWindows
from fsdpckpt.ir.checkpoint import Layout
from fsdpckpt.ir.tensors import Int64Array
from fsdpckpt.options import ConvertOptions, Visibility
from fsdpckpt.plan import Plan
from fsdpckpt.plan.transfer import NOTHING_WRITTEN, Segment, Visible, partition, target_node
from fsdpckpt.readers.protocol import MANIFEST
from fsdpckpt.storage import remote_identity
from fsdpckpt.storage.hidden import Lock, lock_path, open_own_file, read_own_file, write_own_file
from fsdpckpt.storage.local import target_errors
from fsdpckpt.storage.staging import Staging
from fsdpckpt.storage.target_checks import Contents, existing_and_missing, is_empty_directory

_RANK_FILE = re.compile(r"(?:.*_rank_?(\d+)\.(?:pt|bin)|(?:.*/)?__(\d+)_\d+\.distcp)")
_MARKER = "marker"


@dataclass(frozen=True, slots=True)
class StagingDirectories:
    """``of_worker[rank]``: the number of the directory it writes to, None if it writes nothing. ``nodes[rank]``.

    By number of the directory, ``leaders``: its leader; ``paths``: the directory for its target files, and the path of
    a target that is one file; ``existing``: whether DST itself exists there and is compared with the planned output.
    """

    nodes: tuple[int, ...]
    leaders: tuple[int, ...]
    of_worker: tuple[int | None, ...]
    paths: tuple[tuple[str, str], ...]
    existing: tuple[bool, ...]

    @classmethod
    def of_one_process(cls, root: str) -> StagingDirectories:
        """The only staging directory is ``root``."""
        return cls((0,), (0,), (0,), ((os.path.join(root, ""), ""),), (False,))

    @property
    def roots(self) -> tuple[str, ...]:
        """The staging directories themselves, which have the journals."""
        return tuple(os.path.dirname(directory) for directory, _ in self.paths)

    def workers(self, number: int) -> list[int]:
        """The workers that write to directory ``number``."""
        return [worker for worker, directory in enumerate(self.of_worker) if directory == number]

    def locate(self, rank: int, path: str) -> str:
        """Where worker ``rank`` finds the target file ``path`` ("": the target is one file)."""
        directory, file = self.paths[self.of_worker[rank] or 0]
        return os.path.join(directory, path) if path else file


def node_label(environment: Mapping[str, str] | None = None) -> str:
    """The node this worker runs on, as numbered by torchrun or srun; empty without either."""
    variables = os.environ if environment is None else environment
    return variables.get("GROUP_RANK") or variables.get("SLURM_NODEID") or ""


def open_staging(
    group: Group,
    target: str,
    options: ConvertOptions,
    visibility: Visibility,
    *,
    directory: bool,
    replaces: Contents,
    compare: bool,
) -> tuple[StagingDirectories, Staging | None]:
    """Make the staging directories, and find out which workers see which. Collective. Returns also the one that this
    rank made.

    A directory that an interrupted run left with a journal stays, unless ``--no-resume`` was given. With ``compare``
    none is made where DST exists. ``directory``: whether the target is one. ``replaces``: what is at DST and may be
    deleted. Raises UsageError if a node's workers do not see their leader's directory.
    """
    labels = [str(label) for label in group.all_gather_objects(node_label(), name="nodes")]
    order = list(dict.fromkeys(labels))
    nodes = tuple(order.index(label) for label in labels)
    numbers = nodes if visibility is Visibility.NODE else (0,) * group.world_size
    leaders = tuple(numbers.index(number) for number in range(max(numbers) + 1))
    real = os.path.realpath(target)
    existing = group.rank in leaders and compare and os.path.lexists(real) and not is_empty_directory(real)
    staging: Staging | None = None
    try:
        opened = ("", "", "")
        with group.step("make staging"):
            if existing:
                opened = (real, real, _state(real))
            elif group.rank in leaders:
                contents = still_replaceable(target, replaces) if options.overwrite else None
                resume = options.resume is not False
                staging = Staging(target, directory=directory, replaces=contents, resume=resume)
                with target_errors(staging.root):
                    opened = (staging.path, staging.locate(""), _write_marker(staging.root, group))
        compared = cast("list[bool]", group.all_gather_objects(existing, name="where DST exists"))
        paths = cast("list[tuple[str, str, str]]", group.all_gather_objects(opened, name="staging"))
        leader = leaders[numbers[group.rank]]
        sees = group.world_size == 1 or _sees_directory(paths[leader], existing=compared[leader])
        access = group.all_gather_objects(sees, name="who sees staging")
        with group.step("check access to staging"):
            if staging is not None and group.world_size > 1:
                with target_errors(staging.root):
                    os.unlink(os.path.join(staging.root, _MARKER))
            without = [worker for worker, sees in enumerate(access) if not sees]
            if without and visibility is Visibility.NODE and group.rank == 0:
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
    directories = StagingDirectories(
        nodes,
        leaders,
        tuple(number if sees else None for number, sees in zip(numbers, access, strict=True)),
        tuple(paths[leader][:2] for leader in leaders),
        tuple(compared[leader] for leader in leaders),
    )
    return directories, staging


def _write_marker(root: str, group: Group) -> str:
    """Write what the other workers recognise the directory ``root`` by, if there are any; return it."""
    token = uuid.uuid4().hex
    if group.world_size > 1:
        write_own_file(os.path.join(root, _MARKER), token.encode())
    return token


def _sees_directory(opened: tuple[str, str, str], *, existing: bool) -> bool:
    path, _, token = opened
    if existing:
        with contextlib.suppress(OSError):
            return _state(path) == token
        return False
    return _read_text(os.path.join(os.path.dirname(path), _MARKER)) == token


def _state(path: str) -> str:
    status = os.stat(path)
    return f"{status.st_ino} {status.st_mtime_ns} {status.st_size}"


def _read_text(path: str) -> str:
    """The content of the file ``path``; empty if there is none, or this process does not see it."""
    try:
        return read_own_file(path).decode()
    except (OSError, ValueError, TargetUnwritableError):  # the last one: it is a pipe or a link, and not ours
        return ""


def divide_work(
    prepared: Prepared,
    directories: StagingDirectories,
    visible: Visible,
    budget: Budget,
    journaled: Mapping[int, JournaledWindows],
) -> Job:
    """Divide the plan among the workers. ``visible[file, worker]``; ``journaled``: as for ``assign_segments``."""
    plan, checkpoint = prepared.plan, prepared.transformed.checkpoint
    segments = assign_segments(plan, prepared.spec, directories, journaled)
    writers = sorted({segment.owner for segment in segments})
    exchanging = not bool(visible[:, writers].all())
    settings = choose_settings(plan, budget, prepared.spec.options.max_memory, exchanging=exchanging)
    claims = claim_rows(journaled, segments)
    return Job(plan, checkpoint.files, checkpoint.checksums, tuple(segments), settings, claims)


def assign_segments(
    plan: Plan,
    spec: TargetSpec,
    directories: StagingDirectories,
    journaled: Mapping[int, JournaledWindows] | None = None,
) -> list[Segment]:
    """Assign the bytes of every file to a worker and a directory. ``journaled``: for each directory what an interrupted
    run has written.

    One directory gets everything. With one for each node, the files of target rank r go to the node of worker
    ``r * workers // ranks``, which will load them; files of no rank (metadata) go to every node that has rank files; a
    full checkpoint, which is not loaded by ranks, goes to the first node.
    """
    files: dict[int, list[int]] = {directory: [] for directory in range(len(directories.leaders))}
    ranks = [_rank_of(file.path) for file in plan.files]
    world_size = spec.world_size or max((rank + 1 for rank in ranks if rank is not None), default=1)
    nodes = dict(enumerate(directories.nodes))
    everywhere = spec.layout is Layout.FULL or len(files) == 1
    for number, rank in enumerate(ranks):
        if rank is not None and not everywhere:
            files[target_node(rank, world_size, nodes)].append(number)
    common = [number for number, rank in enumerate(ranks) if rank is None or everywhere]
    for directory, numbers in files.items():
        if numbers or directory == 0:
            numbers[:] = sorted({*numbers, *common})
    written = {directory: windows.claims() for directory, windows in (journaled or {}).items()}
    return [
        segment
        for directory, numbers in files.items()
        for segment in partition(
            plan,
            numbers,
            directories.workers(directory),
            directory=directory,
            written=written.get(directory, NOTHING_WRITTEN),
        )
    ]


def claim_rows(journaled: Mapping[int, JournaledWindows], segments: Sequence[Segment]) -> Int64Array:
    """The rows of ``Job.claims``: the windows in ``journaled`` that are inside one segment of their directory."""
    numbers: dict[tuple[int, int], list[int]] = {}
    for number, segment in enumerate(segments):
        numbers.setdefault((segment.directory, segment.file), []).append(number)
    rows = [
        (number, begin, end, crc)
        for directory, windows in journaled.items()
        for file, begin, end, crc, _ in windows.claims().tolist()
        for number in numbers.get((directory, file), ())
        if segments[number].begin <= begin and end <= segments[number].end
    ]
    return np.asarray(sorted(rows), np.int64).reshape(-1, 4)


def _rank_of(path: str) -> int | None:
    match = _RANK_FILE.fullmatch(path)
    return int(match[1] or match[2]) if match else None


def files_in(job: Job, number: int | None) -> tuple[list[str], int]:
    """The target files that are written to directory ``number``, and their total size in bytes."""
    segments = [segment for segment in job.segments if segment.directory == number]
    names = dict.fromkeys(job.plan.files[segment.file].path for segment in segments)
    return list(names), sum(segment.end - segment.begin for segment in segments)


def holders_of(job: Job, directories: StagingDirectories, *, directory: bool) -> dict[str, list[int]]:
    """For each target file the workers that see it where it was written. ``directory``: include ``fsdpckpt.json``."""
    holders: dict[str, set[int]] = {}
    for segment in job.segments:
        workers = directories.workers(segment.directory)
        for path in (job.plan.files[segment.file].path, *([MANIFEST] if directory else [])):
            holders.setdefault(path, set()).update(workers)
    return {path: sorted(workers) for path, workers in holders.items()}


_UPLOAD, _SENT, _OUTPUT = "upload", "sent-", "output"


@dataclass(frozen=True, slots=True)
class UploadDirectory:
    """A local directory to upload from, for one DST and the same in every run. ``path``: the output in it, apart from
    the notes: it is called what DST is called.

    It holds the converted output and notes of what the store already has. A note counts for one *upload* only. A run
    with ``--no-resume``, or one that finds no output, begins a new upload: what an earlier one sent may belong to
    another checkpoint.
    """

    root: str
    path: str

    @classmethod
    def of(cls, url: str, directory: str | None) -> UploadDirectory:
        """The directory for ``url`` in ``directory``, by default the system's directory for temporary files."""
        above = directory or tempfile.gettempdir()
        root = os.path.join(above, f"fsdpckpt-{os.getuid()}-{hashlib.sha256(url.encode()).hexdigest()[:16]}")
        return cls(root, os.path.join(root, _OUTPUT, url.rpartition("/")[2]))

    @contextlib.contextmanager
    def locked(self, *, resume: bool) -> Iterator[str]:
        """Lock the directory against other runs on this machine. The value names the upload; a new one unless
        ``resume``.

        Raises TargetExistsError, TargetUnwritableError.
        """
        _, created = existing_and_missing(os.path.dirname(self.root))
        with target_errors(self.root):
            lock = self._lock()
        try:
            with target_errors(self.root):
                if not resume or not os.path.lexists(self.path):
                    self._clear()
                upload = self.upload() or self._begin()
                os.makedirs(os.path.dirname(self.path), exist_ok=True)
            yield upload
        finally:
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(os.path.dirname(self.path))
            with contextlib.suppress(OSError):
                if os.listdir(self.root) == [_UPLOAD]:  # else it is kept for the next run
                    self.remove()
            lock.close()
            for directory in created:
                with contextlib.suppress(OSError):  # not empty
                    os.rmdir(directory)

    def _lock(self) -> Lock:
        while True:
            os.makedirs(self.root, mode=0o700, exist_ok=True)
            status = os.lstat(self.root)
            if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):  # anyone may make one in /tmp
                whose = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "another user's"
                raise TargetUnwritableError(
                    f"{self.root} is {whose}, and fsdpckpt stages the output in a directory of yours",
                    file=self.root,
                    next_step=f"remove {shlex.quote(self.root)}, or add {flags.staging('DIR')}",
                )
            try:
                return lock_path(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except BlockingIOError:
                raise TargetExistsError(
                    f"another fsdpckpt is writing from {self.root}",
                    file=self.root,
                    next_step="wait for it to end",
                    retryable=True,
                ) from None
            except FileNotFoundError:  # a run that ended has removed it
                continue

    def upload(self) -> str:
        """The name of the current upload; empty if there is none, or this process does not see it."""
        return _read_text(os.path.join(self.root, _UPLOAD))

    def _begin(self) -> str:
        upload = uuid.uuid4().hex
        write_own_file(os.path.join(self.root, _UPLOAD), upload.encode())
        return upload

    def note_sent(self, upload: str, rank: int, name: str, info: Mapping[str, object]) -> None:
        """Note that ``rank`` sent the file ``name``, and the ``info`` that the store returned."""
        line = json.dumps([upload, name, remote_identity(name, info).tag])
        path = os.path.join(self.root, f"{_SENT}{rank}")
        with target_errors(path), os.fdopen(open_own_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
            file.write(line.encode() + b"\n")

    def sent(self, upload: str) -> dict[str, str]:
        """What earlier runs of ``upload`` sent: the store's tag for each name."""
        tags: dict[str, str] = {}
        for path in self._notes():
            for line in read_own_file(path).splitlines():
                with contextlib.suppress(ValueError):  # the last one, cut short by a kill
                    noted, name, tag = json.loads(line)
                    if noted == upload:
                        tags[name] = tag
        return tags

    def _notes(self) -> list[str]:
        try:
            return [os.path.join(self.root, name) for name in os.listdir(self.root) if name.startswith(_SENT)]
        except FileNotFoundError:  # this machine had nothing to convert
            return []

    def locate(self, name: str) -> str:
        """The path of the file ``name``; "" if DST is one file."""
        return os.path.join(self.path, name) if name else self.path

    def _clear(self) -> None:
        """Delete what earlier runs converted and sent. A conversion clears what it has staged itself."""
        for path in (os.path.join(self.root, _UPLOAD), *self._notes()):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        if os.path.isdir(self.path):
            shutil.rmtree(self.path)
        elif os.path.lexists(self.path):
            os.unlink(self.path)

    def remove(self) -> None:
        """Delete the directory, beginning with the file that makes the notes valid. What cannot be removed stays."""
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self.root, _UPLOAD))
        shutil.rmtree(self.root, ignore_errors=True)


def is_sent(earlier: Mapping[str, str], name: str, info: Mapping[str, object]) -> bool:
    """Whether the store's ``info`` on ``name`` matches one of the ``earlier`` tags."""
    tag = remote_identity(name, info).tag
    return bool(tag) and earlier.get(name) == tag
