"""Checks source records against their CRC-32 while they are copied, in whatever order their parts are read.

The checksum of a record is combined from those of its parts. Bytes that no tensor needs (padding of flat parameters,
the rest of a storage) are read for it as well. Some records must be read a second time:

- Rows that are not contiguous in the source (a transposed tensor, or one split by columns) are read with the gaps
  between them, in spans that may overlap or skip bytes.
- After an interrupted run of several ranks, the journals may lack some parts. A rank journals the checksums of what it
  read together with the windows it wrote. The checksums of what it sent to another rank can be lost although that
  rank's window is on the disk.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32, crc32_combine

from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.ir.checkpoint import Checksums, SourceFile
from fsdpckpt.ir.files import path_of
from fsdpckpt.ir.tensors import Int64Array, distinct
from fsdpckpt.plan import Copies, Plan, rows_of, split_copies
from fsdpckpt.plan.written import BEGIN, END, NUMBER
from fsdpckpt.readers.protocol import MANIFEST
from fsdpckpt.storage import ByteSource
from fsdpckpt.text import bytes_text

# The columns of a part of a source record, which travel between workers as plain numbers. What is still to be read of
# records has the first four.
FILE, RECORD, OFFSET, NBYTES, CRC = range(5)  # RECORD: its number in the file
PART_COLUMNS = 5
NO_PARTS: Int64Array = np.zeros((0, PART_COLUMNS), np.int64)

_RECORD_BITS = 40  # of a number that includes the file
_RECORDS_AT_ONCE = 4096

Part = tuple[int, int, int]
"""(offset, nbytes, crc) of one part of a range."""


def combine(parts: list[Part]) -> int:
    """The CRC-32 of the range that ``parts`` tile, given in any order."""
    total = 0
    for _, nbytes, crc in sorted(parts):
        total = crc32_combine(total, crc, nbytes)
    return total


def patch_effect(value: bytes, following: int) -> int:
    """The XOR difference in a range's CRC-32 when ``value`` replaces zeros; ``following`` bytes come after it.

    CRC-32 is affine: the difference of two checksums depends only on which bytes differ, and where.
    """
    return int(crc32_combine(crc32(value) ^ crc32(bytes(len(value))), 0, following))


class SourceCheck:
    """Compares every record that is read completely with the CRC-32 that the source stores for it.

    Parts of records are rows with the columns above. A file may also have
    one checksum for all of it (``fsdpckpt.json``). If it is the only one, the file is a record like others. Else it is
    combined from those of the records and of the bytes between them, which ``rest_of_files`` lists.

    A flipped byte in the source is thus an error and never gets a fresh, valid checksum in the target. A file whose
    checksums are all 0 was saved without any (``torch.serialization.set_crc32_options``) and is not checked.
    """

    def __init__(self, files: Sequence[SourceFile], checksums: Checksums) -> None:
        self._files = files
        self._records: dict[int, Int64Array] = {}  # by file: offset, nbytes and CRC-32 of its records, by offset
        self._whole: dict[int, int] = {}  # by file that also has records: the CRC-32 of all of it
        self._compared_whole: set[int] = set()  # the files that have a CRC-32 of all of it
        self._parts = array("q")  # of records, read here
        self._absorbed: list[Int64Array] = []  # of records, read elsewhere
        self._reported: int | None = None  # how many numbers of ``_parts`` ``new_parts`` has returned
        self._lock = threading.Lock()
        order = np.lexsort((checksums.crc, checksums.nbytes, checksums.offset, checksums.file))
        _require_one_checksum(files, checksums, order)
        numbers = checksums.file[order]
        for number in numbers[np.diff(numbers, prepend=-1) != 0].tolist():
            rows = order[slice(*np.searchsorted(numbers, [number, number + 1]).tolist())]
            table = np.stack([checksums.offset[rows], checksums.nbytes[rows], checksums.crc[rows]])
            whole = (table[0] == 0) & (table[1] == files[number].nbytes)
            if whole.any():
                self._compared_whole.add(number)
            if table[2][~whole].any():
                self._whole.update((number, crc) for crc in table[2][whole].tolist())
                table = table[:, ~whole]
            elif whole.any():
                table = table[:, whole]
            if table[2].any():
                self._records[number] = table

    def add_bytes(self, file: int, offset: int, data: memoryview) -> int:
        """``add_sum`` for ``data`` that was read from ``offset`` of ``file``; returns its CRC-32."""
        crc = crc32(data)
        self.add_sum(file, offset, len(data), crc)
        return crc

    def add_sum(self, file: int, offset: int, nbytes: int, crc: int) -> None:
        """Record that the CRC-32 of ``nbytes`` from ``offset`` of ``file`` is ``crc``.

        Raises SourceCorruptError if they are a whole record and do not match its checksum. Records read in parts are
        compared by ``finish``.
        """
        records = self._records.get(file)
        if records is None:
            return
        index = int(records[0].searchsorted(offset, side="right")) - 1  # the last that begins here or before
        if index < 0:
            return
        begin, length, _ = self._record(file, index)
        if offset + nbytes > begin + length:
            return
        if nbytes == length:
            self._compare(file, index, crc)
        else:
            with self._lock:
                self._parts.extend((file, index, offset, nbytes, crc))

    def add_sums(self, file: int, offset: Int64Array, nbytes: Int64Array, crc: Int64Array) -> None:
        """``add_sum`` for many ranges of one file."""
        records = self._records.get(file)
        if records is None:
            return
        index = np.searchsorted(records[0], offset, side="right") - 1
        begin, length, expected = records[:, np.maximum(index, 0)]
        matches = (begin == offset) & (length == nbytes) & (expected == crc)
        for row in np.flatnonzero(~matches).tolist():
            self.add_sum(file, int(offset[row]), int(nbytes[row]), int(crc[row]))

    def finish(self) -> None:
        """Compare the records that were read in parts. ``missing_parts`` lists those that still lack parts."""
        for file, index, parts in self._by_record():
            if index == self._rest(file):
                self._compare_whole(file, parts)
                continue
            crc = self._sum(file, index, parts)
            if crc is not None:
                self._compare(file, index, crc)

    def _rest(self, file: int) -> int:
        """The number under which the bytes of ``file`` between its records are parts."""
        return len(self._records[file][0])

    def _compare_whole(self, file: int, rest: list[Part]) -> None:
        """Compare a file with its checksum, combined from ``rest`` and the records between, which were compared."""
        begins = np.array([offset for offset, _, _ in rest], np.int64)
        ends = begins + [nbytes for _, nbytes, _ in rest]
        records = self._records[file]
        number = np.searchsorted(begins, records[0], side="right") - 1
        between = (number < 0) | (ends[number] <= records[0])
        crc = combine([*rest, *map(tuple, records[:, between].T.tolist())])
        require_checksum(f"{self._files[file]}", 0, self._files[file].nbytes, self._whole[file], crc, recorded=True)

    def rest_of_files(self, plan: Plan) -> Int64Array:
        """What to read of files that are compared as a whole, beyond what ``plan`` reads: rows of file, record, offset,
        nbytes. Of those that have records of their own, the record is ``_rest``.
        """
        spans = copy_spans(plan) if self._compared_whole else {}
        unread = sorted(self._compared_whole - spans.keys())
        numbers = [self._rest(file) if file in self._whole else 0 for file in unread]
        lengths = [self._files[file].nbytes for file in unread]
        tables = [np.array([unread, numbers, [0] * len(unread), lengths], np.int64).reshape(4, -1)]
        for file in sorted(self._whole.keys() & spans.keys()):
            records = self._records[file][:2, self._touched(file, *spans[file])]
            begins = np.append(0, records[0] + records[1])
            nbytes = np.append(records[0], self._files[file].nbytes) - begins
            if (nbytes < 0).any():  # records overlap: the file is read once more
                begins, nbytes = np.zeros(1, np.int64), np.array([self._files[file].nbytes])
            rows = nbytes > 0
            same = np.ones((2, rows.sum()), np.int64) * [[file], [self._rest(file)]]
            tables.append(np.vstack([same, begins[rows], nbytes[rows]]))
        return np.concatenate(tables, axis=1).T

    def _rows(self) -> Int64Array:
        """All parts."""
        rows = np.frombuffer(self._parts, np.int64).reshape(-1, PART_COLUMNS)
        return np.concatenate([rows, *self._absorbed]) if self._absorbed else rows

    def _by_record(self) -> Iterator[tuple[int, int, list[Part]]]:
        """File, record, and its parts in order, each once."""
        all_rows = self._rows()
        order = np.argsort(_record_of(all_rows), kind="stable")
        batches = _begins(_record_of(all_rows)[order])[_RECORDS_AT_ONCE::_RECORDS_AT_ONCE]
        for batch in np.array_split(order, batches):
            rows = all_rows[batch]  # as Python objects they take ten times the memory
            rows = rows[np.lexsort(rows.T[::-1])]
            rows = rows[(np.diff(rows, axis=0, prepend=-1) != 0).any(axis=1)]
            parts = list(map(tuple, rows[:, [OFFSET, NBYTES, CRC]].tolist()))
            for begin, end in pairwise([*_begins(_record_of(rows)).tolist(), len(rows)]):
                file, index = rows[begin, [FILE, RECORD]].tolist()
                yield file, index, parts[begin:end]

    def _sum(self, file: int, index: int, parts: list[Part]) -> int | None:
        """The CRC-32 of a record, combined from its parts in order; None if some are missing.

        A record may have been read more than once, split differently each time: any parts that tile it will do. Raises
        SourceCorruptError if two reads of the same bytes differ.
        """
        begin, length, _ = self._record(file, index)
        at, tiled = begin, 0
        for offset, nbytes, crc in parts:
            if offset != at:
                break
            tiled, at = crc32_combine(tiled, crc, nbytes), at + nbytes
        else:  # as nearly all records are read: once, each part beginning where the one before ends
            return tiled if at == begin + length else None
        before = {begin: 0}  # offset to the CRC-32 of the record's bytes before it
        crcs: dict[tuple[int, int], int] = {}
        for offset, nbytes, crc in parts:
            if crcs.setdefault((offset, nbytes), crc) != crc:
                raise _read_differently(f"{self._files[file]}", offset, nbytes, crcs[offset, nbytes], crc)
            if offset not in before:
                continue
            total, end = crc32_combine(before[offset], crc, nbytes), offset + nbytes
            if before.setdefault(end, total) != total:
                raise _read_differently(f"{self._files[file]}", begin, end - begin, before[end], total)
        return before.get(begin + length)

    def missing_parts(self, spans: Mapping[int, Int64Array]) -> Int64Array:
        """What must be read so that every record that was read in parts is complete: rows of file, record, offset,
        nbytes.

        These are padding of flat parameters, or the part of a storage that no tensor uses; if parts overlap, the whole
        record. ``spans[file]``: begins and ends of ranges that were read without checksums: a record in them is missing
        whole if no part of it was read with one.
        """
        missing: list[tuple[int, int, int, int]] = []
        for file, index, parts in self._by_record():
            if self._sum(file, index, parts) is not None:
                continue
            begin, length, _ = self._record(file, index)
            missing += [(file, index, *gap) for gap in gaps_in(begin, length, parts)]
        parts_read = self._rows() if spans else None
        for file, (begins, ends) in sorted(spans.items()):
            if parts_read is not None and file in self._records:
                touched = self._touched(file, begins, ends)
                touched[parts_read[parts_read[:, FILE] == file, RECORD]] = False
                for index in np.flatnonzero(touched).tolist():
                    offset, nbytes, _ = self._record(file, index)
                    missing.append((file, index, offset, nbytes))
        return np.array(missing, np.int64).reshape(-1, PART_COLUMNS - 1)

    def _touched(self, file: int, begins: Int64Array, ends: Int64Array) -> npt.NDArray[np.bool_]:
        """For each record of ``file`` whether one of the ranges [begin, end) has bytes of it."""
        offsets, lengths, _ = self._records[file]
        change = np.zeros(len(offsets) + 1, np.int64)  # in the number of ranges, from record to record
        np.add.at(change, np.searchsorted(offsets + lengths, begins, side="right"), 1)
        np.add.at(change, np.searchsorted(offsets, ends, side="left"), -1)
        return np.cumsum(change[:-1]) > 0

    def new_parts(self) -> Int64Array:
        """The parts read since the last call; none at the first call."""
        with self._lock:
            first, self._reported = self._reported, len(self._parts)
            return _table(self._parts[first:] if first is not None else array("q"))

    def parts(self) -> Int64Array:
        """The parts that were read here, of records that were not read whole."""
        return _table(self._parts)

    def absorb(self, tables: Iterable[Int64Array]) -> None:
        """Add parts of the same records: those of other workers, or from an earlier run's journal."""
        self._absorbed.extend(tables)

    def _record(self, file: int, index: int) -> tuple[int, int, int]:
        """(offset, nbytes, crc) of a record."""
        offset, nbytes, crc = self._records[file][:, index].tolist()
        return offset, nbytes, crc

    def _compare(self, file: int, index: int, crc: int) -> None:
        offset, nbytes, expected = self._record(file, index)
        path = str(self._files[file])
        recorded = (offset, nbytes) == (0, self._files[file].nbytes)
        require_checksum(path, offset, nbytes, expected, crc, recorded=recorded)


