"""Opens sources by path or URL, keeps them open, and notices when one changes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self, TypeAlias, TypeVar, cast

from fsdpckpt import globs
from fsdpckpt.ir.files import Inline, SourceFile, Zeros
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.storage.local import LocalFile, MemoryFile, ZeroFile, list_directory, stat
from fsdpckpt.storage.protocols import (
    ByteSource,
    Entry,
    FileIdentity,
    change_between,
    changed_error,
    identity_now,
    is_url,
)
from fsdpckpt.storage.remote_file import AHEAD, REQUESTS, RemoteFile
from fsdpckpt.storage.remote_store import RemoteStore

T = TypeVar("T")

Announced: TypeAlias = "Callable[[], Sequence[tuple[int, int]]]"
"""Returns the ranges (offset, nbytes) of a file that its reader will read."""

MAX_OPEN = 256  # sources: each may hold buffers; descriptors are counted by themselves (``descriptors``)


class Sources:
    """Open sources by path, at most ``MAX_OPEN`` at a time, closed with the block.

    Readers list directories through it too, so that a subclass can show them more than the disks of this machine.
    """

    def __init__(self) -> None:
        self._store = RemoteStore()
        self._files: OrderedDict[str, ByteSource] = OrderedDict()
        self._identities: dict[str, FileIdentity] = {}  # as they were when first seen
        self._lock = threading.Lock()
        self._parsed: dict[str, object] = {}

    def parsed(self, path: str, parse: Callable[[ByteSource], T]) -> T:
        """The result of ``parse`` for the file, computed once; callers must not change it."""
        if path not in self._parsed:
            self._parsed[path] = parse(self.open(path))
        return cast(T, self._parsed[path])

    def stat(self, path: str) -> Entry | None:
        """The function ``stat``, also for URLs."""
        return self._store.stat(path) if is_url(path) else stat(path)

    def stat_all(self, paths: Sequence[str]) -> list[Entry | None]:
        """``stat`` of each path; URLs are requested in parallel."""
        if not any(map(is_url, paths)):
            return [self.stat(path) for path in paths]
        with ThreadPoolExecutor(REQUESTS) as pool:
            return list(pool.map(self.stat, paths))

    def list_directory(self, path: str) -> list[Entry]:
        """The function ``list_directory``, also for URLs."""
        return self._store.list_directory(path) if is_url(path) else list_directory(path)

    def files_below(self, path: str) -> Iterator[tuple[str, Entry]]:
        """The files in the directory ``path`` and in all directories below it, each with its path from there; sorted by
        name.
        """
        for entry in self.list_directory(path):
            if entry.directory:
                yield from ((f"{entry.name}/{name}", file) for name, file in self.files_below(entry.path))
            else:
                yield entry.name, entry

    def prefetch_ends(self, paths: Sequence[str], *, tails: bool = True) -> None:
        """Fetch the heads and ``tails`` of remote files in parallel, before they are read one after the other."""
        remote = [path for path in paths if is_url(path)]
        if len(remote) < 2:
            return
        self._store.identities(remote)

        def ends(path: str) -> None:
            source = self.open(path)
            if source.nbytes:
                source.read(0, 1)
                if tails:
                    source.read(max(source.nbytes - AHEAD, 0), 1)

        with ThreadPoolExecutor(REQUESTS) as pool:  # no more files than fit into the cache
            list(pool.map(ends, remote[: self._store.cache.limit // (2 * AHEAD)]))

    def announce(self, path: str, ranges: Announced) -> None:
        """Say which ranges of a file are read next. Only a source that fetches them from far away makes use of it."""

    def open(self, path: str) -> ByteSource:
        """The source at ``path``, opened once and kept open while it is among the most recently used."""
        with self._lock:
            source = self._files.pop(path, None)
            if source is None:
                source = self.open_new(path)
                if isinstance(source, (LocalFile, RemoteFile)):
                    self._require_same(source.identity)
            self._files[path] = source
            if len(self._files) > MAX_OPEN:
                # Another thread may still read it: the file is only dropped, and closes when that use ends.
                self._files.popitem(last=False)
            return source

    def open_file(self, file: SourceFile) -> ByteSource:
        """The bytes of ``file``, whatever kind it is."""
        match file:
            case Zeros():
                return ZeroFile()
            case Inline():
                return MemoryFile(file.data, str(file))
        return self.open(file.path)

    def read_elements(
        self, files: Sequence[SourceFile], tensor: Tensor, *, row: int = 0, first: int = 0, count: int = 1
    ) -> bytes:
        """The bytes of ``count`` elements from element ``first`` of the contiguous chunk ``row``."""
        itemsize = tensor.dtype.itemsize
        offset = int(tensor.chunks.offset[row]) + first * itemsize
        return bytes(self.open_file(files[int(tensor.chunks.file[row])]).read(offset, count * itemsize))

    def open_new(self, path: str) -> ByteSource:
        """Open the source at ``path`` once more."""
        return self._store.open(path) if is_url(path) else LocalFile(path)

    def identity(self, path: str) -> FileIdentity:
        """The identity of the file at ``path`` when it was first seen; if it was never opened, that is now.

        Raises SourceMissingError, SourceError; SourceCorruptError if it has changed since.
        """
        with self._lock:
            first = self._identities.get(path)
        if first is not None:
            return first
        now = self._store.identity(path) if is_url(path) else identity_now(path)
        with self._lock:
            self._require_same(now)
            return self._identities[path]

    def require_unchanged(self) -> None:
        """Raises SourceCorruptError or SourceMissingError if a file has changed since it was first seen."""
        with self._lock:
            seen = list(self._identities.values())
        local = [first for first in seen if not is_url(first.path)]
        remote = [first for first in seen if is_url(first.path)]
        now = [identity_now(first.path) for first in local]
        now += self._store.identities([first.path for first in remote], again=True)
        for identity in now:
            self._require_same(identity)

    def _require_same(self, identity: FileIdentity) -> None:
        first = self._identities.setdefault(identity.path, identity)
        change = change_between(first, identity)
        if change is not None:
            raise changed_error(identity.path, change)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            for source in self._files.values():
                source.close()
            self._files.clear()


class RemainingSources(Sources):
    """``sources`` without the files and directories below ``source`` whose name, or path from there, matches one of
    ``globs``: no directory lists them. ``ignored``: those that were left out so far, as relative paths. ``all``:
    ``sources`` itself. The values of ``ignored`` say which are directories. ``without``: relative paths to leave out as
    well, which ``ignored`` does not list.
    """

    def __init__(
        self, sources: Sources, source: str, globs: Sequence[str], without: frozenset[str] = frozenset()
    ) -> None:
        super().__init__()
        self.all, self._source, self._globs, self._without = sources, source, globs, without
        self.ignored: dict[str, bool] = {}

    def _remains(self, entry: Entry) -> bool:
        if not entry.path.startswith(f"{self._source.rstrip('/')}/"):
            return True
        path = relative_path(entry.path, self._source)
        if path in self._without:
            return False
        if not any(matches(glob, path) for glob in self._globs):
            return True
        self.ignored[path] = entry.directory
        return False

    def stat(self, path: str) -> Entry | None:
        entry = self.all.stat(path)
        return entry if entry is not None and self._remains(entry) else None

    def list_directory(self, path: str) -> list[Entry]:
        return [entry for entry in self.all.list_directory(path) if self._remains(entry)]

    def prefetch_ends(self, paths: Sequence[str], *, tails: bool = True) -> None:
        self.all.prefetch_ends(paths, tails=tails)

    def announce(self, path: str, ranges: Announced) -> None:
        self.all.announce(path, ranges)

    def open(self, path: str) -> ByteSource:
        return self.all.open(path)

    def parsed(self, path: str, parse: Callable[[ByteSource], T]) -> T:
        return self.all.parsed(path, parse)


def relative_path(path: str, source: str) -> str:
    """``path`` relative to ``source``, which it is or is below."""
    return path.removeprefix(source.rstrip("/")).strip("/")


def is_in(path: str, directory: str) -> bool:
    """Whether ``path`` is ``directory`` or below it."""
    return f"{path.rstrip('/')}/".startswith(f"{directory.rstrip('/')}/")


def matches(glob: str, path: str) -> bool:
    """Whether the name of ``path``, or all of it, matches ``glob``."""
    wanted = glob.removeprefix("./").rstrip("/")
    return globs.matches(path, wanted) or globs.matches(path.rpartition("/")[2], wanted)
