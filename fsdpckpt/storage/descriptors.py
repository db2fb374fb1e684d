"""Keeps few files open at a time: a process may have 256 descriptors, a checkpoint thousands of files.

An open file may be closed at any moment when nobody reads it, and is opened again for the next read.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import cache

_MOST = 256  # files that are read, open at a time
_SHARE = 4  # and so large a part of what the process may open; the rest is for targets, sockets and libraries
_LEAST = 8


@cache
def open_file_limit() -> int:
    """How many of the files that are read stay open at a time."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(min(_MOST, soft // _SHARE), _LEAST)


def written_files_limit() -> int:
    """How many target files may be open at a time: each has two descriptors, one of them for direct writes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(soft // (2 * _SHARE), 1)


_lock = threading.RLock()  # entered by itself: a finaliser may run while it is held
_open: OrderedDict[PooledDescriptor, None] = OrderedDict()  # those with a descriptor, the last used last


class PooledDescriptor:
    """A descriptor of one file: ``with pooled as descriptor:`` keeps it open. Thread-safe.

    ``open_file()`` opens the file; it is called again after the descriptor was closed for other files.
    """

    __slots__ = ("_descriptor", "_open_file", "_users")

    def __init__(self, open_file: Callable[[], int]) -> None:
        self._open_file = open_file
        self._descriptor = -1
        self._users = 0

    def __enter__(self) -> int:
        with _lock:
            if self._descriptor < 0:
                _close_idle(open_file_limit() - 1)
                try:
                    self._descriptor = self._open_file()
                except OSError as error:
                    if error.errno not in (errno.EMFILE, errno.ENFILE) or not _close_idle(0):
                        raise
                    self._descriptor = self._open_file()
                _open[self] = None
            else:
                _open.move_to_end(self)
            self._users += 1
            return self._descriptor

    def __exit__(self, *_: object) -> None:
        with _lock:
            self._users -= 1

    def close(self) -> None:
        """Close the descriptor. Nobody may be using it."""
        with _lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
                _open.pop(self, None)


def _close_idle(kept: int) -> int:
    """Close the files that were not used for longest until ``kept`` are open; returns how many were closed."""
    closed = 0
    for pooled in list(_open) if len(_open) > kept else ():
        if len(_open) <= kept:
            break
        if not pooled._users:
            pooled.close()
            closed += 1
    return closed