def _record_of(rows: Int64Array) -> Int64Array:
    """A number for the file and the record of each part."""
    return (rows[:, FILE] << _RECORD_BITS) | rows[:, RECORD]


def gaps_in(begin: int, length: int, parts: list[Part]) -> list[tuple[int, int]]:
    """(offset, nbytes) of what ``parts``, in order, leave out of a record; the whole record if parts overlap."""
    at = begin
    gaps: list[tuple[int, int]] = []
    for offset, nbytes, _ in parts:
        if offset < at < offset + nbytes:
            return [(begin, length)]
        if at < offset:
            gaps.append((at, offset - at))
        at = max(at, offset + nbytes)
    return [*gaps, (at, begin + length - at)] if at < begin + length else gaps


def _begins(values: Int64Array) -> Int64Array:
    """Where values begin that differ from those before."""
    return np.flatnonzero(np.diff(values, prepend=-1))


def _table(parts: array[int]) -> Int64Array:
    return np.array(parts, np.int64).reshape(-1, PART_COLUMNS)


def _require_one_checksum(files: Sequence[SourceFile], checksums: Checksums, order: Int64Array) -> None:
    """Raises SourceCorruptError if a file lists two checksums for the same bytes.

    ``order`` sorts them by place and CRC-32.
    """
    differ = np.diff(checksums.crc[order]) != 0
    for column in (checksums.file, checksums.offset, checksums.nbytes):
        differ &= np.diff(column[order]) == 0
    for at in np.flatnonzero(differ)[:1].tolist():
        first, second = order[at : at + 2].tolist()
        file, offset, nbytes = (int(column[first]) for column in (checksums.file, checksums.offset, checksums.nbytes))
        raise SourceCorruptError(
            f"{files[file]} contradicts itself: two checksums for {bytes_text(nbytes)} at offset {offset:,}",
            file=path_of(files, file),
            expected=f"CRC-32 {int(checksums.crc[first]):08x}",
            found=f"{int(checksums.crc[second]):08x}",
            why="its directory of records was damaged, or written by a faulty program",
            next_step="save or fetch the checkpoint again",
        )


