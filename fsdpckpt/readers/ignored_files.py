"""Leaves out the files that ``--ignore-file`` names: an export beside the state, the files of another save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TypeVar

from fsdpckpt.errors import UsageError
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.storage import ByteSource, Entry
from fsdpckpt.storage.sources import Sources

T = TypeVar("T")


class RemainingSources(Sources):
    """``sources`` without the files and directories below ``source`` whose name, or path from there, matches one of
    ``globs``: no directory lists them. ``ignored``: those that were left out so far, as relative paths. ``all``:
    ``sources`` itself.
    """

    def __init__(self, sources: Sources, source: str, globs: Sequence[str]) -> None:
        super().__init__()
        self.all, self._source, self._globs = sources, source, globs
        self.ignored: dict[str, None] = {}

    def _remains(self, entry: Entry) -> bool:
        if not entry.path.startswith(f"{self._source.rstrip('/')}/"):
            return True
        path = relative_path(entry.path, self._source)
        if not any(_matches(glob, path) for glob in self._globs):
            return True
        self.ignored[path] = None
        return False

    def stat(self, path: str) -> Entry | None:
        entry = self.all.stat(path)
        return entry if entry is not None and self._remains(entry) else None

    def list_directory(self, path: str) -> list[Entry]:
        return [entry for entry in self.all.list_directory(path) if self._remains(entry)]

    def prefetch_ends(self, paths: Sequence[str], *, tails: bool = True) -> None:
        self.all.prefetch_ends(paths, tails=tails)

    def open(self, path: str) -> ByteSource:
        return self.all.open(path)

    def parsed(self, path: str, parse: Callable[[ByteSource], T]) -> T:
        return self.all.parsed(path, parse)


def relative_path(path: str, source: str) -> str:
    """``path`` relative to ``source``, which it is or is below."""
    return path.removeprefix(source.rstrip("/")).strip("/")


def _matches(glob: str, path: str) -> bool:
    wanted = glob.removeprefix("./").rstrip("/")
    return fnmatchcase(path, wanted) or fnmatchcase(path.rpartition("/")[2], wanted)


def require_matches(globs: Sequence[str], *checkpoints: Checkpoint) -> None:
    """Raises UsageError for a glob that no file of the ``checkpoints`` matched."""
    ignored = [path for checkpoint in checkpoints for path in checkpoint.ignored]
    for glob in globs:
        if not any(_matches(glob, path) for path in ignored):
            names = [file.path for checkpoint in checkpoints for file in checkpoint.files]
            sources = " or ".join(checkpoint.source for checkpoint in checkpoints)
            raise UsageError(
                f"--ignore-file {glob} matches no file of {sources}",
                details=[f"{name} exists" for name in get_close_matches(glob, names, n=3, cutoff=0.4)],
                next_step="give the name of a file or directory, or its path from there",
            )


def glob_of(label: str, source: str) -> str:
    """The glob that leaves out the part with this ``label``: "" if that is the whole source.

    A label is a path, a pattern of paths, or the first and last file of each rank.
    """
    first, _, last = label.partition(" .. ")
    path = relative_path(first, source)
    if path.endswith(".safetensors.index.json"):
        return path.removesuffix(".safetensors.index.json") + "*.safetensors*"
    if not last:
        return path
    end = last.rpartition("/")[2]
    name = path.rpartition("/")[2]
    at = next((number for number, (one, other) in enumerate(zip(name, end, strict=False)) if one != other), 0)
    tail = name[at:].lstrip("0123456789")
    return path.removesuffix(name) + name[:at] + "*" + tail
