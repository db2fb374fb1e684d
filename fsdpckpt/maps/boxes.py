"""Rearranges tensors without their data: each operation gives every chunk other boxes, strides and a first element.

A chunk is a box of elements with strides, so a slice, a permutation of dimensions, one more dimension and several
tensors along one dimension are chunks of the same bytes. Dimensions that are split or merged cut a box into several
where its elements are no box any more: the rows of one head of interleaved rotary halves. The planner copies from
strided chunks as from any others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np

from fsdpckpt.ir.placements import Sharded, TensorCut
from fsdpckpt.ir.tensors import Boxes, Chunks, Int64Array, Tensor, contiguous_stride


class Rows(NamedTuple):
    """What one operation makes of boxes. ``row``: the box that each comes from, None if each comes from the one at its
    place. ``shift``: from the first element of that to its own, in elements of the file.
    """

    row: Int64Array | None
    shift: Int64Array
    boxes: Boxes


@dataclass(frozen=True, slots=True)
class Insert:
    """A new dimension ``dim`` of one element, at ``index`` of it."""

    dim: int
    index: int = 0

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[: self.dim], 1, *shape[self.dim :])

    def rows(self, boxes: Boxes) -> Rows:
        n, ndim = boxes.start.shape
        step = boxes.stride[:, self.dim] * boxes.size[:, self.dim] if self.dim < ndim else np.ones(n, np.int64)
        start = np.insert(boxes.start, self.dim, self.index, axis=1)
        size = np.insert(boxes.size, self.dim, 1, axis=1)
        stride = np.insert(boxes.stride, self.dim, step, axis=1)
        return Rows(None, np.zeros(n, np.int64), Boxes(start, size, stride))


@dataclass(frozen=True, slots=True)
class Select:
    """The elements at ``index`` of dimension ``dim``, without that dimension."""

    dim: int
    index: int

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[: self.dim], *shape[self.dim + 1 :])

    def rows(self, boxes: Boxes) -> Rows:
        start, size = boxes.start[:, self.dim], boxes.size[:, self.dim]
        row = np.flatnonzero((start <= self.index) & (self.index < start + size))
        shift = (self.index - start[row]) * boxes.stride[row, self.dim]
        left = (np.delete(column[row], self.dim, axis=1) for column in (boxes.start, boxes.size, boxes.stride))
        return Rows(row, shift, Boxes(*left))


@dataclass(frozen=True, slots=True)
class Narrow:
    """``length`` elements from ``begin`` of dimension ``dim``."""

    dim: int
    begin: int
    length: int

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[: self.dim], self.length, *shape[self.dim + 1 :])

    def rows(self, boxes: Boxes) -> Rows:
        start, size = boxes.start[:, self.dim], boxes.size[:, self.dim]
        low = np.maximum(start, self.begin)
        extent = np.minimum(start + size, self.begin + self.length) - low
        row = np.flatnonzero(extent > 0)
        narrowed = boxes.take(row)
        new_start, new_size = narrowed.start.copy(), narrowed.size.copy()
        new_start[:, self.dim], new_size[:, self.dim] = low[row] - self.begin, extent[row]
        shift = (low[row] - start[row]) * boxes.stride[row, self.dim]
        return Rows(row, shift, Boxes(new_start, new_size, narrowed.stride))


@dataclass(frozen=True, slots=True)
class Widen:
    """A dimension ``dim`` of ``length`` elements, in which the tensor begins at ``begin``. The rest is not filled."""

    dim: int
    begin: int
    length: int

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[: self.dim], self.length, *shape[self.dim + 1 :])

    def rows(self, boxes: Boxes) -> Rows:
        start = boxes.start.copy()
        start[:, self.dim] += self.begin
        return Rows(None, np.zeros(len(boxes), np.int64), Boxes(start, boxes.size, boxes.stride))


@dataclass(frozen=True, slots=True)
class Permute:
    """Dimension ``order[i]`` becomes dimension i, as ``torch.Tensor.permute``."""

    order: tuple[int, ...]

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(shape[dim] for dim in self.order)

    def rows(self, boxes: Boxes) -> Rows:
        order = list(self.order)
        columns = (np.ascontiguousarray(column[:, order]) for column in (boxes.start, boxes.size, boxes.stride))
        return Rows(None, np.zeros(len(boxes), np.int64), Boxes(*columns))


@dataclass(frozen=True, slots=True)
class Divide:
    """Dimension ``dim`` becomes two, the second of ``inner`` elements, as ``torch.Tensor.unflatten``."""

    dim: int
    inner: int

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[: self.dim], shape[self.dim] // self.inner, self.inner, *shape[self.dim + 1 :])

    def rows(self, boxes: Boxes) -> Rows:
        begin, step = boxes.start[:, self.dim], boxes.stride[:, self.dim]
        end = begin + boxes.size[:, self.dim]
        first, last = -(-begin // self.inner), end // self.inner  # the outer elements that the box covers whole
        # Up to three boxes: the end of an outer element, whole ones, the beginning of another. An end and a beginning
        # of the same element are one box, the first.
        head_end = np.minimum(first * self.inner, end)
        tail_begin = np.maximum(last * self.inner, head_end)
        parts = [
            (begin, head_end, begin // self.inner, np.ones_like(begin)),
            (first * self.inner, last * self.inner, first, np.maximum(last - first, 0)),
            (tail_begin, end, tail_begin // self.inner, np.ones_like(begin)),
        ]
        found: list[tuple[Int64Array, ...]] = []
        for low, high, outer, count in parts:
            row = np.flatnonzero((high > low) & (count > 0))
            inner_begin = low[row] - outer[row] * self.inner
            inner_size = np.where(count[row] > 1, self.inner, (high - low)[row])
            shift = (low[row] - begin[row]) * step[row]
            found.append((row, shift, outer[row], count[row], inner_begin, inner_size))
        row, shift, outer, count, inner_begin, inner_size = map(np.concatenate, zip(*found, strict=True))
        taken = boxes.take(row)
        start = _replaced(taken.start, self.dim, outer, inner_begin)
        size = _replaced(taken.size, self.dim, count, inner_size)
        stride = _replaced(taken.stride, self.dim, step[row] * self.inner, step[row])
        return Rows(row, shift, Boxes(start, size, stride))


@dataclass(frozen=True, slots=True)
class Merge:
    """Dimensions ``dim`` and ``dim + 1``, which has ``inner`` elements, become one, as ``torch.Tensor.flatten``."""

    dim: int
    inner: int

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[: self.dim], shape[self.dim] * self.inner, *shape[self.dim + 2 :])

    def rows(self, boxes: Boxes) -> Rows:
        outer_at, inner_at = self.dim, self.dim + 1
        count, extent = boxes.size[:, outer_at], boxes.size[:, inner_at]
        outer_step, inner_step = boxes.stride[:, outer_at], boxes.stride[:, inner_at]
        contiguous = (extent == self.inner) & (outer_step == inner_step * self.inner)
        one_box = (count == 1) | (self.inner == 1) | contiguous
        # All others become one box for each outer element.
        times = np.where(one_box, 1, count)
        row = np.repeat(np.arange(len(boxes)), times)
        number = np.arange(len(row)) - np.repeat(np.cumsum(times) - times, times)
        taken, joined = boxes.take(row), one_box[row]
        begin = (taken.start[:, outer_at] + number) * self.inner + taken.start[:, inner_at]
        length = np.where(joined, count[row] * extent[row], extent[row])
        step = np.where(joined & (self.inner == 1), outer_step[row], inner_step[row])
        shift = number * outer_step[row]
        columns = zip((taken.start, taken.size, taken.stride), (begin, length, step), strict=True)
        merged = [_replaced(np.delete(column, inner_at, axis=1), outer_at, new) for column, new in columns]
        return Rows(row, shift, Boxes(*merged))


Operation: TypeAlias = Insert | Select | Narrow | Widen | Permute | Divide | Merge


def _replaced(columns: Int64Array, at: int, *new: Int64Array) -> Int64Array:
    """``columns`` with the columns ``new`` in place of column ``at``."""
    return np.concatenate([columns[:, :at], *(column[:, None] for column in new), columns[:, at + 1 :]], axis=1)


class Rearranger:
    """Applies operations to tensors. Tensors that are cut alike share boxes, before and after: what is computed for one
    is kept for all.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[Operation, Boxes], Rows] = {}
        self._joined: dict[tuple[Boxes, ...], Boxes] = {}
        self._filled_rows: dict[Boxes, tuple[Int64Array, Boxes] | None] = {}  # None: all of them

    def apply(self, tensor: Tensor, *operations: Operation) -> Tensor:
        """``tensor`` after ``operations``, one after the other."""
        shape, chunks = tensor.shape, self._filled(tensor.chunks)
        for operation in operations:
            if (key := (operation, chunks.boxes)) not in self._rows:
                self._rows[key] = operation.rows(chunks.boxes)
            chunks = _moved(chunks, self._rows[key], tensor.dtype.itemsize)
            shape = operation.shape(shape)
        return _of_same_source([tensor], shape, chunks)

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """The chunks of all ``tensors`` of one shape, which fill different parts of it, as one tensor."""
        parts = [self._filled(tensor.chunks) for tensor in tensors]
        key = tuple(part.boxes for part in parts)
        if key not in self._joined:
            self._joined[key] = Boxes.joined(key)
        return _of_same_source(tensors, tensors[0].shape, Chunks.joined(parts, self._joined[key]))

    def _filled(self, chunks: Chunks) -> Chunks:
        """``chunks`` without empty ones: those of ranks that got nothing."""
        boxes = chunks.boxes
        if boxes not in self._filled_rows:
            rows = np.flatnonzero((boxes.size > 0).all(axis=1))
            self._filled_rows[boxes] = None if len(rows) == len(boxes) else (rows, boxes.take(rows))
        filled = self._filled_rows[boxes]
        if filled is None:
            return chunks
        rows, left = filled
        item = chunks.item[rows] if chunks.item is not None else None
        return Chunks(chunks.rank[rows], chunks.file[rows], chunks.offset[rows], left, item)

    def cat(self, tensors: Sequence[Tensor], dim: int) -> Tensor:
        """As ``torch.cat``."""
        sizes = [tensor.shape[dim] for tensor in tensors]
        begins = [0, *accumulate(sizes)]
        parts = zip(tensors, begins[:-1], strict=True)
        return self.join([self.apply(tensor, Widen(dim, begin, begins[-1])) for tensor, begin in parts])

    def stack(self, tensors: Sequence[Tensor], dim: int) -> Tensor:
        """As ``torch.stack``."""
        return self.cat([self.apply(tensor, Insert(dim)) for tensor in tensors], dim)

    def split(self, tensor: Tensor, dim: int, sizes: Sequence[int]) -> list[Tensor]:
        """As ``torch.split``."""
        begins = [0, *accumulate(sizes)]
        return [self.apply(tensor, Narrow(dim, begin, size)) for begin, size in zip(begins, sizes, strict=False)]

    def unstack(self, tensor: Tensor, dim: int) -> list[Tensor]:
        """As ``torch.unbind``."""
        return [self.apply(tensor, Select(dim, index)) for index in range(tensor.shape[dim])]

    def new(self, tensor: Tensor) -> Tensor:
        """``tensor`` as one that is made, and not a view of what it was made of.

        One chunk with strides of its own is a tensor in another memory order, or a part of one that others share, and
        writers keep that, as ``torch.save`` does. Two chunks are not.
        """
        boxes = tensor.chunks.boxes
        if len(boxes) != 1:
            return tensor
        size = tuple(boxes.size[0].tolist())
        stride, row_major = boxes.stride[0].tolist(), contiguous_stride(size)
        steps = zip(size, stride, row_major, strict=True)
        if all(extent == 1 or step == plain for extent, step, plain in steps):
            return tensor
        dim = size.index(max(size))
        half = size[dim] // 2
        parts = [Narrow(dim, 0, half), Narrow(dim, half, size[dim] - half)]
        begins = (0, half)
        pieces: list[Tensor] = []
        for part, at in zip(parts, begins, strict=True):
            pieces.append(self.apply(tensor, part, Widen(dim, at, size[dim])))
        return self.join(pieces)


