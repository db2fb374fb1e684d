"""Lists what is at a DST that is replaced, so that nothing is deleted that was not looked at before."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

from fsdpckpt.storage.protocols import FileIdentity, identity_of_status

Contents: TypeAlias = "Mapping[str, FileIdentity]"
"""The files and links at and below a path, by their paths below it; "" when the path is a file itself."""

LINK = "link"
"""The tag of a symbolic link."""

# What NFS (a file that was deleted while it was open) and macOS leave in any directory: not data of the user.
_LEFT_BEHIND = re.compile(r"\.nfs[0-9a-f]{16,}|\.DS_Store")


def is_left_behind(path: str) -> bool:
    """Whether the file system made this file, so that nobody misses it."""
    return _LEFT_BEHIND.fullmatch(os.path.basename(path)) is not None


def contents_of(path: str) -> dict[str, FileIdentity]:
    """What is at the local ``path``, which is not followed when it is a link; empty when nothing is there."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return {}
    if not stat.S_ISDIR(status.st_mode):
        return {"": _identity("", status)}
    return {name: _identity(name, os.lstat(os.path.join(path, name))) for name in _below(path)}


def _identity(name: str, status: os.stat_result) -> FileIdentity:
    found = identity_of_status(name, status)
    return replace(found, tag=LINK) if stat.S_ISLNK(status.st_mode) else found


def _below(directory: str) -> Iterator[str]:
    """The relative paths of all but real directories."""
    for folder, directories, names in os.walk(directory, onerror=_raise):
        links = [name for name in directories if os.path.islink(os.path.join(folder, name))]
        for name in (*names, *links):
            yield os.path.relpath(os.path.join(folder, name), directory)


def _raise(error: OSError) -> None:
    raise error


def added_since(before: Contents, now: Contents) -> list[str]:
    """The files that came or changed after ``before``, in order."""
    return sorted(name for name, found in now.items() if before.get(name) != found and not is_left_behind(name))


def is_empty_directory(path: str) -> bool:
    """Whether ``path`` is a local directory with nothing in it."""
    try:
        with os.scandir(path) as entries:
            return next(entries, None) is None
    except OSError:  # nothing is there, it is a file, or nobody may look
        return False