def require_checksum(path: str, offset: int, nbytes: int, expected: int, found: int, *, recorded: bool = False) -> None:
    """Raises SourceCorruptError if the CRC-32 of the record at ``offset`` of ``path`` is ``found`` and not
    ``expected``.

    ``recorded``: the record is the whole file, and ``fsdpckpt.json`` has its checksum.
    """
    if found == expected:
        return
    if recorded:
        raise SourceCorruptError(
            f"{path} is damaged: it does not match the checksum that {MANIFEST} recorded when it was written",
            file=path,
            expected=f"CRC-32 {expected:08x}",
            found=f"{found:08x}",
            why=f"bytes changed since (disk, copy or transfer), or another program wrote here (then remove {MANIFEST})",
            next_step="copy the file again",
            run_again=True,
        )
    raise SourceCorruptError(
        f"{path} is damaged: the record of {bytes_text(nbytes)} at offset {offset:,} does not match its checksum",
        file=path,
        expected=f"CRC-32 {expected:08x}",
        found=f"{found:08x}",
        why="bytes changed after the checkpoint was saved (disk, copy or transfer)",
        next_step="copy the file again",
        run_again=True,
    )


def _read_differently(path: str, offset: int, nbytes: int, first: int, second: int) -> SourceCorruptError:
    return SourceCorruptError(
        f"{path} is damaged, or changed: {bytes_text(nbytes)} at offset {offset:,} differed between two reads",
        file=path,
        expected=f"CRC-32 {first:08x}",
        found=f"{second:08x}",
        why="a disk or a network that returns wrong bytes now and then, or another program writes there",
        next_step=f"run `fsdpckpt verify {path}` on each machine that read it, then fetch the file again",
    )


