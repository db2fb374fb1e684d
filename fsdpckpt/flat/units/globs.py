"""``--unit GLOB``: which module paths of a model are FSDP1 units, and which unit owns which parameter."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from fsdpckpt.errors import UsageError

__all__ = ["ROOT_ONLY", "expand", "module_paths", "owner"]

ROOT_ONLY = "none"
"""What ``--unit`` says when no module but the root is wrapped."""


def module_paths(names: Iterable[str]) -> list[str]:
    """Every module on the way to a parameter, the root left out, in the order of the names."""
    found: dict[str, None] = {}
    for name in names:
        words = name.split(".")
        found.update({".".join(words[:depth]): None for depth in range(1, len(words))})
    return list(found)


def expand(globs: Sequence[str], names: Iterable[str]) -> tuple[str, ...]:
    """The module paths that the globs match, the root left out. ``*`` stays within a segment, ``**`` crosses dots.

    Raises UsageError for a glob that matches no module, with the module paths there are.
    """
    if tuple(globs) == (ROOT_ONLY,):
        return ()
    paths = module_paths(names)
    found: dict[str, None] = {}
    for glob in globs:
        if glob == ROOT_ONLY and ROOT_ONLY not in paths:
            raise UsageError(
                "--unit none says that only the root is wrapped, and another --unit wraps more",
                found=" ".join(f"--unit {one}" for one in globs),
                next_step="drop --unit none: the root is a unit beside the others",
            )
        pattern = _pattern(glob)
        matched = [path for path in paths if pattern.fullmatch(path)]
        if not matched:
            raise _nothing(glob, paths)
        found.update(dict.fromkeys(matched))
    return tuple(path for path in paths if path in found)


def _pattern(glob: str) -> re.Pattern[str]:
    text = ""
    for part in re.split(r"(\*\*|\*|\?|\[[^\]]+\])", glob):
        if part == "**":
            text += ".*"
        elif part == "*":
            text += r"[^.]*"
        elif part == "?":
            text += r"[^.]"
        elif part.startswith("[") and part.endswith("]"):
            inside = part[1:-1].replace("\\", "\\\\").replace("[", "\\[").replace("^", "\\^")
            text += f"[^{inside[1:]}]" if inside.startswith("!") else f"[{inside}]"
        else:
            text += re.escape(part)
    try:
        return re.compile(text)
    except re.error:
        raise UsageError(f"--unit {glob}: {glob!r} is no glob", next_step="--unit 'layers.*'") from None


def _nothing(glob: str, paths: Sequence[str]) -> UsageError:
    return UsageError(
        f"--unit {glob or repr(glob)} matches no module of this model",
        details=paths,
        why="a glob is matched against whole module paths, and * does not cross dots; these are the modules",
        next_step="--unit 'layers.*' for every layer, --unit '**.block' for a name anywhere, --unit none for the root",
    )


def owner(name: str, prefixes: Collection[str]) -> str | None:
    """The innermost of the prefixes under which a parameter lies; None when it lies under none."""
    words = name.split(".")
    for depth in range(len(words) - 1, -1, -1):
        prefix = ".".join(words[:depth])
        if prefix in prefixes:
            return prefix
    return None
