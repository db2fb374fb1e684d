"""Plans every byte of every target file, as literals and as copies from source files. Columns, not objects.

A copy is two-dimensional, like a pitched memory copy: ``rows`` rows of ``width`` bytes, ``source_pitch`` and
``target_pitch`` bytes apart. A contiguous copy has one row. A box of a tensor is one or more such copies. ``make_plan``
intersects the chunks that a checkpoint has with the write items that a target wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import NamedTuple, TypeAlias

import numpy as np

from fsdpckpt.errors import InternalError
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.targets import Target, TargetFile, WriteItem
from fsdpckpt.ir.tensors import Chunks, Int64Array, Tensor, contiguous_stride


class Claim(NamedTuple):
    """A journal's claim that the window [begin, end) of a target file is on the disk, with this CRC-32."""

    begin: int
    end: int
    crc: int


COPY_COLUMNS = ("file", "source", "source_pitch", "target", "target_pitch", "width", "rows", "cast")


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """One row a copy, all int64. ``file``: index of the source file.

    ``source``, ``target``: byte offsets of the first row.
    ``width``: bytes of one row in the target. ``cast``: index into ``Plan.casts``, -1 for a plain copy; a cast row
    takes ``width // target itemsize * source itemsize`` bytes of the source.
    """

    file: Int64Array
    source: Int64Array
    source_pitch: Int64Array
    target: Int64Array
    target_pitch: Int64Array
    width: Int64Array
    rows: Int64Array
    cast: Int64Array

    @classmethod
    def of(cls, rows: list[tuple[int, int, int, int, int, int, int, int]]) -> Copies:
        """From rows in the order of ``COPY_COLUMNS``."""
        flat = np.fromiter(chain.from_iterable(rows), np.int64, len(rows) * len(COPY_COLUMNS))
        return cls(*np.ascontiguousarray(flat.reshape(len(rows), len(COPY_COLUMNS)).T))

    def __len__(self) -> int:
        return len(self.file)


