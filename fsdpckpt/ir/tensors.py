"""Describes tensors: dtype, global shape, and where every element is, in columns.

A *chunk* is a box of one tensor's elements in one file. Several chunks may hold the same box (replicas); together the
chunks of a whole tensor cover every element. How a source cuts a tensor over
ranks: ``fsdpckpt.ir.placements``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.placements import Sharding, TensorCut, Whole

Int64Array: TypeAlias = npt.NDArray[np.int64]
_WHOLE = Whole()


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements, as torch gives them (a size-0 dimension counts as 1)."""
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def contiguous_strides(size: Int64Array) -> Int64Array:
    """``contiguous_stride`` of each of n boxes (n, d). Read-only: one row in memory if all are the same."""
    n, d = size.shape
    if n == 1:
        return np.array([contiguous_stride(size[0].tolist())], np.int64).reshape(1, d)
    if n and (size[1:, 1:] == size[0, 1:]).all():  # the first dimension is part of no stride
        return np.broadcast_to(np.array(contiguous_stride(size[0].tolist()), np.int64), (n, d))
    stride = np.ones((n, d), np.int64)
    for dim in range(d - 1, 0, -1):
        np.multiply(stride[:, dim], np.maximum(size[:, dim], 1), out=stride[:, dim - 1])
    return stride


def distinct(values: npt.ArrayLike) -> Int64Array:
    """The different numbers, ascending: ``np.unique`` without the masked arrays that it imports, which takes longer
    than most of a small conversion's steps.
    """
    ordered = np.sort(np.asarray(values, np.int64), axis=None)
    new = np.ones(len(ordered), np.bool_)
    new[1:] = ordered[1:] != ordered[:-1]
    return ordered[new]


def first_equal(rows: Int64Array) -> Int64Array:
    """For each row (n, d) the number of the first row that equals it."""
    first = np.zeros(len(rows), np.int64)
    if rows.shape[1]:
        order = np.lexsort(rows.T)  # stable: the first of equals comes first
        new = np.ones(len(rows), np.bool_)
        new[1:] = (rows[order[1:]] != rows[order[:-1]]).any(axis=1)
        first[order] = order[new][np.cumsum(new) - 1]
    return first


