"""Divides a conversion among workers, on rank 0: who writes what, and what an interrupted run has written already."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fsdpckpt.converters.convert import Prepared
from fsdpckpt.converters.resumption import fresh_note, resumed_note, started_over_note
from fsdpckpt.converters.staged import Places, share_out
from fsdpckpt.converters.taken_up import claims_of, taken_up
from fsdpckpt.execute.budget import Budget, settle
from fsdpckpt.execute.job import Job
from fsdpckpt.execute.journal import Finished, RunIdentity, joined
from fsdpckpt.ir.checkpoint import Note
from fsdpckpt.options import ConvertOptions
from fsdpckpt.readers.protocol import MANIFEST
from fsdpckpt.storage.journal import Record
from fsdpckpt.storage.staging import Staging

__all__ = ["bytes_at", "divide", "holders_of", "note_of"]


def divide(
    prepared: Prepared,
    options: ConvertOptions,
    budget: Budget,
    places: Places,
    visible: npt.NDArray[np.bool_],
    now: RunIdentity,
    journals: Sequence[Sequence[Sequence[Record]]],
) -> tuple[Job, Finished]:
    """What all do, and what the ``journals`` of an interrupted run say is finished.

    ``visible[file, worker]``: who sees which source. Raises SourceError or TargetError when that run was not ``now``.
    """
    checkpoint = prepared.transformed.checkpoint
    found = taken_up(journals, places, now, options.max_memory)
    segments = share_out(prepared.plan, prepared.spec, places, found)
    writers = sorted({segment.owner for segment in segments})
    exchanging = not bool(visible[:, writers].all())
    settings = settle(prepared.plan, budget, options.max_memory, exchanging=exchanging)
    claims = claims_of(found, segments)
    job = Job(prepared.plan, checkpoint.files, checkpoint.checksums, tuple(segments), settings, claims)
    return job, joined(list(found.values()))


def note_of(job: Job, target: str, staging: Sequence[Staging], *, asked: bool) -> Note | None:
    """What to say of what was there. ``staging``: rank 0's, empty where DST is there; ``asked``: to resume."""
    if len(job.claims):
        total = sum(segment.end - segment.begin for segment in job.segments)
        return resumed_note(int((job.claims[:, 3] - job.claims[:, 2]).sum()), total)
    if not staging:
        return Note("resumed", f"{target} was complete already: every byte was compared, nothing was written")
    if staging[0].resumed:
        return started_over_note(staging[0].root)
    return fresh_note(staging[0], asked=asked)


def bytes_at(job: Job, places: Places, rank: int) -> int:
    """How many bytes are written where worker ``rank`` writes."""
    place = places.place[rank]
    return sum(segment.end - segment.begin for segment in job.segments if segment.place == place)


def holders_of(job: Job, places: Places, *, directory: bool) -> dict[str, list[int]]:
    """By target file the workers that see it where it was written. ``directory``: with ``fsdpckpt.json`` in it."""
    found: dict[str, set[int]] = {}
    for segment in job.segments:
        workers = places.workers(segment.place)
        for path in (job.plan.files[segment.file].path, *([MANIFEST] if directory else [])):
            found.setdefault(path, set()).update(workers)
    return {path: sorted(workers) for path, workers in found.items()}
