"""Exact positional reads from local files, memory and anything fsspec opens, kept open and watched for changes."""

from __future__ import annotations

import os
import shlex
import stat as modes
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from fsdpckpt.errors import SourceError, SourceMissingError, SourceUnrecognisedError
from fsdpckpt.ir.checkpoint import ZEROS
from fsdpckpt.storage.identity import FileIdentity, change_between, changed_error, identity_now, identity_of_status
from fsdpckpt.storage.protocol import ByteSource, Entry, ends_too_early, is_url
from fsdpckpt.storage.remote.file import AHEAD, REQUESTS, RemoteFile, prefetch, request_cost
from fsdpckpt.storage.remote.store import RemoteStore

__all__ = [
    "ByteSource",
    "Entry",
    "LocalFile",
    "MemoryFile",
    "RemoteFile",
    "Sources",
    "ZeroFile",
    "is_url",
    "list_directory",
    "prefetch",
    "request_cost",
    "stat",
]


def stat(path: str) -> Entry | None:
    """What is at the local ``path`` (following links), or None when nothing is."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:  # a NUL byte in the path
        return None
    directory = os.path.isdir(path)
    return Entry(os.path.basename(os.path.normpath(path)), path, 0 if directory else status.st_size, directory)


def list_directory(path: str) -> list[Entry]:
    """The entries of a local directory, sorted by name; paths are ``path`` joined with the name."""
    entries = []
    with os.scandir(path) as scan:
        for item in scan:
            directory = item.is_dir()
            try:
                nbytes = 0 if directory else item.stat().st_size
            except FileNotFoundError:  # a dangling link: whoever opens it reports it
                nbytes = 0
            entries.append(Entry(item.name, item.path, nbytes, directory))
    return sorted(entries, key=lambda entry: entry.name)


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


def _absent(path: str) -> SourceMissingError:
    if os.path.islink(path):
        return SourceMissingError(
            f"{path} is a link to {os.readlink(path)}, which does not exist",
            file=path,
            why="a download into a cache did not finish, or what the link names was moved or not copied along",
            next_step="download or copy it again (cp -L, rsync -L), or remove the link",
        )
    return SourceMissingError(f"{path} does not exist", file=path, next_step="copy the file to where it is looked for")


def _unreadable(path: str, offset: int, error: OSError) -> SourceError:
    return SourceError(
        f"{path} cannot be read at offset {offset}: {error.strerror}",
        file=path,
        why="the disk or the network file system is failing",
        next_step="run the command again; if it fails at the same place, fetch the file again",
    )


class LocalFile:
    """A local file, read with pread: safe from many threads."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            # Without O_NONBLOCK opening a pipe would wait for a writer, maybe for ever; files and disks do not mind it.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise _absent(path) from None
        except OSError as error:
            raise SourceError(
                f"{path} cannot be opened: {error.strerror}",
                file=path,
                why="it belongs to another user, or the disk is failing",
                next_step=f"ls -l {shlex.quote(path)}",
            ) from None
        status = os.fstat(self._fd)
        if not modes.S_ISREG(status.st_mode):
            raise SourceUnrecognisedError(
                f"{path} is a pipe or a device: a checkpoint is read at many places, in no order",
                file=path,
                next_step="write it to a file first, and give that file",
            )
        self.nbytes = status.st_size
        self.identity = identity_of_status(path, status)

    def read(self, offset: int, nbytes: int) -> bytes:
        try:
            data = os.pread(self._fd, nbytes, offset)
            while len(data) < nbytes:
                more = os.pread(self._fd, nbytes - len(data), offset + len(data))
                if not more:
                    raise ends_too_early(self.path, offset, nbytes, len(data))
                data += more
        except OSError as error:
            raise _unreadable(self.path, offset, error) from error
        return data

    def read_into(self, offset: int, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            try:
                got = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise _unreadable(self.path, offset + done, error) from error
            if got == 0:
                raise ends_too_early(self.path, offset, len(buffer), done)
            done += got

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


class MemoryFile:
    """Bytes already in memory, e.g. one item cut out of a DCP file."""

    def __init__(self, data: bytes, path: str = "<memory>") -> None:
        self.path = path
        self.nbytes = len(data)
        self._data = data

    def read(self, offset: int, nbytes: int) -> bytes:
        data = self._data[offset : offset + nbytes]
        if len(data) < nbytes or offset < 0:
            raise ends_too_early(self.path, offset, nbytes, len(data))
        return data

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.read(offset, len(buffer))

    def close(self) -> None:
        return None


class ZeroFile:
    """Zeros wherever it is read, without a file: the states that ``--missing-state zeros`` makes."""

    def __init__(self) -> None:
        self.path = ZEROS
        self.nbytes = 1 << 62  # longer than any checkpoint: nothing lies behind its end

    def read(self, offset: int, nbytes: int) -> bytes:
        return bytes(nbytes)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        for begin in range(0, len(buffer), len(_ZERO_BLOCK)):
            count = min(len(_ZERO_BLOCK), len(buffer) - begin)
            buffer[begin : begin + count] = _ZERO_BLOCK[:count]

    def close(self) -> None:
        return None


_ZERO_BLOCK = memoryview(bytes(1 << 20))  # copied, so that no buffer-sized block of zeros is allocated a read
