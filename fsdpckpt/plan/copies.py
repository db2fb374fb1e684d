"""Intersects write items with the chunks of their tensors: an interval join over columns, for all tensors at once.

The first dimensions of all tensors are laid end to end on one line, so that one search finds the chunks that may
overlap each write item. The rest is arithmetic on arrays: the intersection of the two boxes, as pitched copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.targets import WrittenTensor
from fsdpckpt.ir.tensors import Boxes, Chunks, Int64Array, Tensor

CopyTable = tuple[Int64Array, ...]
"""The number of the write item of each copy, then the columns of ``Copies``."""

Casts = dict[tuple[DType, DType], int]
"""The number of each (source, target) pair of dtypes of one plan."""

_PAIRS_AT_ONCE = 1 << 17  # pairs of a write item and a chunk: bounds the memory of computing with them


class SourceChunks:
    """The chunks of ``tensors``, which ``copies`` intersects with write items."""

    def __init__(self, tensors: Sequence[WrittenTensor], casts: Casts) -> None:
        numbers: dict[tuple[int, tuple[int, ...] | None], int] = {}
        members: list[list[int]] = []
        self._group = np.empty(len(tensors), np.int64)
        self._index = np.empty(len(tensors), np.int64)  # position in its group
        for number, (tensor, _, order) in enumerate(tensors):
            group = numbers.setdefault((tensor.ndim, order), len(numbers))
            if group == len(members):
                members.append([])
            self._group[number], self._index[number] = group, len(members[group])
            members[group].append(number)
        self._groups: list[_Group] = []
        for (ndim, order), of_group in zip(numbers, members, strict=True):
            self._groups.append(_Group([tensors[number] for number in of_group], ndim, order, casts))

    def copies(self, items: Int64Array, boxes: Int64Array) -> CopyTable:
        """The copies that fill ``items`` (rows of offset, bytes, tensor, position in ``boxes``), in target order.

        Items ascend by offset. An item that the chunks do not fill gets too few copies.
        """
        tables: list[CopyTable] = []
        groups = self._group[items[:, 2]]
        for number in np.flatnonzero(np.bincount(groups)).tolist():
            rows = np.flatnonzero(groups == number)
            tensor = self._index[items[rows, 2]]
            tables += self._groups[number].copies(rows, tensor, items[rows, 0], items[rows, 3], boxes)
        if not tables:
            return (np.zeros(0, np.int64),) * 9
        table = tables[0] if len(tables) == 1 else tuple(map(np.concatenate, zip(*tables, strict=True)))
        if (table[4][1:] < table[4][:-1]).any():
            order = np.argsort(table[4], kind="stable")
            table = tuple(column[order] for column in table)
        return _join_copies(table)


@dataclass(slots=True, eq=False)
class _Chunks:
    """Chunks on the line: the ``begin`` of their first dimension, ascending, and ``reach``, the largest end so far.

    ``box``: the row of ``start``, ``size`` and ``stride`` for each chunk.
    """

    begin: Int64Array
    reach: Int64Array
    file: Int64Array
    offset: Int64Array
    box: Int64Array
    start: Int64Array
    size: Int64Array
    stride: Int64Array


class _Group:
    """Tensors with the same number of dimensions, written in the same ``order`` of dimensions."""

    def __init__(
        self, tensors: Sequence[WrittenTensor], ndim: int, order: tuple[int, ...] | None, casts: Casts
    ) -> None:
        self._scalars = ndim == 0  # each is one row of one element
        self._ndim = max(ndim, 1)
        self._order = tuple(range(self._ndim)) if order is None else order or (0,)
        length = np.array([tensor.shape[0] if ndim else 1 for tensor, _, _ in tensors], np.int64)
        dtypes = [(tensor.dtype, dtype) for tensor, dtype, _ in tensors]
        numbers = [-1 if pair[0] is pair[1] else casts.setdefault(pair, len(casts)) for pair in dtypes]
        self._cast = np.array(numbers, np.int64)
        self._source_item, self._target_item = np.array([(a.itemsize, b.itemsize) for a, b in dtypes], np.int64).T
        self._base = np.cumsum(length) - length  # where each tensor begins on the line
        self._chunks = _line_of_chunks([tensor for tensor, *_ in tensors], self._ndim, self._base)

    def copies(
        self, rows: Int64Array, tensor: Int64Array, offset: Int64Array, box: Int64Array, boxes: Int64Array
    ) -> Iterator[CopyTable]:
        """The copies for write items of these tensors. ``rows``: the items' numbers."""
        ndim, chunks = self._ndim, self._chunks
        if self._scalars:
            start, size = np.zeros((len(box), 1), np.int64), np.ones((len(box), 1), np.int64)
        else:
            rows_of_boxes = boxes[box[:, None] + np.arange(2 * ndim)]
            start, size = rows_of_boxes[:, :ndim], rows_of_boxes[:, ndim:]
        begin = self._base[tensor] + start[:, 0]
        low = np.searchsorted(chunks.reach, begin, side="right")
        count = np.maximum(np.searchsorted(chunks.begin, begin + size[:, 0], side="left") - low, 0)
        ends = np.cumsum(count)
        first = 0
        while first < len(rows):
            before = int(ends[first - 1]) if first else 0
            last = max(int(np.searchsorted(ends, before + _PAIRS_AT_ONCE, side="right")), first + 1)
            item = np.repeat(np.arange(first, last), count[first:last])
            chunk = np.arange(len(item)) + np.repeat(
                low[first:last] - (ends - count)[first:last] + before, count[first:last]
            )
            yield self._pairs(item, chunk, rows, tensor, offset, start, size)
            first = last

    def _pairs(
        self, item: Int64Array, chunk: Int64Array, rows: Int64Array, tensor: Int64Array, offset: Int64Array,
        start: Int64Array, size: Int64Array,
    ) -> CopyTable:  # fmt: skip
        """The copies for pairs of a write item and a chunk that may overlap."""
        chunks, ndim = self._chunks, self._ndim
        box = chunks.box[chunk]
        low = np.maximum(start[item], chunks.start[box])
        extent = np.minimum(start[item] + size[item], chunks.start[box] + chunks.size[box]) - low
        overlap = (extent > 0).all(axis=1)
        if not overlap.all():
            item, chunk, box = item[overlap], chunk[overlap], box[overlap]
            low, extent = low[overlap], extent[overlap]
        stride, target_stride = chunks.stride[box], np.ones((len(item), ndim), np.int64)
        for slow, fast in zip(self._order[-2::-1], self._order[:0:-1], strict=True):
            target_stride[:, slow] = target_stride[:, fast] * size[item, fast]
        source_item, target_item = self._source_item[tensor[item]], self._target_item[tensor[item]]
        source_at = ((low - chunks.start[box]) * stride).sum(axis=1)
        target_at = ((low - start[item]) * target_stride).sum(axis=1)
        pair, source_more, target_more, source_pitch, target_pitch, count, run = _pitched_copies(
            extent, stride, target_stride, self._order
        )
        if pair is not None:
            item, chunk, source_item, target_item = item[pair], chunk[pair], source_item[pair], target_item[pair]
            source_at, target_at = source_at[pair] + source_more, target_at[pair] + target_more
        source = np.where(chunks.offset[chunk] < 0, -1, chunks.offset[chunk] + source_at * source_item)
        target = offset[item] + target_at * target_item
        source_pitch, target_pitch, width = source_pitch * source_item, target_pitch * target_item, run * target_item
        columns = (chunks.file[chunk], source, source_pitch, target, target_pitch, width, count)
        return (rows[item], *columns, self._cast[tensor[item]])


