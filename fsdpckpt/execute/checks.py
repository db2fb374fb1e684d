"""CRC-32 while copying: proves the source records that are read, and fills in the checksums of the target."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np

from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.execute.crc import Part, combine, crc32
from fsdpckpt.ir.checkpoint import Checksums, SourceFile
from fsdpckpt.ir.tensors import Int64Array

__all__ = ["SourceCheck", "SourceRecord", "require_sum"]

SourceRecord = tuple[int, int, int, int]
"""(source file, offset, nbytes, crc) of a record that carries a checksum."""


class _Records:
    """The checksummed records of one source file, sorted by offset."""

    def __init__(self, offsets: list[int], lengths: list[int], crcs: list[int]) -> None:
        self.offsets = offsets
        self.lengths = lengths
        self.crcs = crcs


class SourceCheck:
    """Compares what was read with the CRC-32 the source carries, for every record that is read whole.

    A flipped byte in the source is thereby an error and never gets a fresh, valid checksum in the target. A file
    whose records all say 0 was saved without checksums (``torch.serialization.set_crc32_options``) and is not checked.
    """

    def __init__(self, files: Sequence[SourceFile], checksums: Checksums) -> None:
        self._files = files
        self._records: dict[int, _Records] = {}
        self._parts: dict[tuple[int, int], list[Part]] = {}
        self._fresh: list[tuple[int, int, int, int, int]] = []
        self._keep_fresh = False
        self._lock = threading.Lock()
        _require_one_sum(files, checksums)
        order = np.lexsort((checksums.offset, checksums.file))
        numbers = checksums.file[order]
        for number in np.unique(numbers).tolist():
            rows = order[slice(*np.searchsorted(numbers, [number, number + 1]).tolist())]
            if checksums.crc[rows].any():
                self._records[number] = _Records(
                    checksums.offset[rows].tolist(), checksums.nbytes[rows].tolist(), checksums.crc[rows].tolist()
                )

    def saw(self, file: int, offset: int, data: memoryview) -> int:
        """``data`` was read from ``offset`` of ``file``; returns its CRC-32.

        Raises SourceCorruptError when that completes a record and the record does not match its checksum.
        """
        crc = crc32(data)
        records = self._records.get(file)
        if records is None:
            return crc
        index = bisect_right(records.offsets, offset) - 1
        nbytes = len(data)
        if index < 0 or offset + nbytes > records.offsets[index] + records.lengths[index]:
            return crc
        if nbytes == records.lengths[index]:
            self._compare(file, records, index, crc)
        else:
            with self._lock:
                self._parts.setdefault((file, index), []).append((offset, nbytes, crc))
                if self._keep_fresh:
                    self._fresh.append((file, index, offset, nbytes, crc))
        return crc

    def finish(self) -> None:
        """Compare the records that were read in parts; one of which some bytes were not needed is not judged."""
        for file, index in self._parts:
            crc = self._sum(file, index)
            if crc is not None:
                self._compare(file, self._records[file], index, crc)

    def _sum(self, file: int, index: int) -> int | None:
        """The CRC-32 of a record by its parts; None when they are not all there.

        It may have been read more than once, in other parts each time: any of them that tile it will do. Raises
        SourceCorruptError when the same bytes were not the same each time: then one of the reads was wrong.
        """
        records = self._records[file]
        begin = records.offsets[index]
        sums = {begin: 0}  # of the record's bytes up to there
        read: dict[tuple[int, int], int] = {}
        for offset, nbytes, crc in sorted(set(self._parts.get((file, index), ()))):
            if read.setdefault((offset, nbytes), crc) != crc:
                raise _read_differently(self._files[file].path, offset, nbytes, read[offset, nbytes], crc)
            if offset not in sums:
                continue
            total, end = combine([(0, 0, sums[offset]), (1, nbytes, crc)]), offset + nbytes
            if sums.setdefault(end, total) != total:
                raise _read_differently(self._files[file].path, begin, end - begin, sums[end], total)
        return sums.get(begin + records.lengths[index])

    def unjudged(self, file: int, begins: Int64Array, ends: Int64Array) -> list[SourceRecord]:
        """The records of ``file`` that have bytes in ``begins[i]`` .. ``ends[i]``, and of which parts are missing."""
        records = self._records.get(file)
        if records is None:
            return []
        offsets = np.asarray(records.offsets, np.int64)
        lengths = np.asarray(records.lengths, np.int64)
        change = np.zeros(len(offsets) + 1, np.int64)
        np.add.at(change, np.searchsorted(offsets + lengths, begins, side="right"), 1)
        np.add.at(change, np.searchsorted(offsets, ends, side="left"), -1)
        touched = np.flatnonzero(np.cumsum(change[:-1]) > 0).tolist()
        return [
            (file, records.offsets[index], records.lengths[index], records.crcs[index])
            for index in touched
            if self._sum(file, index) is None
        ]

    def fresh(self) -> list[tuple[int, int, int, int, int]]:
        """The parts of records seen since the last call, as ``unfinished`` gives them; none at the first call."""
        with self._lock:
            self._keep_fresh = True
            found, self._fresh = self._fresh, []
        return found

    def unfinished(self) -> list[tuple[int, int, int, int, int]]:
        """The parts of records that were not read whole: (file, record, offset, nbytes, crc)."""
        return [(file, index, *part) for (file, index), parts in self._parts.items() for part in parts]

    def absorb(self, rows: Iterable[tuple[int, int, int, int, int]]) -> None:
        """Take what another worker's ``unfinished`` says, or a journal, which read other parts of the same records."""
        for file, index, offset, nbytes, crc in rows:
            self._parts.setdefault((file, index), []).append((offset, nbytes, crc))

    def _compare(self, file: int, records: _Records, index: int, crc: int) -> None:
        require_sum(self._files[file].path, records.offsets[index], records.lengths[index], records.crcs[index], crc)


