"""Decides whether two paths lead to the same place: by device and inode, since a place may have many paths.

A bind mount, a file system that is mounted twice, a container's view and a link all give one directory several paths,
whose texts have nothing in common. Whatever is written, replaced or removed is compared with the source here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from typing import TypeAlias

from fsdpckpt.storage.mounts import mounts

Inode: TypeAlias = "tuple[int, int]"
"""The device and the number of a file or directory on it."""


def inode_of(path: str) -> Inode | None:
    """What ``path`` leads to, through links; None if that does not exist or nobody may look."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # a NUL byte in the path
        return None
    return status.st_dev, status.st_ino


def is_within(path: str, directory: str) -> bool:
    """Whether ``path``, which need not exist, is ``directory`` or lies below it. Looks only upward from ``path``.

    Two names of one file (hard links) are two places: removing one leaves the other.
    """
    real, above = os.path.realpath(path), os.path.realpath(directory)
    if os.path.commonpath([real, above]) == above:
        return True
    if not os.path.isdir(above):
        return _same_entry(real, above)
    wanted = inode_of(above)
    return wanted is not None and wanted in map(inode_of, _upward(real))


class DirectoryTree:
    """The file ``path``, or the directory ``path`` with all directories below it; links in it are not followed."""

    def __init__(self, path: str) -> None:
        self.path = os.path.realpath(path)

    def holds(self, path: str) -> bool:
        """Whether ``path``, which need not exist, is this place or lies anywhere in it: also where only a directory in
        the middle of the tree has a second path.
        """
        if is_within(path, self.path):
            return True
        return not self._directories.isdisjoint(map(inode_of, _upward(os.path.realpath(path))))

    @cached_property
    def _directories(self) -> frozenset[Inode]:
        folders = [folder for folder, _, _ in os.walk(self.path)]
        return frozenset(inode for inode in map(inode_of, folders) if inode is not None)


def is_mount_point(path: str) -> bool:
    """Whether something is mounted at the real ``path``, which therefore cannot be renamed or removed.

    ``os.path.ismount`` does not notice a bind mount from the same device.
    """
    if os.path.ismount(path):
        return True
    return any(mount.point == path for mount in mounts())


def _upward(path: str) -> Iterator[str]:
    """The absolute ``path``, and the directories above it."""
    yield path
    while (above := os.path.dirname(path)) != path:
        path = above
        yield path


def _same_entry(one: str, other: str) -> bool:
    """Whether two real paths of files name the same entry of the same directory, so that removing one removes both."""
    if inode_of(one) is None or inode_of(one) != inode_of(other):
        return False
    if os.stat(one).st_nlink == 1:
        return True
    # Among several names of the file, it is this one. Some file systems take no notice of upper and lower case.
    same_name = os.path.basename(one).casefold() == os.path.basename(other).casefold()
    return same_name and inode_of(os.path.dirname(one)) == inode_of(os.path.dirname(other))
