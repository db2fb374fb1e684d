"""Reads local files at positions; bytes in memory and zeros are read the same way. ``local_target`` writes."""

from __future__ import annotations

import errno
import os
import shlex
import stat as modes

from fsdpckpt.errors import (
    InternalError,
    SourceError,
    SourceMissingError,
    SourceUnrecognisedError,
    to_copy,
    to_look,
)
from fsdpckpt.ir.files import Zeros
from fsdpckpt.storage.descriptors import PooledDescriptor
from fsdpckpt.storage.protocols import (
    ByteSource,
    Entry,
    FileIdentity,
    change_between,
    changed_error,
    identity_of_status,
    too_short_error,
)


def stat(path: str) -> Entry | None:
    """The entry at the local ``path`` (following links), or None if there is none."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:  # a NUL byte in the path
        return None
    directory = os.path.isdir(path)
    return Entry(os.path.basename(os.path.normpath(path)), path, 0 if directory else status.st_size, directory)


def list_directory(path: str) -> list[Entry]:
    """The entries of a local directory, sorted by name; their paths are ``path`` joined with the name."""
    entries = []
    with os.scandir(path) as scan:
        for item in scan:
            try:
                directory = item.is_dir()
                nbytes = 0 if directory else item.stat().st_size
            except OSError:  # a dangling link, or a link to itself: opening it reports that
                directory, nbytes = False, 0
            link = os.path.realpath(item.path) if item.is_symlink() else ""
            entries.append(Entry(item.name, item.path, nbytes, directory, link))
    return sorted(entries, key=lambda entry: entry.name)


def _missing_error(path: str) -> SourceMissingError:
    if os.path.islink(path):
        return SourceMissingError(
            f"{path} is a link to {os.readlink(path)}, which does not exist",
            file=path,
            why="a download into a cache did not finish, or the file was moved, or not copied along with the link",
            next_step="download or copy it again (cp -L, rsync -L), or remove the link",
        )
    return SourceMissingError(f"{path} does not exist", file=path, next_step="copy the file to that path")


def _read_error(path: str, offset: int, error: OSError) -> SourceError:
    if isinstance(error, FileNotFoundError):  # opened again, after it was closed for other files
        return _missing_error(path)
    return SourceError(
        f"{path} cannot be read at offset {offset}: {error.strerror}",
        file=path,
        why="the disk or the network file system is failing",
        next_step="run the command again; if it fails at the same place, fetch the file again",
        retryable=True,
    )


def _open_error(path: str, error: OSError) -> SourceError:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return SourceError(
            f"{path} cannot be opened: {error.strerror}",
            file=path,
            why="this process may open only a few files at once, and some are open that are not SRC's",
            next_step=to_copy("allow more", "ulimit -n 1024"),
            run_again=True,
        )
    return SourceError(
        f"{path} cannot be opened: {error.strerror}",
        file=path,
        why="it belongs to another user, or the disk is failing",
        next_step=to_look("see whose it is", f"ls -l {shlex.quote(path)}"),
    )


class LocalFile(ByteSource):
    """A local file, read with pread. It may be closed for other files and opened again (``descriptors``): raises
    SourceCorruptError if it is another one by then.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._first: FileIdentity | None = None
        self._pooled = PooledDescriptor(self._open)
        try:
            with self._pooled:  # open now, so that what is no file is refused now
                pass
        except FileNotFoundError:
            raise _missing_error(path) from None
        except OSError as error:
            raise _open_error(path, error) from None

    @property
    def identity(self) -> FileIdentity:
        """What it was when it was opened first."""
        if self._first is None:
            raise InternalError(f"{self.path} was never opened")
        return self._first

    def _open(self) -> int:
        # Without O_NONBLOCK, opening a pipe waits for a writer, maybe for ever; regular files ignore it.
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._take(os.fstat(descriptor))
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _take(self, status: os.stat_result) -> None:
        """Take the identity and the length, or compare them."""
        path = self.path
        if modes.S_ISDIR(status.st_mode):
            raise SourceUnrecognisedError(
                f"{path} is a directory; a file is needed", file=path, next_step="give a file in it"
            )
        if not modes.S_ISREG(status.st_mode):
            raise SourceUnrecognisedError(
                f"{path} is a pipe or a device: a checkpoint is read at many positions, in any order",
                file=path,
                next_step="write it to a file first, and give that file",
            )
        now = identity_of_status(path, status)
        if self._first is None:
            self._first, self.nbytes = now, status.st_size
        elif (change := change_between(self._first, now)) is not None:
            raise changed_error(path, change)

    def read(self, offset: int, nbytes: int) -> bytes:
        if offset < 0:
            raise too_short_error(self.path, offset, nbytes, 0)
        try:
            with self._pooled as descriptor:
                data = os.pread(descriptor, nbytes, offset)
                while len(data) < nbytes:
                    more = os.pread(descriptor, nbytes - len(data), offset + len(data))
                    if not more:
                        raise too_short_error(self.path, offset, nbytes, len(data))
                    data += more
        except OSError as error:
            raise _read_error(self.path, offset, error) from error
        return data

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset < 0:  # preadv takes -1 for the current position
            raise too_short_error(self.path, offset, len(buffer), 0)
        done = 0
        try:
            with self._pooled as descriptor:
                while done < len(buffer):
                    got = os.preadv(descriptor, [buffer[done:]], offset + done)
                    if got == 0:
                        raise too_short_error(self.path, offset, len(buffer), done)
                    done += got
        except OSError as error:
            raise _read_error(self.path, offset + done, error) from error

    def close(self) -> None:
        self._pooled.close()

    def __del__(self) -> None:
        if hasattr(self, "_pooled"):
            self._pooled.close()


class MemoryFile(ByteSource):
    """Bytes in memory, for example one item cut out of a DCP file."""

    def __init__(self, data: bytes, path: str = "<memory>") -> None:
        self.path = path
        self.nbytes = len(data)
        self._data = data

    def read(self, offset: int, nbytes: int) -> bytes:
        self.require_inside(offset, nbytes)
        return self._data[offset : offset + nbytes]

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.read(offset, len(buffer))


class ZeroFile(ByteSource):
    """Zeros at every position, without a file: the states that ``--missing-state zeros`` makes."""

    def __init__(self) -> None:
        self.path = str(Zeros(0))
        self.nbytes = 1 << 62  # longer than any checkpoint

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.require_inside(offset, len(buffer))
        for begin in range(0, len(buffer), len(_ZERO_BLOCK)):
            count = min(len(_ZERO_BLOCK), len(buffer) - begin)
            buffer[begin : begin + count] = _ZERO_BLOCK[:count]


_ZERO_BLOCK = memoryview(bytes(1 << 20))  # copied from, so that no read allocates a block of zeros of its own size