def _line_of_chunks(tensors: Sequence[Tensor], ndim: int, base: Int64Array) -> _Chunks:
    """The chunks of ``tensors`` without empty ones and replicas: of replicas the one on the lowest rank stays."""
    by_tensor = [tensor.chunks for tensor in tensors]
    count = np.array([len(chunks.file) for chunks in by_tensor], np.int64)
    start, size, stride, box = _unique_boxes(by_tensor, count, ndim)
    begin = np.repeat(base, count) + start[box, 0]
    order = None
    full = np.asarray((size > 0).all(axis=1))
    if not full.all():
        order = np.flatnonzero(full[box])
        begin = begin[order]
    if (begin[1:] < begin[:-1]).any():
        ascending = np.argsort(begin, kind="stable")
        begin, order = begin[ascending], ascending if order is None else order[ascending]
    if (begin[1:] == begin[:-1]).any():
        order = np.arange(len(begin)) if order is None else order
        number, rank = (
            np.repeat(np.arange(len(by_tensor)), count),
            np.concatenate([chunks.rank for chunks in by_tensor]),
        )
        of_chunk = box[order]
        order = order[np.lexsort([rank[order], *size[of_chunk].T, *start[of_chunk].T, number[order]])]
        of_chunk = box[order]
        boxes = np.column_stack([number[order], start[of_chunk], size[of_chunk]])
        new = np.ones(len(order), np.bool_)
        new[1:] = (boxes[1:] != boxes[:-1]).any(axis=1)
        order = order[new]
        begin = base[number[order]] + start[box[order], 0]
        ascending = np.argsort(begin, kind="stable")
        begin, order = begin[ascending], order[ascending]
    file = np.concatenate([chunks.file for chunks in by_tensor])
    offset = np.concatenate([chunks.offset for chunks in by_tensor])
    if order is not None:
        file, offset, box = file[order], offset[order], box[order]
    reach: Int64Array = np.maximum.accumulate(begin + size[box, 0]) if len(begin) else begin
    return _Chunks(begin, reach, file, offset, box, start, size, stride)


