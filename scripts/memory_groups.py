"""Control groups that limit memory, including the page cache: cgroup v2 if it has the memory controller, else v1."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

MOUNTS = "/proc/self/mounts"
OWN = "/proc/self/cgroup"


class NoGroup(Exception):
    """No group can be made or limited here."""


@dataclass(frozen=True)
class Version:
    """Names of the memory controller's files. ``peaks``: of those that hold the peak."""

    limit: str
    peaks: tuple[str, ...]


V2 = Version("memory.max", ("memory.peak",))  # which kernels before 5.19 lack
V1 = Version("memory.limit_in_bytes", ("memory.max_usage_in_bytes",))


@dataclass(frozen=True)
class Group:
    directory: str
    version: Version

    def entering(self, command: list[str]) -> list[str]:
        """``command`` as a process of this group."""
        return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', self.directory, *command]

    @property
    def peak(self) -> int | None:
        """The peak of its processes and of their page cache, in bytes; None where the kernel reports none."""
        for name in self.version.peaks:
            with contextlib.suppress(OSError), open(os.path.join(self.directory, name)) as file:
                return int(file.read())
        return None


@contextlib.contextmanager
def group_of(nbytes: int) -> Iterator[Group]:
    """A new group limited to ``nbytes``, removed when the context ends. Raises NoGroup."""
    refused = ["no memory controller is mounted here"]
    for parent, version in _parents():
        made = Group(os.path.join(parent, f"fsdpckpt-{uuid.uuid4().hex[:8]}"), version)
        try:
            os.mkdir(made.directory)
            try:
                _limit(made, nbytes)
            except OSError:
                os.rmdir(made.directory)
                raise
        except OSError as error:
            refused.append(str(error))
            continue
        try:
            yield made
        finally:
            os.rmdir(made.directory)
        return
    raise NoGroup(refused[-1])


def _limit(group: Group, nbytes: int) -> None:
    with open(os.path.join(group.directory, group.version.limit), "w") as file:
        file.write(str(nbytes))


def _parents() -> Iterator[tuple[str, Version]]:
    """Where a group might be made, v2 first: at the root of each hierarchy with memory, and where this process is."""
    with open(MOUNTS) as file:
        mounts = [line.split()[1:4] for line in file]
    roots = [(place, V2) for place, kind, _ in mounts if kind == "cgroup2" and _controls_memory(place)]
    roots += [(place, V1) for place, kind, words in mounts if kind == "cgroup" and "memory" in words.split(",")]
    for root, version in roots:
        yield root, version
        yield os.path.join(root, _own("" if version is V2 else "memory").lstrip("/")), version


def _controls_memory(root: str) -> bool:
    try:
        with open(os.path.join(root, "cgroup.controllers")) as file:
            return "memory" in file.read().split()
    except OSError:
        return False


def _own(controller: str) -> str:
    """This process's group in the hierarchy of ``controller``; of v2's with ""."""
    with open(OWN) as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if controller in controllers.split(","):
                return path
    return ""