def _require_one_sum(files: Sequence[SourceFile], checksums: Checksums) -> None:
    """Raises SourceCorruptError when two sums are stated for the same bytes: whichever is right, the file is not."""
    table = np.stack([checksums.file, checksums.offset, checksums.nbytes, checksums.crc])
    table = table[:, np.lexsort(table[::-1])]
    same = (table[:3, 1:] == table[:3, :-1]).all(axis=0) & (table[3, 1:] != table[3, :-1])
    for file, offset, nbytes, second in table[:, 1:][:, same].T.tolist():
        first = int(table[3, :-1][same][0])
        raise SourceCorruptError(
            f"{files[file].path} contradicts itself: it states two checksums for {nbytes} bytes at offset {offset}",
            file=files[file].path,
            expected=f"CRC-32 {first:08x}",
            found=f"{second:08x}",
            why="its directory of records was damaged, or made by a program that is wrong",
            next_step="save or fetch the checkpoint again",
        )


def require_sum(path: str, offset: int, nbytes: int, expected: int, found: int) -> None:
    """Raises SourceCorruptError when the record at ``offset`` of ``path`` sums to ``found``, not to ``expected``."""
    if found == expected:
        return
    raise SourceCorruptError(
        f"{path} is damaged: the record of {nbytes} bytes at offset {offset} does not match its checksum",
        file=path,
        expected=f"CRC-32 {expected:08x}",
        found=f"{found:08x}",
        why="bytes changed after the checkpoint was saved (disk, copy or transfer)",
        next_step=f"run `fsdpckpt verify {path}` to list all damage, then fetch the file again",
    )


def _read_differently(path: str, offset: int, nbytes: int, first: int, second: int) -> SourceCorruptError:
    return SourceCorruptError(
        f"{path} is damaged, or changed: {nbytes} bytes at offset {offset} were not the same each time they were read",
        file=path,
        expected=f"CRC-32 {first:08x}",
        found=f"{second:08x}",
        why="a disk or a network that returns wrong bytes now and then, or another program writes there",
        next_step=f"run `fsdpckpt verify {path}` on each machine that read it, then fetch the file again",
    )
