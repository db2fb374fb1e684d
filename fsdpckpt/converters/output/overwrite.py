"""Decides what ``--overwrite`` may delete: one checkpoint in which every file belongs to it.

A file belongs to it if the readers open it, ``fsdpckpt.json`` lists it, or it is a side file that a framework or a
Hugging Face library keeps in a checkpoint. Anything else (a project, notes, results, a link, a file that is not a
checkpoint) is the user's: the error names it, and nothing is deleted.
"""

from __future__ import annotations

import os
import posixpath
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from fsdpckpt import flags
from fsdpckpt.errors import FsdpckptError, NeedsInformationError, SourceError, TargetExistsError, to_copy
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.files import paths_in
from fsdpckpt.producers.recognition import belongs, flavor_named
from fsdpckpt.producers.table import EXPORT_DIRECTORIES
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.readers.manifest import read_manifest
from fsdpckpt.readers.protocol import MANIFEST, Locate
from fsdpckpt.readers.side_files import describes_model
from fsdpckpt.storage import FileIdentity, is_url
from fsdpckpt.storage.local_target import target_errors
from fsdpckpt.storage.sources import Sources
from fsdpckpt.storage.target_checks import LINK, Contents, added_since, contents_of, is_system_file

_MAX_LISTED = 10  # files in an error
# Files that describe a checkpoint's data and are read, but hold none. Or data of an older save.
_DESCRIBING = re.compile(r"fsdpckpt\.json|units\.json|\.metadata|.*\.(safetensors|bin)\.index\.json|__\d+_\d+\.distcp")
# torch files beside a model and an optimizer that frameworks and training scripts keep there. Any other one may be a
# data set or a result, although a reader can open it.
_TORCH = (".pt", ".pth", ".bin", ".ckpt", ".tar", ".pkl")
_TRAINING_STATE = re.compile(
    r"model|optim|state|weights|params|sched|rng|random|scaler|sampler|loader|extra|meta|ema|adapter|lora|rank|shard",
    re.IGNORECASE,
)


def find_replaceable(target: str) -> Contents:
    """What is at ``target``, a path or a URL, if all of it may be deleted; empty if nothing is there.

    Raises TargetExistsError if it is neither empty nor a checkpoint, or holds a file that does not belong to one.
    """
    with Sources() as sources, target_errors(target):
        where = target.rstrip("/") if is_url(target) else os.path.realpath(target)
        contents = _contents_of_url(where, sources) if is_url(where) else contents_of(where)
        present = [name for name in contents if not is_system_file(name)]
        if not present or (present == [""] and not contents[""].nbytes):
            return contents
        try:
            foreign = list(_foreign_files(where, target, contents, sources))
        except SourceError as error:
            raise _refused_error(f"{target} cannot be read", target, [error.what], why=_ONLY_ONE) from error
    if foreign:
        raise foreign_files_error(target, foreign)
    return contents


def still_replaceable(target: str, before: Contents) -> Contents:
    """What is at ``target`` now. Checks it again if it differs from ``before``."""
    with target_errors(target):
        now = contents_of(os.path.realpath(target))
    return now if not added_since(before, now) else find_replaceable(target)


@contextmanager
def explain_why_overwrite_is_refused(target: str) -> Iterator[None]:
    """If an error in the block suggests ``--overwrite`` and that would be refused for ``target``, make the error say
    why.
    """
    try:
        yield
    except TargetExistsError as error:
        if f"add {flags.overwrite!s}" in (error.next_step or ""):
            try:
                find_replaceable(target)
            except FsdpckptError as refused:
                error.details, error.next_step = refused.details, refused.next_step
                error.why = f"fsdpckpt would not replace it even with {flags.overwrite}: {refused.what}"
        raise


def foreign_files_error(target: str, names: Iterable[str]) -> TargetExistsError:
    """The error for files at ``target`` that do not belong to a checkpoint. ``names``: their paths below it."""
    return _refused_error(
        f"{target} contains files that do not belong to a checkpoint, and {flags.overwrite} would delete them",
        target,
        _listed(names),
        why=f"{flags.overwrite} replaces a checkpoint, and nothing else",
    )


def _foreign_files(where: str, target: str, contents: Contents, sources: Sources) -> Iterator[str]:
    """The files of ``contents``, at ``where``, that do not belong to the checkpoint there.

    Raises TargetExistsError if there is no checkpoint, or several.
    """
    if "" in contents:
        _open(where, target, sources, contents)
        return
    names = [name for name in contents if "/" not in name]
    manifest = read_manifest(where, names, sources).manifest
    checkpoint = None
    if manifest is not None and manifest.files:
        parts = {MANIFEST, *manifest.files}
    else:
        checkpoint = _open(where, target, sources, contents)
        opened = {posixpath.relpath(path, where) for path in paths_in(checkpoint.files)}
        parts = {name for name in opened if _is_training_state(posixpath.basename(name))} or opened
    flavor = flavor_named(checkpoint.flavor) if checkpoint is not None else None
    folders = {"", *EXPORT_DIRECTORIES, *(posixpath.dirname(name) for name in parts)}
    for name in contents:
        folder, base = posixpath.split(name)
        described = folder in folders and (_DESCRIBING.fullmatch(base) or describes_model(base))
        part = name in parts or described or belongs(flavor, name) or is_system_file(name)
        if not part or contents[name].tag == LINK:
            yield name


def _is_training_state(name: str) -> bool:
    return not name.endswith(_TORCH) or _TRAINING_STATE.search(name) is not None


def _open(where: str, target: str, sources: Sources, contents: Contents) -> Checkpoint:
    """Open the checkpoint at ``where``, reading only its metadata."""
    files = _listed(name or posixpath.basename(where) for name in contents)
    try:
        checkpoint = open_checkpoint(where, sources=sources, locate=Locate.NOTHING)
    except NeedsInformationError as error:
        raise _refused_error(
            f"{target} is not one checkpoint", target, error.details or files, why=_ONLY_ONE
        ) from error
    except FsdpckptError as error:
        raise _refused_error(f"{target} is not a checkpoint", target, files, why=error.what) from error
    if checkpoint.origin.directory and checkpoint.origin.directory.rstrip("/") != where:
        what = f"{target} is not a checkpoint, it contains one"
        raise _refused_error(what, target, [checkpoint.origin.directory], why=_ONLY_ONE)
    return checkpoint


def _listed(names: Iterable[str]) -> list[str]:
    """The first of ``names``, and how many more there are."""
    ordered = sorted(names)
    more = len(ordered) - _MAX_LISTED
    return [*ordered[:_MAX_LISTED], *([f"and {more} more"] if more > 0 else [])]


_ONLY_ONE = f"{flags.overwrite} replaces one checkpoint, and everything at DST would be deleted"


def _refused_error(what: str, target: str, details: Iterable[str], *, why: str) -> TargetExistsError:
    new = "give a DST that does not exist yet"
    old = target.rstrip("/")
    move = to_copy(f"{new}, or move what is there out of the way", f"mv {shlex.quote(old)} {shlex.quote(old + '.old')}")
    return TargetExistsError(
        what,
        details=tuple(details),
        file=target,
        why=why,
        next_step=f"{new}, or remove it with the store's own tools" if is_url(target) else move,
    )


def _contents_of_url(url: str, sources: Sources) -> dict[str, FileIdentity]:
    entry = sources.stat(url)
    if entry is None:
        return {}
    if not entry.directory:
        return {"": FileIdentity("", entry.nbytes)}
    return {name: FileIdentity(name, file.nbytes) for name, file in sources.files_below(url)}
