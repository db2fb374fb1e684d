"""What an interrupted run left, read back by all workers of a group: each what it would write otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, cast

import numpy as np

from fsdpckpt.comm.protocol import Group
from fsdpckpt.execute.checks import SourceCheck, SourceRecord
from fsdpckpt.execute.copy_pool import Crew
from fsdpckpt.execute.kept import Kept, ReadBack, buffer_for, longest_claim, threads_for_claims
from fsdpckpt.execute.reread import has_gaps, read_again, unjudged
from fsdpckpt.execute.resume import Finished
from fsdpckpt.execute.shipping import Job
from fsdpckpt.plan.partition import Segment
from fsdpckpt.plan.plan import Claim
from fsdpckpt.plan.transfer import OwnWindow, Visible
from fsdpckpt.plan.windows import Range
from fsdpckpt.storage.sources import Sources

__all__ = ["Done", "judge_again", "keep_together"]

Done: TypeAlias = "dict[int, list[Range]]"
"""By segment, in order, what an interrupted run has written of it."""


def keep_together(group: Group, job: Job, locate: Callable[[str], str], threads: int) -> tuple[dict[int, Kept], Done]:
    """What this worker keeps of its segments, and what all keep of theirs. All ranks."""
    if not len(job.claims):
        return {}, {}
    claims = {number: _claims(job, segment) for number, segment in enumerate(job.segments)}
    with group.step("read back what is there"):
        kept = _read_back(group, job, claims, locate, threads)
    mine: list[list[int]] = []
    for number, each in kept.items():
        there = set(each.ranges)
        mine += [[number, begin] for begin, end, _ in claims[number] if (begin, end) not in there]
    everyone = group.all_gather_objects(mine, name="what is there")
    lost = {tuple(pair) for told in everyone for pair in cast("list[list[int]]", told)}
    done = {
        number: [(begin, end) for begin, end, _ in own if (number, begin) not in lost] for number, own in claims.items()
    }
    return kept, done


def _claims(job: Job, segment: Segment) -> list[Claim]:
    place, file, begin, end, _ = job.claims.T
    inside = (place == segment.place) & (file == segment.file) & (begin >= segment.begin) & (end <= segment.end)
    return [(low, high, crc) for _, _, low, high, crc in job.claims[np.flatnonzero(inside)].tolist()]


def _read_back(
    group: Group, job: Job, claims: dict[int, list[Claim]], locate: Callable[[str], str], threads: int
) -> dict[int, Kept]:
    backs = {}
    for number, segment in enumerate(job.segments):
        if segment.owner == group.rank:
            file = job.plan.files[segment.file]
            backs[number] = ReadBack(file, locate(file.path), claims[number])
    longest = longest_claim(backs.values())
    most = threads_for_claims(threads, job.settings.windows, longest)
    buffers = [buffer_for(longest) for _ in range(most)]
    crcs = {(number, begin): crc for number, back in backs.items() for begin, _, crc in back.claims}

    def take(thread: int, window: OwnWindow) -> None:
        claim = (window.begin, window.end, crcs[window.segment, window.begin])
        backs[window.segment].take(claim, buffers[thread])

    windows = [OwnWindow(number, *claim[:2], -1) for number, back in backs.items() for claim in back.claims]
    crew = Crew(windows, most, take)
    try:
        crew.wait(lambda: group.watch(moving=crew.moved()))
    finally:
        crew.stop()
    return {number: back.close() for number, back in backs.items()}


def judge_again(group: Group, job: Job, check: SourceCheck, finished: Finished, visible: Visible) -> None:
    """Once ``check`` on rank 0 knows all parts that are known: read the records again that lack some. All ranks.

    ``finished``, on rank 0: what the journals say. Raises SourceCorruptError.
    """
    if not len(job.claims) and not has_gaps(job.plan):
        return
    found: object = None
    if group.rank == 0:
        with group.heartbeat():
            found = [list(record) for record in unjudged(check, job.plan, finished.received_ranges())]
    records = [cast("SourceRecord", tuple(row)) for row in cast("list[list[int]]", group.broadcast_object(found))]
    readers = [np.flatnonzero(visible[file]) for file, _, _, _ in records]
    mine = [
        record
        for number, (record, seers) in enumerate(zip(records, readers, strict=True))
        if seers[number % len(seers)] == group.rank
    ]
    with group.step("read again what no sum proves"), Sources() as sources:
        read_again(mine, job.files, sources, group.beat)
