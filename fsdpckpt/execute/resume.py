"""Resumes an interrupted run: reads back what its journals name, on the ranks that would write it otherwise.

A window whose bytes are as claimed is kept, any other one is copied again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, cast

import numpy as np

from fsdpckpt.comm.protocol import Group
from fsdpckpt.execute.checks import Part, SourceCheck, SourceRecord, crc32, has_gaps, read_sums, reread, unproved
from fsdpckpt.execute.job import Job
from fsdpckpt.execute.journal import Finished
from fsdpckpt.execute.output import LatePlaces, Resumed, TargetChecks
from fsdpckpt.execute.window import PATIENCE, CopyPool
from fsdpckpt.plan import Claim, FilePlan
from fsdpckpt.plan.transfer import Segment, Visible, Window
from fsdpckpt.plan.windows import Range
from fsdpckpt.progress import Progress
from fsdpckpt.storage.local import BLOCK, WritableFile, aligned_buffer
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import size_text

Written: TypeAlias = "dict[int, list[Range]]"
"""By segment, in order, what an interrupted run has written of it."""


class ReadBack:
    """Verifies the ``claims`` of one target file that an earlier run left at ``path``. Any thread may call ``take``."""

    def __init__(self, file: FilePlan, path: str, claims: Sequence[Claim]) -> None:
        self._checks = TargetChecks(file)
        self._late = LatePlaces(file)
        self._parts: list[Part] = []
        there = os.path.isfile(path) and os.path.getsize(path) == file.nbytes
        self.claims = tuple(claims) if there else ()
        self._file = WritableFile(path, file.nbytes, existing=True) if self.claims else None

    def take(self, claim: Claim, buffer: memoryview) -> None:
        """Keep the window of ``claim`` if its bytes are as claimed. ``buffer`` is at least as long as the window."""
        if self._file is None:
            return
        begin, end, crc = claim
        view = buffer[: end - begin]
        self._file.read_into(begin, view)
        self._late.clear(begin, view)
        if crc32(view) == crc:
            self._checks.window(begin, view, {})
            self._parts.append((begin, end - begin, crc))

    def close(self) -> Resumed:
        """What ``take`` has kept."""
        if self._file is not None:
            self._file.close()
        rows, late = self._checks.unfinished()
        return Resumed(tuple(sorted(self._parts)), tuple(rows), tuple(late))


def read_back(
    group: Group, backs: Mapping[int, ReadBack], threads: int, nbytes: int, advance: Callable[[int], None]
) -> None:
    """Verify all claims of all ``backs``, on at most ``threads`` threads that share ``nbytes`` of buffers."""
    longest = max((end - begin for back in backs.values() for begin, end, _ in back.claims), default=0)
    most = max(min(threads, nbytes // max(longest, 1)), 1)
    buffers = [aligned_buffer(longest + BLOCK) for _ in range(most)]
    crcs = {(number, begin): crc for number, back in backs.items() for begin, _, crc in back.claims}

    def take(thread: int, window: Window) -> None:
        claim = Claim(window.begin, window.end, crcs[window.segment, window.begin])
        backs[window.segment].take(claim, buffers[thread])
        advance(window.end - window.begin)

    windows = [Window(number, *claim[:2], -1) for number, back in backs.items() for claim in back.claims]
    pool = CopyPool(windows, most, take)
    try:
        pool.start()
        pool.wait(lambda: group.watch(moving=pool.moved()))
    finally:
        pool.stop(PATIENCE if group.world_size > 1 else None)


def resume(
    group: Group, job: Job, locate: Callable[[str], str], threads: int, progress: Progress
) -> tuple[dict[int, Resumed], Written]:
    """What this rank keeps of its segments, and what all ranks keep of theirs; each by segment. All ranks."""
    if not len(job.claims):
        return {}, {}
    claims = {number: _claims(job, segment) for number, segment in enumerate(job.segments)}
    backs: dict[int, ReadBack] = {}
    with group.step("read back what is there"):
        for number, segment in enumerate(job.segments):
            if segment.owner == group.rank:
                file = job.plan.files[segment.file]
                backs[number] = ReadBack(file, locate(file.path), claims[number])
        nbytes = sum(end - begin for back in backs.values() for begin, end, _ in back.claims)
        progress.begin(f"checking {size_text(nbytes)} already written", nbytes)
        try:
            read_back(group, backs, threads, job.settings.windows, progress.advance)
        finally:
            resumed = {number: back.close() for number, back in backs.items()}
        progress.end()
    lost: set[tuple[int, int]] = set()
    own: list[list[int]] = []
    for number, each in resumed.items():
        there = set(each.ranges)
        own += [[number, begin] for begin, end, _ in claims[number] if (begin, end) not in there]
    for theirs in cast("list[list[list[int]]]", group.all_gather_objects(own, name="what is there")):
        lost |= {(number, begin) for number, begin in theirs}
    written = {
        number: [Range(begin, end) for begin, end, _ in found if (number, begin) not in lost]
        for number, found in claims.items()
    }
    return resumed, written


def _claims(job: Job, segment: Segment) -> list[Claim]:
    place, file, begin, end, _ = job.claims.T
    inside = (place == segment.place) & (file == segment.file) & (begin >= segment.begin) & (end <= segment.end)
    return [Claim(low, high, crc) for _, _, low, high, crc in job.claims[np.flatnonzero(inside)].tolist()]


def read_rest(group: Group, job: Job, check: SourceCheck, visible: Visible, sources: Sources) -> None:
    """Once ``check`` on rank 0 knows all parts that are known: read what is missing of their records. All ranks.

    Raises SourceCorruptError.
    """
    rest: object = check.rest() if group.rank == 0 else None
    ranges = cast("list[tuple[int, int, int, int]]", group.broadcast_object(rest, name="what was not read"))
    if not ranges:
        return
    mine = [row for number, row in enumerate(ranges) if _reader(visible, row[0], number) == group.rank]
    with group.step("read the rest of records"):
        sums = read_sums(mine, job.files, sources, group.beat)
    everyone = cast("list[list[tuple[int, int, int, int, int]]]", group.all_gather_objects(sums, name="sums"))
    with group.step("compare checksums"):
        if group.rank == 0:
            for rows in everyone:
                check.absorb(rows)
            check.finish()


def _reader(visible: Visible, file: int, number: int) -> int:
    """Which of the ranks that see ``file`` reads range ``number``."""
    seers = np.flatnonzero(visible[file])
    return int(seers[number % len(seers)])


def reread_unproved(
    group: Group, job: Job, check: SourceCheck, finished: Finished, visible: Visible, sources: Sources
) -> None:
    """Once ``check`` on rank 0 knows all parts that are known: read the records again that lack some. All ranks.

    ``finished``, on rank 0: what the journals say. Raises SourceCorruptError.
    """
    if not len(job.claims) and not has_gaps(job.plan):
        return
    found: object = None
    if group.rank == 0:
        with group.heartbeat():
            found = [list(record) for record in unproved(check, job.plan, finished.received_ranges())]
    records = [cast("SourceRecord", tuple(row)) for row in cast("list[list[int]]", group.broadcast_object(found))]
    mine = [row for number, row in enumerate(records) if _reader(visible, row[0], number) == group.rank]
    with group.step("read again what no sum proves"):
        reread(mine, job.files, sources, group.beat)
