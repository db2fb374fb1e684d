"""Formats of other packages: readers and flavors that an installed package announces by an entry point.

A package is asked only because somebody installed it: a checkpoint can neither name one nor bring one along. Entry
points are imported on first use, by every process that reads checkpoints, workers included.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cache

from fsdpckpt.errors import UsageError

READERS, FLAVORS = "fsdpckpt.readers", "fsdpckpt.flavors"


@dataclass(frozen=True, slots=True)
class Extension:
    """What ``package`` announces as ``name``; ``value``: the object that its entry point names."""

    name: str
    package: str
    version: str
    value: object

    @property
    def origin(self) -> str:
        """The package and its version."""
        return f"{self.package} {self.version}"

    def refused(self, what: str, expected: str, found: str) -> UsageError:
        """The error for a value that is ``what``."""
        return UsageError(
            f"{self.name} of {self.origin} {what}",
            expected=expected,
            found=found,
            next_step=f"update the package, or uninstall it: pip uninstall {self.package}",
        )


@cache
def extensions(group: str) -> tuple[Extension, ...]:
    """The extensions of ``group``, by name. Raises UsageError for one that cannot be imported, and for two of one
    name.
    """
    if not _is_any_announced():
        return ()
    from importlib.metadata import entry_points  # takes time, and hardly anybody needs it

    found: dict[str, Extension] = {}
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        package, version = (point.dist.name, point.dist.version) if point.dist is not None else ("unknown", "")
        other = found.get(point.name)
        if other is not None and other.package != package:
            raise UsageError(
                f"two packages announce {point.name} in {group}",
                details=[f"{other.package} {other.version}", f"{package} {version}"],
                next_step=f"uninstall one of them: pip uninstall {package}",
            )
        try:
            value = point.load()
        except (Exception, SystemExit) as error:  # whatever the other package does
            raise UsageError(
                f"{point.name} of {package} {version} cannot be imported from {point.value}",
                found=f"{type(error).__name__}: {error}",
                next_step=f"update the package, or uninstall it: pip uninstall {package}",
            ) from error
        found[point.name] = Extension(point.name, package, version, value)
    return tuple(found.values())


@cache
def _is_any_announced() -> bool:
    """Whether any installed package has a reader or a flavor: searched once for both."""
    return any(map(_announces_formats, sys.path))


def _announces_formats(directory: str) -> bool:
    """Whether a package in ``directory`` has entry points of ours. Reading a few small files is much faster than
    importing what parses them.
    """
    try:
        with os.scandir(directory or ".") as entries:
            paths = [entry.path for entry in entries if entry.name.endswith((".dist-info", ".egg-info"))]
    except OSError:  # a zip file, or nothing
        return False
    return any(_mentions_us(os.path.join(path, "entry_points.txt")) for path in paths)


def _mentions_us(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            text = file.read()
    except OSError:
        return False
    return any(f"[{group}]".encode() in text for group in (READERS, FLAVORS))
