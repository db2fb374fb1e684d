"""Leaves files of a source out (``--ignore-file``): an export beside the state, the files of another save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from fsdpckpt.errors import UsageError
from fsdpckpt.ir.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class IgnoredFiles:
    """The files and directories below ``source`` whose name, or path from there, matches one of ``globs``."""

    source: str = ""
    globs: tuple[str, ...] = ()

    def matches(self, path: str) -> bool:
        """Whether the file or directory at ``path``, which lies below the source, is one of them."""
        return any(_matches(glob, self.relative(path)) for glob in self.globs)

    def relative(self, path: str) -> str:
        """``path`` as it is seen from the source."""
        return path.removeprefix(self.source.rstrip("/")).strip("/")


def _matches(glob: str, path: str) -> bool:
    wanted = glob.removeprefix("./").rstrip("/")
    return fnmatchcase(path, wanted) or fnmatchcase(path.rpartition("/")[2], wanted)


def require_matches(globs: Sequence[str], *checkpoints: Checkpoint) -> None:
    """Raises UsageError for a glob that no file of the ``checkpoints`` matched."""
    found = [path for checkpoint in checkpoints for path in checkpoint.ignored]
    for glob in globs:
        if not any(_matches(glob, path) for path in found):
            names = [file.path for checkpoint in checkpoints for file in checkpoint.files]
            sources = " or ".join(checkpoint.source for checkpoint in checkpoints)
            raise UsageError(
                f"--ignore-file {glob} matches no file of {sources}",
                details=[f"{name} exists" for name in get_close_matches(glob, names, n=3, cutoff=0.4)],
                next_step="give the name of a file or directory, or its path from there",
            )


def glob_of(label: str, source: str) -> str:
    """What to ignore to leave out the part that messages call ``label``: "" when that is the whole source.

    A label is a path, a pattern of paths, or the first and last of one rank's files each.
    """
    first, _, last = label.partition(" .. ")
    path = IgnoredFiles(source).relative(first)
    if path.endswith(".safetensors.index.json"):
        return path.removesuffix(".safetensors.index.json") + "*.safetensors*"
    if not last:
        return path
    end = last.rpartition("/")[2]
    name = path.rpartition("/")[2]
    at = next((number for number, (one, other) in enumerate(zip(name, end, strict=False)) if one != other), 0)
    tail = name[at:].lstrip("0123456789")
    return path.removesuffix(name) + name[:at] + "*" + tail
