"""Formats of other packages: readers and flavors that an installed package announces by an entry point.

A package is asked only because somebody installed it: a checkpoint can neither name one nor bring one along. Entry
points are imported on first use, by every process that reads checkpoints, workers included.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TextIO

from fsdpckpt.errors import FsdpckptError, UsageError

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

    @contextmanager
    def running(self, what: str) -> Iterator[None]:
        """Run code of the package. Raises UsageError, which says ``what`` failed, for any error that is not ours.

        What it prints goes to stderr: stdout is for data.
        """
        try:
            with _PRINTS:
                yield
        except FsdpckptError:
            raise
        except (Exception, SystemExit) as error:  # whatever the other package does
            raise UsageError(
                f"{self.name} of {self.origin} {what}",
                found=f"{type(error).__name__}: {error}",
                why="the package has an error, is for another version of fsdpckpt, or does not expect such files",
                next_step=f"tell the package's authors, update it, or uninstall it: pip uninstall {self.package}",
            ) from error


class _PrintsToStderr:
    """While code of another package runs, in whatever threads, standard output is standard error."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._stdout: TextIO | None = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._running:
                self._stdout, sys.stdout = sys.stdout, sys.stderr
            self._running += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._running -= 1
            if not self._running and self._stdout is not None:
                sys.stdout, self._stdout = self._stdout, None


_PRINTS = _PrintsToStderr()


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
            with _PRINTS:
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
