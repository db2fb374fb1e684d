"""Machines of one's own for each worker, as far as disks go: every worker sees another directory under the same path.

Each worker enters a mount namespace of its own, which needs root or user namespaces, and binds its directory there. It
has to happen before torch is imported: a process with threads cannot enter a user namespace.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping

__all__ = ["bind", "can_bind", "own_namespace"]

NEWNS, NEWUSER = 0x00020000, 0x10000000
BIND, PRIVATE, RECURSIVE = 4096, 1 << 18, 16384


def _call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def own_namespace() -> None:
    """From now on this process's mounts are its own."""
    user, group = os.getuid(), os.getgid()
    _call("unshare", NEWNS | (NEWUSER if user else 0))
    if user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _call("mount", b"none", b"/", None, RECURSIVE | PRIVATE, None)


def bind(disks: Mapping[str, str]) -> None:
    """Show the directory ``disks[path]`` at each ``path``, to this process only."""
    for path, directory in disks.items():
        _call("mount", os.fsencode(directory), os.fsencode(path), None, BIND, None)


def can_bind() -> bool:
    """Whether this machine lets a process do that."""
    child = os.fork()
    if child == 0:
        try:
            own_namespace()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    sys.exit(0 if can_bind() else 1)