def _unique_boxes(
    by_tensor: Sequence[Chunks], count: Int64Array, ndim: int
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Starts, sizes and strides of all boxes, and the box of each chunk. Tensors that are cut alike share boxes."""
    first: dict[Boxes, int] = {}
    begins = np.empty(len(by_tensor), np.int64)
    total = 0
    for number, chunks in enumerate(by_tensor):
        begins[number] = first.setdefault(chunks.boxes, total)
        if begins[number] == total:
            total += len(chunks.file)
    boxes = Boxes.joined(list(first))
    start, size, stride = boxes.start, boxes.size, boxes.stride
    if not start.shape[1]:
        start, size = np.zeros((total, ndim), np.int64), np.ones((total, ndim), np.int64)
        stride = size
    return start, size, stride, np.arange(count.sum()) + np.repeat(begins - (np.cumsum(count) - count), count)


_Pitched = tuple["npt.NDArray[np.intp] | None", Int64Array, Int64Array, Int64Array, Int64Array, Int64Array, Int64Array]


def _pitched_copies(
    size: Int64Array, source_stride: Int64Array, target_stride: Int64Array, order: Sequence[int]
) -> _Pitched:
    """Boxes as pitched copies: box (None: each is one copy), source and target start, pitches, rows, run; in elements.

    Goes through the dimensions from fastest to slowest in the target. Neighbouring dimensions that are contiguous on
    both sides merge into one run, the next one becomes the rows, and the rest is enumerated.
    """
    boxes, ndim = size.shape
    run = np.ones(boxes, np.int64)
    depth = np.zeros(boxes, np.int64)  # how many dimensions are left besides the run
    left = np.ones((3, ndim + 1, boxes), np.int64)  # extent, source stride, target stride; fastest first
    for dim in reversed(order):
        extent, source, target = size[:, dim], source_stride[:, dim], target_stride[:, dim]
        several = extent > 1
        plain = several & (depth == 0) & (source == run) & (target == run)
        rest = np.flatnonzero(several & ~plain)
        run = np.where(plain, run * extent, run)
        if not len(rest):
            continue
        top = np.maximum(depth[rest] - 1, 0)
        before, source_before, target_before = left[:, top, rest]
        merges = (source[rest] == before * source_before) & (target[rest] == before * target_before) & (depth[rest] > 0)
        left[0, top[merges], rest[merges]] *= extent[rest[merges]]
        new = rest[~merges]
        left[:, depth[new], new] = extent[new], source[new], target[new]
        depth[new] += 1
    flat = depth == 0
    rows = left[0, 0]
    source_pitch, target_pitch = np.where(flat, run, left[1, 0]), np.where(flat, run, left[2, 0])
    none = np.zeros(0, np.int64)
    if not (depth > 1).any():
        return None, none, none, source_pitch, target_pitch, rows, run
    box = np.arange(boxes)
    source_at, target_at = np.zeros(boxes, np.int64), np.zeros(boxes, np.int64)
    for level in range(1, int(depth.max())):
        count = np.where(depth[box] > level, left[0, level, box], 1)
        every = np.repeat(np.arange(len(box)), count)
        step = np.arange(len(every)) - np.repeat(np.cumsum(count) - count, count)
        box = box[every]
        source_at = source_at[every] + step * left[1, level, box]
        target_at = target_at[every] + step * left[2, level, box]
    return box, source_at, target_at, source_pitch[box], target_pitch[box], rows[box], run[box]


def _join_copies(table: CopyTable) -> CopyTable:
    """Merge neighbouring copies: a slice of a flat parameter is several boxes that follow each other on both sides."""
    item, file, source, source_pitch, target, target_pitch, width, rows, cast = table
    linked = (item[1:] == item[:-1]) & (rows[1:] == 1) & (rows[:-1] == 1) & (file[1:] == file[:-1])
    linked &= (source[:-1] + source_pitch[:-1] == source[1:]) & (target[:-1] + width[:-1] == target[1:])
    if not linked.any():
        return table
    first = np.flatnonzero(np.concatenate([[True], ~linked]))
    source_pitch, target_pitch, width = (
        np.add.reduceat(column, first) for column in (source_pitch, target_pitch, width)
    )
    return (
        item[first], file[first], source[first], source_pitch, target[first], target_pitch, width, rows[first],
        cast[first],
    )  # fmt: skip
