"""Cuts a target file into windows: the unit that one thread assembles in memory and writes with one request."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from fsdpckpt.ir.tensors import Int64Array
from fsdpckpt.planner.plan import FilePlan, Plan

__all__ = ["Range", "open_windows", "window_bounds"]

Range = tuple[int, int]
"""The bytes [begin, end) of a target file."""

CAST_GRAIN = 16  # bytes: the largest element; a cast element must not be split between two windows


def window_bounds(file: FilePlan, plan: Plan, window: int, *, begin: int = 0, end: int | None = None) -> Int64Array:
    """Boundaries ``begin`` .. ``end`` (the whole file by default) with at most ``window`` bytes between neighbours.

    A boundary inside a slot that is cast falls between two elements, and inside a slot filled row by row between two
    rows where a row is shorter than a window; elsewhere any byte will do.
    """
    last = file.nbytes if end is None else end
    bounds = [begin]
    while bounds[-1] < last:
        bounds.append(min(_next_bound(file, plan, bounds[-1], window), last))
    return np.asarray(bounds, np.int64)


def open_windows(
    file: FilePlan, plan: Plan, window: int, *, begin: int = 0, end: int | None = None, done: Sequence[Range] = ()
) -> list[Range]:
    """The windows between ``begin`` and ``end`` (the whole file by default) without what is ``done``, in order.

    ``done``: disjoint windows of an earlier run between ``begin`` and ``end``, in order. Empty when they are all.
    """
    last = file.nbytes if end is None else end
    found: list[Range] = []
    at = begin
    for low, high in (*done, (last, last)):
        found += pairwise(window_bounds(file, plan, window, begin=at, end=low).tolist())
        at = high
    return found


def _next_bound(file: FilePlan, plan: Plan, begin: int, window: int) -> int:
    limit = begin + window
    if limit >= file.nbytes:
        return file.nbytes
    slot = int(np.searchsorted(file.slots[:, 0], limit, side="right")) - 1
    if slot < 0:
        return limit
    offset, nbytes = file.slots[slot].tolist()
    if limit >= offset + nbytes:
        return limit
    grain = _grain(file, plan, slot)
    cut: int = offset + (limit - offset) // grain * grain
    return cut if cut > begin else offset + (limit - offset) // CAST_GRAIN * CAST_GRAIN


def _grain(file: FilePlan, plan: Plan, slot: int) -> int:
    rows = slice(int(file.first_copy[slot]), int(file.first_copy[slot + 1]))
    several = file.copies.rows[rows] > 1
    if several.any():
        return max(int(file.copies.target_pitch[rows][several].max()), CAST_GRAIN)
    return CAST_GRAIN if plan.casts and (file.copies.cast[rows] >= 0).any() else 1
