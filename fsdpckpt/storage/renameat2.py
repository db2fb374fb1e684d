"""The renames of Linux that POSIX does not have: one that swaps two names, and one that replaces nothing.

``staging`` is the only module that uses them.
"""

from __future__ import annotations

import ctypes
import errno
import os

_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2  # RENAME_NOREPLACE and RENAME_EXCHANGE of linux/fs.h
# Errors that mean "not possible here": old kernels, NFS and some network file systems, sandboxes that refuse unknown
# calls. Where the permission is missing, the plain renames that are tried next lack it as well.
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM})


def swap_names(source: str, target: str) -> bool:
    """Swap the names of ``source`` and ``target``, which both exist, in one atomic step.

    False, with nothing done, where the system cannot do that. Raises OSError for what would stop any rename.
    """
    return _renameat2(source, target, _EXCHANGE)


def rename_if_absent(source: str, target: str) -> bool:
    """Rename ``source`` to ``target``. Raises FileExistsError if something is there.

    False, with nothing done, where the system cannot do that in one step. Raises OSError for what would stop any
    rename.
    """
    return _renameat2(source, target, _NOREPLACE)


def _renameat2(source: str, target: str, flags: int) -> bool:
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), ctypes.c_uint(flags)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), source)
