"""What interrupted runs left where workers write: each leader reads the journals of its place, rank 0 judges them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from fsdpckpt.comm.protocol import Group
from fsdpckpt.converters.resumption import data_files, same_run
from fsdpckpt.converters.staged import Places
from fsdpckpt.execute.journal import Finished, RunIdentity, run_of
from fsdpckpt.ir.checkpoint import SourceFile
from fsdpckpt.ir.tensors import Int64Array
from fsdpckpt.plan.partition import Segment
from fsdpckpt.storage.journal import Record, read_records
from fsdpckpt.storage.protocols import FileIdentity
from fsdpckpt.storage.sources import Sources
from fsdpckpt.storage.staging import Staging, journal_paths

__all__ = ["claims_of", "copies_known", "journals_read", "taken_up"]


def copies_known(
    group: Group, files: Sequence[SourceFile], sources: Sources, seen: Sequence[bool]
) -> list[list[FileIdentity]]:
    """Of each of ``data_files`` the copies that workers see, each once, alike on every rank. All ranks.

    ``seen[file]``: whether this worker sees it. ``sources`` knows what each was when it was first opened.
    """
    wanted = set(data_files(files))
    mine = [
        _row(sources.identity(file.path)) if see else []
        for file, see in zip(files, seen, strict=True)
        if file.path in wanted
    ]
    everyone = cast("list[list[list[object]]]", group.all_gather_objects(mine, name="copies of the sources"))
    paths = data_files(files)
    return [
        [_identity(path, row) for row in dict.fromkeys(tuple(told[number]) for told in everyone) if row]
        for number, path in enumerate(paths)
    ]


def _row(identity: FileIdentity) -> list[object]:
    return [identity.nbytes, identity.mtime_ns, identity.inode, identity.tag]


def _identity(path: str, row: Sequence[object]) -> FileIdentity:
    nbytes, mtime_ns, inode, tag = row
    return FileIdentity(path, cast("int", nbytes), cast("int", mtime_ns), cast("int", inode), str(tag))


def journals_read(group: Group, staging: Sequence[Staging]) -> list[list[list[Record]]]:
    """By worker the records of each journal that an interrupted run left at its place, if it leads one. All ranks."""
    mine = [read_records(path) for each in staging if each.resumed for path in journal_paths(each.root)]
    return cast("list[list[list[Record]]]", group.all_gather_objects(mine, name="journals"))


def taken_up(
    journals: Sequence[Sequence[Sequence[Record]]], places: Places, now: RunIdentity, most: int
) -> dict[int, Finished]:
    """By place what is gone on with: nothing where no journal is readable, or one window has more than ``most`` bytes.

    Raises SourceError or TargetError when what is there is not this run's.
    """
    found: dict[int, Finished] = {}
    for place, leader in enumerate(places.leaders):
        runs = [run for records in journals[leader] if (run := run_of(records)) is not None]
        finished = same_run(runs, now, places.roots[place])
        if 0 < finished.longest <= most:
            found[place] = finished
    return found


def claims_of(found: Mapping[int, Finished], segments: Sequence[Segment]) -> Int64Array:
    """The rows of ``Job.claims``: the windows in ``found`` of which all lies in one segment of its place."""
    bounds: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for segment in segments:
        bounds.setdefault((segment.place, segment.file), []).append((segment.begin, segment.end))
    rows = [
        (place, file, begin, end, crc)
        for place, finished in found.items()
        for file, claims in finished.claims().items()
        for begin, end, crc in claims
        if any(low <= begin and end <= high for low, high in bounds.get((place, file), ()))
    ]
    return np.asarray(rows, np.int64).reshape(-1, 5)
