"""Reads and writes local files at positions; bytes in memory and zeros are read the same way.

New files are made durable before they are trusted.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shlex
import stat as modes
import threading
from contextlib import AbstractContextManager

import numpy as np

from fsdpckpt.errors import (
    FsdpckptError,
    InternalError,
    SourceError,
    SourceMissingError,
    SourceUnrecognisedError,
    TargetUnwritableError,
    to_copy,
    to_look,
)
from fsdpckpt.ir.files import Zeros
from fsdpckpt.storage.descriptors import PooledDescriptor
from fsdpckpt.storage.mounts import is_in_memory
from fsdpckpt.storage.protocols import (
    ByteSource,
    Entry,
    FileIdentity,
    change_between,
    changed_error,
    identity_of_status,
    too_short_error,
)
from fsdpckpt.text import bytes_text

BLOCK = 4096  # bytes: the alignment that direct writes need on every disk in use
HUGE_PAGE = 2 << 20  # bytes
DIRECT_FROM = 1 << 20  # bytes: shorter files are not worth a second descriptor


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


class target_errors:  # noqa: N801  # used like a function; as a generator it would cost more than a small write
    """Turn an OSError while writing ``path`` into a TargetUnwritableError with the next step."""

    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise _write_error(self._path, error) from None


def _write_error(path: str, error: OSError) -> FsdpckptError:
    why = {
        errno.ENOSPC: "the file system is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EACCES: "no permission to write there",
        errno.EPERM: "no permission to write there",
        errno.EROFS: "the file system is mounted read-only",
        errno.ENAMETOOLONG: "the file name is too long for this file system",
        errno.EFBIG: "the file is larger than this file system allows",
    }.get(error.errno or 0, "the file system refused the request")
    return TargetUnwritableError(
        f"cannot write {path}: {error.strerror}",
        file=path,
        why=why,
        next_step="choose another DST, or make room",
        run_again=True,
    )


def aligned_buffer(nbytes: int) -> memoryview:
    """At least ``nbytes`` bytes of zeroed memory, aligned to a page, as direct writes need.

    In huge pages where Linux has some: touching 80 MiB for the first time takes 4 ms with them, 36 ms without, and 65
    ms in shared memory, which is what ``mmap`` gives by default.
    """
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


class WritableFile:
    """A ``ByteTarget`` on a local disk.

    Large writes bypass the page cache (O_DIRECT) if the file system allows it: this saves one copy of the bytes, and
    the disk works from the first write on instead of waiting for the final fsync. Partial blocks, and memory that is
    not aligned as the file is, are written through the cache; both may be mixed, as they never share a block.
    """

    def __init__(self, path: str, nbytes: int, *, existing: bool = False) -> None:
        """``existing``: the file exists, with this length; other processes may write other bytes of it."""
        self.path = path
        self.nbytes = nbytes
        self._fd = self._direct = -1
        self._turn: AbstractContextManager[object] = contextlib.nullcontext()
        self._aligned = True
        self._durable = False  # committed
        self._lost = False  # a sync failed: the kernel reports a lost write once, and every later sync succeeds
        self._closing = threading.Lock()
        with target_errors(path):
            try:
                self._open(existing=existing)
            except BaseException:
                self.close()
                raise

    def _open(self, *, existing: bool) -> None:
        create = 0 if existing else os.O_CREAT | os.O_EXCL
        self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | create, 0o644)
        if not existing:
            os.ftruncate(self._fd, self.nbytes)
        if self.nbytes < DIRECT_FROM or not hasattr(os, "O_DIRECT"):
            return
        if is_in_memory(os.fstat(self._fd).st_dev):
            self._turn = threading.Lock()  # the kernel lets one thread write to such a file; the others would spin
            self._require_space()
            return
        if not existing:
            os.posix_fallocate(self._fd, 0, self.nbytes)  # finds a full disk now, and allocates contiguous extents
        with contextlib.suppress(OSError):  # a file system without direct writes
            self._direct = os.open(self.path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)

    def _require_space(self) -> None:
        """Find a full file system now. Allocating would write zeros to all of the file, which is in memory."""
        free, used = os.fstatvfs(self._fd), os.fstat(self._fd).st_blocks * 512
        if free.f_blocks > 0 and free.f_bavail * free.f_frsize < self.nbytes - used:  # no blocks: there is no limit
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)

    def write(self, offset: int, data: memoryview | bytes) -> None:
        """Write all of ``data`` at ``offset``."""
        with target_errors(self.path):
            view = memoryview(data)
            low, high = self._blocks(offset, view)
            if low < high:
                try:
                    _write_all(self._direct, view[low:high], offset + low)
                except OSError as error:
                    if error.errno != errno.EINVAL:  # EINVAL: the device needs another alignment
                        raise
                    self._aligned = False  # the descriptor stays: other threads may be writing with it
                    low = high
            if low >= high:
                low = high = len(view)
            with self._turn:
                _write_all(self._fd, view[:low], offset)
                _write_all(self._fd, view[high:], offset + high)

    def _blocks(self, offset: int, view: memoryview) -> tuple[int, int]:
        """The range of ``view`` that is whole blocks of the file and aligned in memory; (0, 0) if there is none."""
        if self._direct < 0 or not self._aligned or len(view) < BLOCK or (_address_of(view) - offset) % BLOCK:
            return 0, 0
        return -offset % BLOCK, (offset + len(view)) // BLOCK * BLOCK - offset

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with what was written at ``offset``."""
        with target_errors(self.path):
            done = 0
            while done < len(buffer):
                got = os.preadv(self._fd, [buffer[done:]], offset + done)
                if got == 0:
                    raise OSError(errno.EIO, "the staged file became shorter")
                done += got

    def sync(self) -> None:
        """Make what was written so far durable. Any thread may call it at any time."""
        with target_errors(self.path):
            with self._closing:  # a closed descriptor's number may belong to another file by now
                descriptor = os.dup(self._fd) if self._fd >= 0 else -1
            if descriptor < 0 and self._durable:
                return
            if descriptor < 0 or self._lost:
                raise OSError(errno.EIO, "what was written is not known to be on the disk")
            try:
                os.fdatasync(descriptor)
            except OSError:
                self._lost = True
                raise
            finally:
                os.close(descriptor)

    def commit(self) -> None:
        """See ``ByteTarget.commit``."""
        with target_errors(self.path):
            length = os.fstat(self._fd).st_size
            if length != self.nbytes:
                raise TargetUnwritableError(
                    f"{self.path} changed while it was written",
                    file=self.path,
                    expected=bytes_text(self.nbytes),
                    found=bytes_text(length),
                )
            if self._lost:
                raise OSError(errno.EIO, "what was written is not known to be on the disk")
            try:
                os.fsync(self._fd)
            except OSError:
                self._lost = True
                raise
            self._durable = True
            self.close()

    def close(self) -> None:
        with self._closing:
            for descriptor in (self._fd, self._direct):
                if descriptor >= 0:
                    os.close(descriptor)
            self._fd = self._direct = -1


def _address_of(view: memoryview) -> int:
    """The memory address of the first byte of ``view``."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


# What a file system answers that cannot sync directories: some network ones and FUSE.
_NO_DIRECTORY_SYNC = frozenset({errno.EINVAL, errno.EOPNOTSUPP})


def sync_directory(path: str) -> bool:
    """Make the file names in a directory durable. False if the file system cannot do that."""
    with target_errors(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY_SYNC:
                raise
            return False
        finally:
            os.close(descriptor)
    return True


def replace_file(path: str, content: bytes) -> None:
    """Make ``content`` the file at ``path``, durably and at once: readers see the earlier file or the new one.

    Raises OSError, and then leaves the earlier file.
    """
    folder, name = os.path.split(os.path.abspath(path))
    partial = os.path.join(folder, f".{name}-{os.urandom(8).hex()}.partial")
    try:
        with open(partial, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
        raise
    with contextlib.suppress(TargetUnwritableError):  # the file is complete, and visible under its name
        sync_directory(folder)
