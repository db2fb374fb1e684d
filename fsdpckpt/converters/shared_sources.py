"""Gives rank 0 the files on every rank's disks while it plans, and finds out by content which rank sees which file.

While rank 0 is in ``UnionSources``, the other ranks are in ``serve_sources``. Rank 0 sends requests to one rank, or to
all in turn; each answers until rank 0 is done. Rank 0 reads a file that it sees itself, and any other from the lowest
rank that has it. The same name on two machines may be two files: ``see_sources`` compares them, and lets a rank read
its own only if it provably is the same.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt

from fsdpckpt.comm.protocol import Group, decode_error, encode_error
from fsdpckpt.converters.same_files import checksum_proof, identity_proofs
from fsdpckpt.errors import FsdpckptError, InternalError, SourceCorruptError, SourceMissingError
from fsdpckpt.ir.checkpoint import Note
from fsdpckpt.ir.files import SourceFile, Stored
from fsdpckpt.plan.transfer import Visible
from fsdpckpt.storage import ByteSource, Entry, is_url
from fsdpckpt.storage.remote_file import CachedFile
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import names_text

STEP = 4 << 20  # bytes of one answer, which both ranks hold in memory

Request = tuple[str, str, int, int]
"""(kind, path, offset, nbytes). The kinds are ``list``, ``stat``, ``read`` and ``done``."""


def serve_sources(group: Group, *, roots: Mapping[str, str] | None = None) -> None:
    """Answer rank 0 until it is done. All ranks but 0. ``roots``: this rank's path for a directory of rank 0's."""
    with Sources() as sources:
        while True:
            kind, path, offset, nbytes = cast("Request", group.receive_object(source=0))
            if kind == "done":
                return
            for root, resolved in (roots or {}).items():
                if path == root or path.startswith(f"{root}/"):
                    path = resolved + path[len(root) :]
            try:
                answer: object = _answer(sources, kind, path, offset, nbytes)
            except (FsdpckptError, OSError) as error:  # raised on rank 0, as if its own disk had failed
                answer = encode_error(error)
            group.send_object(answer, to=0)


def _answer(sources: Sources, kind: str, path: str, offset: int, nbytes: int) -> object:
    if kind == "read":
        return sources.open(path).read(offset, nbytes)
    if kind == "list":
        entries = sources.list_directory(path) if os.path.isdir(path) or is_url(path) else []
        return [[entry.name, entry.nbytes, entry.directory, entry.link] for entry in entries]
    entry = sources.stat(path)
    return [] if entry is None else [[entry.name, entry.nbytes, entry.directory, entry.link]]


class UnionSources(Sources):
    """For rank 0: ``Sources`` that also include what only other ranks see, while these are in ``serve_sources``.

    ``opened``: every path that was read, in order.
    """

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.opened: dict[str, None] = {}
        self._group = group
        self._requesting = threading.Lock()
        self._holders: dict[str, int] = {}  # the rank that has the file of a path

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        for rank in range(1, self._group.world_size) if exception[0] is None else ():
            self._group.send_object(("done", "", 0, 0), to=rank)

    def request(self, rank: int, kind: str, path: str, offset: int = 0, nbytes: int = 0) -> object:
        """The answer of ``rank``. Raises the error with which it failed instead."""
        with self._requesting:
            self._group.send_object((kind, path, offset, nbytes), to=rank)
            answer = self._group.receive_object(source=rank)
        if isinstance(answer, dict):
            raise decode_error(answer)
        return answer

    def _union_entries(self, kind: str, path: str, entries: list[Entry], parent: str) -> list[Entry]:
        by_name = {entry.name: entry for entry in entries}
        for rank in range(1, self._group.world_size):
            answer = cast("list[tuple[str, int, bool, str]]", self.request(rank, kind, path))
            for name, nbytes, directory, link in answer:
                if name not in by_name:
                    by_name[name] = Entry(name, f"{parent}{name}" if parent else path, nbytes, directory, link)
                    self._holders[by_name[name].path] = rank
        return [by_name[name] for name in sorted(by_name)]

    def stat(self, path: str) -> Entry | None:
        entry = super().stat(path)
        if entry is not None:
            return entry
        return next(iter(self._union_entries("stat", path, [], "")), None)

    def list_directory(self, path: str) -> list[Entry]:
        if self._group.world_size == 1 or is_url(path):
            return super().list_directory(path)
        entries = super().list_directory(path) if os.path.isdir(path) else []
        return self._union_entries("list", path, entries, os.path.join(path, ""))

    def open(self, path: str) -> ByteSource:
        self.opened.setdefault(path)
        return super().open(path)

    def open_new(self, path: str) -> ByteSource:
        try:
            return super().open_new(path)
        except SourceMissingError:
            entry = self.stat(path)
            if entry is None or entry.directory or path not in self._holders:
                raise
        return CachedFile(path, entry.nbytes, partial(self._fetch, path), self._store.cache, requests=1)

    def _fetch(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from a file that only another rank sees."""
        rank = self._holders[path]
        for begin in range(0, len(buffer), STEP):
            count = min(STEP, len(buffer) - begin)
            data = self.request(rank, "read", path, offset + begin, count)
            if not isinstance(data, bytes) or len(data) != count:
                raise InternalError(f"worker {rank} did not send the {count} bytes of {path} that were requested")
            buffer[begin : begin + count] = data


