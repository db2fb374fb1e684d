"""Tells one checkpoint that cannot be read from several in a directory, of which some cannot.

The rest decides: the directory is read again without what cannot be read. If that finds several checkpoints, what was
left out is one more of them; if it finds one, or parts of one, the error is about that.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from fsdpckpt.errors import FsdpckptError, SeveralCheckpointsError, SourceError
from fsdpckpt.readers.candidates import MAX_CANDIDATES
from fsdpckpt.storage.sources import Sources, relative_path
from fsdpckpt.text import natural, plural

_MOST_UNREAD = 16  # checkpoints: the rest is read once more for each
_DEEPEST = 3  # directories from the source to a checkpoint in it
_MAY_BE_ONE = re.compile(r".*\.(pt|pth|bin|ckpt|safetensors)")  # a file that may be a checkpoint of its own
_NUMBERS = re.compile(r"\d+")


def several_with_unread(
    source: str, error: FsdpckptError, sources: Sources, open_without: Callable[[frozenset[str]], object]
) -> SeveralCheckpointsError | None:
    """The error for the directory ``source`` if it contains several checkpoints, with those that cannot be read; None
    if ``error`` is about the only one.

    ``open_without``: reads the directory without some paths, relative to it, and raises what is wrong with the rest.
    """
    for depth in range(1, _DEEPEST + 1):
        several = _several_at(depth, source, error, sources, open_without)
        if several is not None:
            return several
    return None


def _several_at(
    depth: int,
    source: str,
    error: FsdpckptError,
    sources: Sources,
    open_without: Callable[[frozenset[str]], object],
) -> SeveralCheckpointsError | None:
    """``depth``: how many directories below ``source`` the checkpoints are."""
    unread: dict[str, str] = {}  # what is wrong with each, by its path from the source
    while len(unread) < _MOST_UNREAD:
        path = _path_of(error, source, depth, sources)
        if path is None or path in unread:
            return None
        unread[path] = error.what
        try:
            open_without(frozenset(unread))
        except SeveralCheckpointsError as several:
            return _with_unread(source, several, unread)
        except SourceError as another:
            error = another
        except FsdpckptError:
            return None
        else:
            return None
    return None


def _path_of(error: FsdpckptError, source: str, depth: int, sources: Sources) -> str | None:
    """The directory or file, ``depth`` below ``source``, that ``error`` is about, relative to ``source``; None if it
    cannot be a checkpoint of its own.
    """
    above = f"{source.rstrip('/')}/"
    if error.file is None or not error.file.startswith(above):
        return None
    words = relative_path(error.file, source).split("/")[:depth]
    path = "/".join(words)
    entry = sources.stat(above + path)
    if len(words) < depth or entry is None:
        return None
    if entry.directory:
        return path
    beside = [each.name for each in sources.list_directory(entry.path.rpartition("/")[0]) if not each.directory]
    # Files that differ in a number may be those of ranks.
    alike = [name for name in beside if _NUMBERS.sub("#", name) == _NUMBERS.sub("#", entry.name)]
    return path if _MAY_BE_ONE.fullmatch(entry.name) and len(alike) == 1 else None


def _with_unread(
    source: str, several: SeveralCheckpointsError, unread: dict[str, str]
) -> SeveralCheckpointsError | None:
    """``several`` with the checkpoints that cannot be read."""
    found = sorted((*several.checkpoints, *(f"{source.rstrip('/')}/{path}" for path in unread)), key=natural)
    if len(found) - len(unread) < 2:
        return None
    return SeveralCheckpointsError(
        f"{source} contains {plural(len(found), 'checkpoint')}, and {len(unread)} of them cannot be read",
        details=found,
        most_shown=MAX_CANDIDATES,
        why="; ".join([*unread.values()][:MAX_CANDIDATES]),
        next_step=several.next_step,
        file=source,
        checkpoints=found,
    )