@dataclass(frozen=True, slots=True, eq=False)
class FilePlan:
    """One target file, in columns.

    ``literals`` (n, 3): file offset, start in ``blob``, bytes. ``write_items`` (m, 2): file offset, bytes.
    ``first_copy`` (m + 1,): write item i is filled by rows ``first_copy[i]`` to ``first_copy[i + 1]`` of ``copies``.
    ``checksums`` (k, 2): begin and end of each range whose CRC-32 goes to ``places[i]``, sorted by begin.
    """

    path: str
    nbytes: int
    blob: bytes | bytearray
    literals: Int64Array
    write_items: Int64Array
    first_copy: Int64Array
    copies: Copies
    checksums: Int64Array
    places: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """All target files in the order they are written. ``casts``: (source dtype, target dtype) pairs."""

    files: tuple[FilePlan, ...]
    casts: tuple[tuple[DType, DType], ...]

    @property
    def bytes_written(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensor data the copies take from the sources."""
        each = (self.source_bytes(file.copies.width * file.copies.rows, file.copies.cast) for file in self.files)
        return sum(int(nbytes.sum()) for nbytes in each)

    def source_bytes(self, target_bytes: Int64Array, cast: Int64Array) -> Int64Array:
        """What ``target_bytes`` of copies with those casts take of their sources."""
        found = target_bytes.copy()
        for index, (source, target) in enumerate(self.casts):
            of_cast = cast == index
            found[of_cast] = found[of_cast] // target.itemsize * source.itemsize
        return found

    def check(self) -> None:
        """Every target byte is written exactly once. Raises InternalError: a plan that fails must never run."""
        for file in self.files:
            _check_file(file)


def _check_file(file: FilePlan) -> None:
    extents = np.concatenate([file.literals[:, [0, 2]], file.write_items])
    extents = extents[np.argsort(extents[:, 0], kind="stable")]
    ends = extents[:, 0] + extents[:, 1]
    starts = np.append(extents[:, 0], file.nbytes)
    if (starts[0] if len(starts) else 0) != 0 or not np.array_equal(starts[1:], ends):
        raise InternalError(f"the plan of {file.path or 'the target file'} leaves a gap or writes bytes twice")
    filled = np.zeros(len(file.copies) + 1, np.int64)
    np.cumsum(file.copies.width * file.copies.rows, out=filled[1:])
    per_write_item = filled[file.first_copy[1:]] - filled[file.first_copy[:-1]]
    if not np.array_equal(per_write_item, file.write_items[:, 1]):
        write_item = int(np.flatnonzero(per_write_item != file.write_items[:, 1])[0])
        offset, nbytes = file.write_items[write_item].tolist()
        raise InternalError(
            f"the plan of {file.path or 'the target file'} does not fill the write item at offset {offset}",
            expected=f"{nbytes} bytes",
            found=f"{int(per_write_item[write_item])}",
        )


Row: TypeAlias = tuple[int, int, int, int, int, int, int, int]


class _Casts:
    """Numbers the (source, target) dtype pairs of one plan."""

    def __init__(self) -> None:
        self.pairs: list[tuple[DType, DType]] = []
        self._index: dict[tuple[str, str], int] = {}

    def number(self, source: DType, target: DType) -> int:
        if source is target:
            return -1
        key = (source.name, target.name)
        if key not in self._index:
            self._index[key] = len(self.pairs)
            self.pairs.append((source, target))
        return self._index[key]


FEW = 32  # chunks: up to here plain Python is quicker than numpy's fixed cost per call

Box: TypeAlias = tuple[list[int], list[int], list[int], int, int]
"""One chunk: start, size and stride (elements), source file, byte offset."""


class _Layout:
    """The chunks of one tensor, replicas dropped (the lowest rank's copy stays) and sorted by their first row."""

    __slots__ = ("_boxes", "_chunks", "_reach", "single")

    def __init__(self, tensor: Tensor) -> None:
        chunks = tensor.chunks
        # The common case, one row-major chunk that is the whole tensor: its file, its offset, bytes from row to row.
        self.single: tuple[int, int, int] | None = None
        self._boxes: list[Box] | None = None
        self._chunks = chunks
        self._reach: Int64Array | None = None
        if len(chunks) > FEW:
            self._chunks = _unique(chunks)
            if tensor.ndim:
                self._chunks = self._chunks.take(np.argsort(self._chunks.start[:, 0], kind="stable"))
                self._reach = np.maximum.accumulate(self._chunks.start[:, 0] + self._chunks.size[:, 0])
            return
        self._boxes = _boxes(chunks)
        if len(self._boxes) == 1:
            _, size, stride, file, offset = self._boxes[0]
            if tuple(size) == tensor.shape and tuple(stride) == contiguous_stride(size):
                self.single = (file, offset, stride[0] * tensor.dtype.itemsize if stride else 0)

    def near(self, begin: int, end: int) -> list[Box]:
        """The chunks whose first dimension may meet [begin, end)."""
        if self._boxes is not None:
            return self._boxes
        if self._reach is None:
            return _boxes(self._chunks)
        low = int(np.searchsorted(self._reach, begin, side="right"))
        high = int(np.searchsorted(self._chunks.start[:, 0], end, side="left"))
        return _boxes(self._chunks.take(np.arange(low, high)))


def _boxes(chunks: Chunks) -> list[Box]:
    start, size, stride = chunks.start.tolist(), chunks.size.tolist(), chunks.stride.tolist()
    rows: list[Box] = list(zip(start, size, stride, chunks.file.tolist(), chunks.offset.tolist(), strict=True))
    if len(rows) < 2:
        return [] if not rows or 0 in size[0] else rows
    best: dict[tuple[int, ...], tuple[int, Box]] = {}
    for rank, row in zip(chunks.rank.tolist(), rows, strict=True):
        box = (*row[0], *row[1])
        if 0 not in row[1] and (box not in best or rank < best[box][0]):
            best[box] = (rank, row)
    return [row for _, row in best.values()]


def _unique(chunks: Chunks) -> Chunks:
    chunks = chunks.take(np.argsort(chunks.rank, kind="stable"))
    boxes = np.concatenate([chunks.start, chunks.size], axis=1)
    if boxes.shape[1] == 0:
        return chunks.take(np.arange(1))
    _, first = np.unique(boxes, axis=0, return_index=True)
    keep = np.zeros(len(chunks), bool)
    keep[first] = True
    return chunks.take(keep & (chunks.size > 0).all(axis=1))


def make_plan(target: Target) -> Plan:
    """The plan of ``target``. Raises InternalError when a chunk was never located or a write item cannot be filled."""
    casts = _Casts()
    layouts: dict[Tensor, _Layout] = {}
    files = tuple(_plan_file(file, layouts, casts) for file in target.files)
    plan = Plan(files, tuple(casts.pairs))
    plan.check()
    return plan


def _plan_file(file: TargetFile, layouts: dict[Tensor, _Layout], casts: _Casts) -> FilePlan:
    rows: list[Row] = []
    first_copy = [0]
    for write_item in file.write_items:
        offset, nbytes, tensor, start, size, dtype, order = write_item
        layout = layouts.get(tensor)
        if layout is None:
            layout = layouts[tensor] = _Layout(tensor)
        cast = -1 if tensor.dtype is dtype else casts.number(tensor.dtype, dtype)
        if layout.single is not None and order is None and size[1:] == tensor.shape[1:]:
            number, source, row = layout.single
            if start:
                source += start[0] * row
            rows.append((number, source, nbytes, offset, nbytes, nbytes, 1, cast))
        else:
            _fill(write_item, layout, cast, rows)
        first_copy.append(len(rows))
    copies = Copies.of(rows)
    if len(copies) and int(copies.source.min()) < 0:
        raise InternalError(f"{file.path or 'the target file'}: a source chunk was never located in its file")
    checksums = sorted(file.checksums)
    return FilePlan(
        path=file.path,
        nbytes=file.nbytes,
        blob=file.blob,
        literals=_table(file.literals, 3),
        write_items=_table([write_item[:2] for write_item in file.write_items], 2),
        first_copy=np.asarray(first_copy, np.int64),
        copies=copies,
        checksums=_table([row[:2] for row in checksums], 2),
        places=tuple(row[2] for row in checksums),
    )


def _table(rows: Sequence[tuple[int, ...]], columns: int) -> Int64Array:
    return np.fromiter(chain.from_iterable(rows), np.int64, len(rows) * columns).reshape(len(rows), columns)


def _fill(write_item: WriteItem, layout: _Layout, cast: int, rows: list[Row]) -> None:
    """Append the copies that fill one write item, in target order."""
    order = tuple(range(len(write_item.size))) if write_item.order is None else write_item.order
    target_stride = [1] * len(write_item.size)
    for dim, step in zip(order, contiguous_stride([write_item.size[dim] for dim in order]), strict=True):
        target_stride[dim] = step
    reach = (write_item.start[0], write_item.start[0] + write_item.size[0]) if write_item.size else (0, 1)
    source_item, target_item = write_item.tensor.dtype.itemsize, write_item.dtype.itemsize
    first = len(rows)
    for start, length, stride, file, offset in layout.near(*reach):
        source, target = offset, write_item.offset
        size: list[int] = []
        for dim, low in enumerate(write_item.start):
            begin = max(start[dim], low)
            count = min(start[dim] + length[dim], low + write_item.size[dim]) - begin
            if count <= 0:
                break
            size.append(count)
            source += (begin - start[dim]) * stride[dim] * source_item
            target += (begin - low) * target_stride[dim] * target_item
        else:
            for source_at, target_at, source_pitch, target_pitch, count, run in _pitched(
                size, stride, target_stride, order
            ):
                rows.append(
                    (
                        file,
                        source + source_at * source_item,
                        source_pitch * source_item,
                        target + target_at * target_item,
                        target_pitch * target_item,
                        run * target_item,
                        count,
                        cast,
                    )
                )
    if len(rows) - first > 1:
        rows[first:] = _joined(sorted(rows[first:], key=lambda row: row[3]))


def _joined(rows: list[Row]) -> list[Row]:
    """Neighbours made one: a slice of a flat parameter is several boxes, which lie end to end on both sides."""
    joined = rows[:1]
    for row in rows[1:]:
        file, source, source_pitch, target, target_pitch, width, count, cast = joined[-1]
        plain = count == row[6] == 1 and file == row[0] and cast == row[7]
        if plain and source + source_pitch == row[1] and target + width == row[3]:
            grown = (file, source, source_pitch + row[2], target, target_pitch + row[4], width + row[5], 1, cast)
            joined[-1] = grown
        else:
            joined.append(row)
    return joined


def _pitched(
    size: Sequence[int], source_stride: Sequence[int], target_stride: Sequence[int], order: Sequence[int]
) -> list[tuple[int, int, int, int, int, int]]:
    """One box as pitched copies: (source start, target start, source pitch, target pitch, rows, run), in elements.

    Dimensions are taken from fastest to slowest in the target; neighbours that are contiguous on both sides melt
    into one, the next one becomes the rows, and what is left is enumerated.
    """
    run = 1
    dims: list[list[int]] = []  # [size, source stride, target stride], fastest first
    for d in reversed(order):
        if size[d] == 1:
            continue
        n, s, t = size[d], source_stride[d], target_stride[d]
        if not dims and s == run and t == run:
            run *= n
        elif dims and s == dims[-1][0] * dims[-1][1] and t == dims[-1][0] * dims[-1][2]:
            dims[-1][0] *= n
        else:
            dims.append([n, s, t])
    if not dims:
        return [(0, 0, run, run, 1, run)]
    rows, source_pitch, target_pitch = dims[0]
    outer = dims[1:]
    found = []
    for index in product(*(range(n) for n, _, _ in outer)):
        source_at = sum(i * s for i, (_, s, _) in zip(index, outer, strict=True))
        target_at = sum(i * t for i, (_, _, t) in zip(index, outer, strict=True))
        found.append((source_at, target_at, source_pitch, target_pitch, rows, run))
    return found
