"""Checks that the chunks of a tensor hold every element once. Equal boxes are replicas; other overlaps are flaws.

Three steps, cheapest first: a whole chunk; a grid (each dimension cut into intervals that tile it, every cell present),
as FSDP, HSDP and FSDP x TP make; and counting on the grid of all edges, which finds what is wrong. The grid of n boxes
in d dimensions may have n**d cells. If it is too large, ``_Cells`` proves by a random sum that each cell is in one box,
or finds one that is not: in time and memory that grow with n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from fsdpckpt.ir.tensors import Int64Array, Tensor, distinct

_FEW_CHUNKS = 48  # up to this many, plain Python is faster than numpy's cost per call
_MAX_CELLS = 1 << 20  # of the counting grid: 4 MiB of counters ...
_CELLS_PER_BOX = 64  # ... and for each box
_MAX_CUT_DIMENSIONS = 8  # each doubles the corners to count
_PRIME = (1 << 31) - 1  # products of two numbers below it fit into 64 bits


FlawKind: TypeAlias = Literal["incomplete", "overlap", "outside"]


@dataclass(frozen=True, slots=True)
class Flaw:
    """One way in which chunks fail to hold a tensor.

    ``elements``: how many are missing, held twice, or outside. ``start``, ``size``: the first box of them. ``ranks``:
    the ranks that hold that box (empty for a missing one).
    """

    kind: FlawKind
    elements: int
    start: tuple[int, ...]
    size: tuple[int, ...]
    ranks: tuple[int, ...]


def box_text(start: Sequence[int], size: Sequence[int]) -> str:
    """A box as Python slices: ``[8:16, 0:9]``."""
    return "[" + ", ".join(f"{begin}:{begin + count}" for begin, count in zip(start, size, strict=True)) + "]"


def flaws(tensor: Tensor) -> list[Flaw]:
    """Everything wrong with the coverage of ``tensor``; empty if every element is held exactly once, not counting
    replicas.

    Ignores empty boxes wherever they are: DCP and FSDP2 write them for ranks beyond the last row.
    """
    chunks = tensor.chunks
    shape = tensor.shape
    count = len(chunks.file)
    if count == 1:
        if chunks.size.tolist()[0] == list(shape) and not any(chunks.start.tolist()[0]):
            return []
    elif count <= _FEW_CHUNKS:
        if _is_small_grid(shape, chunks.start.tolist(), chunks.size.tolist()):
            return []
    elif _is_grid(shape, chunks.start, chunks.size):
        return []
    return _find_flaws(shape, chunks.start, chunks.size, chunks.rank)


def _is_small_grid(shape: tuple[int, ...], starts: list[list[int]], sizes: list[list[int]]) -> bool:
    """Whether the boxes are all cells of one grid over ``shape``, each at least once."""
    boxes = {(*start, *size) for start, size in zip(starts, sizes, strict=True) if 0 not in size}
    if not boxes:
        return 0 in shape
    cells = 1
    dimensions = len(shape)
    for dimension, length in enumerate(shape):
        intervals = {(box[dimension], box[dimension + dimensions]) for box in boxes}
        end = 0
        for begin, count in sorted(intervals):
            if begin != end or count < 0:
                return False
            end += count
        if end != length:
            return False
        cells *= len(intervals)
    return cells == len(boxes)


def _is_grid(shape: tuple[int, ...], start: Int64Array, size: Int64Array) -> bool:
    """``_is_small_grid`` in columns: O(n log n) for n chunks."""
    if (size < 0).any():
        return False
    filled = size.all(axis=1)
    if not filled.all():
        start, size = start[filled], size[filled]
    if not len(start):
        return 0 in shape
    cell = np.zeros(len(start), np.int64)
    cells = 1
    for dimension, length in enumerate(shape):
        begin, count = start[:, dimension], size[:, dimension]
        if int(count.min()) == length and not begin.any():
            if int(count.max()) != length:
                return False
            continue
        values, first, which = np.unique(begin, return_index=True, return_inverse=True)
        lengths = count[first]
        ends = np.append(values[1:], length)
        follow_each_other = values[0] == 0 and np.array_equal(values + lengths, ends)
        if not follow_each_other or not np.array_equal(lengths[which], count):
            return False
        cells *= len(values)
        if cells > len(start):
            return False
        cell = cell * len(values) + which
    return len(distinct(cell)) == cells


def _find_flaws(shape: tuple[int, ...], start: Int64Array, size: Int64Array, rank: Int64Array) -> list[Flaw]:
    """Find exactly what is wrong, if anything is: chunks may cover a tensor without forming a grid."""
    flaws: list[Flaw] = []
    limit = np.asarray(shape, np.int64).reshape(1, len(shape))
    filled = size.all(axis=1)
    inside = ((start >= 0) & (size >= 0) & (start + size <= limit)).all(axis=1)
    for row in np.flatnonzero(filled & ~inside).tolist():
        begin, count = tuple(start[row].tolist()), tuple(size[row].tolist())
        flaws.append(Flaw("outside", _elements_outside(shape, begin, count), begin, count, (int(rank[row]),)))
    valid = filled & inside
    boxes = np.concatenate([start[valid], size[valid]], axis=1)
    if len(boxes):
        boxes = np.unique(boxes, axis=0)
    box_start, box_size = boxes[:, : len(shape)], boxes[:, len(shape) :]
    holders = (start[valid], size[valid], rank[valid])
    edges = [
        distinct(np.concatenate([[0, length], box_start[:, k], box_start[:, k] + box_size[:, k]]))
        for k, length in enumerate(shape)
    ]
    cut = [k for k, edge in enumerate(edges) if len(edge) > 2]
    if 0 in shape:
        return flaws
    most = max(_MAX_CELLS, _CELLS_PER_BOX * len(boxes))
    if len(cut) > _MAX_CUT_DIMENSIONS or prod(len(edges[k]) for k in cut) > most:
        return flaws + _first_wrong_cell(shape, box_start, box_size, holders, edges)
    return flaws + _count_boxes(shape, box_start, box_size, holders, edges)


def _elements_outside(shape: tuple[int, ...], start: tuple[int, ...], size: tuple[int, ...]) -> int:
    """The number of elements of the box that are outside of the tensor."""
    inside = prod(max(min(b + n, e) - max(b, 0), 0) for b, n, e in zip(start, size, shape, strict=True))
    return abs(prod(size)) - inside


def _count_boxes(
    shape: tuple[int, ...],
    start: Int64Array,
    size: Int64Array,
    holders: tuple[Int64Array, Int64Array, Int64Array],
    edges: list[Int64Array],
) -> list[Flaw]:
    """Counts the boxes over every cell between neighbouring edges, by a difference array."""
    cut = [k for k, edge in enumerate(edges) if len(edge) > 2]
    if not cut:
        # No dimension is cut, so every box is the whole tensor: there is one after removing equals, or none.
        return [] if len(start) else [Flaw("incomplete", prod(shape), (0,) * len(shape), shape, ())]
    counts = np.zeros([len(edges[k]) for k in cut], np.int32)
    low = [np.searchsorted(edges[k], start[:, k]) for k in cut]
    high = [np.searchsorted(edges[k], start[:, k] + size[:, k]) for k in cut]
    for corner in product((0, 1), repeat=len(cut)):
        index = tuple(high[i] if upper else low[i] for i, upper in enumerate(corner))
        np.add.at(counts, index, -1 if sum(corner) % 2 else 1)
    for axis in range(len(cut)):
        np.cumsum(counts, axis=axis, out=counts)
    counts = counts[tuple(slice(0, -1) for _ in cut)]
    flaws: list[Flaw] = []
    marked: tuple[tuple[FlawKind, npt.NDArray[np.bool_]], ...] = (("incomplete", counts == 0), ("overlap", counts > 1))
    for kind, wrong in marked:
        if not wrong.any():
            continue
        first = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        begin, end = [0] * len(shape), list(shape)
        for axis, k in enumerate(cut):
            begin[k], end[k] = int(edges[k][first[axis]]), int(edges[k][first[axis] + 1])
        box = tuple(e - b for b, e in zip(begin, end, strict=True))
        ranks = _holding_ranks(holders, begin, end) if kind == "overlap" else ()
        volume: Int64Array = wrong.astype(np.int64)  # of the marked cells, over the cut dimensions
        for k in reversed(cut):
            volume = volume @ np.diff(edges[k])
        elements = int(volume) * prod(n for k, n in enumerate(shape) if k not in cut)
        flaws.append(Flaw(kind, elements, tuple(begin), box, ranks))
    return flaws


def _holding_ranks(
    holders: tuple[Int64Array, Int64Array, Int64Array], begin: Sequence[int], end: Sequence[int]
) -> tuple[int, ...]:
    """The ranks whose boxes contain the cell from ``begin`` to ``end``."""
    start, size, rank = holders
    contains = (start <= np.asarray(begin, np.int64)) & (start + size >= np.asarray(end, np.int64))
    ranks: list[int] = distinct(rank[contains.all(axis=1)]).tolist()
    return tuple(ranks)


def _first_wrong_cell(
    shape: tuple[int, ...],
    start: Int64Array,
    size: Int64Array,
    holders: tuple[Int64Array, Int64Array, Int64Array],
    edges: list[Int64Array],
) -> list[Flaw]:
    """For boxes of too many cells to count: one that is in no box, or in several."""
    cells = _Cells(start, size, edges)
    wrong = cells.first_wrong()
    if wrong is None:
        return []
    cell, boxes = wrong
    begin = [int(edge[at]) for edge, at in zip(edges, cell, strict=True)]
    end = [int(edge[at + 1]) for edge, at in zip(edges, cell, strict=True)]
    box = tuple(e - b for b, e in zip(begin, end, strict=True))
    if boxes:
        return [Flaw("overlap", prod(box), tuple(begin), box, _holding_ranks(holders, begin, end))]
    missing = prod(shape) - sum(prod(row) for row in size.tolist())
    return [Flaw("incomplete", max(missing, prod(box)), tuple(begin), box, ())]


class _Cells:
    """The cells between neighbouring edges, each with the number of boxes that it is in.

    Every interval of every dimension gets a secret random number, and a cell the product of its intervals' numbers. A
    box then sums up to the product of its sides' sums. If each cell of a region is in one box, its boxes sum up to the
    region's own product. If not, they hardly ever do: the difference is a polynomial in the random numbers that is not
    zero (Schwartz and Zippel), and two draws modulo a prime leave a chance of 1 in 10**16.
    """

    def __init__(self, start: Int64Array, size: Int64Array, edges: list[Int64Array]) -> None:
        self._low = np.stack([np.searchsorted(edge, start[:, k]) for k, edge in enumerate(edges)], axis=1)
        self._high = np.stack([np.searchsorted(edge, start[:, k] + size[:, k]) for k, edge in enumerate(edges)], axis=1)
        self._counts = [len(edge) - 1 for edge in edges]
        draw = np.random.default_rng()
        self._sums: list[list[Int64Array]] = []  # by draw and dimension: of the numbers of all intervals before an edge
        for _ in range(2):
            numbers = [draw.integers(1, _PRIME, count, np.int64) for count in self._counts]
            self._sums.append([np.append(0, np.cumsum(of_dim) % _PRIME) for of_dim in numbers])

    def first_wrong(self) -> tuple[list[int], int] | None:
        """The first cell that is not in exactly one box, as the number of its interval in each dimension, and the
        number of boxes that it is in; None if there is none.
        """
        low, high = [0] * len(self._counts), list(self._counts)
        rows = np.arange(len(self._low))
        if self._is_right(rows, low, high):
            return None
        while any(end - begin > 1 for begin, end in zip(low, high, strict=True)):
            lengths = [end - begin for begin, end in zip(low, high, strict=True)]
            dimension = next(k for k, length in enumerate(lengths) if length > 1)
            middle = (low[dimension] + high[dimension]) // 2
            first_half = [*high[:dimension], middle, *high[dimension + 1 :]]
            inside = rows[self._low[rows, dimension] < middle]
            if self._is_right(inside, low, first_half):
                low[dimension] = middle
                rows = rows[self._high[rows, dimension] > middle]
            else:
                high, rows = first_half, inside
        return low, len(rows)

    def _is_right(self, rows: npt.NDArray[np.intp], low: list[int], high: list[int]) -> bool:
        """Whether each cell of the region from ``low`` to ``high`` is in one of the boxes ``rows``."""
        for sums in self._sums:
            total, expected = np.ones(len(rows), np.int64), 1
            for k, of_dimension in enumerate(sums):
                begins, ends = self._low[rows, k].clip(low[k], high[k]), self._high[rows, k].clip(low[k], high[k])
                total = total * ((of_dimension[ends] - of_dimension[begins]) % _PRIME) % _PRIME
                expected = expected * int(of_dimension[high[k]] - of_dimension[low[k]]) % _PRIME
            if int(total.sum()) % _PRIME != expected:
                return False
        return True
