"""Says what ``--overwrite`` may delete: a file, or a directory of one checkpoint and files beside it.

A file, or the directory that files lie in, is meant when it is named. A directory above it (``runs`` for
``runs/step-1000``, a project, a home) is a typing mistake: that, and a directory of several checkpoints, is refused.
"""

from __future__ import annotations

import os
import posixpath
import re
import shlex
from collections.abc import Iterator
from itertools import islice

from fsdpckpt.errors import FsdpckptError, NeedsInformationError, TargetExistsError
from fsdpckpt.readers.beside import read_manifest
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.readers.protocol import MANIFEST, UNITS
from fsdpckpt.storage.local import target_errors
from fsdpckpt.storage.protocols import is_url
from fsdpckpt.storage.sources import Sources

__all__ = ["require_replaceable"]

_SHOWN = 5  # files that are named in a refusal
# What describes the data of a checkpoint, in whichever of its directories: read, but no data file itself.
_DESCRIPTIONS = (MANIFEST, UNITS, ".metadata")
_DESCRIBING = (".safetensors.index.json", ".distcp")
# What NFS (a file that was deleted while it was open) and macOS leave in any directory: not data of the user.
_LEFT_BEHIND = re.compile(r"\.nfs[0-9a-f]{16,}|\.DS_Store")


def require_replaceable(target: str) -> None:
    """Raises TargetExistsError when deleting ``target``, a path or a URL, would delete more than one checkpoint.

    In a directory, that is a directory below it that is no part of the checkpoint there (by its ``fsdpckpt.json``, or
    as it is read), or a second checkpoint. Files right in it go with it.
    """
    with Sources() as sources, target_errors(target):
        where = target.rstrip("/") if is_url(target) else os.path.realpath(target)
        entry = sources.stat(where)
        if entry is None or not entry.directory:
            return
        known = _listed(where, sources)
        if known is None:
            known = _parts(where, target, sources)
        unrelated = list(islice(_unrelated(where, known, sources), _SHOWN + 1))
    if unrelated:
        raise _refused(
            f"{target} holds more than a checkpoint: --overwrite does not replace that",
            target,
            [f"no part of the checkpoint: {path}" for path in unrelated[:_SHOWN]]
            + (["and more"] if len(unrelated) > _SHOWN else []),
        )


def _parts(directory: str, target: str, sources: Sources) -> set[str]:
    """The files of the checkpoint in ``directory``, by its metadata alone; none where none can be read."""
    try:
        checkpoint = open_checkpoint(directory, sources=sources, locate=False)
    except NeedsInformationError as error:
        what = f"{target} is not one checkpoint: --overwrite does not replace that"
        raise _refused(what, target, error.details) from error
    except FsdpckptError:
        return set()
    if checkpoint.directory and checkpoint.directory.rstrip("/") != directory.rstrip("/"):
        what = f"{target} is not a checkpoint, one lies below it: --overwrite does not replace that"
        raise _refused(what, target, [checkpoint.directory])
    return {posixpath.relpath(file.path, directory) for file in checkpoint.files}


def _refused(what: str, target: str, details: list[str] | tuple[str, ...]) -> TargetExistsError:
    remove = "remove it with the store's own tools" if is_url(target) else f"rm -r {shlex.quote(target)}"
    return TargetExistsError(
        what,
        details=details,
        file=target,
        why="everything there would be deleted",
        next_step=f"give a DST that does not exist yet; or, when nothing there is needed, remove it yourself: {remove}",
    )


def _listed(directory: str, sources: Sources) -> set[str] | None:
    """The files that ``fsdpckpt.json`` says were written with it, by their paths below ``directory``."""
    names = [entry.name for entry in sources.list_directory(directory)]
    manifest, _ = read_manifest(directory, names, sources)
    return {MANIFEST, *manifest.files} if manifest is not None and manifest.files else None


def _unrelated(directory: str, known: set[str], sources: Sources) -> Iterator[str]:
    """Files in directories below ``directory`` that are neither ``known`` nor describe what is known beside them."""
    folders = {posixpath.dirname(path) for path in known}
    for path in _files(directory, sources):
        folder, name = posixpath.split(path)
        describes = folder in folders and (name in _DESCRIPTIONS or name.endswith(_DESCRIBING))
        if folder and path not in known and not describes:
            yield path


def _files(directory: str, sources: Sources) -> Iterator[str]:
    """What a user may miss below ``directory``, by relative path: files and links, not directories."""
    for path in _everything(directory, sources):
        if not _LEFT_BEHIND.fullmatch(posixpath.basename(path)):
            yield path


def _everything(directory: str, sources: Sources) -> Iterator[str]:
    """All but real directories."""
    if is_url(directory):
        for entry in sources.list_directory(directory):
            below = (f"{entry.name}/{path}" for path in _everything(entry.path, sources))
            yield from below if entry.directory else [entry.name]
        return
    for folder, directories, names in os.walk(directory, onerror=_raise):
        links = [name for name in directories if os.path.islink(os.path.join(folder, name))]
        for name in (*names, *links):
            yield posixpath.relpath(os.path.join(folder, name), directory)


def _raise(error: OSError) -> None:
    raise error
