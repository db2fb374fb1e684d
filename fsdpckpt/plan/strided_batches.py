"""Copies whose rows lie between each other's, as those of a transposed tensor do, taken together.

One row of such a tensor is one element of every row of the source: read alone it costs as much as all of them. The
copies of one window that interleave are a sheet, which is read once, a stretch of each source row at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fsdpckpt.ir.tensors import Int64Array
from fsdpckpt.plan.plan import COPY_COLUMNS, Copies

__all__ = ["Sheet", "sheets"]


@dataclass(frozen=True, slots=True)
class Sheet:
    """``count`` copies from number ``first`` on, of which each begins ``source_step`` bytes behind the one before in
    the source, and ``target_step`` in the target."""

    first: int
    count: int = 1
    source_step: int = 0
    target_step: int = 0


def sheets(
    copies: Copies, numbers: Int64Array, source_width: Int64Array, begin: int, end: int, limit: int
) -> Iterator[Sheet]:
    """The copies ``numbers`` (ascending), in order, as few sheets. ``source_width``: of their rows, in bytes.

    Copies are joined only when they lie whole in the bytes [begin, end) of the target, and when what a sheet takes
    of one source row is at most ``limit`` bytes and ends before the next row of the source begins.
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
            yield Sheet(int(numbers[first]))
            continue
        step, target_step = int(steps[first]), int(target_steps[first])
        count = int(most[first]) // step + 1
        for at in range(first, last, count):
            yield Sheet(int(numbers[at]), min(count, last - at), step, target_step)
