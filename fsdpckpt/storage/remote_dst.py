"""Opens a DST in an object store, and refuses what may not be written to or replaced.

``target_checks`` is the counterpart for paths.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from fsdpckpt import flags
from fsdpckpt.errors import SourceError, TargetExistsError, TargetUnwritableError, UsageError
from fsdpckpt.storage.parts import package_of, request_target
from fsdpckpt.storage.protocols import is_url
from fsdpckpt.storage.remote_store import filesystem_of, is_http
from fsdpckpt.storage.target_checks import TargetState
from fsdpckpt.storage.upload import RemoteTarget


def open_target(url: str, source: str, *, state: TargetState) -> RemoteTarget:
    """The DST at ``url``, if what is there is what ``state`` allows.

    Raises UsageError when it contains or lies in ``source``, or is no name; TargetExistsError when it is complete and
    not to be overwritten, TargetUnwritableError when nothing can be written there.
    """
    target = url.rstrip("/")
    refuse_odd_names(url)
    if is_http(target):
        raise TargetUnwritableError(
            f"{url}: fsdpckpt reads from web servers, and does not write to them",
            file=url,
            next_step="give a path, or the URL of an object store (s3://, gs://, abfs://)",
        )
    require_apart_from(url, source, target)
    try:
        filesystem, root = filesystem_of(target, examples="s3://, gs://, ...")
    except SourceError as error:  # the same is true of a target
        raise TargetUnwritableError(error.what, why=error.why, file=url, next_step=error.next_step) from error
    root = root.rstrip("/")
    require_apart_in_store(url, source, filesystem, root)
    filesystem.invalidate_cache()
    listed = request_target(lambda: list(_find(filesystem, root)), url=url, action="listing it")
    objects = (name for name in listed if not name.endswith("/"))  # else it is a directory's placeholder
    names = tuple(name[len(root) :].lstrip("/") for name in objects)
    remote = RemoteTarget(target, filesystem, root, names)
    if names and not remote.interrupted and state is not TargetState.COMPLETE_TO_COMPARE:
        _refuse_existing(remote, overwrite=state is TargetState.REPLACEABLE)
    return remote


def _find(filesystem: Any, path: str) -> Iterator[str]:
    """The objects at and below ``path``.

    fsspec's own ``find``, which these packages replace, takes a directory for empty if listing it fails.
    """
    if package_of(filesystem) in ("s3fs", "gcsfs", "adlfs"):
        yield from map(str, filesystem.find(path))
        return
    with suppress(FileNotFoundError):
        is_directory = filesystem.info(path)["type"] == "directory"
        for info in filesystem.ls(path, detail=True) if is_directory else ({"name": path, "type": "file"},):
            if info["type"] != "directory":
                yield str(info["name"])
            elif info["name"].rstrip("/") != path:
                yield from _find(filesystem, info["name"].rstrip("/"))


def refuse_odd_names(url: str) -> None:
    """Raises UsageError for ``s3://bucket//x`` and ``s3://bucket/./x``: a disk has no such names, a store has."""
    scheme, _, rest = url.rstrip("/").partition("://")
    names = rest.split("/")
    if odd := [name for name in names[1:] if name in ("", ".", "..")]:
        path = "/".join(names[1:]).lstrip("/")
        plain = f"{names[0]}{posixpath.normpath(f'/{path}')}".rstrip("/")
        raise UsageError(
            f"{url} has {odd[0]} for a name in it" if odd[0] else f"{url} has an empty name in it",
            file=url,
            why="a store takes it for a name like any other, so that other programs may look elsewhere",
            next_step=f"give {scheme}://{plain}",
        )


def require_apart_from(url: str, source: str, target: str, *, above: bool = True) -> None:
    """Raises UsageError if ``target``, which messages call ``url``, is ``source`` or lies in it; with ``above`` also if
    it contains it.
    """
    source_prefix, target_prefix = source.rstrip("/") + "/", target.rstrip("/") + "/"
    relation = ""
    if source_prefix == target_prefix:
        relation = "is the source, which is never written to"
    elif target_prefix.startswith(source_prefix):
        relation = "lies inside the source, which is never written to"
    elif above and source_prefix.startswith(target_prefix):
        relation = "contains the source"
    if relation:
        raise UsageError(f"{url} {relation}", file=url, next_step="give a DST outside of SRC")


def require_apart_in_store(url: str, source: str, filesystem: Any, root: str, *, above: bool = True) -> None:
    """``require_apart_from`` for the place ``root`` of ``filesystem``: s3:// and s3a:// name one object."""
    if is_url(source):
        other, name = filesystem_of(source)
        if type(other) is type(filesystem):
            require_apart_from(url, name, root, above=above)


def _refuse_existing(remote: RemoteTarget, *, overwrite: bool) -> None:
    if not overwrite:
        raise TargetExistsError(
            f"{remote.url} already exists",
            file=remote.url,
            why=f"fsdpckpt won't replace existing files without {flags.overwrite}",
            next_step=f"give another DST, or add {flags.overwrite} to replace it",
        )
    if "/" not in remote.root:
        raise TargetExistsError(
            f"{remote.url} is a whole bucket: {flags.overwrite} does not replace that",
            file=remote.url,
            why="everything in it would be deleted",
            next_step="give a DST that does not exist yet",
        )
