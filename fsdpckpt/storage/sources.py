"""Exact positional reads from local files, memory and anything fsspec opens.

Every read returns exactly the bytes asked for or raises: a short read is an error, never a shorter result.
"""

from __future__ import annotations

import os
import shlex
import stat as modes
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from fsdpckpt.errors import SourceCorruptError, SourceError, SourceMissingError, SourceUnrecognisedError
from fsdpckpt.ir.checkpoint import ZEROS
from fsdpckpt.storage.identity import (
    FileIdentity,
    change_between,
    changed_error,
    identity_now,
    identity_of_status,
    remote_identity,
)

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

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
    "stat",
]


class ByteSource(Protocol):
    """Bytes at positions. ``nbytes`` is the total length; ``path`` names it in messages."""

    path: str
    nbytes: int

    def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` from ``offset``. Raises SourceCorruptError when the file ends before."""
        ...

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` (bytes format) from ``offset``. Raises SourceCorruptError when the file ends before."""
        ...

    def close(self) -> None: ...


def _truncated(path: str, offset: int, wanted: int, got: int) -> SourceCorruptError:
    return SourceCorruptError(
        f"{path} ends too early",
        file=path,
        expected=f"{wanted} bytes at offset {offset}",
        found=f"{got}",
        why="the file was truncated, or is still being written",
        next_step="copy or save the checkpoint again, then run the command again",
    )


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
            raise SourceMissingError(
                f"{path} does not exist", file=path, next_step="copy the file to where it is looked for"
            ) from None
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
                    raise _truncated(self.path, offset, nbytes, len(data))
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
                raise _truncated(self.path, offset, len(buffer), done)
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
            raise _truncated(self.path, offset, nbytes, len(data))
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


class RemoteFile:
    """A file behind fsspec, read by byte ranges."""

    def __init__(self, url: str) -> None:
        self.path = url
        self._fs, self._name = _filesystem(url)
        try:
            self.identity = remote_identity(url, self._fs.info(self._name))
        except FileNotFoundError:
            raise SourceMissingError(f"{url} does not exist", file=url) from None
        self.nbytes = self.identity.nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        if nbytes == 0:
            return b""
        data: bytes = self._fs.cat_file(self._name, start=offset, end=offset + nbytes)
        if len(data) != nbytes:
            raise _truncated(self.path, offset, nbytes, len(data))
        return data

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.read(offset, len(buffer))

    def close(self) -> None:
        return None


_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "http": "aiohttp requests",
    "https": "aiohttp requests",
    "abfs": "adlfs",
    "az": "adlfs",
    "hf": "huggingface_hub",
}


def is_url(path: str) -> bool:
    """True for ``scheme://...``: such a path goes through fsspec."""
    return "://" in path


def _filesystem(url: str) -> tuple[AbstractFileSystem, str]:
    from fsspec.core import url_to_fs

    try:
        filesystem, name = url_to_fs(url)
    except ImportError as error:  # fsspec says which package to install
        raise SourceError(
            f"{url} cannot be opened: {error}",
            file=url,
            why="fsspec opens this kind of URL with a package that is not installed",
            next_step=f"pip install {_PACKAGES.get(url.partition(':')[0], 'the package named above')}",
        ) from None
    except ValueError as error:
        raise SourceUnrecognisedError(
            f"{url} cannot be opened: {error}",
            file=url,
            next_step="give a path, or a URL that fsspec knows: s3://, gs://, https://, ...",
        ) from None
    return filesystem, name


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a directory. ``nbytes`` is 0 for a directory."""

    name: str
    path: str
    nbytes: int
    directory: bool


def stat(path: str) -> Entry | None:
    """What is at ``path`` (following links), or None when nothing is."""
    if is_url(path):
        filesystem, name = _filesystem(path)
        try:
            info = filesystem.info(name)
        except FileNotFoundError:
            return None
        return Entry(name.rsplit("/", 1)[-1], path, int(info.get("size") or 0), info["type"] == "directory")
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:  # a NUL byte in the path
        return None
    directory = os.path.isdir(path)
    return Entry(os.path.basename(os.path.normpath(path)), path, 0 if directory else status.st_size, directory)


def list_directory(path: str) -> list[Entry]:
    """The entries of a directory, sorted by name; paths are ``path`` joined with the name."""
    if is_url(path):
        filesystem, name = _filesystem(path)
        found = []
        for info in filesystem.ls(name, detail=True):
            base = str(info["name"]).rstrip("/").rsplit("/", 1)[-1]
            nbytes = int(info.get("size") or 0)
            found.append(Entry(base, f"{path.rstrip('/')}/{base}", nbytes, info["type"] == "directory"))
        return sorted(found, key=lambda entry: entry.name)
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
        self._opener = opener if opener is not None else _open
        self._files: OrderedDict[str, ByteSource] = OrderedDict()
        self._first: dict[str, FileIdentity] = {}
        self._lock = threading.Lock()

    def stat(self, path: str) -> Entry | None:
        """As the function ``stat``."""
        return stat(path)

    def list_directory(self, path: str) -> list[Entry]:
        """As the function ``list_directory``."""
        return list_directory(path)

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
        found = RemoteFile(path).identity if is_url(path) else identity_now(path)
        with self._lock:
            self._recognise(found)
            return self._first[path]

    def require_unchanged(self) -> None:
        """Raises SourceCorruptError or SourceMissingError when a local file that was opened is not what it was then."""
        with self._lock:
            met = [(path, first) for path, first in self._first.items() if not is_url(path)]
        for path, first in met:
            change = change_between(first, identity_now(path))
            if change is not None:
                raise changed_error(path, change)

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


def _open(path: str) -> ByteSource:
    if path == ZEROS:
        return ZeroFile()
    return RemoteFile(path) if is_url(path) else LocalFile(path)
