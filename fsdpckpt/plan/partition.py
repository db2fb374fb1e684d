"""Partitions the bytes of all target files over the ranks that write them. Pure arithmetic on a plan.

The files are laid end to end and divided into as many parts of equal bytes as there are ranks, so that the files of one
target rank stay together. A boundary moves to the end of a file when one is near; inside a file it falls on a block of
the disk, unless that lies within an element that is cast, or within a window of an interrupted run, which stays whole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fsdpckpt.plan.plan import Claim, FilePlan, Plan

__all__ = ["Segment", "partition", "target_node"]

NEAR = 0.05  # of a part: a rank may have so much more than another if that saves a file from having two writers
BLOCK = 1 << 16  # bytes: no page of any system in use is larger, so no page of a file has two writers


@dataclass(frozen=True, slots=True)
class Segment:
    """The bytes [begin, end) of target file number ``file``, which rank ``owner`` writes.

    ``place``: which output directory, where each node keeps its own; 0 where all ranks write to the same.
    """

    file: int
    place: int
    begin: int
    end: int
    owner: int


def partition(
    plan: Plan,
    files: Sequence[int],
    workers: Sequence[int],
    *,
    place: int = 0,
    written: Mapping[int, Sequence[Claim]] | None = None,
) -> list[Segment]:
    """Partition ``files`` (their numbers in ``plan``) over ``workers``. Every file has a segment, even an empty one.

    ``written``: by file, in order, what an interrupted run has written of it.
    """
    ends = np.cumsum([plan.files[number].nbytes for number in files], dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    marks = [_snapped(total * part // len(workers), ends, total // len(workers)) for part in range(1, len(workers))]
    segments: list[Segment] = []
    begin = 0
    worker = 0
    for number, end in zip(files, ends.tolist(), strict=True):
        file = plan.files[number]
        at = 0
        while worker < len(marks) and marks[worker] < end:
            stop = _outside(_allowed(file, plan, marks[worker] - begin), (written or {}).get(number, ()))
            if stop > at:
                segments.append(Segment(number, place, at, stop, workers[worker]))
                at = stop
            worker += 1
        if at < file.nbytes or file.nbytes == 0:
            segments.append(Segment(number, place, at, file.nbytes, workers[worker]))
        begin = end
    return segments


def _snapped(mark: int, ends: np.ndarray[tuple[int], np.dtype[np.int64]], share: int) -> int:
    """``mark`` or the end of a file near it."""
    index = int(np.searchsorted(ends, mark))
    near = [int(end) for end in ends[max(index - 1, 0) : index + 1]]
    best = min([0, *near], key=lambda end: abs(end - mark))
    return best if abs(best - mark) <= share * NEAR else mark


def _allowed(file: FilePlan, plan: Plan, at: int) -> int:
    """The last place up to ``at`` where ``file`` may be cut; 0 when there is none."""
    at = at // BLOCK * BLOCK
    write_item = int(np.searchsorted(file.write_items[:, 0], at, side="right")) - 1
    if write_item < 0 or not plan.casts:
        return at
    offset, nbytes = file.write_items[write_item].tolist()
    rows = slice(int(file.first_copy[write_item]), int(file.first_copy[write_item + 1]))
    cast = int(file.copies.cast[rows].max())  # the same for all copies of a write item
    if at >= offset + nbytes or cast < 0:
        return at
    # Not on a block where the tensor is not aligned: then two workers write that one, each its own bytes.
    return at - (at - int(offset)) % plan.casts[cast][1].itemsize


def _outside(at: int, written: Sequence[Claim]) -> int:
    """``at``, or where the window in ``written`` begins that it lies in."""
    index = bisect_left(written, at, key=lambda claim: claim[0]) - 1  # the last that begins before it
    return written[index][0] if index >= 0 and written[index][1] > at else at


def target_node(target_rank: int, world_size: int, nodes: Mapping[int, int]) -> int:
    """The node that will load target rank ``target_rank`` of ``world_size``, when ``nodes[worker]`` is each one's node.

    Worker w of W takes the ranks from w * N / W on: N ranks on as many nodes, in the same order, as these workers.
    """
    return nodes[target_rank * len(nodes) // world_size]
