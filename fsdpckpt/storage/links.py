"""Makes a new file of an existing one without copying its bytes: as a hard link, or as a reflink.

A hard link is the same file under a second name. A reflink is a new file that shares the blocks of the other one until
either is written to. Nothing here opens the existing file for writing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import tempfile

from fsdpckpt.errors import TargetUnwritableError
from fsdpckpt.storage.local import target_errors

_FICLONE, _FICLONERANGE = 0x40049409, 0x4020940D  # linux/fs.h
_PROBE = 1 << 20  # bytes: a multiple of every block size


def can_reflink(path: str, directory: str) -> bool:
    """Whether a new file in ``directory`` can share blocks with the file at ``path``. Nothing stays there."""
    try:
        with open(path, "rb") as source, tempfile.TemporaryFile(dir=directory) as probe:
            nbytes = _PROBE if os.fstat(source.fileno()).st_size > _PROBE else 0  # 0: to the end
            fcntl.ioctl(probe.fileno(), _FICLONERANGE, struct.pack("qQQQ", source.fileno(), 0, nbytes, 0))
    except OSError:
        return False
    return True


def hardlink(source: str, path: str) -> None:
    """Give the file at ``source`` the second name ``path``, durably but for the name. Raises TargetUnwritableError."""
    try:
        os.link(source, path, follow_symlinks=False)
    except OSError as error:
        raise _refused(source, path, error) from None
    _sync(path)


def reflink(source: str, path: str) -> None:
    """Make ``path`` a new file with the bytes of ``source``. Raises TargetUnwritableError."""
    with target_errors(path):
        new = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            with open(source, "rb") as file:
                fcntl.ioctl(new, _FICLONE, file.fileno())
        finally:
            os.close(new)
    _sync(path)


def _sync(path: str) -> None:
    with target_errors(path):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def _refused(source: str, path: str, error: OSError) -> TargetUnwritableError:
    why = {
        errno.EXDEV: "they are on different file systems, which no hard link can cross",
        errno.EPERM: "the file belongs to another user (fs.protected_hardlinks), or the file system has no hard links",
        errno.EMLINK: "the file has as many names as its file system allows",
    }.get(error.errno or 0, "the file system refused the request")
    return TargetUnwritableError(
        f"{path} cannot be a hard link to {source}: {error.strerror}",
        file=path,
        why=why,
        next_step="give --link auto, which copies where nothing can be shared",
    )
