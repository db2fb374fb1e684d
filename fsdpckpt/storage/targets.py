"""Positional writes to new local files, made durable before they are trusted."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Iterator

import numpy as np

from fsdpckpt.errors import FsdpckptError, TargetUnwritableError

__all__ = ["BLOCK", "WritableFile", "aligned_buffer", "sync_directory", "target_errors"]

BLOCK = 4096  # bytes: the alignment that direct writes need on every disk in use
DIRECT_FROM = 1 << 20  # bytes: shorter files are not worth a second descriptor


@contextlib.contextmanager
def target_errors(path: str) -> Iterator[None]:
    """Turns an OSError while writing ``path`` into a TargetUnwritableError that says what to do."""
    try:
        yield
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: str, error: OSError) -> FsdpckptError:
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
        next_step="choose another DST, or make room and run the command again",
    )


def aligned_buffer(nbytes: int) -> memoryview:
    """At least ``nbytes`` of zeroed memory that begins on a page, as direct writes need."""
    return memoryview(mmap.mmap(-1, max(nbytes, 1)))


class WritableFile:
    """A new file of exactly ``nbytes``, written with pwrite from any thread.

    Large writes bypass the page cache (O_DIRECT) where the file system can: the bytes are copied once less, and the
    disk works from the first write on instead of waiting for the final fsync. What is not a whole block, or lies in
    memory at another alignment than in the file, goes the ordinary way; both may be mixed, as they never share a block.
    """

    def __init__(self, path: str, nbytes: int, *, there: bool = False) -> None:
        """``there``: another process has made the file, with this length, and writes other bytes of it."""
        self.path = path
        self.nbytes = nbytes
        self._direct = -1
        self._aligned = True
        self._durable = False  # committed
        self._lost = False  # a sync failed: the system tells of a lost write once, and every later sync succeeds
        self._closing = threading.Lock()
        with target_errors(path):
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (0 if there else os.O_CREAT | os.O_EXCL), 0o644)
            if not there:
                os.ftruncate(self._fd, nbytes)
            if nbytes >= DIRECT_FROM and hasattr(os, "O_DIRECT"):
                if not there:
                    os.posix_fallocate(self._fd, 0, nbytes)  # a full disk shows now, and extents are laid in one run
                with contextlib.suppress(OSError):  # a file system without direct writes, tmpfs for one
                    self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)

    def write(self, offset: int, data: memoryview | bytes) -> None:
        """Write all of ``data`` at ``offset``."""
        with target_errors(self.path):
            view = memoryview(data)
            low, high = self._blocks(offset, view)
            if low < high:
                try:
                    _write_all(self._direct, view[low:high], offset + low)
                except OSError as error:
                    if error.errno != errno.EINVAL:  # EINVAL: the device wants another alignment
                        raise
                    self._aligned = False  # the descriptor stays: other threads may be writing with it
                    low = high
            if low >= high:
                low = high = len(view)
            _write_all(self._fd, view[:low], offset)
            _write_all(self._fd, view[high:], offset + high)

    def _blocks(self, offset: int, view: memoryview) -> tuple[int, int]:
        """The range of ``view`` that is whole blocks of the file, aligned in memory too; empty when there is none."""
        if self._direct < 0 or not self._aligned or len(view) < BLOCK or (address_of(view) - offset) % BLOCK:
            return 0, 0
        return -offset % BLOCK, (offset + len(view)) // BLOCK * BLOCK - offset

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with what stands at ``offset`` already."""
        with target_errors(self.path):
            done = 0
            while done < len(buffer):
                got = os.preadv(self._fd, [buffer[done:]], offset + done)
                if got == 0:
                    raise OSError(errno.EIO, "the staged file became shorter")
                done += got

    def sync(self) -> None:
        """What was written until now is on the disk when this returns. Any thread may call it at any time."""
        with target_errors(self.path):
            with self._closing:  # the number of a closed descriptor may be another file's by now
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
        """Flush to the disk and close. Raises TargetUnwritableError when the length is not ``nbytes``."""
        with target_errors(self.path):
            length = os.fstat(self._fd).st_size
            if length != self.nbytes:
                raise TargetUnwritableError(
                    f"{self.path} changed while it was written",
                    file=self.path,
                    expected=f"{self.nbytes} bytes",
                    found=f"{length}",
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


def address_of(view: memoryview) -> int:
    """Where the first byte of ``view`` lies in memory."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    with target_errors(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