def _moved(chunks: Chunks, rows: Rows, itemsize: int) -> Chunks:
    """The chunks of ``rows``. An offset that is not known yet stays so."""
    row = slice(None) if rows.row is None else rows.row
    offset = chunks.offset[row]
    offset = np.where(offset < 0, offset, offset + rows.shift * itemsize)
    item = chunks.item[row] if chunks.item is not None else None
    return Chunks(chunks.rank[row], chunks.file[row], offset, rows.boxes, item)


def _of_same_source(tensors: Sequence[Tensor], shape: tuple[int, ...], chunks: Chunks) -> Tensor:
    """A tensor of ``shape`` made of ``tensors``: sharded if all of them are, on no mesh that is known."""
    first = tensors[0]
    sharded = first.sharded if all(tensor.sharded is first.sharded for tensor in tensors) else None
    undetermined = any(tensor.undetermined for tensor in tensors)
    if not prod(shape):  # no element is anywhere
        chunks = Chunks.whole(file=0, offset=0, shape=shape)
    return Tensor(first.dtype, shape, chunks, sharded, _cut(first), None, undetermined)


def _cut(tensor: Tensor) -> TensorCut:
    """How the source held what ``tensor`` became a part of; along which dimensions is not true any more."""
    return Sharded((), tensor.cut.form) if isinstance(tensor.cut, Sharded) else tensor.cut
