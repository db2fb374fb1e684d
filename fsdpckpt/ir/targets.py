"""Describes what a writer lays out: target files of literal bytes, and write items for tensor data. In columns.

A *write item* is one contiguous range of a target file that receives one box of one tensor, row-major (or in the
memory order ``order`` says). A *checksum* is a range whose CRC-32 the executor computes while copying and
then writes as 4 little-endian bytes at one or two places.
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
    """What write items refer to by number; files of the same tensors share it.

    ``boxes``: the start of each box, then its size, in elements.
    """

    tensors: list[WrittenTensor] = field(default_factory=list)
    boxes: array[int] = field(default_factory=lambda: array("q"))
    _numbers: dict[tuple[str, tuple[int, ...] | None], dict[Tensor, int]] = field(default_factory=dict)

    def tensor(self, tensor: Tensor, dtype: DType, order: tuple[int, ...] | None = None) -> int:
        """The number of a tensor as it is written."""
        number = self._numbers.setdefault((dtype.name, order), {}).setdefault(tensor, len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(WrittenTensor(tensor, dtype, order))
        return number

    def box(self, start: Sequence[int], size: Sequence[int]) -> int:
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

    ``blob``: every literal byte, repeated bytes once; files may share it. In columns, row after row, of which several
    may be added at once: ``literal_columns``: file offset, begin in ``blob``, bytes. ``item_columns``: file offset,
    bytes, number of the tensor and of the box in ``data``. ``checksum_columns``: begin, end, and the file offsets of up
    to two places that receive the CRC-32 of [begin, end), -1 for none. A file with ``make`` has only path and length.
    """

    path: str
    data: TargetData = field(default_factory=TargetData)
    nbytes: int = 0
    blob: bytearray = field(default_factory=bytearray)
    literal_columns: array[int] = field(default_factory=lambda: array("q"))
    item_columns: array[int] = field(default_factory=lambda: array("q"))
    checksum_columns: array[int] = field(default_factory=lambda: array("q"))
    make: Callable[[TargetFile], TargetFile] | None = None

    def made(self) -> TargetFile:
        """The file with its columns: itself, or a new one that ``make`` builds and the caller discards."""
        return self if self.make is None else self.make(self)

    def literal(self, data: bytes | bytearray) -> int:
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

    def repeat(self, begin: int, nbytes: int) -> None:
        """Append ``nbytes`` that are already at ``begin`` of ``blob``."""
        if nbytes:
            self.literal_columns.extend((self.nbytes, begin, nbytes))
            self.nbytes += nbytes

    def write_item(
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
            number = data.tensor(tensor, dtype, order)
            box = data.box((0,) * len(size) if start is None else start, size)
            self.item_columns.extend((offset, nbytes, number, box))
            self.nbytes += nbytes
        return offset

    def write_whole(self, tensors: Sequence[WrittenTensor], offset: Int64Array, nbytes: Int64Array) -> None:
        """Write items for whole tensors, at offsets that were left free for them."""
        boxes: dict[tuple[int, ...], int] = {}
        rows = np.empty((len(tensors), 2), np.int64)
        for number, written in enumerate(tensors):
            shape = written.tensor.shape
            box = boxes.get(shape)
            if box is None:
                box = boxes[shape] = self.data.box((0,) * len(shape), shape)
            rows[number] = self.data.tensor(*written) if nbytes[number] else -1, box
        table = np.column_stack([offset, nbytes, rows])[nbytes > 0]
        self.item_columns.frombytes(np.ascontiguousarray(table).tobytes())

    def checksum(self, begin: int, end: int, places: Sequence[int]) -> None:
        """Ask for the CRC-32 of [begin, end), to be stored little-endian at every offset of ``places``, one or two.

        The places must lie in literal bytes, and hold zeros there.
        """
        if not 0 < len(places) <= 2:
            raise InternalError(f"a checksum of {self.path or 'the target file'} with {len(places)} places")
        self.checksum_columns.extend((begin, end, places[0], places[1] if len(places) > 1 else -1))

    @property
    def literals(self) -> list[tuple[int, ...]]:
        """(file offset, begin in ``blob``, bytes) of each literal."""
        return _rows(self.made().literal_columns, 3)

    @property
    def write_items(self) -> list[WriteItem]:
        """Each write item as a value: for a file that has few."""
        items = []
        for offset, nbytes, number, place in _rows(self.made().item_columns, 4):
            tensor, dtype, order = self.data.tensors[number]
            box = tuple(self.data.boxes[place : place + 2 * tensor.ndim])
            start, size = box[: tensor.ndim], box[tensor.ndim :]
            items.append(WriteItem(offset, nbytes, tensor, start, size, dtype, order))
        return items

    @property
    def checksums(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """(begin, end, places) of each checksum."""
        rows = _rows(self.made().checksum_columns, 4)
        return [(begin, end, tuple(place for place in places if place >= 0)) for begin, end, *places in rows]


def as_table(columns: array[int], width: int) -> Int64Array:
    """Rows that were added one by one, as an array (n, ``width``)."""
    return np.frombuffer(columns, np.int64).reshape(-1, width)


def _rows(columns: array[int], width: int) -> list[tuple[int, ...]]:
    return list(zip(*[iter(columns)] * width, strict=True))


EACH = -1
"""In the columns of an item that is put into files at many places: each place says which tensor, and which box."""


class ItemKinds:
    """The columns of several items, one after the other. Each is a kind of item that files have many of."""

    def __init__(self, kinds: list[TargetFile]) -> None:
        self._literals = _join([as_table(kind.literal_columns, 3) for kind in kinds], 3)
        self._items = _join([as_table(kind.item_columns, 4) for kind in kinds], 4)
        self._checksums = _join([as_table(kind.checksum_columns, 4) for kind in kinds], 4)

    def put(
        self, file: TargetFile, kind: Int64Array, begin: Int64Array, tensor: Int64Array, box: Int64Array
    ) -> TargetFile:
        """``file`` with items of these kinds at these offsets, with these tensors and boxes in place of ``EACH``."""
        number, literals = _rows_of(self._literals, kind)
        literals[:, 0] += begin[number]
        number, items = _rows_of(self._items, kind)
        items[:, 0] += begin[number]
        each = items[:, 2] == EACH
        items[each, 2], items[each, 3] = tensor[number[each]], box[number[each]]
        number, checksums = _rows_of(self._checksums, kind)
        checksums += begin[number, None]  # all checksums have two places
        return replace(
            file,
            literal_columns=array("q", literals.tobytes()),
            item_columns=array("q", items.tobytes()),
            checksum_columns=array("q", checksums.tobytes()),
            make=None,
        )


_Joined: TypeAlias = tuple[Int64Array, Int64Array, Int64Array]


def _join(tables: list[Int64Array], width: int) -> _Joined:
    """All rows, and for each table the first of its rows and their number."""
    count = np.array([len(table) for table in tables], np.int64)
    return np.concatenate([np.zeros((0, width), np.int64), *tables]), np.cumsum(count) - count, count


def _rows_of(joined: _Joined, tables: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The rows of ``tables``, one table after the other: to which of them each belongs, and the rows."""
    rows, first, count = joined
    counts = count[tables]
    number = np.repeat(np.arange(len(tables)), counts)
    place = np.arange(len(number)) - np.repeat(np.cumsum(counts) - counts - first[tables], counts)
    return number, rows[place]


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

    ``notes``: what the layout dropped, renamed or cast.
    """

    files: list[TargetFile]
    notes: list[Note] = field(default_factory=list)
    links: list[LinkedFile] = field(default_factory=list)
