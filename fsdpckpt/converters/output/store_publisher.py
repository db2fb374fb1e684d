"""Which publisher a target in an object store takes: ``Streamed`` where it can be, else ``Spooled``."""

from __future__ import annotations

import os

from fsdpckpt.converters.output.publisher import Publisher, Request
from fsdpckpt.converters.output.spool import Spool
from fsdpckpt.converters.output.stream_memory import PART, memory_for
from fsdpckpt.converters.output.streamed import Streamed
from fsdpckpt.converters.output.upload import Spooled
from fsdpckpt.errors import SourceError
from fsdpckpt.storage import UPLOADING
from fsdpckpt.storage.parts import takes_parts
from fsdpckpt.storage.remote_dst import refuse_odd_names
from fsdpckpt.storage.remote_store import filesystem_of, is_http
from fsdpckpt.storage.sources import Sources
from fsdpckpt.storage.upload import UPLOADED_LAST


def publisher_for_store(request: Request, *, staged: bool = False) -> Publisher:
    """``publisher_of`` for a target in a store."""
    refuse_odd_names(request.target)  # before a store is opened: some wait for credentials
    if staged:
        return Spooled(request)
    group, streams = request.group, False
    with group.step("choose how to write"), group.heartbeat():
        if group.rank == 0:  # it has the spool, and what it sees of the store is what counts
            streams = _streams(request)
    streams = bool(group.broadcast_object(streams, name="how to write"))
    return Streamed(request) if streams else Spooled(request)


def _streams(request: Request) -> bool:
    options = request.options
    if options.staging is not None or is_http(request.target):
        return False
    try:
        filesystem, _ = filesystem_of(request.target.rstrip("/"))
    except SourceError:  # it is raised again where the target is opened
        return False
    spool = Spool.of(request.target.rstrip("/"), None)
    needed = memory_for(PART, request.group.world_size)
    if not takes_parts(filesystem) or _holds_files(spool.path) or options.max_memory < needed:
        return False
    # A checkpoint in a directory is replaced by a run that has all of the new one. An interrupted run's journals do not
    # say that the directory is still what it left: another machine may have made a checkpoint there since.
    return not options.overwrite or not _is_older_directory(request.target, begun=bool(spool.journals()))


def _is_older_directory(url: str, *, begun: bool) -> bool:
    """Whether there are objects below ``url``, and not of an upload that was ``begun`` and is not complete.

    As far as the store says: an error is raised where it is opened.
    """
    directory = url.rstrip("/")
    with Sources() as sources:
        try:
            entry = sources.stat(directory)
            there = entry is not None and entry.directory
            return there and not (begun and sources.stat(f"{directory}/{UPLOADING}") is not None)
        except SourceError:
            return True


def _holds_files(path: str) -> bool:
    """Whether a run has staged its output at ``path``, beyond the lists that ``Streamed`` keeps there."""
    if os.path.isfile(path):
        return True
    names = (name for _, _, files in os.walk(path) for name in files)
    return any(not name.endswith(UPLOADED_LAST) for name in names)
