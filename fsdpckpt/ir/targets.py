"""Describes what a writer lays out: target files of literal bytes, and write items for tensor data. In columns.

A *write item* is one contiguous range of a target file that receives one box of one tensor, row-major or in the memory
order ``order``. A *checksum* is a range whose CRC-32 the executor computes while it copies, and then writes as 4
little-endian bytes at one or two offsets.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import numpy as np

from fsdpckpt.errors import InternalError
from fsdpckpt.ir.checkpoint import Note
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.tensors import Int64Array, Tensor
from fsdpckpt.ir.text_keys import LostDict


class WrittenTensor(NamedTuple):
    """A tensor as it is written: cast to ``dtype``. ``order``: its dimensions from slowest to fastest in the memory of
    each write item; None is row-major."""

    tensor: Tensor
    dtype: DType
    order: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        return self.tensor.numel * self.dtype.itemsize


@dataclass(slots=True, eq=False)
class TargetData:
    """The tensors and boxes that write items refer to by number; files of the same tensors share it.

    ``boxes``: the start of each box, then its size, in elements.
    """

    tensors: list[WrittenTensor] = field(default_factory=list)
    boxes: array[int] = field(default_factory=lambda: array("q"))
    _numbers: dict[tuple[str, tuple[int, ...] | None], dict[Tensor, int]] = field(default_factory=dict)

    def add_tensor(self, tensor: Tensor, dtype: DType, order: tuple[int, ...] | None = None) -> int:
        """Append a tensor as it is written, unless it is there; returns its number."""
        number = self._numbers.setdefault((dtype.name, order), {}).setdefault(tensor, len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(WrittenTensor(tensor, dtype, order))
        return number

    def add_box(self, start: Sequence[int], size: Sequence[int]) -> int:
        """Append a box to ``boxes``; returns its index there."""
        index = len(self.boxes)
        self.boxes.extend(start)
        self.boxes.extend(size)
        return index


class WriteItem(NamedTuple):
    """One write item, as a value: ``nbytes`` from ``offset``, elements ``start`` .. ``start + size`` of ``tensor``."""

    offset: int
    nbytes: int
    tensor: Tensor
    start: tuple[int, ...]
    size: tuple[int, ...]
    dtype: DType
    order: tuple[int, ...] | None


@dataclass(slots=True)
class TargetFile:
    """One file being laid out, front to back. ``path`` is relative to the target directory ("" for a one-file target).

    ``blob``: all literal bytes; files may share it. The columns hold one row after the other. ``literal_columns``: file
    offset, begin in ``blob``, bytes. ``item_columns``: file offset, bytes, number of the tensor and of the box in
    ``data``. ``checksum_columns``: begin, end, and one or two file offsets at which the CRC-32 of [begin, end) is
    written, -1 for none. A file with ``build`` has only path and length until ``built``.
    """

    path: str
    data: TargetData = field(default_factory=TargetData)
    nbytes: int = 0
    blob: bytearray = field(default_factory=bytearray)
    literal_columns: array[int] = field(default_factory=lambda: array("q"))
    item_columns: array[int] = field(default_factory=lambda: array("q"))
    checksum_columns: array[int] = field(default_factory=lambda: array("q"))
    build: Callable[[TargetFile], TargetFile] | None = None

    def built(self) -> TargetFile:
        """The file with its columns: itself, or a new one that the caller discards after use."""
        return self if self.build is None else self.build(self)

    def add_literal(self, data: bytes | bytearray) -> int:
        """Append ``data``; returns the file offset it starts at."""
        offset, rows, begin = self.nbytes, self.literal_columns, len(self.blob)
        if data:
            if rows and rows[-3] + rows[-1] == offset and rows[-2] + rows[-1] == begin:
                rows[-1] += len(data)
            else:
                rows.extend((offset, begin, len(data)))
            self.blob += data
            self.nbytes = offset + len(data)
        return offset

    def add_write_item(
        self,
        tensor: Tensor,
        *,
        start: Sequence[int] | None = None,
        size: Sequence[int] | None = None,
        dtype: DType | None = None,
        order: tuple[int, ...] | None = None,
    ) -> int:
        """Append a write item for a box of ``tensor`` (the whole tensor by default); returns its file offset."""
        offset, data = self.nbytes, self.data
        dtype = tensor.dtype if dtype is None else dtype
        size = tensor.shape if size is None else size
        nbytes = dtype.itemsize
        for extent in size:
            nbytes *= extent
        if nbytes:
            number = data.add_tensor(tensor, dtype, order)
            box = data.add_box((0,) * len(size) if start is None else start, size)
            self.item_columns.extend((offset, nbytes, number, box))
            self.nbytes += nbytes
        return offset

    def add_whole_tensors(self, tensors: Sequence[WrittenTensor], offset: Int64Array, nbytes: Int64Array) -> None:
        """Append write items for whole tensors, at offsets that the caller left free for them."""
        boxes: dict[tuple[int, ...], int] = {}
        rows = np.empty((len(tensors), 2), np.int64)
        for number, written in enumerate(tensors):
            shape = written.tensor.shape
            box = boxes.get(shape)
            if box is None:
                box = boxes[shape] = self.data.add_box((0,) * len(shape), shape)
            rows[number] = self.data.add_tensor(*written) if nbytes[number] else -1, box
        table = np.column_stack([offset, nbytes, rows])[nbytes > 0]
        self.item_columns.frombytes(np.ascontiguousarray(table).tobytes())

    def add_checksum(self, begin: int, end: int, offsets: Sequence[int]) -> None:
        """Have the CRC-32 of [begin, end) written at each of ``offsets``, one or two: literal zeros, 4 bytes each."""
        if not 0 < len(offsets) <= 2:
            raise InternalError(f"a checksum of {self.path or 'the target file'} at {len(offsets)} offsets")
        self.checksum_columns.extend((begin, end, offsets[0], offsets[1] if len(offsets) > 1 else -1))

    @property
    def literals(self) -> list[tuple[int, ...]]:
        """(file offset, begin in ``blob``, bytes) of each literal."""
        return _rows(self.built().literal_columns, 3)

    @property
    def write_items(self) -> list[WriteItem]:
        """Each write item as a value: for a file that has few."""
        items = []
        for offset, nbytes, number, first in _rows(self.built().item_columns, 4):
            tensor, dtype, order = self.data.tensors[number]
            box = tuple(self.data.boxes[first : first + 2 * tensor.ndim])
            start, size = box[: tensor.ndim], box[tensor.ndim :]
            items.append(WriteItem(offset, nbytes, tensor, start, size, dtype, order))
        return items

    @property
    def checksums(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """(begin, end, offsets it is written at) of each checksum."""
        checksums = []
        for begin, end, *offsets in _rows(self.built().checksum_columns, 4):
            checksums.append((begin, end, tuple(offset for offset in offsets if offset >= 0)))
        return checksums


def as_table(columns: array[int], width: int) -> Int64Array:
    """Rows that were added one by one, as an array (n, ``width``)."""
    return np.frombuffer(columns, np.int64).reshape(-1, width)


def _rows(columns: array[int], width: int) -> list[tuple[int, ...]]:
    return list(zip(*[iter(columns)] * width, strict=True))


PER_ITEM = -1
"""The tensor and the box in the columns of a kind of items whose data differs: each item says which they are."""


class ItemKinds:
    """The columns of several kinds of items, one kind after the other. Each is laid out as a file of one item."""

    def __init__(self, kinds: list[TargetFile]) -> None:
        self._literals = _join([as_table(kind.literal_columns, 3) for kind in kinds], 3)
        self._items = _join([as_table(kind.item_columns, 4) for kind in kinds], 4)
        self._checksums = _join([as_table(kind.checksum_columns, 4) for kind in kinds], 4)

    def insert(
        self, file: TargetFile, kind: Int64Array, begin: Int64Array, tensor: Int64Array, box: Int64Array
    ) -> TargetFile:
        """``file`` with items of these kinds from these offsets on, with these tensors and boxes for ``PER_ITEM``."""
        number, literals = _rows_of(self._literals, kind)
        literals[:, 0] += begin[number]
        number, items = _rows_of(self._items, kind)
        items[:, 0] += begin[number]
        differs = items[:, 2] == PER_ITEM
        items[differs, 2], items[differs, 3] = tensor[number[differs]], box[number[differs]]
        number, checksums = _rows_of(self._checksums, kind)
        checksums += begin[number, None]  # all checksums have two offsets
        return replace(
            file,
            literal_columns=array("q", literals.tobytes()),
            item_columns=array("q", items.tobytes()),
            checksum_columns=array("q", checksums.tobytes()),
            build=None,
        )


_Joined: TypeAlias = tuple[Int64Array, Int64Array, Int64Array]


def _join(tables: list[Int64Array], width: int) -> _Joined:
    """All rows, and for each table the first of its rows and their number."""
    count = np.array([len(table) for table in tables], np.int64)
    return np.concatenate([np.zeros((0, width), np.int64), *tables]), np.cumsum(count) - count, count


def _rows_of(joined: _Joined, tables: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The rows of ``tables``, one table after the other. Also returns, first, the position in ``tables`` of each."""
    rows, first, count = joined
    counts = count[tables]
    number = np.repeat(np.arange(len(tables)), counts)
    row = np.arange(len(number)) - np.repeat(np.cumsum(counts) - counts - first[tables], counts)
    return number, rows[row]


@dataclass(frozen=True, slots=True)
class LinkedFile:
    """A target file at ``path`` with the same bytes as source file number ``source``: it is linked, not written.

    ``used``: the bytes in it that belong to the target.
    """

    path: str
    source: int
    used: int


@dataclass(slots=True)
class Target:
    """All files of one output, in the order they become visible (a DCP ``.metadata`` last); ``links`` come first.

    ``notes``: what the layout dropped, renamed or cast. ``lost``: the dicts that are others in a DCP directory.
    """

    files: list[TargetFile]
    notes: list[Note] = field(default_factory=list)
    links: list[LinkedFile] = field(default_factory=list)
    lost: tuple[LostDict, ...] = ()
