"""A conversion whose DST is in an object store: converted on a local disk, checked there, then uploaded.

Staged and not streamed, because the check before anything is visible, ``--verify full`` and ``--resume`` need the whole
output at hand, and a zip file's checksums stand before the data that they are of. It takes DST's size of local disk.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

from fsdpckpt.converters.delivery_stage import Stage, is_there
from fsdpckpt.converters.replaceable import require_replaceable
from fsdpckpt.converters.report import Report
from fsdpckpt.converters.resumption import is_resumable, say_staged
from fsdpckpt.errors import Leftover, TargetUnwritableError, attach_leftover
from fsdpckpt.ir.checkpoint import Note
from fsdpckpt.options import ConvertOptions, VerifyLevel
from fsdpckpt.progress import Progress
from fsdpckpt.storage.protocols import is_url
from fsdpckpt.storage.remote_store import RemoteStore
from fsdpckpt.storage.upload import RemoteTarget, Sending, open_target

__all__ = ["compare", "deliver", "delivered", "for_staging", "open_for", "say_converted"]

BLOCK = 4 << 20  # bytes compared at once
_MAKE_ROOM = "make room there, or name a local directory that has it: --staging DIR"


class Convert(Protocol):
    """The conversion to a local DST."""

    def __call__(self, source: str, target: str, options: ConvertOptions, progress: Progress) -> Report: ...


def deliver(source: str, target: str, options: ConvertOptions, progress: Progress, *, convert: Convert) -> Report:
    """Convert ``source`` to the URL ``target`` by way of ``options.staging``, or the system's directory for such files.

    Raises what ``convert`` and ``open_target`` raise. When it fails after the conversion, the local output stays for
    ``--resume``, and readers refuse what was uploaded so far.
    """
    begun = time.monotonic()
    remote = open_for(target, source, options)
    stage = Stage.of(remote.url, options.staging)
    local = for_staging(options)
    if options.dry_run:
        return delivered(convert(source, stage.path, local, progress), target, stage, begun)
    with stage.locked(resume=options.resume) as upload:
        try:
            report = convert(source, stage.path, local, progress)
        except TargetUnwritableError as error:
            error.next_step, error.run_again = _MAKE_ROOM, False
            raise
        try:
            _upload(stage, upload, remote, options, progress)
        except BaseException as error:
            _say(error, stage)
            raise
        stage.remove()
    return delivered(report, target, stage, begun)


def open_for(target: str, source: str, options: ConvertOptions) -> RemoteTarget:
    """``target``, if it may be written as ``options`` ask. Raises what ``open_target`` does, TargetExistsError."""
    remote = open_target(target, source, overwrite=options.overwrite, resume=options.resume)
    if options.overwrite and not remote.interrupted:
        require_replaceable(remote.url)
    return remote


def for_staging(options: ConvertOptions) -> ConvertOptions:
    """``options`` of the conversion to a local directory, which is this program's own."""
    return replace(options, staging=None, overwrite=not options.resume)


def _upload(stage: Stage, upload: str, remote: RemoteTarget, options: ConvertOptions, progress: Progress) -> None:
    files = stage.files()
    progress.begin("upload", sum(os.path.getsize(path) for path in files.values()))
    remote.upload(
        files,
        Sending(
            memory=options.max_memory,
            sent=progress.advance,
            there=partial(is_there, stage.arrivals(upload)),
            arrived=partial(stage.arrived, upload, 0),
            check=compare(options),
        ),
    )
    progress.end()


def compare(options: ConvertOptions) -> Callable[[str, str], None] | None:
    """What compares an object with its file, where ``options`` want it read back."""
    return _compare if options.verify is VerifyLevel.FULL else None


def _compare(url: str, path: str) -> None:
    """Raises TargetUnwritableError when the object at ``url`` is not the file at ``path``, byte for byte."""
    there = RemoteStore().open(url)
    with open(path, "rb") as file:
        offset = 0
        while data := file.read(BLOCK):
            if there.read(offset, len(data)) != data:
                raise TargetUnwritableError(
                    f"{url} is not what was uploaded",
                    file=url,
                    found=f"other bytes within {len(data)} from offset {offset}",
                    why="another program writes there, or the store lost something",
                    run_again=True,
                )
            offset += len(data)


def say_converted(error: BaseException, url: str, options: ConvertOptions) -> None:
    """Tell whoever shows ``error`` of what workers left for the DST at ``url``, as far as it is seen from here."""
    stage = Stage.of(url.rstrip("/"), options.staging)
    if isinstance(error, TargetUnwritableError) and not is_url(error.file or url):
        error.next_step, error.run_again = _MAKE_ROOM, False
    if not os.path.lexists(stage.path):
        say_staged(error, stage.path)
    elif is_resumable(error):
        _say(error, stage)


def _say(error: BaseException, stage: Stage) -> None:
    attach_leftover(error, Leftover(f"the converted checkpoint is kept in {stage.path}", "uploads what is missing"))


def delivered(report: Report, target: str, stage: Stage, begun: float) -> Report:
    """``report`` of the conversion to ``stage`` as that of the whole run, which began at ``begun``."""
    note = Note("staged", f"converted in {os.path.dirname(stage.root)}, then uploaded")
    seconds = time.monotonic() - begun
    return replace(
        report, target=target, staged_in=os.path.dirname(stage.root), notes=(*report.notes, note), seconds=seconds
    )
