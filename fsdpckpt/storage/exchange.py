"""Two names of one directory change places in one step, where the system and the file system can do that."""

from __future__ import annotations

import ctypes
import errno
import os

__all__ = ["exchange"]

_AT_FDCWD = -100
_EXCHANGE = 2  # RENAME_EXCHANGE of linux/fs.h
# Old kernels; NFS and some network file systems; sandboxes that refuse a call they do not know. Where it is permission
# that lacks, the renames that are then tried lack it too.
_LACKING = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM})


def exchange(one: str, other: str) -> bool:
    """Whether ``one`` and ``other``, which both exist, have changed places: then there was no moment without either.

    False, with nothing done, where that is not possible. Raises OSError for what would stop any rename.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_EXCHANGE)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _LACKING:
        return False
    raise OSError(number, os.strerror(number), one)
