"""Builds the columns of all chunks of a DCP checkpoint: boxes, and for each the item that holds it.

Chunks come one by one, or as a run of rows that were scanned; so do the stored items. An item belongs to the chunk
of its tensor with the same start. Its index says which chunk that is, and is checked.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fsdpckpt.formats.dcp.records import chunks_of, items_of
from fsdpckpt.formats.pickle.operands import Columns, NotScannedError
from fsdpckpt.formats.pickle.records import Record, RecordRun, Scan
from fsdpckpt.ir.tensors import Boxes, Int64Array, contiguous_strides

Indexes: TypeAlias = tuple[int, ...]
_Ranges: TypeAlias = tuple[tuple[int, int], ...]

_BATCH_ROWS = 1 << 20  # rows that are processed at a time


class ItemLocation(NamedTuple):
    """Where one item is: ``length`` bytes from ``offset`` of ``relative_path``, encoded by ``transforms``."""

    relative_path: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class StoredChunks:
    """The chunks of one tensor of d dimensions, one row each, each offset once.

    ``boxes``: their boxes, row-major, which tensors that are cut alike share. ``file`` (n,): the data file, a position
    in ``DcpMetadata.files``. ``item`` (n, 2): first byte and length in it of the item that holds the chunk.
    """

    boxes: Final[Boxes]
    file: Final[Int64Array]
    item: Final[Int64Array]

    @property
    def start(self) -> Int64Array:
        return self.boxes.start

    @property
    def size(self) -> Int64Array:
        return self.boxes.size

    def __len__(self) -> int:
        return len(self.file)


class _BoxColumns:
    """Starts and sizes of all chunks of ``ndim`` dimensions, in the order they are added. ``rows_of``: the rows of each
    run, which tensors with the same run share.
    """

    def __init__(self, ndim: int) -> None:
        self.count = 0
        self.start: Int64Array = np.zeros((0, ndim), np.int64)
        self.size = self.start
        self.rows_of: dict[_Ranges, int] = {}
        self._ndim = ndim
        self._single: list[int] = []
        self._parts: list[tuple[Int64Array, Int64Array]] = []

    def add(self, start: Indexes, size: Indexes) -> None:
        self._single += start
        self._single += size
        self.count += 1

    def add_rows(self, start: Int64Array, size: Int64Array) -> None:
        self._collect()
        self._parts.append((start, size))
        self.count += len(start)

    def finish(self) -> None:
        self._collect()
        if self._parts and self._ndim:
            starts, sizes = zip(*self._parts, strict=True)
            self.start, self.size = np.concatenate(starts), np.concatenate(sizes)
        elif not self._ndim:
            self.start = self.size = np.zeros((self.count, 0), np.int64)
        self.start.flags.writeable = self.size.flags.writeable = False
        self._parts = []

    def _collect(self) -> None:
        if self._single:
            table = np.array(self._single, np.int64).reshape(-1, 2, self._ndim)
            self._parts.append((table[:, 0], table[:, 1]))
            self._single = []


class _TensorRows(NamedTuple):
    """The chunks of one tensor: their first row among all chunks, their number, and the first row of their boxes among
    those of ``ndim`` dimensions.
    """

    key: str
    first: int
    rows: int
    ndim: int
    box: int


class ChunkTable:
    """Takes tensors one by one, and is then joined with the stored items.

    ``single``: the items that the pickle has one by one, by key and start. Those in ``scan`` are columns. Raises
    NotScannedError for runs that are neither the chunks of a tensor nor the stored items.
    """

    def __init__(self, scan: Scan | None) -> None:
        self.single: dict[tuple[str, Indexes | None], ItemLocation] = {}
        self.transforms: set[str] = set()
        self.files: list[str] = []
        self._numbers: dict[str, int] = {}
        self._texts = [] if scan is None else scan.texts
        self._chunks = {} if scan is None else chunks_of(scan)
        self._items = [] if scan is None else items_of(scan)
        self._unused = set() if scan is None else {run for run in scan.runs if run.holder < 0}
        self._boxes: dict[int, _BoxColumns] = {}
        self._tensors: list[_TensorRows] = []
        self._in_columns: dict[str, int] = {}  # tensors whose chunks were added as runs: their numbers
        self._fitting: set[tuple[Indexes, _Ranges]] = set()  # lists of chunks that are inside a tensor of this shape
        self._starts: dict[int, dict[Indexes, int]] = {}
        self._count = 0
        self._stored: list[tuple[int, int, int, int]] = []  # row, file, offset, length

    def __len__(self) -> int:
        return len(self._tensors)

    def mark_used(self, run: RecordRun, record: Record) -> None:
        """Note that ``run`` is used where records of this kind belong."""
        if run.record is not record or run not in self._unused:
            raise NotScannedError("a run that is used twice, or in the wrong table")
        self._unused.discard(run)

    def boxes_of(self, run: RecordRun) -> tuple[Int64Array, Int64Array]:
        """The starts and sizes of the chunks in ``run``."""
        chunks = self._chunks
        rows = slice(run.begin, run.end)
        ndim = int(chunks["ndim"][run.begin])
        return chunks["start"][rows, :ndim], chunks["size"][rows, :ndim]

    def add(self, key: str, ndim: int, boxes: Iterable[tuple[Indexes, Indexes]]) -> None:
        """Add a tensor with these boxes."""
        columns = self._boxes.setdefault(ndim, _BoxColumns(ndim))
        first_box, first = columns.count, self._count
        for start, size in boxes:
            item = self.single.get((key, start))
            if item is not None:
                self._store(self._count, item)
            columns.add(start, size)
            self._count += 1
        self._tensors.append(_TensorRows(key, first, self._count - first, ndim, first_box))

    def add_runs(self, key: str, shape: Indexes, runs: Sequence[RecordRun]) -> bool:
        """Add a tensor with the chunks in ``runs``. Adds nothing and returns False unless they are disjoint and inside
        the tensor.
        """
        ranges = tuple([(run.begin, run.end) for run in runs])
        boxes = self._boxes.setdefault(len(shape), _BoxColumns(len(shape)))
        if (shape, ranges) not in self._fitting:
            start, size = map(np.concatenate, zip(*map(self.boxes_of, runs), strict=True))
            if not disjoint_and_inside(shape, start, size):
                return False
            self._fitting.add((shape, ranges))
            if ranges not in boxes.rows_of:
                boxes.rows_of[ranges] = boxes.count
                boxes.add_rows(start, size)
        n = sum(end - begin for begin, end in ranges)
        self._in_columns[key] = len(self._tensors)
        self._tensors.append(_TensorRows(key, self._count, n, len(shape), boxes.rows_of[ranges]))
        self._count += n
        return True

    def add_copy(self, key: str, number: int) -> None:
        """Add a tensor with the chunks of the tensor ``number``, which were added as runs."""
        original = self._tensors[number]
        self._in_columns[key] = len(self._tensors)
        self._tensors.append(original._replace(key=key, first=self._count))
        self._count += original.rows

    def _store(self, row: int, item: ItemLocation) -> None:
        self.transforms.update(item.transforms)
        self._stored.append((row, self._file(item.relative_path), item.offset, item.length))

    def finish(self) -> tuple[list[StoredChunks], list[tuple[int, str]]]:
        """The chunks of each tensor, and those that no item holds: the tensor's number, and a name for messages."""
        if self._unused:
            raise NotScannedError("an unused run")
        for boxes in self._boxes.values():
            boxes.finish()
        self._chunks.clear()
        where = np.full((self._count, 3), -1, np.int64)  # file, offset, length
        for (key, start), stored in self.single.items():
            row = self._chunk_row(self._in_columns[key], start) if start is not None and key in self._in_columns else -1
            if row >= 0:
                self._store(row, stored)
        if self._stored:
            table = np.array(self._stored, np.int64)
            where[table[:, 0]] = table[:, 1:]
        self._assign_items(where)
        missing = np.flatnonzero(where[:, 0] < 0).tolist()
        if missing:
            return [], list(self._name_of(missing))
        self._sort_files(where[:, 0])
        cuts: dict[tuple[int, int, int], Boxes] = {}
        return [self._chunks_of(tensor, where, cuts) for tensor in self._tensors], []

    def _chunks_of(
        self, tensor: _TensorRows, where: Int64Array, cuts: dict[tuple[int, int, int], Boxes]
    ) -> StoredChunks:
        """The chunks of one tensor. ``cuts``: the boxes that tensors that are cut alike share."""
        _, first, rows, ndim, box = tensor
        cut = cuts.get((ndim, box, rows))
        if cut is None:
            boxes = self._boxes[ndim]
            start, size = boxes.start[box : box + rows], boxes.size[box : box + rows]
            cut = cuts[ndim, box, rows] = Boxes(start, size, contiguous_strides(size))
        here = where[first : first + rows]
        return StoredChunks(cut, here[:, 0], here[:, 1:])

    def _file(self, path: str) -> int:
        number = self._numbers.get(path)
        if number is None:
            number = self._numbers[path] = len(self.files)
            self.files.append(path)
        return number

    def _sort_files(self, file: Int64Array) -> None:
        """Number the files in the order of their first chunk, without those that hold none."""
        first = np.full(len(self.files), len(file), np.int64)
        parts = [slice(begin, begin + _BATCH_ROWS) for begin in range(0, len(file), _BATCH_ROWS)]
        for part in reversed(parts):
            numbers = file[part]
            first[numbers[::-1]] = np.arange(part.start, part.start + len(numbers))[::-1]
        order = [number for number in np.argsort(first, kind="stable").tolist() if first[number] < len(file)]
        if order != list(range(len(self.files))):
            numbers = np.zeros(len(self.files), np.int64)
            numbers[order] = np.arange(len(order))
            for part in parts:
                file[part] = numbers[file[part]]
            self.files = [self.files[number] for number in order]

    def _assign_items(self, where: Int64Array) -> None:
        """Assign each item in a run to its chunk. Leaves two items for one chunk to the general reader."""
        texts = [text or "" for text in self._texts]  # all are known now
        by_key = {tensor.key: number for number, tensor in enumerate(self._tensors)}
        number_of = np.array([by_key.get(text, -1) for text in texts], np.int32)
        table = np.array([tensor[1:] for tensor in self._tensors], np.int64).reshape(len(self._tensors), 4)
        columns = tuple(np.ascontiguousarray(column) for column in table.T)
        paths = np.full(len(texts), -1, np.int64)
        assigned = len(self._stored)
        while self._items:
            part = self._items.pop()
            for number in np.flatnonzero(np.bincount(part["path"])).tolist():
                if not is_inside(texts[number]):
                    raise NotScannedError("a path that leaves the directory")
                paths[number] = self._file(texts[number])
            holder = number_of[part["name"]]
            if (holder < 0).any():  # items of no tensor
                inner = holder >= 0
                part, holder = {name: column[inner] for name, column in part.items()}, holder[inner]
            rows = self._chunk_rows(part, holder, columns)
            for row in np.flatnonzero(rows < 0).tolist():  # its index names another chunk
                start = part["start"][row, : part["ndim"][row]]
                rows[row] = self._chunk_row(int(holder[row]), tuple(start.tolist()))
            if (rows < 0).any():  # items of no chunk
                hit = rows >= 0
                part, rows = {name: column[hit] for name, column in part.items()}, rows[hit]
            where[rows] = np.stack([paths[part["path"]], part["offset"], part["length"]], axis=1)
            assigned += len(rows)
        if np.count_nonzero(where[:, 0] >= 0) != assigned:
            raise NotScannedError("two items of one chunk")

    def _chunk_rows(self, part: Columns, holder: npt.NDArray[np.int32], tensors: tuple[Int64Array, ...]) -> Int64Array:
        """The rows of the chunks that the items name, -1 if that chunk starts somewhere else."""
        first, count, ndim, box = (column[holder] for column in tensors)
        index = part["index"]
        fits = (index < count) & (part["ndim"] == ndim)
        for dimensions, boxes in self._boxes.items():
            some = np.flatnonzero(fits & (ndim == dimensions))
            chunk = box[some] + index[some]
            for dimension in range(dimensions if len(some) else 0):
                fits[some] &= boxes.start[chunk, dimension] == part["start"][some, dimension]
        return np.where(fits, first + index, -1)

    def _chunk_row(self, number: int, start: Indexes) -> int:
        """The chunk of a tensor that begins at ``start``; -1 if there is none."""
        starts = self._starts.get(number)
        if starts is None:
            _, first, rows, ndim, box = self._tensors[number]
            table = self._boxes[ndim].start[box : box + rows].tolist()
            starts = {tuple(chunk_start): first + index for index, chunk_start in enumerate(table)}
            self._starts[number] = starts
        return starts.get(start, -1)

    def _name_of(self, missing: list[int]) -> Iterator[tuple[int, str]]:
        firsts = [tensor.first for tensor in self._tensors]
        for row in missing:
            number = bisect_right(firsts, row) - 1
            key, first, _, ndim, box = self._tensors[number]
            start = self._boxes[ndim].start[box + row - first]
            yield number, f"{key} at {tuple(start.tolist())}"


def disjoint_and_inside(shape: Indexes, start: Int64Array, size: Int64Array) -> bool:
    """Whether all boxes are inside a tensor of ``shape``, and no two start at the same place."""
    limit = np.array(shape, np.int64)
    if start.shape[1] != len(shape) or not ((start <= limit).all() and (size <= limit - start).all()):
        return False
    if len(start) < 2 or (start.shape[1] and (start[1:, 0] > start[:-1, 0]).all()):
        return True
    ordered = start[np.lexsort(start.T[::-1])] if start.shape[1] else start
    return bool((ordered[1:] != ordered[:-1]).any(axis=1).all())


def is_inside(path: str) -> bool:
    """Whether a relative path stays inside the directory."""
    outside = not path or path.startswith(("/", "\\")) or "\0" in path or ":" in path.partition("/")[0]
    return not outside and ".." not in path.replace("\\", "/").split("/")
