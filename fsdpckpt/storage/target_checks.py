"""Refuses a DST on a local disk that exists, lies in SRC, or cannot be created."""

from __future__ import annotations

import os
import shlex

from fsdpckpt.errors import EMPTY, TargetExistsError, TargetUnwritableError, UsageError
from fsdpckpt.storage.contents import is_empty_directory
from fsdpckpt.storage.local import target_errors
from fsdpckpt.storage.protocols import is_url
from fsdpckpt.storage.staging import NAME_LIMIT


def check_target(target: str, source: str, *, overwrite: bool, compare: bool = False) -> None:
    """Refuse a DST that exists, lies in SRC, or cannot be created. Nothing is written.

    DST may be an empty directory. With ``compare`` it may exist: whether it is what this command writes is checked once
    the plan is known.

    Raises UsageError, TargetExistsError or TargetUnwritableError.
    """
    if not target:
        raise UsageError("DST is empty", why=EMPTY, next_step="give a DST")
    if "\0" in target:
        raise UsageError("DST holds a NUL byte", file=target, next_step="give another DST")
    with target_errors(target):
        real = os.path.realpath(target)
        if source and not is_url(source):  # opening an empty SRC reports that
            _refuse_source(target, real, os.path.realpath(source), overwrite=overwrite)
        if (os.path.lexists(target) or os.path.lexists(real)) and not compare:
            _refuse_existing(target, real, overwrite=overwrite)
        _require_parent(target, os.path.dirname(real), [os.path.basename(real)])


def _refuse_source(target: str, real: str, source: str, *, overwrite: bool) -> None:
    if _within(real, source):
        relation = "is the source" if real == source else "lies inside the source"
        raise UsageError(
            f"{target} {relation}, which is never written to", file=target, next_step="give a DST outside of SRC"
        )
    if overwrite and _within(source, real):
        raise UsageError(
            f"replacing {target} would delete the source, which lies inside it",
            file=target,
            next_step="give a DST that does not exist yet",
        )


def _refuse_existing(target: str, real: str, *, overwrite: bool) -> None:
    if not overwrite and not is_empty_directory(real):
        raise TargetExistsError(
            f"{target} exists",
            file=target,
            why="fsdpckpt won't replace existing files without --overwrite",
            next_step="give another DST, or add --overwrite to replace it once the new one is complete",
        )
    kind = None
    if _within(os.getcwd(), real):
        kind = "the current directory, or contains it"
    elif _within(os.path.expanduser("~"), real):
        kind = "the home directory, or contains it"
    elif os.path.ismount(real):
        kind = "a mount point"
    elif os.path.exists(real) and not os.path.isdir(real) and not os.path.isfile(real):
        kind = "neither a file nor a directory"
    if kind is not None:
        inside = f", for example {shlex.quote(os.path.join(real, 'converted'))}" if os.path.isdir(real) else ""
        raise TargetExistsError(
            f"{target} is {kind}, which fsdpckpt does not replace",
            file=target,
            why="DST appears in one step, by a rename, and everything that was there would be deleted",
            next_step=f"give a DST that does not exist yet{inside}",
        )


def _require_parent(target: str, parent: str, names: list[str]) -> None:
    """``names``: what will be created below ``parent``; missing directories are added to it."""
    while not os.path.lexists(parent):
        names.append(os.path.basename(parent))
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent):
        raise TargetUnwritableError(
            f"{target} cannot be created: {parent} is not a directory", file=target, next_step="choose another DST"
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        raise TargetUnwritableError(
            f"{target} cannot be created: no permission to write in {parent}",
            file=target,
            why="it belongs to another user, or the file system is mounted read-only",
            next_step="choose another DST",
        )
    limit = _name_limit(parent)
    longest = max(len(os.fsencode(name)) for name in names)
    if longest > limit:
        raise TargetUnwritableError(
            f"{target} cannot be created: a name in it is too long for the file system",
            file=target,
            expected=f"at most {limit} bytes per name",
            found=f"{longest}",
            next_step="choose a shorter DST",
        )


def _name_limit(directory: str) -> int:
    try:
        return os.pathconf(directory, "PC_NAME_MAX")
    except (OSError, ValueError):  # the file system does not say
        return NAME_LIMIT


def _within(path: str, directory: str) -> bool:
    """Whether ``path`` is ``directory`` or lies below it; both are absolute."""
    return os.path.commonpath([path, directory]) == directory
