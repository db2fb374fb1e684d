"""Lists what is mounted where, as Linux tells it in ``/proc/self/mountinfo`` (proc(5)). Empty on other systems."""

from __future__ import annotations

import functools
import os
import re
from typing import NamedTuple

_LISTING = "/proc/self/mountinfo"
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})


class Mount(NamedTuple):
    """One mounted file system."""

    device: str  # major:minor, the ``st_dev`` of the files in it
    root: str  # the directory of the file system that is seen at ``point``
    point: str
    system: str  # ext4, nfs4, tmpfs, fuse.sshfs, ...
    source: str  # a disk, or a server and what it exports


def mounts() -> list[Mount]:
    """Everything that this process sees mounted, in the kernel's order. A line in another form is passed over."""
    try:
        with open(_LISTING, "rb") as file:
            lines = os.fsdecode(file.read()).split("\n")
    except OSError:  # no Linux
        return []
    parsed = map(_parsed, lines)
    return [mount for mount in parsed if mount is not None]


def mounts_of(device: int) -> list[Mount]:
    """Where the file system with this number (``st_dev``) is mounted."""
    number = f"{os.major(device)}:{os.minor(device)}"
    return [mount for mount in mounts() if mount.device == number]


@functools.cache
def is_in_memory(device: int) -> bool:
    """Whether the file system with this number (``st_dev``) keeps its files in memory."""
    return any(mount.system in _IN_MEMORY for mount in mounts_of(device))


def _parsed(line: str) -> Mount | None:
    # 36 35 98:0 /root /mount/point rw,noatime shared:1 - ext4 /dev/sda1 rw: the fields before the dash vary in number.
    before, _, after = line.partition(" - ")
    of_place, of_system = before.split(" "), after.split(" ")
    if len(of_place) < 5 or not of_system[0]:
        return None
    device, root, point = of_place[2:5]
    source = of_system[1] if len(of_system) > 1 else ""
    return Mount(device, _unescaped(root), _unescaped(point), of_system[0], _unescaped(source))


def _unescaped(text: str) -> str:
    """The kernel writes a space as ``\\040``, and a newline, a tab and a backslash alike."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
