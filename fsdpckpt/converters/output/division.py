"""Divides the bytes of the target files among the workers, and says who sees which file afterwards."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from fsdpckpt.converters.output.places import OutputPlaces
from fsdpckpt.converters.prepare import Prepared
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.execute.job import Budget, Job, choose_settings
from fsdpckpt.execute.journal import JournaledWindows
from fsdpckpt.ir.checkpoint import Layout
from fsdpckpt.ir.tensors import Int64Array
from fsdpckpt.plan import Plan
from fsdpckpt.plan.transfer import SeenBy, Segment, partition, target_node
from fsdpckpt.plan.written import COLUMNS_OF_SEGMENTS, NOTHING_WRITTEN
from fsdpckpt.readers.protocol import MANIFEST
from fsdpckpt.storage.upload import UPLOADED_LAST

_RANK_FILE = re.compile(r"(?:.*_rank_?(\d+)\.(?:pt|bin)|(?:.*/)?__(\d+)_\d+\.distcp)")


def divide_work(
    prepared: Prepared,
    places: OutputPlaces,
    seen_by: SeenBy,
    budget: Budget,
    journaled: Mapping[int, JournaledWindows],
    memory: int,
) -> Job:
    """Divide the plan among the workers. ``seen_by[file, worker]``; ``journaled``: as for ``assign_segments``;
    ``memory``: bytes of each worker for windows and for what it exchanges with others.
    """
    plan, checkpoint = prepared.plan, prepared.transformed.checkpoint
    segments = assign_segments(plan, prepared.decision, places, journaled)
    writers = sorted({segment.owner for segment in segments})
    exchanging = not bool(seen_by[:, writers].all())
    settings = choose_settings(plan, budget, memory, exchanging=exchanging)
    written = written_in_segments(journaled, segments)
    return Job(plan, checkpoint.files, checkpoint.checksums, tuple(segments), settings, written)


def assign_segments(
    plan: Plan,
    decision: Decision,
    places: OutputPlaces,
    journaled: Mapping[int, JournaledWindows] | None = None,
) -> list[Segment]:
    """Assign the bytes of every file to a worker and a directory. ``journaled``: for each directory what an interrupted
    run has written.

    One directory gets everything. With one for each node, the files of target rank r go to the node of worker
    ``r * workers // ranks``, which will load them; files of no rank (metadata) go to every node that has rank files; a
    full checkpoint, which is not loaded by ranks, goes to the first node.
    """
    first = places.places[0]
    if first.part:
        return assign_parts(plan, first.workers, first.part)
    files: dict[int, list[int]] = {directory: [] for directory in range(len(places.places))}
    ranks = [_rank_of(file.path) for file in plan.files]
    world_size = decision.world_size or max((rank + 1 for rank in ranks if rank is not None), default=1)
    nodes = dict(enumerate(places.nodes))
    everywhere = decision.layout is Layout.FULL or len(files) == 1
    for number, rank in enumerate(ranks):
        if rank is not None and not everywhere:
            files[target_node(rank, world_size, nodes)].append(number)
    common = [number for number, rank in enumerate(ranks) if rank is None or everywhere]
    for directory, numbers in files.items():
        if numbers or directory == 0:
            numbers[:] = sorted({*numbers, *common})
    written = {directory: windows.written() for directory, windows in (journaled or {}).items()}
    return [
        segment
        for directory, numbers in files.items()
        for segment in partition(
            plan,
            numbers,
            places.workers(directory),
            directory=directory,
            written=written.get(directory, NOTHING_WRITTEN),
        )
    ]


def assign_parts(plan: Plan, workers: Sequence[int], part: int) -> list[Segment]:
    """``assign_segments`` for objects that are sent in parts of ``part`` bytes. The first of ``workers`` has the files
    that list others: they are sent last.
    """
    lists = [number for number, file in enumerate(plan.files) if file.path.endswith(UPLOADED_LAST)]
    data = [number for number in range(len(plan.files)) if number not in lists]
    segments = [Segment(number, 0, 0, plan.files[number].nbytes, workers[0]) for number in lists]
    return [*partition(plan, data, workers, part=part), *segments]


def written_in_segments(journaled: Mapping[int, JournaledWindows], segments: Sequence[Segment]) -> Int64Array:
    """The rows of ``Job.written``: the windows in ``journaled`` that are inside one segment of their directory."""
    numbers: dict[tuple[int, int], list[int]] = {}
    for number, segment in enumerate(segments):
        numbers.setdefault((segment.directory, segment.file), []).append(number)
    rows: list[tuple[int, int, int, int]] = []
    for directory, windows in journaled.items():
        for file, begin, end, crc, _ in windows.written().tolist():
            for number in numbers.get((directory, file), ()):
                if segments[number].begin <= begin and end <= segments[number].end:
                    rows.append((number, begin, end, crc))
    return np.asarray(sorted(rows), np.int64).reshape(-1, COLUMNS_OF_SEGMENTS)


def _rank_of(path: str) -> int | None:
    match = _RANK_FILE.fullmatch(path)
    return int(match[1] or match[2]) if match else None


def files_in(job: Job, number: int | None) -> tuple[list[str], int]:
    """The target files that are written to directory ``number``, and their total size in bytes."""
    segments = [segment for segment in job.segments if segment.directory == number]
    names = dict.fromkeys(job.plan.files[segment.file].path for segment in segments)
    return list(names), sum(segment.end - segment.begin for segment in segments)


def holders_of(job: Job, places: OutputPlaces, *, directory: bool) -> dict[str, Sequence[int]]:
    """For each target file the workers that see it where it was written. ``directory``: include ``fsdpckpt.json``."""
    holders: dict[str, set[int]] = {}
    for segment in job.segments:
        workers = places.workers(segment.directory)
        for path in (job.plan.files[segment.file].path, *([MANIFEST] if directory else [])):
            holders.setdefault(path, set()).update(workers)
    return {path: sorted(workers) for path, workers in holders.items()}
