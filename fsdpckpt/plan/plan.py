"""Plans every byte of every target file: literals, and copies from source files. In columns, not in objects.

A copy is two-dimensional, like a pitched memory copy: ``rows`` rows of ``width`` bytes, ``source_pitch`` and
``target_pitch`` bytes apart. A contiguous copy has one row. A box of a tensor is one or more copies. ``make_plan``
intersects the chunks of a checkpoint with the write items of a target.

A target file is cut into *windows*: one thread assembles a window in memory and writes it with one request. A row of a
transposed tensor takes one element from every row of the source, so reading it alone costs as much as reading all
rows. A ``StridedBatch`` reads the copies of several such rows at once, a range of each source row at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fsdpckpt.errors import InternalError
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.targets import Target, TargetData, TargetFile, as_table
from fsdpckpt.ir.tensors import Int64Array
from fsdpckpt.plan.copies import Casts, SourceChunks
from fsdpckpt.text import bytes_text


class Copies(NamedTuple):
    """One row for each copy, in int64 columns. ``file``: index of the source file.

    ``source``, ``target``: byte offsets of the first row. ``width``: bytes of one row in the target. ``cast``: index
    into ``Plan.casts``, -1 for a plain copy; a cast row takes ``width // target itemsize * source itemsize`` bytes of
    the source.
    """

    file: Int64Array
    source: Int64Array
    source_pitch: Int64Array
    target: Int64Array
    target_pitch: Int64Array
    width: Int64Array
    rows: Int64Array
    cast: Int64Array


_SOURCE, _SOURCE_PITCH, _TARGET, _TARGET_PITCH, _WIDTH = (
    Copies._fields.index(name) for name in ("source", "source_pitch", "target", "target_pitch", "width")
)


@dataclass(frozen=True, slots=True, eq=False)
class FilePlan:
    """One target file, in columns.

    ``literals`` (n, 3): file offset, start in ``blob``, bytes. ``write_items`` (m, 2): file offset, bytes.
    ``first_copy`` (m + 1,): write item i is filled by rows ``first_copy[i]`` to ``first_copy[i + 1]`` of ``copies``.
    ``checksums`` (k, 4), sorted by begin: begin and end of each range, and one or two offsets of its CRC-32 (-1: none).
    """

    path: str
    nbytes: int
    blob: bytes | bytearray
    literals: Int64Array
    write_items: Int64Array
    first_copy: Int64Array
    copies: Copies
    checksums: Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """All target files in the order they are written. ``casts``: (source dtype, target dtype) pairs.

    ``bytes_read``: bytes of tensor data that the copies take from the sources.
    """

    files: tuple[FilePlan, ...]
    casts: tuple[tuple[DType, DType], ...]
    bytes_read: int

    @property
    def bytes_written(self) -> int:
        return sum(file.nbytes for file in self.files)

    def source_bytes(self, target_bytes: Int64Array, cast: Int64Array) -> Int64Array:
        """How many bytes copies of ``target_bytes`` with these casts read from the source."""
        return _source_bytes(self.casts, target_bytes, cast)

    def without(self, paths: Collection[str]) -> Plan:
        """The plan without these files."""
        others = tuple(file for file in self.files if file.path not in paths)
        return Plan(others, self.casts, sum(_bytes_read(file, self.casts) for file in others))

    def only(self, paths: Collection[str]) -> Plan:
        """The plan of these files alone."""
        return self.without([file.path for file in self.files if file.path not in paths])

    def outline(self) -> Plan:
        """What is needed after the plan has run: the paths and lengths of the files."""
        files = (_outline(file.path, file.nbytes) for file in self.files)
        return Plan(tuple(files), self.casts, self.bytes_read)

    def digest(self) -> str:
        """The SHA-256 of everything that determines which bytes the plan writes, where, and where they come from."""
        total = hashlib.sha256(repr([(source.name, target.name) for source, target in self.casts]).encode())
        blob: bytes | bytearray | None = None
        for file in self.files:
            total.update(repr((file.path, file.nbytes, len(file.blob))).encode())
            if file.blob != blob:  # files that were laid out together share one
                blob = file.blob
                total.update(blob)
            for table in (file.literals, file.write_items, file.first_copy, file.checksums, *file.copies):
                total.update(repr(table.shape).encode())
                total.update(np.ascontiguousarray(table).data)
        return total.hexdigest()


def check_file(file: FilePlan) -> None:
    """Check that every byte of ``file`` is written exactly once. Raises InternalError if not: the plan must not run."""
    extents = np.concatenate([file.literals[:, [0, 2]], file.write_items])
    extents = extents[np.argsort(extents[:, 0], kind="stable")]
    ends = extents[:, 0] + extents[:, 1]
    starts = np.append(extents[:, 0], file.nbytes)
    if (starts[0] if len(starts) else 0) != 0 or not np.array_equal(starts[1:], ends):
        raise InternalError(f"the plan of {file.path or 'the target file'} leaves a gap or writes bytes twice")
    filled = np.zeros(len(file.copies.file) + 1, np.int64)
    np.cumsum(file.copies.width * file.copies.rows, out=filled[1:])
    per_write_item = filled[file.first_copy[1:]] - filled[file.first_copy[:-1]]
    if not np.array_equal(per_write_item, file.write_items[:, 1]):
        write_item = int(np.flatnonzero(per_write_item != file.write_items[:, 1])[0])
        offset, nbytes = file.write_items[write_item].tolist()
        raise InternalError(
            f"the plan of {file.path or 'the target file'} does not fill the write item at offset {offset}",
            expected=bytes_text(nbytes),
            found=bytes_text(int(per_write_item[write_item])),
        )


def make_plan(target: Target, *, totals_only: bool = False) -> Plan:
    """Plan ``target``. Raises InternalError if a chunk was never located or a write item cannot be filled.

    ``totals_only``: plan file by file, and keep only the path and length of each and the total bytes read.
    """
    casts: Casts = {}
    sources: dict[TargetData, SourceChunks] = {}
    files: list[FilePlan] = []
    bytes_read = 0
    for batch in _batches(target.files):
        planned = _plan_files([each.built() for each in batch], sources, casts)
        for file in planned:
            check_file(file)
            bytes_read += _bytes_read(file, list(casts))
        files += [_outline(each.path, each.nbytes) for each in batch] if totals_only else planned
    return Plan(tuple(files), tuple(casts), bytes_read)


_ITEMS_AT_ONCE = 1 << 12  # small files are planned together, so that they share the cost of each numpy call


def _batches(files: Sequence[TargetFile]) -> Iterator[list[TargetFile]]:
    """Groups of neighbouring files that share their data, in order. A file that is built on demand comes alone."""
    batch: list[TargetFile] = []
    items = 0
    for file in files:
        apart = batch and (file.build or batch[0].build or file.data is not batch[0].data)
        if batch and (apart or items > _ITEMS_AT_ONCE):
            yield batch
            batch, items = [], 0
        batch.append(file)
        items += len(file.item_columns) // 4
    if batch:
        yield batch


def _source_bytes(casts: Sequence[tuple[DType, DType]], target_bytes: Int64Array, cast: Int64Array) -> Int64Array:
    source_bytes = target_bytes.copy()
    for index, (source, target) in enumerate(casts):
        of_cast = cast == index
        source_bytes[of_cast] = source_bytes[of_cast] // target.itemsize * source.itemsize
    return source_bytes


def _bytes_read(file: FilePlan, casts: Sequence[tuple[DType, DType]]) -> int:
    return int(_source_bytes(casts, file.copies.width * file.copies.rows, file.copies.cast).sum())


def _plan_files(files: Sequence[TargetFile], sources: dict[TargetData, SourceChunks], casts: Casts) -> list[FilePlan]:
    """Plan files that share their data: as one file with all of them end to end, which is then split."""
    data = files[0].data
    if data not in sources:
        sources[data] = SourceChunks(data.tensors, casts)
    ends = np.cumsum([file.nbytes for file in files])
    begins = ends - [file.nbytes for file in files]
    counts = [len(file.item_columns) // 4 for file in files]
    items = np.concatenate([as_table(file.item_columns, 4) for file in files])
    items[:, 0] += np.repeat(begins, counts)
    item, *columns = sources[data].copies(items, np.frombuffer(data.boxes, np.int64))
    table = np.stack(columns)
    of_file = np.repeat(np.arange(len(files)), counts)[item]
    for number in of_file[table[_SOURCE] < 0].tolist():
        path = files[number].path or "the target file"
        raise InternalError(f"{path}: a source chunk was never located in its file")
    table[_TARGET] -= begins[of_file]
    first_copy = np.zeros(len(items) + 1, np.int64)
    np.cumsum(np.bincount(item, minlength=len(items)), out=first_copy[1:])
    plans = []
    last = 0
    for file, count in zip(files, counts, strict=True):
        first, last = last, last + count
        copy_rows = slice(int(first_copy[first]), int(first_copy[last]))
        checksums = as_table(file.checksum_columns, 4)
        plans.append(
            FilePlan(
                path=file.path,
                nbytes=file.nbytes,
                blob=file.blob,
                literals=as_table(file.literal_columns, 3),
                write_items=as_table(file.item_columns, 4)[:, :2],
                first_copy=first_copy[first : last + 1] - copy_rows.start,
                copies=Copies(*table[:, copy_rows]),
                checksums=checksums[np.argsort(checksums[:, 0], kind="stable")],
            )
        )
    return plans


_NO_ROWS = np.zeros((0, 4), np.int64)
_NO_COPIES = Copies(*(_NO_ROWS[:, 0],) * len(Copies._fields))


def _outline(path: str, nbytes: int) -> FilePlan:
    return FilePlan(path, nbytes, b"", _NO_ROWS[:, :3], _NO_ROWS[:, :2], np.zeros(1, np.int64), _NO_COPIES, _NO_ROWS)


class Range(NamedTuple):
    """The bytes [begin, end) of a target file."""

    begin: int
    end: int


_CAST_UNIT = 16  # bytes: the largest element; a cast element must not be split between two windows


def open_windows(
    file: FilePlan, plan: Plan, window: int, begin: int, end: int, written: Sequence[tuple[int, int]]
) -> list[Range]:
    """The windows from ``begin`` to ``end`` that are not ``written`` yet, in order.

    ``window``: the largest size in bytes. A boundary inside a write item with a cast falls between two elements, and
    inside one filled row by row between two rows if a row is shorter than a window; elsewhere it may fall anywhere.
    ``written``: disjoint windows of an earlier run from ``begin`` to ``end``, in order.
    """
    windows: list[Range] = []
    at = begin
    for low, high in (*written, (end, end)):
        while at < low:
            windows.append(Range(at, min(_window_end(file, plan, at, window), low)))
            at = windows[-1].end
        at = high
    return windows


def _window_end(file: FilePlan, plan: Plan, begin: int, window: int) -> int:
    limit = begin + window
    if limit >= file.nbytes:
        return file.nbytes
    write_item = int(np.searchsorted(file.write_items[:, 0], limit, side="right")) - 1
    if write_item < 0:
        return limit
    offset, nbytes = file.write_items[write_item].tolist()
    if limit >= offset + nbytes:
        return limit
    unit = _unit(file, plan, write_item)
    end: int = offset + (limit - offset) // unit * unit
    return end if end > begin else offset + (limit - offset) // _CAST_UNIT * _CAST_UNIT


def _unit(file: FilePlan, plan: Plan, write_item: int) -> int:
    """The bytes of a write item that should be in one window: a row of the target, or an element that is cast."""
    rows = slice(int(file.first_copy[write_item]), int(file.first_copy[write_item + 1]))
    several = file.copies.rows[rows] > 1
    if several.any():
        return max(int(file.copies.target_pitch[rows][several].max()), _CAST_UNIT)
    return _CAST_UNIT if plan.casts and (file.copies.cast[rows] >= 0).any() else 1


@dataclass(frozen=True, slots=True, eq=False)
class CopyParts:
    """Parts of copies, sorted by window and then by copy. ``window``, ``copy``: the window and the copy of each part.
    ``nbytes``: the source bytes that each part reads.
    """

    copies: Copies
    window: Int64Array
    copy: Int64Array
    nbytes: Int64Array


def split_copies(
    file: FilePlan, plan: Plan, wanted: npt.NDArray[np.bool_], begins: Int64Array, ends: Int64Array
) -> CopyParts:
    """Cut the ``wanted`` copies of ``file`` into the windows from ``begins[i]`` to ``ends[i]`` (ascending); drop what
    is in no window.
    """
    table = np.stack(file.copies)
    plain = _split_plain(table, np.flatnonzero(wanted & (file.copies.rows == 1)), plan, begins, ends)
    pitched = _split_pitched(table, np.flatnonzero(wanted & (file.copies.rows > 1)), plan, begins, ends)
    rows = np.concatenate([plain, pitched], axis=1)
    rows = rows[:, np.lexsort((rows[2], rows[1], rows[0]))]  # by window, copy, and offset in the target
    copies = Copies(*np.ascontiguousarray(rows[3:]))
    return CopyParts(copies, rows[0], rows[1], plan.source_bytes(copies.width * copies.rows, copies.cast))


def _split_plain(
    table: Int64Array, numbers: npt.NDArray[np.intp], plan: Plan, begins: Int64Array, ends: Int64Array
) -> Int64Array:
    """Split copies of one row. Rows of the result: window, copy, order, then the columns of a copy."""
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
    parts[_WIDTH] = parts[_TARGET_PITCH] = high - low
    parts[_SOURCE_PITCH] = plan.source_bytes(parts[_WIDTH], parts[-1])
    return np.concatenate([np.stack([window, copy, low]), parts]).astype(np.int64, copy=False)


def _split_pitched(
    table: Int64Array, numbers: npt.NDArray[np.intp], plan: Plan, begins: Int64Array, ends: Int64Array
) -> Int64Array:
    """Split copies of several rows: in each window part of a row, whole rows, part of a row."""
    split: list[tuple[int, ...]] = []
    for number in numbers.tolist():
        copy = table[:, number].tolist()
        file, _, source_pitch, target, pitch, width, rows, cast = copy
        window = int(np.searchsorted(ends, target, side="right"))
        last_window = int(np.searchsorted(begins, target + (rows - 1) * pitch + width, side="left"))
        for index in range(window, last_window):
            for at, low, nbytes, count in rows_within(plan, copy, int(begins[index]), int(ends[index])):
                split.append((index, number, low, file, at, source_pitch, low, pitch, nbytes, count, cast))
    return np.asarray(split, np.int64).reshape(len(split), 3 + len(Copies._fields)).T


def rows_within(plan: Plan, copy: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """The parts of ``copy`` (a row of ``Copies``) in [begin, end) of the target: part of a row, whole rows, part of a
    row.

    Each as its offsets in source and target, its bytes of one row, and its number of rows.
    """
    _, source, source_pitch, target, pitch, width, rows, cast = copy
    source_itemsize, target_itemsize = (dtype.itemsize for dtype in plan.casts[cast]) if cast >= 0 else (1, 1)
    row = max(0, (begin - target - width) // pitch + 1)
    last = min(rows, -((target - end) // pitch))
    while row < last:
        at = target + row * pitch
        low, high = max(at, begin), min(at + width, end)
        count = min(last - row, (end - at - width) // pitch + 1) if high - low == width else 1
        skipped = (low - at) // target_itemsize * source_itemsize
        yield source + row * source_pitch + skipped, low, high - low, count
        row += count


@dataclass(frozen=True, slots=True)
class StridedBatch:
    """``count`` copies from number ``first``. Each begins ``source_step`` bytes after the one before in the source, and
    ``target_step`` in the target.
    """

    first: int
    count: int = 1
    source_step: int = 0
    target_step: int = 0


def strided_batches(
    copies: Copies, numbers: Int64Array, source_width: Int64Array, begin: int, end: int, limit: int
) -> Iterator[StridedBatch]:
    """Group the copies ``numbers`` (ascending) into as few batches as possible. ``source_width``: the bytes that each
    takes from one row of the source.

    Copies share a batch only if they are entirely in the bytes [begin, end) of the target, and if the batch takes at
    most ``limit`` bytes from one row of the source and ends before the next row begins.
    """
    file, source, source_pitch, target, target_pitch, width, rows, cast = (column[numbers] for column in copies)
    steps, target_steps = np.diff(source), np.diff(target)
    inside = (target >= begin) & (target + (rows - 1) * target_pitch + width <= end)
    reach = np.minimum(source_pitch, limit) - source_width  # how far the last copy may begin after the first
    neighbours = inside[:-1] & inside[1:] & (np.diff(numbers) == 1)
    joined = neighbours & (steps > 0) & (steps <= reach[:-1]) & (rows[:-1] > 1)
    for column in (file, source_pitch, target_pitch, width, rows, cast):
        joined &= column[:-1] == column[1:]
    other_step = (steps[1:] != steps[:-1]) | (target_steps[1:] != target_steps[:-1])
    separate = ~joined
    separate[1:] |= joined[:-1] & other_step
    starts = [0, *(np.flatnonzero(separate) + 1).tolist()]
    for first, last in zip(starts, [*starts[1:], len(numbers)], strict=True):
        if last - first == 1:
            yield StridedBatch(int(numbers[first]))
            continue
        step, target_step = int(steps[first]), int(target_steps[first])
        count = int(reach[first]) // step + 1
        for at in range(first, last, count):
            yield StridedBatch(int(numbers[at]), min(count, last - at), step, target_step)
