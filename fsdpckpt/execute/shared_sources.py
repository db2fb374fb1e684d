"""Gives rank 0 the files on every rank's disks while it plans, and finds out by content which rank sees which file.

While rank 0 is in ``union_sources``, the other ranks are in ``serve_sources``. Rank 0 asks one rank, or all in turn;
each answers until rank 0 is done. Rank 0 reads a file that it sees itself, and any other from the lowest rank that has
it. The same name on two machines may be two files: ``content_identities`` and ``find_visible`` compare their content.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import numpy as np
import numpy.typing as npt

from fsdpckpt.comm.protocol import Group, decode_error, encode_error
from fsdpckpt.errors import FsdpckptError, InternalError, SourceCorruptError, SourceMissingError
from fsdpckpt.ir.checkpoint import ZEROS
from fsdpckpt.storage import ByteSource, Entry, is_url
from fsdpckpt.storage.sources import Sources

PAGE = 256 * 1024  # bytes: metadata is read in small pieces that are near each other, and a request costs more
PAGES = 16  # pages of each file that are kept: its head, its tail, and its metadata

Question = tuple[str, str, int, int]
"""(what, path, offset, nbytes): ``list``, ``stat``, ``read`` or ``done``."""


def serve_sources(group: Group, *, roots: Mapping[str, str] | None = None) -> None:
    """Answer rank 0 until it is done. All ranks but 0. ``roots``: this rank's path for a directory of rank 0's."""
    with Sources() as sources:
        while True:
            what, path, offset, nbytes = cast("Question", group.receive_object(source=0))
            if what == "done":
                return
            for root, resolved in (roots or {}).items():
                if path == root or path.startswith(f"{root}/"):
                    path = resolved + path[len(root) :]
            try:
                answer: object = _answer(sources, what, path, offset, nbytes)
            except (FsdpckptError, OSError) as error:  # raised on rank 0, as if its own disk had failed
                answer = encode_error(error)
            group.send_object(answer, to=0)


def _answer(sources: Sources, what: str, path: str, offset: int, nbytes: int) -> object:
    if what == "read":
        return sources.open(path).read(offset, nbytes)
    if what == "list":
        entries = sources.list_directory(path) if os.path.isdir(path) or is_url(path) else []
        return [[entry.name, entry.nbytes, entry.directory] for entry in entries]
    entry = sources.stat(path)
    return [] if entry is None else [[entry.name, entry.nbytes, entry.directory]]


@contextmanager
def union_sources(group: Group) -> Iterator[UnionSources]:
    """For rank 0: the union of what all ranks see, while the others are in ``serve_sources``."""
    files = UnionSources(group)
    with files:
        yield files
        for rank in range(1, group.world_size):
            group.send_object(("done", "", 0, 0), to=rank)


class UnionSources(Sources):
    """``Sources`` that also hold what only other workers see. ``opened``: every path that was read, in order."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.opened: dict[str, None] = {}
        self._group = group
        self._asking = threading.Lock()
        self._holders: dict[str, int] = {}

    def ask(self, rank: int, what: str, path: str, offset: int = 0, nbytes: int = 0) -> object:
        """The answer of worker ``rank``. Raises the error that it met instead."""
        with self._asking:
            self._group.send_object((what, path, offset, nbytes), to=rank)
            answer = self._group.receive_object(source=rank)
        if isinstance(answer, dict):
            raise decode_error(answer)
        return answer

    def _union_entries(self, what: str, path: str, entries: list[Entry], join: str) -> list[Entry]:
        by_name = {entry.name: entry for entry in entries}
        for rank in range(1, self._group.world_size):
            for name, nbytes, directory in cast("list[tuple[str, int, bool]]", self.ask(rank, what, path)):
                if name not in by_name:
                    by_name[name] = Entry(name, f"{join}{name}" if join else path, nbytes, directory)
                    self._holders[by_name[name].path] = rank
        return [by_name[name] for name in sorted(by_name)]

    def stat(self, path: str) -> Entry | None:
        entry = super().stat(path)
        if entry is not None or self._group.world_size == 1:
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
            entry = None if self._group.world_size == 1 else self.stat(path)
            if entry is None or entry.directory or path not in self._holders:
                raise
        return _Elsewhere(self, self._holders[path], path, entry.nbytes)


class _Elsewhere:
    """A file on another worker's disk, read in pages that are cached."""

    def __init__(self, files: UnionSources, rank: int, path: str, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self._files = files
        self._rank = rank
        self._pages: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, offset: int, nbytes: int) -> bytes:
        if nbytes > PAGE or offset + nbytes > self.nbytes:  # past its end, the worker reports the error
            return self._fetch(offset, nbytes)
        pages = range(offset // PAGE, -(-(offset + nbytes) // PAGE))
        data = b"".join(self._page(page) for page in pages)
        begin = offset % PAGE
        return data[begin : begin + nbytes]

    def _page(self, page: int) -> bytes:
        with self._lock:
            data = self._pages.pop(page, None)
            if data is None:
                data = self._fetch(page * PAGE, min(PAGE, self.nbytes - page * PAGE))
            self._pages[page] = data
            if len(self._pages) > PAGES:
                self._pages.popitem(last=False)
            return data

    def _fetch(self, offset: int, nbytes: int) -> bytes:
        data = self._files.ask(self._rank, "read", self.path, offset, nbytes)
        if not isinstance(data, bytes) or len(data) != nbytes:
            raise InternalError(f"worker {self._rank} answered a read of {self.path} with something else")
        return data

    def read_into(self, offset: int, buffer: memoryview) -> None:
        step = 4 << 20  # bytes that either side holds at most
        for begin in range(0, len(buffer), step):
            count = min(step, len(buffer) - begin)
            buffer[begin : begin + count] = self.read(offset + begin, count)

    def close(self) -> None:
        return None


SAMPLE = 4096  # bytes
SAMPLES = 16  # samples of each file: evenly spaced, the first at its head and the last at its tail


def content_identities(paths: Sequence[str], sources: Sources) -> list[bytes]:
    """For each path an identity of its content, from its length and samples of its bytes; empty if this rank does not
    see it.

    A torch file ends with the checksums of everything in it, so its tail alone identifies it.
    """
    return [_identity(path, sources) for path in paths]


def _identity(path: str, sources: Sources) -> bytes:
    if path == ZEROS:
        return b"zeros"
    try:
        file = sources.open(path)
        total = hashlib.sha256(str(file.nbytes).encode())
        if is_url(path):  # the same for every worker that may read it, and each request costs time
            return total.digest()
        count = min(SAMPLE, file.nbytes)
        for sample in range(SAMPLES if file.nbytes > SAMPLE else 1):
            total.update(file.read((file.nbytes - count) * sample // (SAMPLES - 1), count))
    except (FsdpckptError, OSError):
        return b""
    return total.digest()


def find_visible(paths: Sequence[str], identities: Sequence[Sequence[bytes]]) -> npt.NDArray[np.bool_]:
    """``visible[path, worker]`` from every worker's ``content_identities``.

    Raises SourceCorruptError that lists every path under which workers see different files, or which no worker sees.
    """
    wrong: list[str] = []
    for number, path in enumerate(paths):
        seen: dict[bytes, list[int]] = {}
        for worker, identity in enumerate(column[number] for column in identities):
            seen.setdefault(identity, []).append(worker)
        seen.pop(b"", None)
        if len(seen) != 1:
            groups = " and ".join(_workers(workers) for workers in seen.values())
            wrong.append(f"{path}: {groups} see different files" if seen else f"{path}: gone on every worker")
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
