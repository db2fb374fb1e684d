"""Positional writes to new local files, made durable before they are trusted."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from fsdpckpt.errors import FsdpckptError, TargetUnwritableError

__all__ = ["WritableFile", "sync_directory", "target_errors"]


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


class WritableFile:
    """A new file of exactly ``nbytes``, written with pwrite from any thread."""

    def __init__(self, path: str, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes
        with target_errors(path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            os.ftruncate(self._fd, nbytes)

    def write(self, offset: int, data: memoryview | bytes) -> None:
        """Write all of ``data`` at ``offset``, and let the disk start on it at once."""
        with target_errors(self.path):
            view = memoryview(data)
            done = 0
            while done < len(view):
                done += os.pwrite(self._fd, view[done:], offset + done)
            if len(view) >= 1 << 20 and hasattr(os, "posix_fadvise"):
                # Linux answers DONTNEED on dirty pages by starting their writeback: otherwise gigabytes pile up in
                # memory until the final fsync, with the disk idle meanwhile.
                os.posix_fadvise(self._fd, offset, len(view), os.POSIX_FADV_DONTNEED)

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
            os.fsync(self._fd)
            self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    with target_errors(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
