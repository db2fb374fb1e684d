"""Compares what is loaded with the checksums that are recorded for it.

These are the CRC-32s of the records in torch files and DCP items, and those of whole files in ``fsdpckpt.json``. A
record that is read whole is compared on the way. One that is read in part can only be proved by reading its rest: that
is done where it adds little to what was asked for (padding, a header), or however much it is with ``everything``.
"""

from __future__ import annotations

import threading
from functools import cached_property

import numpy as np
from isal.isal_zlib import crc32

from fsdpckpt.execute.checks import Part, combine, gaps_in, require_checksum, sum_of
from fsdpckpt.execute.recorded import whole_file_checksums
from fsdpckpt.execute.window import MAX_GAP
from fsdpckpt.ir.checkpoint import Checkpoint, Checksums, SourceFile
from fsdpckpt.ir.files import Stored, stored_by_number
from fsdpckpt.ir.tensors import Int64Array
from fsdpckpt.storage import ByteSource
from fsdpckpt.storage.sources import Sources

_SHARE = 8  # one eighth more than what was asked for may be read to compare it,
_FREE_BYTES = 64 << 10  # and this much
_MOST_PARTS = 1 << 16  # of records at a time; beyond, each takes memory for bytes that hardly ever make a record


class ReadCheck:
    """The recorded checksums of one checkpoint, and which of them were found right. ``everything``: also compare what
    is only read in part. Thread-safe.
    """

    def __init__(self, checkpoint: Checkpoint, sources: Sources, *, everything: bool = False) -> None:
        self.sources = sources
        self.everything = everything
        self.proved: set[tuple[int, int]] = set()  # file, and number of the record in it
        self._checkpoint = checkpoint
        self._located: tuple[Checksums, ...] = ()

    def add(self, located: Checksums) -> None:
        """Compare with these, too: the checksums of items that were opened later than the checkpoint."""
        if len(located.file):
            self._located += (located,)
            self.proved.clear()
            self.__dict__.pop("records", None)

    @cached_property
    def records(self) -> dict[int, Int64Array]:
        """By file: offset, nbytes and CRC-32 of its records, by offset. A file without records of its own is one, if
        ``fsdpckpt.json`` has its checksum; one whose records all state 0 was saved without checksums.
        """
        sums = Checksums.joined([self._checkpoint.checksums, *self._located])
        by_file = _by_file(sums)
        whole = _by_file(whole_file_checksums(self._checkpoint))
        return {**whole, **{number: rows for number, rows in by_file.items() if rows[2].any()}}

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each file by its path."""
        return {file.path: number for number, file in stored_by_number(self._checkpoint.files).items()}

    def source(self, number: int) -> ByteSource:
        """The file ``number``, of which nothing is compared."""
        return self.sources.open_file(self._checkpoint.files[number])

    def reading(self) -> CheckedReads:
        """What opens files for one load, whose ``finish`` is to be called at its end."""
        return CheckedReads(self)


class CheckedReads:
    """Opens the files of a checkpoint for one load. ``finish`` compares what was read in parts."""

    def __init__(self, check: ReadCheck) -> None:
        self._check = check
        self._parts: dict[tuple[int, int], list[Part]] = {}
        self._count = 0
        self._nbytes = 0
        self._lock = threading.Lock()

    def open_file(self, file: SourceFile) -> ByteSource:
        """The bytes of ``file``; reading them raises SourceCorruptError if they do not have their checksum."""
        source = self._check.sources.open_file(file)
        number = self._check.numbers.get(file.path, -1) if isinstance(file, Stored) else -1
        return _CheckedFile(source, number, self) if number in self._check.records else source

    def add(self, number: int, offset: int, data: memoryview) -> None:
        """Compare ``data`` from ``offset`` of the file ``number``, by record, or keep its checksums for later."""
        records = self._check.records[number]
        end = offset + len(data)
        first = int(records[0].searchsorted(offset, side="right")) - 1  # the last that begins here or before
        for index in range(max(first, 0), int(records[0].searchsorted(end, side="left"))):
            record_begin, length, _ = records[:, index].tolist()
            begin, stop = max(offset, record_begin), min(end, record_begin + length)
            if begin < stop and (number, index) not in self._check.proved:
                self._add_to_record(number, index, begin, data[begin - offset : stop - offset])

    def _add_to_record(self, number: int, index: int, offset: int, data: memoryview) -> None:
        """Compare ``data``, which is in the record ``index`` of the file, or keep its checksum for later."""
        length = int(self._check.records[number][1, index])
        crc = crc32(data)
        if len(data) == length:
            self._require(number, index, crc)
            return
        with self._lock:
            self._nbytes += len(data)
            parts = self._parts.setdefault((number, index), [])
            if self._count < _MOST_PARTS:
                self._count += 1
                parts.append((offset, len(data), crc))

    def finish(self) -> None:
        """Read the rest of the records that were read in part, those first that lack the least, and compare them.

        Raises SourceCorruptError.
        """
        records = self._check.records
        lacking: list[tuple[int, int, int, list[Part], list[tuple[int, int]]]] = []
        for (number, index), read in self._parts.items():
            begin, length, _ = records[number][:, index].tolist()
            parts = sorted(set(read))
            gaps = gaps_in(begin, length, parts)
            cost = sum(nbytes for _, nbytes in gaps) + MAX_GAP * max(len(gaps) - 1, 0)
            lacking.append((cost, number, index, parts, gaps))
        self._parts = {}
        allowed = self._nbytes // _SHARE + _FREE_BYTES
        for cost, number, index, parts, gaps in sorted(lacking, key=lambda row: row[:3]):
            allowed -= cost
            if allowed < 0 and not self._check.everything:
                return
            self._require(number, index, self._sum(number, index, parts, gaps))

    def _sum(self, number: int, index: int, parts: list[Part], gaps: list[tuple[int, int]]) -> int:
        """The CRC-32 of a record, of which ``parts`` were read and ``gaps`` were not."""
        source = self._check.source(number)
        read = [(offset, nbytes, sum_of(source, offset, nbytes)) for offset, nbytes in gaps]
        begin, length, _ = self._check.records[number][:, index].tolist()
        return read[0][2] if gaps == [(begin, length)] else combine([*parts, *read])

    def _require(self, number: int, index: int, crc: int) -> None:
        offset, nbytes, expected = self._check.records[number][:, index].tolist()
        source = self._check.source(number)
        whole_file = (offset, nbytes) == (0, source.nbytes)
        require_checksum(source.path, offset, nbytes, expected, crc, recorded=whole_file)
        self._check.proved.add((number, index))


class _CheckedFile(ByteSource):
    """A file of which every read is compared."""

    def __init__(self, source: ByteSource, number: int, reads: CheckedReads) -> None:
        self.path, self.nbytes = source.path, source.nbytes
        self._source, self._number, self._reads = source, number, reads

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._source.read_into(offset, buffer)
        self._reads.add(self._number, offset, buffer)


def _by_file(sums: Checksums) -> dict[int, Int64Array]:
    """By file: offset, nbytes and CRC-32 of each row, by offset."""
    order = np.lexsort((sums.nbytes, sums.offset, sums.file))
    table = np.stack([sums.offset, sums.nbytes, sums.crc])[:, order]
    numbers = sums.file[order]
    begins = np.flatnonzero(np.diff(numbers, prepend=-1))
    if not len(begins):
        return {}
    return dict(zip(numbers[begins].tolist(), np.split(table, begins[1:], axis=1), strict=True))
