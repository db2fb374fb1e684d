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
from enum import Enum
from itertools import chain
from typing import TypeAlias

from fsdpckpt import flags
from fsdpckpt.errors import EMPTY, TargetExistsError, TargetUnwritableError, UsageError
from fsdpckpt.storage.hidden import NAME_LIMIT, hidden_place_of
from fsdpckpt.storage.local_target import target_errors
from fsdpckpt.storage.places import DirectoryTree, is_mount_point, is_within
from fsdpckpt.storage.protocols import FileIdentity, identity_of_status, is_url, require_complete_url
from fsdpckpt.text import bytes_text

Contents: TypeAlias = "Mapping[str, FileIdentity]"
"""The files and links at and below a path, by their paths below it; "" when the path is a file itself."""

LINK = "link"
"""The tag of a symbolic link."""


class TargetState(Enum):
    """What may be at DST when a run begins."""

    ABSENT = "nothing, or an empty directory"
    REPLACEABLE = "a checkpoint that is deleted once the new one is complete"
    COMPLETE_TO_COMPARE = "the output of this command, which is compared byte by byte once the plan is known"


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
    return {name: _identity(name, os.lstat(os.path.join(path, name))) for name in names_below(path)}


def _identity(name: str, status: os.stat_result) -> FileIdentity:
    identity = identity_of_status(name, status)
    return replace(identity, tag=LINK) if stat.S_ISLNK(status.st_mode) else identity


def names_below(directory: str) -> Iterator[str]:
    """The relative paths of everything but directories; a link to a directory counts as a file."""
    for folder, directories, names in os.walk(directory, onerror=_raise):
        links = [name for name in directories if os.path.islink(os.path.join(folder, name))]
        for name in (*names, *links):
            yield os.path.relpath(os.path.join(folder, name), directory)


def _raise(error: OSError) -> None:
    raise error


def added_since(before: Contents, now: Contents) -> list[str]:
    """The files that came or changed after ``before``, in order."""
    changed = [name for name, identity in now.items() if before.get(name) != identity]
    return sorted(name for name in changed if not is_system_file(name))


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


def check_target(target: str, source: str, *, state: TargetState) -> None:
    """Refuse a DST that exists although ``state`` does not allow it, lies in SRC, or cannot be created. Nothing is
    written.

    Raises UsageError, TargetExistsError or TargetUnwritableError.
    """
    if target == "-":
        raise UsageError(
            "- is not standard output: DST is a file or a directory, written at many positions and then checked",
            next_step="give DST a path (a file that is called so is ./-)",
        )
    if not target:
        raise UsageError("DST is empty", why=EMPTY, next_step="give a DST")
    if "\0" in target:
        raise UsageError("DST contains a NUL byte", file=target, next_step="give another DST")
    _refuse_tilde(target)
    require_complete_url(target, "DST")
    with target_errors(target):
        real = os.path.realpath(target)
        local = bool(source) and not is_url(source)  # opening an empty SRC reports that
        if local:
            require_outside(target, source)
            _refuse_hidden(target, source)
        overwrite = state is TargetState.REPLACEABLE
        if local and overwrite and is_within(source, real):
            raise _holds_source(target)
        if (os.path.lexists(target) or os.path.lexists(real)) and state is not TargetState.COMPLETE_TO_COMPARE:
            _refuse_existing(target, real, overwrite=overwrite)
        if local and overwrite and DirectoryTree(real).holds(source):  # not earlier: nobody wants a walk through / or ~
            raise _holds_source(target)
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


def require_outside(path: str, source: str, *, what: str = "DST") -> None:
    """Raises UsageError if ``path``, which is to be written, is the local ``source`` or lies in it, by whatever path
    it is reached. ``what``: how messages call it.
    """
    tree = DirectoryTree(source)
    if not tree.holds(path):
        return
    relation = "is the source" if is_within(source, path) else "lies inside the source"
    visibly = os.path.commonpath([os.path.realpath(path), tree.path]) == tree.path
    raise UsageError(
        f"{path} {relation}{'' if visibly else f' ({source}) by another path'}, which is never written to",
        file=path,
        why=None if visibly else "both paths lead to one directory: a bind mount, or a file system mounted twice",
        next_step=f"give a {what} outside of SRC",
    )


