"""Looks at what is at DST: refuses one that exists, lies in SRC or cannot be created, and lists what is replaced.

Nothing is deleted that was not listed before.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import TypeAlias

from fsdpckpt.errors import EMPTY, TargetExistsError, TargetUnwritableError, UsageError
from fsdpckpt.storage import FileIdentity, identity_of_status, is_url
from fsdpckpt.storage.local import target_errors
from fsdpckpt.text import bytes_text

Contents: TypeAlias = "Mapping[str, FileIdentity]"
"""The files and links at and below a path, by their paths below it; "" when the path is a file itself."""

NAME_LIMIT = 255  # bytes of one file name on every file system in use; some allow fewer

LINK = "link"
"""The tag of a symbolic link."""

# What NFS (a file that was deleted while it was open) and macOS put into any directory: not data of the user.
_SYSTEM_FILES = re.compile(r"\.nfs[0-9a-f]{16,}|\.DS_Store")


def is_system_file(path: str) -> bool:
    """Whether the file system made this file, so that nobody misses it."""
    return _SYSTEM_FILES.fullmatch(os.path.basename(path)) is not None


def contents_of(path: str) -> dict[str, FileIdentity]:
    """What is at the local ``path``, which is not followed when it is a link; empty when nothing is there."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return {}
    if not stat.S_ISDIR(status.st_mode):
        return {"": _identity("", status)}
    return {name: _identity(name, os.lstat(os.path.join(path, name))) for name in files_below(path)}


def _identity(name: str, status: os.stat_result) -> FileIdentity:
    identity = identity_of_status(name, status)
    return replace(identity, tag=LINK) if stat.S_ISLNK(status.st_mode) else identity


def files_below(directory: str) -> Iterator[str]:
    """The relative paths of everything but directories; a link to a directory counts as a file."""
    for folder, directories, names in os.walk(directory, onerror=_raise):
        links = [name for name in directories if os.path.islink(os.path.join(folder, name))]
        for name in (*names, *links):
            yield os.path.relpath(os.path.join(folder, name), directory)


def _raise(error: OSError) -> None:
    raise error


def added_since(before: Contents, now: Contents) -> list[str]:
    """The files that came or changed after ``before``, in order."""
    return sorted(name for name, identity in now.items() if before.get(name) != identity and not is_system_file(name))


def is_empty_directory(path: str) -> bool:
    """Whether ``path`` is a local directory with nothing in it."""
    try:
        with os.scandir(path) as entries:
            return next(entries, None) is None
    except OSError:  # nothing is there, it is a file, or nobody may look
        return False


def existing_and_missing(directory: str) -> tuple[str, list[str]]:
    """``directory`` or the first one above it that exists, and the ones below that which do not, deepest first."""
    missing = []
    while directory and not os.path.lexists(directory):
        missing.append(directory)
        directory = os.path.dirname(directory)
    return directory or os.curdir, missing


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
    _refuse_tilde(target)
    with target_errors(target):
        real = os.path.realpath(target)
        if source and not is_url(source):  # opening an empty SRC reports that
            _refuse_source(target, real, os.path.realpath(source), overwrite=overwrite)
        if (os.path.lexists(target) or os.path.lexists(real)) and not compare:
            _refuse_existing(target, real, overwrite=overwrite)
        _require_parent(target, real)


def _refuse_tilde(target: str) -> None:
    """``~/out`` in quotes, or in Python, is a directory called ``~``: hardly what anybody wants."""
    home = target.partition("/")[0]
    expanded = os.path.expanduser(target)
    if home.startswith("~") and expanded != target and not os.path.lexists(home):
        raise UsageError(
            f"DST begins with {home}, which only a shell replaces, and only where it is not quoted",
            file=target,
            next_step=f"give {shlex.quote(expanded)}, or {shlex.quote(f'./{target}')} for a directory called {home}",
        )


def _refuse_source(target: str, real: str, source: str, *, overwrite: bool) -> None:
    if _is_within(real, source):
        relation = "is the source" if real == source else "lies inside the source"
        raise UsageError(
            f"{target} {relation}, which is never written to", file=target, next_step="give a DST outside of SRC"
        )
    if overwrite and _is_within(source, real):
        raise UsageError(
            f"replacing {target} would delete the source, which is inside it",
            file=target,
            next_step="give a DST that does not exist yet",
        )


def refuse_links_into(target: str, source: str, opened: Iterable[str]) -> None:
    """Refuse to replace ``target`` if links in the local ``source`` lead into it. ``opened``: every file that was read;
    those of another checkpoint, such as a reference, may be in DST.

    Raises UsageError.
    """
    if os.path.isdir(source):
        below = os.path.join(source, "")
        listed = (os.path.join(folder, name) for folder, *names in os.walk(source) for name in chain(*names))
        paths = list(filter(os.path.islink, listed))
        paths += [path for path in opened if path.startswith(below)]  # also what is behind a link to a directory
    else:  # an index lies beside its shards
        paths = [path for path in opened if os.path.dirname(path) == os.path.dirname(source)]
    real = os.path.realpath(target)
    links = {path: inside for path in paths if _is_within(inside := os.path.realpath(path), real)}
    if links:
        raise UsageError(
            f"replacing {target} would delete data of the source, which has links into it",
            details=[f"{path} leads to {inside}" for path, inside in links.items()],
            file=target,
            next_step="give a DST that does not exist yet",
        )


def _refuse_existing(target: str, real: str, *, overwrite: bool) -> None:
    kind = None
    if _is_within(os.getcwd(), real):
        kind = "the current directory, or contains it"
    elif _is_within(os.path.realpath(os.path.expanduser("~")), real):
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
    if not overwrite and not is_empty_directory(real):
        leads = f": it is a link to {real}" if os.path.islink(target) else ""
        raise TargetExistsError(
            f"{target} exists{leads}",
            file=target,
            why="fsdpckpt won't replace existing files without --overwrite",
            next_step="give another DST, or add --overwrite to replace it once the new one is complete",
        )


def _require_parent(target: str, real: str) -> None:
    """Raises TargetUnwritableError unless ``real``, and the missing directories above it, can be created."""
    parent, missing = existing_and_missing(os.path.dirname(real))
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
    longest = max(len(os.fsencode(os.path.basename(path))) for path in (real, *missing))
    if longest > limit:
        raise TargetUnwritableError(
            f"{target} cannot be created: a name in it is too long for the file system",
            file=target,
            expected=f"at most {limit} bytes per name",
            found=f"{longest}",
            next_step="choose a shorter DST",
        )


def space_error(target: str, nbytes: int, free: int) -> TargetUnwritableError:
    """The error of a ``target`` that takes ``nbytes`` bytes where ``free`` bytes are free."""
    return TargetUnwritableError(
        f"not enough free space for {target}",
        file=target,
        expected=bytes_text(nbytes),
        found=f"{bytes_text(free)} free",
        next_step="make room, or choose a DST on another file system",
    )


def _name_limit(directory: str) -> int:
    try:
        return os.pathconf(directory, "PC_NAME_MAX")
    except (OSError, ValueError):  # the file system does not say
        return NAME_LIMIT


def _is_within(path: str, directory: str) -> bool:
    """Whether ``path`` is ``directory`` or lies below it; both are absolute."""
    return os.path.commonpath([path, directory]) == directory
