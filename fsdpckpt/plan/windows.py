"""Cuts a target file into windows: the unit that one thread assembles in memory and writes with one request.

Also batches the copies of one window whose rows lie between each other's, as those of a transposed tensor do. One row
of such a tensor is one element of every row of the source: read alone it costs as much as all of them. The copies that
interleave are one ``StridedBatch``, which is read once, a stretch of each source row at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fsdpckpt.ir.tensors import Int64Array
from fsdpckpt.plan import COPY_COLUMNS, Copies, FilePlan, Plan


class Range(NamedTuple):
    """The bytes [begin, end) of a target file."""

    begin: int
    end: int


CAST_GRAIN = 16  # bytes: the largest element; a cast element must not be split between two windows


def window_bounds(file: FilePlan, plan: Plan, window: int, *, begin: int = 0, end: int | None = None) -> Int64Array:
    """Boundaries ``begin`` .. ``end`` (the whole file by default) with at most ``window`` bytes between neighbours.

    A boundary inside a write item that is cast falls between two elements, and inside one filled row by row between
    two rows where a row is shorter than a window; elsewhere any byte will do.
    """
    last = file.nbytes if end is None else end
    bounds = [begin]
    while bounds[-1] < last:
        bounds.append(min(_next_bound(file, plan, bounds[-1], window), last))
    return np.asarray(bounds, np.int64)


def open_windows(
    file: FilePlan, plan: Plan, window: int, *, begin: int = 0, end: int | None = None, written: Sequence[Range] = ()
) -> list[Range]:
    """The windows between ``begin`` and ``end`` (the whole file by default) without what is ``written``, in order.

    ``written``: disjoint windows of an earlier run between ``begin`` and ``end``, in order. Empty when they are all.
    """
    last = file.nbytes if end is None else end
    windows: list[Range] = []
    at = begin
    for low, high in (*written, (last, last)):
        bounds = window_bounds(file, plan, window, begin=at, end=low).tolist()
        windows += (Range(*pair) for pair in pairwise(bounds))
        at = high
    return windows


def _next_bound(file: FilePlan, plan: Plan, begin: int, window: int) -> int:
    limit = begin + window
    if limit >= file.nbytes:
        return file.nbytes
    write_item = int(np.searchsorted(file.write_items[:, 0], limit, side="right")) - 1
    if write_item < 0:
        return limit
    offset, nbytes = file.write_items[write_item].tolist()
    if limit >= offset + nbytes:
        return limit
    grain = _grain(file, plan, write_item)
    bound: int = offset + (limit - offset) // grain * grain
    return bound if bound > begin else offset + (limit - offset) // CAST_GRAIN * CAST_GRAIN


def _grain(file: FilePlan, plan: Plan, write_item: int) -> int:
    rows = slice(int(file.first_copy[write_item]), int(file.first_copy[write_item + 1]))
    several = file.copies.rows[rows] > 1
    if several.any():
        return max(int(file.copies.target_pitch[rows][several].max()), CAST_GRAIN)
    return CAST_GRAIN if plan.casts and (file.copies.cast[rows] >= 0).any() else 1


_SOURCE, _SOURCE_PITCH, _TARGET, _PITCH, _WIDTH, _ROWS = (
    COPY_COLUMNS.index(name) for name in ("source", "source_pitch", "target", "target_pitch", "width", "rows")
)


@dataclass(frozen=True, slots=True, eq=False)
class CopyParts:
    """``copies``: the parts, by window and within it by copy. ``window``, ``copy``: where each lies, what it is of.

    ``nbytes``: bytes each takes of its source.
    """

    copies: Copies
    window: Int64Array
    copy: Int64Array
    nbytes: Int64Array


def split_copies(
    file: FilePlan, plan: Plan, wanted: npt.NDArray[np.bool_], begins: Int64Array, ends: Int64Array
) -> CopyParts:
    """The ``wanted`` copies of ``file``, as far as they lie in the windows ``begins[i]`` .. ``ends[i]`` (ascending)."""
    table = np.stack([getattr(file.copies, name) for name in COPY_COLUMNS])
    plain = _plain(table, np.flatnonzero(wanted & (file.copies.rows == 1)), plan, begins, ends)
    pitched = _pitched(table, np.flatnonzero(wanted & (file.copies.rows > 1)), plan, begins, ends)
    rows = np.concatenate([plain, pitched], axis=1)
    rows = rows[:, np.lexsort((rows[2], rows[1], rows[0]))]  # by window, copy, and place in the target
    copies = Copies(*np.ascontiguousarray(rows[3:]))
    return CopyParts(copies, rows[0], rows[1], plan.source_bytes(copies.width * copies.rows, copies.cast))


def _plain(
    table: Int64Array, numbers: npt.NDArray[np.intp], plan: Plan, begins: Int64Array, ends: Int64Array
) -> Int64Array:
    """Parts of copies of one row. Rows: window, copy, order, then the columns of a copy."""
    target, width = table[_TARGET, numbers], table[_WIDTH, numbers]
    first = np.searchsorted(ends, target, side="right")
    count = np.maximum(np.searchsorted(begins, target + width, side="left") - first, 0)
    copy = np.repeat(numbers, count)
    window = np.repeat(first - (np.cumsum(count) - count), count) + np.arange(int(count.sum()))
    parts = table[:, copy].copy()
    low = np.maximum(parts[_TARGET], begins[window])
    high = np.minimum(parts[_TARGET] + parts[_WIDTH], ends[window])
    parts[_SOURCE] += plan.source_bytes(low - parts[_TARGET], parts[-1])
    parts[_TARGET] = low
    parts[_WIDTH] = parts[_PITCH] = high - low
    parts[_SOURCE_PITCH] = plan.source_bytes(parts[_WIDTH], parts[-1])
    return np.concatenate([np.stack([window, copy, low]), parts]).astype(np.int64, copy=False)


def _pitched(
    table: Int64Array, numbers: npt.NDArray[np.intp], plan: Plan, begins: Int64Array, ends: Int64Array
) -> Int64Array:
    """Parts of copies of several rows: in each window part of a row, whole rows, part of a row."""
    found: list[tuple[int, ...]] = []
    for number in numbers.tolist():
        file, source, source_pitch, target, pitch, width, rows, cast = table[:, number].tolist()
        have, want = (plan.casts[cast][0].itemsize, plan.casts[cast][1].itemsize) if cast >= 0 else (1, 1)
        window = int(np.searchsorted(ends, target, side="right"))
        last_window = int(np.searchsorted(begins, target + (rows - 1) * pitch + width, side="left"))
        for index in range(window, last_window):
            begin, end = int(begins[index]), int(ends[index])
            row = max(0, (begin - target - width) // pitch + 1)
            last = min(rows, -((target - end) // pitch))
            while row < last:
                at = target + row * pitch
                low, high = max(at, begin), min(at + width, end)
                whole = min(last - row, (end - at - width) // pitch + 1) if (low, high) == (at, at + width) else 1
                place = source + row * source_pitch + (low - at) // want * have
                found.append((index, number, low, file, place, source_pitch, low, pitch, high - low, whole, cast))
                row += whole
    return np.asarray(found, np.int64).reshape(len(found), 3 + len(COPY_COLUMNS)).T


@dataclass(frozen=True, slots=True)
class StridedBatch:
    """``count`` copies from number ``first`` on, each of which begins ``source_step`` bytes after the one before in
    the source, and ``target_step`` in the target."""

    first: int
    count: int = 1
    source_step: int = 0
    target_step: int = 0


def strided_batches(
    copies: Copies, numbers: Int64Array, source_width: Int64Array, begin: int, end: int, limit: int
) -> Iterator[StridedBatch]:
    """The copies ``numbers`` (ascending), in order, as few batches. ``source_width``: of their rows, in bytes.

    Copies are joined only when they lie whole in the bytes [begin, end) of the target, and when a batch takes at
    most ``limit`` bytes of one source row and ends before the next row of the source begins.
    """
    columns = {name: getattr(copies, name)[numbers] for name in COPY_COLUMNS}
    steps, target_steps = np.diff(columns["source"]), np.diff(columns["target"])
    ends = columns["target"] + (columns["rows"] - 1) * columns["target_pitch"] + columns["width"]
    inside = (columns["target"] >= begin) & (ends <= end)
    most = np.minimum(columns["source_pitch"], limit) - source_width
    linked = inside[:-1] & inside[1:] & (np.diff(numbers) == 1) & (steps > 0) & (steps <= most[:-1])
    linked &= columns["rows"][:-1] > 1
    for name in ("file", "source_pitch", "target_pitch", "width", "rows", "cast"):
        linked &= columns[name][:-1] == columns[name][1:]
    other = (steps[1:] != steps[:-1]) | (target_steps[1:] != target_steps[:-1])
    broken = ~linked
    broken[1:] |= linked[:-1] & other
    starts = [0, *(np.flatnonzero(broken) + 1).tolist()]
    for first, last in zip(starts, [*starts[1:], len(numbers)], strict=True):
        if last - first == 1:
            yield StridedBatch(int(numbers[first]))
            continue
        step, target_step = int(steps[first]), int(target_steps[first])
        count = int(most[first]) // step + 1
        for at in range(first, last, count):
            yield StridedBatch(int(numbers[at]), min(count, last - at), step, target_step)