SAMPLE = 4096  # bytes
SAMPLES = 16  # samples of each file: evenly spaced, the first at its head and the last at its tail


def content_identity(source_file: SourceFile, sources: Sources) -> bytes:
    """The length of a file and samples of its bytes: files in which these differ are different files. Empty if this
    rank does not see it.
    """
    if not isinstance(source_file, Stored):  # every rank makes the same
        return source_file.path.encode()
    try:
        file = sources.open_file(source_file)
        total = hashlib.sha256(str(file.nbytes).encode())
        if is_url(source_file.path):  # the same for every worker that may read it, and each request costs time
            return total.digest()
        count = min(SAMPLE, file.nbytes)
        for sample in range(SAMPLES if file.nbytes > SAMPLE else 1):
            total.update(file.read((file.nbytes - count) * sample // (SAMPLES - 1), count))
    except (FsdpckptError, OSError):
        return b""
    return total.digest()


@dataclass(frozen=True, slots=True)
class SeenSources:
    """Who reads which file. ``visible[file, rank]``: which rank may read it; ``apart`` (files,): ranks may read copies
    of it that only their checksums prove to be the same. ``unproved[file, rank]``: which rank sees a file that nothing
    proves to be the one of the lowest rank, whose copy is then used for all.
    """

    visible: Visible
    apart: npt.NDArray[np.bool_]
    unproved: Visible

    def first(self, count: int) -> SeenSources:
        """Of the first ``count`` files."""
        return SeenSources(self.visible[:count], self.apart[:count], self.unproved[:count])

    def notes(self, paths: Sequence[str]) -> list[Note]:
        """Whose copies are used of files of which several were found. ``paths``: those of all files."""
        by_workers: dict[tuple[int, tuple[int, ...]], list[str]] = {}
        for number in np.flatnonzero(self.unproved.any(axis=1)).tolist():
            others = tuple(np.flatnonzero(self.unproved[number]).tolist())
            by_workers.setdefault((int(np.argmax(self.visible[number])), others), []).append(paths[number])
        return [
            Note(
                "copies",
                f"{names_text(names, 3)}: the copy of worker {worker} was used for all. Nothing proves that "
                f"{_workers(others)} {'has' if len(others) == 1 else 'have'} the same: it is another file of the same "
                "length, and its container has no checksums of everything in it",
                keys=tuple(names),
            )
            for (worker, others), names in by_workers.items()
        ]


def see_sources(group: Group, files: Sequence[SourceFile], sources: Sources) -> SeenSources:
    """Find out which rank may read which of ``files``. Collective. Raises what ``find_visible`` raises.

    1. All compare length and samples: files that differ are refused. 2. A rank may read a file if it provably is the
    one that the lowest rank sees. 3. For the others, all compare the checksums of everything in the file. Whoever then
    has another copy gets the bytes from a rank that may read it.
    """
    paths = [file.path for file in files]
    identities: list[bytes] = []
    proofs: list[tuple[bytes, ...]] = []
    with group.step("find visible sources"), group.heartbeat():
        for file in files:
            identities.append(content_identity(file, sources))
            shared = not isinstance(file, Stored) or is_url(file.path)  # every rank makes, or requests, the same
            proofs.append((b"shared",) if shared else identity_proofs(file.path))
            group.beat()
    gathered = group.all_gather_objects([identities, proofs], name="who sees what")
    everyone = cast("list[tuple[list[bytes], list[Sequence[bytes]]]]", gathered)
    with group.step("compare the sources"):
        if group.rank == 0:  # all would raise the same errors; one rank reports them
            find_visible(paths, [identities for identities, _ in everyone])
    seen = find_visible(paths, [identities for identities, _ in everyone])
    same = _like_the_lowest(seen, [proofs for _, proofs in everyone])
    unproved = np.flatnonzero((seen & ~same).any(axis=1)).tolist()
    if not unproved:  # the same on all ranks
        return SeenSources(seen, np.zeros(len(paths), np.bool_), np.zeros_like(seen))
    with group.step("compare checksums of copies"), group.heartbeat():
        sums = [(checksum_proof(paths[number], sources),) for number in unproved]
    everyones = cast("list[list[Sequence[bytes]]]", group.all_gather_objects(sums, name="checksums of copies"))
    by_sums = np.zeros_like(seen)
    by_sums[unproved] = _like_the_lowest(seen[unproved], everyones)
    apart = np.asarray((by_sums & ~same).any(axis=1), bool)
    return SeenSources(seen & (same | by_sums), apart, seen & ~same & ~by_sums)


def _like_the_lowest(seen: Visible, proofs: Sequence[Sequence[Sequence[bytes]]]) -> Visible:
    """``[file, rank]``: whether a rank's file has a proof in common with that of the lowest rank that sees it.

    ``proofs[rank][file]``; an empty one proves nothing.
    """
    same = np.zeros_like(seen)
    for number, ranks in enumerate(seen):
        holder = int(np.argmax(ranks))
        of_holder = {bytes(proof) for proof in proofs[holder][number] if proof}
        for rank in np.flatnonzero(ranks).tolist():
            same[number, rank] = rank == holder or not of_holder.isdisjoint(map(bytes, proofs[rank][number]))
    return same


def find_visible(paths: Sequence[str], identities: Sequence[Sequence[bytes]]) -> Visible:
    """``visible[path, worker]``, from ``identities[worker]``: the ``content_identity`` of each path.

    Raises SourceCorruptError that lists every path under which workers see different files, or which no worker sees.
    """
    wrong: list[str] = []
    for number, path in enumerate(paths):
        workers_by_identity: dict[bytes, list[int]] = {}
        for worker, identity in enumerate(column[number] for column in identities):
            workers_by_identity.setdefault(identity, []).append(worker)
        workers_by_identity.pop(b"", None)
        if len(workers_by_identity) != 1:
            groups = " and ".join(map(_workers, workers_by_identity.values()))
            wrong.append(f"{path}: {groups} see different files" if groups else f"{path}: gone on every worker")
    if wrong:
        raise SourceCorruptError(
            "the workers do not see the same source",
            details=wrong,
            file=paths[0] if len(paths) == 1 else None,
            why="each machine has a file of this name on its own disk, and they are not the same",
            next_step="remove the ones that do not belong to this checkpoint, or copy the right ones over them",
        )
    return (
        np.asarray([[bool(identity) for identity in column] for column in identities], bool).reshape(-1, len(paths)).T
    )


def _workers(workers: Sequence[int]) -> str:
    return f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"
