"""Plans every byte of every target file, as literals and as copies from source files. Columns, not objects.

A copy is two-dimensional, like a pitched memory copy: ``rows`` rows of ``width`` bytes, ``source_pitch`` and
``target_pitch`` bytes apart. A contiguous copy has one row. A box of a tensor is one or more such copies. ``make_plan``
intersects the chunks that a checkpoint has with the write items that a target wants.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fsdpckpt.errors import InternalError
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.targets import Target, TargetData, TargetFile, as_table
from fsdpckpt.ir.tensors import Int64Array
from fsdpckpt.plan.copies import Casts, Sources
from fsdpckpt.text import bytes_text


class Claim(NamedTuple):
    """A journal's claim that the window [begin, end) of a target file is on the disk, with this CRC-32."""

    begin: int
    end: int
    crc: int


COPY_COLUMNS = ("file", "source", "source_pitch", "target", "target_pitch", "width", "rows", "cast")
_SOURCE, _TARGET = (COPY_COLUMNS.index(name) for name in ("source", "target"))


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

    def __len__(self) -> int:
        return len(self.file)


@dataclass(frozen=True, slots=True, eq=False)
class FilePlan:
    """One target file, in columns.

    ``literals`` (n, 3): file offset, start in ``blob``, bytes. ``write_items`` (m, 2): file offset, bytes.
    ``first_copy`` (m + 1,): write item i is filled by rows ``first_copy[i]`` to ``first_copy[i + 1]`` of ``copies``.
    ``checksums`` (k, 4), sorted by begin: begin and end of each range, and where its CRC-32 goes, one place or two (-1:
    none).
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
        """What ``target_bytes`` of copies with those casts take of their sources."""
        return _source_bytes(self.casts, target_bytes, cast)

    def without(self, paths: Collection[str]) -> Plan:
        """The plan of all files but these."""
        left = tuple(file for file in self.files if file.path not in paths)
        return Plan(left, self.casts, sum(_bytes_read(file, self.casts) for file in left))

    def outline(self) -> Plan:
        """What is left to know once the plan was run: the paths and lengths of the files."""
        files = (_outline(file.path, file.nbytes) for file in self.files)
        return Plan(tuple(files), self.casts, self.bytes_read)

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
            expected=bytes_text(nbytes),
            found=bytes_text(int(per_write_item[write_item])),
        )


def make_plan(target: Target, *, totals_only: bool = False) -> Plan:
    """The plan of ``target``. Raises InternalError when a chunk was never located or a write item cannot be filled.

    ``totals_only``: file by file, of each of which only the path and the length are kept, and what all of them read.
    """
    casts = Casts()
    sources: dict[TargetData, Sources] = {}
    files: list[FilePlan] = []
    bytes_read = 0
    for batch in _batches(target.files):
        planned = _plan_files([each.made() for each in batch], sources, casts)
        for file in planned:
            _check_file(file)
            bytes_read += _bytes_read(file, casts.pairs)
        files += [_outline(each.path, each.nbytes) for each in batch] if totals_only else planned
    return Plan(tuple(files), tuple(casts.pairs), bytes_read)


_AT_ONCE = 1 << 12  # files of few items: what numpy costs for each call is then divided among them


def _batches(files: Sequence[TargetFile]) -> Iterator[list[TargetFile]]:
    """Neighbours that share their data, in order; a file that is made when it is wanted comes alone."""
    batch: list[TargetFile] = []
    items = 0
    for file in files:
        if batch and (file.make or batch[0].make or file.data is not batch[0].data or items > _AT_ONCE):
            yield batch
            batch, items = [], 0
        batch.append(file)
        items += len(file.item_columns) // 4
    if batch:
        yield batch


def _source_bytes(casts: Sequence[tuple[DType, DType]], target_bytes: Int64Array, cast: Int64Array) -> Int64Array:
    found = target_bytes.copy()
    for index, (source, target) in enumerate(casts):
        of_cast = cast == index
        found[of_cast] = found[of_cast] // target.itemsize * source.itemsize
    return found


def _bytes_read(file: FilePlan, casts: Sequence[tuple[DType, DType]]) -> int:
    return int(_source_bytes(casts, file.copies.width * file.copies.rows, file.copies.cast).sum())


def _plan_files(files: Sequence[TargetFile], sources: dict[TargetData, Sources], casts: Casts) -> list[FilePlan]:
    """The plans of files that share their data: planned as one file in which they lie end to end, then parted."""
    data = files[0].data
    if data not in sources:
        sources[data] = Sources(data.tensors, casts)
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
        own = slice(int(first_copy[first]), int(first_copy[last]))
        checksums = as_table(file.checksum_columns, 4)
        plans.append(
            FilePlan(
                path=file.path,
                nbytes=file.nbytes,
                blob=file.blob,
                literals=as_table(file.literal_columns, 3),
                write_items=as_table(file.item_columns, 4)[:, :2],
                first_copy=first_copy[first : last + 1] - own.start,
                copies=Copies(*table[:, own]),
                checksums=checksums[np.argsort(checksums[:, 0], kind="stable")],
            )
        )
    return plans


_NONE = np.zeros(0, np.int64)
_NO_COPIES = Copies(*(_NONE,) * len(COPY_COLUMNS))


def _outline(path: str, nbytes: int) -> FilePlan:
    none = _NONE.reshape(0, 4)
    return FilePlan(path, nbytes, b"", none[:, :3], none[:, :2], np.zeros(1, np.int64), _NO_COPIES, none)