def require_source_apart(target: str, source: str, *, overwrite: bool) -> None:
    """Raises UsageError if writing, or with ``overwrite`` replacing, ``target`` would touch the local ``source``.

    Each machine that writes asks this for itself: its paths may lead elsewhere than those of others.
    """
    require_outside(target, source)
    if overwrite and DirectoryTree(target).holds(source):
        raise _holds_source(target)


def require_outside_opened(target: str, source: str, opened: Iterable[str]) -> None:
    """Raises UsageError if ``target`` lies in a directory that a link in the directory ``source`` leads to, and from
    which the source was read. ``opened``: every file that was read.
    """
    above, below = os.path.realpath(source), os.path.join(source, "")
    folders = {os.path.realpath(os.path.dirname(path)) for path in opened if path.startswith(below)}
    for folder in sorted(folders):
        if os.path.commonpath([folder, above]) != above and DirectoryTree(folder).holds(target):
            raise UsageError(
                f"{target} lies inside {folder}, which is a part of the source: a link in {source} leads there",
                file=target,
                next_step="give a DST outside of SRC and of what its links lead to",
            )


def _refuse_hidden(target: str, source: str) -> None:
    """What a run keeps beside DST is removed by the next one: nothing is converted from there."""
    place = hidden_place_of(target, source)
    if place is not None:
        raise UsageError(
            f"{source} is part of what an interrupted run left for {target}, which this run would remove",
            file=place,
            next_step=f"give another DST, or move {source} out of {place}",
        )


def require_apart(directory: str, source: str) -> None:
    """Raises UsageError if the ``directory`` to upload from lies in the local ``source``, or the source in it."""
    require_outside(directory, source, what=f"{flags.staging('DIR')}")
    if is_within(source, directory):
        raise UsageError(
            f"{source} is part of what an interrupted upload left in {directory}, which this run would remove",
            file=directory,
            next_step=f"give another {flags.staging('DIR')}, or move {source} out of {directory}",
        )


def _holds_source(target: str) -> UsageError:
    return UsageError(
        f"replacing {target} would delete the source, which is inside it",
        file=target,
        next_step="give a DST that does not exist yet",
    )


def refuse_links_into(target: str, source: str, opened: Iterable[str], *, units: str | None = None) -> None:
    """Refuse to replace ``target`` if links in the local ``source`` lead into it, or if it holds the file ``units``,
    without which the source may not be understood again.

    ``opened``: every file that was read; those of another checkpoint, such as a reference, may be in DST.

    Raises UsageError.
    """
    if os.path.isdir(source):
        below = os.path.join(source, "")
        listed = (os.path.join(folder, name) for folder, *names in os.walk(source) for name in chain(*names))
        paths = list(filter(os.path.islink, listed))
        paths += [path for path in opened if path.startswith(below)]  # also what is behind a link to a directory
    else:  # an index lies beside its shards
        paths = [path for path in opened if os.path.dirname(path) == os.path.dirname(source)]
    tree = DirectoryTree(target)
    links = {path: os.path.realpath(path) for path in paths if tree.holds(path)}
    if links:
        raise UsageError(
            f"replacing {target} would delete data of the source, which has links into it",
            details=[f"{path} leads to {inside}" for path, inside in links.items()],
            file=target,
            next_step="give a DST that does not exist yet",
        )
    if units is not None and tree.holds(units):
        raise UsageError(
            f"replacing {target} would delete {units}, which says what the source holds",
            file=target,
            next_step=f"copy that file out of DST and give the copy with {flags.units}, or give a DST that does not "
            "exist yet",
        )


def _refuse_existing(target: str, real: str, *, overwrite: bool) -> None:
    kind = None
    if is_within(os.curdir, real):
        kind = "the current directory, or contains it"
    elif is_within(os.path.expanduser("~"), real):
        kind = "the home directory, or contains it"
    elif is_mount_point(real):
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
            f"{target} already exists{leads}",
            file=target,
            why=f"fsdpckpt won't replace existing files without {flags.overwrite}",
            next_step=f"give another DST, or add {flags.overwrite} to replace it once the new one is complete",
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
