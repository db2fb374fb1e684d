"""Opens sources by path or URL, keeps them open, and notices when one changes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from fsdpckpt.ir.checkpoint import ZEROS
from fsdpckpt.storage.local import LocalFile, ZeroFile, list_directory, stat
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

__all__ = ["Sources"]


class Sources:
    """Open sources by path, at most ``limit`` at a time (file descriptors are finite), closed with the block.

    Readers also ask here what there is, so that a subclass can show them more than this machine's own disks.
    """

    def __init__(self, limit: int = 256, opener: Callable[[str], ByteSource] | None = None) -> None:
        self._limit = limit
        self._opener = opener if opener is not None else self._open
        self._store = RemoteStore()
        self._files: OrderedDict[str, ByteSource] = OrderedDict()
        self._first: dict[str, FileIdentity] = {}
        self._lock = threading.Lock()

    def stat(self, path: str) -> Entry | None:
        """As the function ``stat``, also of URLs."""
        return self._store.stat(path) if is_url(path) else stat(path)

    def stat_all(self, paths: Sequence[str]) -> list[Entry | None]:
        """``stat`` of each; of URLs side by side."""
        if not any(map(is_url, paths)):
            return [self.stat(path) for path in paths]
        with ThreadPoolExecutor(REQUESTS) as pool:
            return list(pool.map(self.stat, paths))

    def list_directory(self, path: str) -> list[Entry]:
        """As the function ``list_directory``, also of URLs."""
        return self._store.list_directory(path) if is_url(path) else list_directory(path)

    def warm(self, paths: Sequence[str], *, tails: bool = True) -> None:
        """Fetch the heads and tails of remote files side by side: they are looked at next, one after the other."""
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

        with ThreadPoolExecutor(REQUESTS) as pool:  # no more of them than are remembered
            list(pool.map(ends, remote[: self._store.extents.limit // (2 * AHEAD)]))

    def open(self, path: str) -> ByteSource:
        """The source at ``path``, opened once and kept while it is among the last used."""
        with self._lock:
            source = self._files.pop(path, None)
            if source is None:
                source = self.open_new(path)
                if isinstance(source, (LocalFile, RemoteFile)):
                    self._recognise(source.identity)
            self._files[path] = source
            if len(self._files) > self._limit:
                # A retired file may be in use by another thread: it is dropped, and closes when that use ends.
                self._files.popitem(last=False)
            return source

    def open_new(self, path: str) -> ByteSource:
        """The source at ``path``, opened anew."""
        return self._opener(path)

    def identity(self, path: str) -> FileIdentity:
        """What the file at ``path`` was when it was first met, which is now if it was not opened yet.

        Raises SourceMissingError, SourceError; SourceCorruptError when it changed since.
        """
        with self._lock:
            first = self._first.get(path)
        if first is not None:
            return first
        found = self._store.identity(path) if is_url(path) else identity_now(path)
        with self._lock:
            self._recognise(found)
            return self._first[path]

    def require_unchanged(self) -> None:
        """Raises SourceCorruptError or SourceMissingError when a file that was opened is not what it was then."""
        with self._lock:
            met = list(self._first.values())
        local = [first for first in met if not is_url(first.path)]
        remote = [first for first in met if is_url(first.path)]
        now = [identity_now(first.path) for first in local]
        now += self._store.identities([first.path for first in remote], again=True)
        for first, found in zip([*local, *remote], now, strict=True):
            change = change_between(first, found)
            if change is not None:
                raise changed_error(first.path, change)

    def _open(self, path: str) -> ByteSource:
        if path == ZEROS:
            return ZeroFile()
        return self._store.open(path) if is_url(path) else LocalFile(path)

    def _recognise(self, identity: FileIdentity) -> None:
        first = self._first.setdefault(identity.path, identity)
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