@dataclass(slots=True, eq=False, repr=False)  # Final, not frozen: see Chunks
class Boxes:
    """n boxes of a tensor of d dimensions, one row each, and the strides with which each is stored.

    ``start``, ``size`` (n, d): in elements of the global tensor. ``stride`` (n, d): elements between neighbours in the
    file, as ``torch.Tensor.stride``. Equal only to itself: tensors that are cut alike share one, which is then the key
    of what is computed once for all of them.
    """

    start: Final[Int64Array]
    size: Final[Int64Array]
    stride: Final[Int64Array]

    def __len__(self) -> int:
        return len(self.start)

    def __repr__(self) -> str:
        return f"<{len(self):,} boxes of {self.start.shape[1]} dimensions>"

    @classmethod
    def joined(cls, parts: Sequence[Boxes]) -> Boxes:
        """The boxes of all ``parts``, one after the other."""
        if len(parts) == 1:
            return parts[0]
        columns = [(part.start, part.size, part.stride) for part in parts]
        return cls(*map(np.concatenate, zip(*columns, strict=True)))

    def take(self, index: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> Boxes:
        """The rows that ``index`` selects."""
        return Boxes(self.start[index], self.size[index], self.stride[index])


@lru_cache(maxsize=1 << 10)  # no more: a file may be made of shapes that have one hash
def _whole_box(shape: tuple[int, ...], stride: tuple[int, ...] | None) -> Boxes:
    """The box of a chunk that is a whole tensor. Cached: a model has few shapes, and many tensors of each."""
    box = np.zeros((3, 1, len(shape)), np.int64)
    box[1, 0] = shape
    box[2, 0] = contiguous_stride(shape) if stride is None else stride
    box.flags.writeable = False
    return Boxes(box[0], box[1], box[2])


@lru_cache(maxsize=1 << 12)
def _number(value: int) -> Int64Array:
    """A column with one row."""
    column = np.array((value,), np.int64)
    column.flags.writeable = False
    return column


@dataclass(
    slots=True, eq=False, repr=False
)  # Final, not frozen: frozen objects take four times as long to make, and there are many
class Chunks:
    """The chunks of one tensor, one row each: n rows.

    ``rank`` (n,): the rank that held or wrote the chunk. ``file`` (n,): index into ``Checkpoint.files``. ``offset``
    (n,): byte offset in that file of the chunk's first element, -1 until the reader has located it.
    ``boxes``: their boxes and strides, which tensors that are cut alike share. ``item`` (n, 2), for chunks stored by
    DCP: the first byte and the length of the archive in that file that holds the chunk.
    """

    rank: Final[Int64Array]
    file: Final[Int64Array]
    offset: Final[Int64Array]
    boxes: Final[Boxes]
    item: Final[Int64Array | None] = None

    @property
    def start(self) -> Int64Array:
        return self.boxes.start

    @property
    def size(self) -> Int64Array:
        return self.boxes.size

    @property
    def stride(self) -> Int64Array:
        return self.boxes.stride

    def __len__(self) -> int:
        return len(self.file)

    def __repr__(self) -> str:
        return f"<{len(self):,} chunks>"

    @classmethod
    def whole(
        cls, *, file: int, offset: int, shape: Sequence[int], stride: Sequence[int] | None = None, rank: int = 0
    ) -> Chunks:
        """One chunk that is the whole tensor. All arrays but ``offset`` are shared and read-only."""
        boxes = _whole_box(tuple(shape), None if stride is None else tuple(stride))
        return cls(_number(rank), _number(file), np.array((offset,), np.int64), boxes)

    @classmethod
    def rows(
        cls,
        *,
        ndim: int,
        rank: Sequence[int],
        file: Sequence[int],
        offset: Sequence[int],
        start: Sequence[Sequence[int]],
        size: Sequence[Sequence[int]],
        stride: Sequence[Sequence[int]] | None = None,
    ) -> Chunks:
        """Several chunks; ``stride`` None means each is row-major."""
        n = len(rank)
        sizes = np.asarray(size, np.int64).reshape(n, ndim)
        return cls(
            np.asarray(rank, np.int64).reshape(n),
            np.asarray(file, np.int64).reshape(n),
            np.asarray(offset, np.int64).reshape(n),
            Boxes(
                np.asarray(start, np.int64).reshape(n, ndim),
                sizes,
                contiguous_strides(sizes) if stride is None else np.asarray(stride, np.int64).reshape(n, ndim),
            ),
        )

    @classmethod
    def joined(cls, parts: Sequence[Chunks], boxes: Boxes | None = None) -> Chunks:
        """The chunks of all ``parts``, one after the other. ``boxes``: theirs, if others share them."""
        if len(parts) == 1:
            return parts[0]
        columns = [(part.rank, part.file, part.offset) for part in parts]
        rank, file, offset = map(np.concatenate, zip(*columns, strict=True))
        items = [part.item for part in parts if part.item is not None]
        item = np.concatenate(items) if len(items) == len(parts) else None
        return cls(rank, file, offset, boxes or Boxes.joined([part.boxes for part in parts]), item)

    def take(self, index: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> Chunks:
        """The rows that ``index`` selects."""
        return Chunks(
            self.rank[index],
            self.file[index],
            self.offset[index],
            self.boxes.take(index),
            self.item[index] if self.item is not None else None,
        )

    def with_boxes(
        self, *, start: Int64Array | None = None, size: Int64Array | None = None, stride: Int64Array | None = None
    ) -> Chunks:
        """The same places with other boxes; what is not given stays."""
        boxes = self.boxes
        changed = Boxes(
            boxes.start if start is None else start,
            boxes.size if size is None else size,
            boxes.stride if stride is None else stride,
        )
        return Chunks(self.rank, self.file, self.offset, changed, self.item)


@dataclass(slots=True, eq=False, repr=False)
class Tensor:
    """One tensor of a checkpoint. ``shape``: the global shape in elements. Equal only to itself, so that it can be a
    key of a dict.

    ``sharded``: True if FSDP shards it (DTensor, ShardedTensor, several DCP chunks, FSDP1's clone mark, an
    ``nn.Parameter``), False if every rank holds it whole (plain tensor among sharded ones, 0-dim), None if the source
    does not say. It comes from metadata, never from values. ``cut``: how the source held it. ``sharding``: its
    placements on a device mesh, the source's until the target's are decided. None if the source names no mesh: only
    DTensors do. ``undetermined``: whether it is cut like a parameter although it may be a buffer; ``fsdpckpt.json``
    says so, under whatever name it has then.
    """

    dtype: Final[DType]
    shape: Final[tuple[int, ...]]
    chunks: Final[Chunks]
    sharded: Final[bool | None] = None
    cut: Final[TensorCut] = _WHOLE
    sharding: Final[Sharding | None] = None
    undetermined: Final[bool] = False

    def __repr__(self) -> str:
        """One line: the positions of its chunks would fill the screen."""
        return f"<{self.dtype.name} {list(self.shape)}, {self.placement}, {len(self.chunks):,} chunks>"

    def with_sharded(self, sharded: bool | None) -> Tensor:  # noqa: FBT001 (the field of that name)
        """Another tensor of the same data. Ten times as fast as ``dataclasses.replace``."""
        return Tensor(self.dtype, self.shape, self.chunks, sharded, self.cut, self.sharding, self.undetermined)

    @property
    def placement(self) -> str:
        """``cut`` in PyTorch's words: ``"[Shard(0)]"``, ``"[Replicate(), Shard(0)]"``, ``"whole"``."""
        return str(self.cut)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def location(self) -> tuple[object, ...] | None:
        """Where every element is, and in which form: equal for two names of one stored tensor. None if there are no
        elements, or the reader has not located them.
        """
        chunks = self.chunks
        if not self.numel or not len(chunks) or (chunks.offset < 0).any():
            return None
        columns = (chunks.file, chunks.offset, chunks.start, chunks.size, chunks.stride)
        return self.shape, self.dtype.name, *(column.tobytes() for column in columns)


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of a tensor's finite elements, in float64; ``nan`` and ``inf`` count the others.

    ``std``: of the population; ``norm``: Euclidean, inf if it is too large for a float64. None if there are no finite
    elements. The real and imaginary parts of a complex tensor count as separate elements.
    """

    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    norm: float | None
    nan: int
    inf: int

    @property
    def numbers(self) -> tuple[float | None, ...]:
        """All but the counts."""
        return self.min, self.max, self.mean, self.std, self.norm


def spans_of(tensors: Sequence[Tensor]) -> Int64Array:
    """The bytes from the first element to the end of the last, for each chunk of ``tensors``; 0 for an empty one."""
    by_boxes: dict[tuple[Boxes, int], Int64Array] = {}  # and the bytes of an element
    spans = [np.zeros(0, np.int64)]
    for tensor in tensors:
        boxes, itemsize = tensor.chunks.boxes, tensor.dtype.itemsize
        of_tensor = by_boxes.get((boxes, itemsize))
        if of_tensor is None:
            elements = ((boxes.size - 1) * boxes.stride).sum(axis=1) + 1
            of_tensor = by_boxes[boxes, itemsize] = np.where(boxes.size.all(axis=1), elements * itemsize, 0)
        spans.append(of_tensor)
    return np.concatenate(spans)


def ranges_of(tensors: Sequence[Tensor]) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The file of each chunk of ``tensors``, where it begins there, and where its last element ends."""
    nothing = np.zeros(0, np.int64)
    file = np.concatenate([nothing, *(tensor.chunks.file for tensor in tensors)])
    begin = np.concatenate([nothing, *(tensor.chunks.offset for tensor in tensors)])
    return file, begin, begin + spans_of(tensors)


@dataclass(frozen=True, slots=True)
class Box:
    """``offsets`` and ``sizes`` in elements of the whole tensor, one number for each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """All of a tensor of ``shape``."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        return prod(self.sizes)