_READ_BYTES = 1 << 20


def unverified_spans(plan: Plan, received: Int64Array) -> dict[int, Int64Array]:
    """By source file, begins and ends of what is read without checksums: copies with gaps between their rows, and what
    an interrupted run has written from bytes that other workers read.

    ``received``: rows of ``plan.written``, by target file, in order.
    """
    spans: dict[int, list[Int64Array]] = {}
    for number in dict.fromkeys(received[:, NUMBER].tolist()):
        file = plan.files[number]
        begins, ends = rows_of(received, number)[:, [BEGIN, END]].T
        parts = split_copies(file, plan, np.ones(len(file.copies.rows), bool), begins, ends)
        _add_spans(spans, parts.copies, parts.nbytes // parts.copies.rows, np.ones(len(parts.nbytes), bool))
    for file in plan.files:
        copies = file.copies
        if (copies.rows > 1).any():
            widths = plan.source_bytes(copies.width, copies.cast)
            _add_spans(spans, copies, widths, (copies.rows > 1) & (copies.source_pitch != widths))
    return {source: np.concatenate(parts_of_spans, axis=1) for source, parts_of_spans in spans.items()}


def joined_spans(each: Iterable[Mapping[int, Int64Array]]) -> dict[int, Int64Array]:
    """The union of several results of ``unverified_spans``."""
    joined: dict[int, list[Int64Array]] = {}
    for spans in each:
        for source, of_source in spans.items():
            joined.setdefault(source, []).append(of_source)
    return {source: np.concatenate(parts, axis=1) for source, parts in joined.items()}


def copy_spans(plan: Plan) -> dict[int, Int64Array]:
    """By source file, begins and ends of what the copies of ``plan`` read, with the gaps between their rows."""
    spans: dict[int, list[Int64Array]] = {}
    for file in plan.files:
        widths = plan.source_bytes(file.copies.width, file.copies.cast)
        _add_spans(spans, file.copies, widths, np.ones(len(widths), np.bool_))
    return {source: np.concatenate(parts, axis=1) for source, parts in spans.items()}


def _add_spans(
    spans: dict[int, list[Int64Array]], copies: Copies, width: Int64Array, selected: npt.NDArray[np.bool_]
) -> None:
    """Add to ``spans``, by source file, where ``selected`` copies begin and end. Their rows have ``width`` bytes."""
    ends = copies.source + (copies.rows - 1) * copies.source_pitch + width
    for source in distinct(copies.file[selected]).tolist():
        of_source = selected & (copies.file == source)
        spans.setdefault(source, []).append(np.stack([copies.source[of_source], ends[of_source]]))


def sum_of(source: ByteSource, offset: int, nbytes: int) -> int:
    """The CRC-32 of ``nbytes`` from ``offset``."""
    buffer = memoryview(bytearray(min(_READ_BYTES, nbytes)))
    total = 0
    for at in range(0, nbytes, _READ_BYTES):
        view = buffer[: min(_READ_BYTES, nbytes - at)]
        source.read_into(offset + at, view)
        total = crc32(view, total)
    return total
