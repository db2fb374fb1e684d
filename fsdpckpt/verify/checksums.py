"""Checks every CRC-32 that a checkpoint carries: of records in its containers, of whole files in ``fsdpckpt.json``.

``torch.load`` checks none of them. A file whose records all state 0 was saved without checksums
(``torch.serialization.set_crc32_options``) and is skipped. Every byte is read once, in file order: where a record and
its whole file both have a checksum, the file's is combined from the sums of its parts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fsdpckpt.errors import SourceCorruptError, SourceError
from fsdpckpt.ir.checkpoint import Checkpoint, Manifest, Problem, ProblemKind
from fsdpckpt.readers.beside import check_listing, listed, read_manifest
from fsdpckpt.readers.protocol import MANIFEST
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.parallel import DEFAULT_THREADS, Advance, for_each, no_progress
from fsdpckpt.verify.tensors import TensorsInFiles, named_text

__all__ = ["Record", "bytes_to_read", "check_records", "damaged_files", "records", "stated_records"]

READ_BYTES = 4 * 1024 * 1024  # per read: large enough for a disk, small enough for a processor's cache
READ_THROUGH = 64 * 1024  # bytes between two parts: reading a gap this small costs less than another request


@dataclass(frozen=True, slots=True)
class Record:
    """``nbytes`` from ``offset`` of the file at ``path`` should have the CRC-32 ``crc``.

    ``stated_by``: the file that says so, "" for the file itself.
    """

    path: str
    offset: int
    nbytes: int
    crc: int
    stated_by: str = ""

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring parts of one file, read together: from ``cuts[i]`` to ``cuts[i + 1]``."""

    path: str
    cuts: list[int]


def records(checkpoint: Checkpoint) -> list[Record]:
    """The records whose checksums the containers themselves state, in file order."""
    sums = checkpoint.checksums
    summed = set(np.unique(sums.file[sums.crc != 0]).tolist())
    rows = zip(sums.file.tolist(), sums.offset.tolist(), sums.nbytes.tolist(), sums.crc.tolist(), strict=True)
    paths = [file.path for file in checkpoint.files]
    return [Record(paths[row[0]], *row[1:]) for row in sorted(set(rows)) if row[0] in summed]


def bytes_to_read(wanted: Iterable[Record]) -> int:
    """How many bytes ``check_records`` advances by."""
    return sum(run.cuts[-1] - run.cuts[0] for run in _runs(wanted))


def check_records(
    wanted: Sequence[Record],
    *,
    sources: Sources,
    tensors: TensorsInFiles | None = None,
    threads: int = DEFAULT_THREADS,
    advance: Advance = no_progress,
) -> list[Problem]:
    """A problem for each record that does not have its checksum, and for each range that cannot be read.

    ``tensors`` names those whose bytes are hit.
    """
    from isal.isal_zlib import crc32

    def work(buffer: memoryview, run: _Run) -> list[int] | Problem:
        begin = run.cuts[0]
        view = buffer[: run.cuts[-1] - begin]
        try:
            sources.open(run.path).read_into(begin, view)
        except SourceError as error:
            kind: ProblemKind = "truncated" if isinstance(error, SourceCorruptError) else "unreadable"
            return _problem(kind, str(error.what), run.path, begin, run.cuts[-1], tensors)
        finally:
            advance(len(view))
        return [crc32(view[low - begin : high - begin]) for low, high in pairwise(run.cuts)]

    runs = list(_runs(wanted))
    results = for_each(runs, work, make_reader=lambda: memoryview(bytearray(READ_BYTES)), threads=threads)
    sums = _Sums()
    unreadable: list[Problem] = []
    for run, result in zip(runs, results, strict=True):
        if isinstance(result, Problem):
            unreadable.append(result)
        else:
            sums.add(run, result)
    return [*unreadable, *(problem for record in wanted if (problem := sums.judge(record, tensors)) is not None)]


def _problem(
    kind: ProblemKind, message: str, path: str, begin: int, end: int, tensors: TensorsInFiles | None
) -> Problem:
    """A problem of these bytes of a file, under the name of the tensor that they belong to."""
    hit = tensors.within(path, begin, end) if tensors is not None else []
    if not hit:
        return Problem(kind, message, file=path)
    return Problem(kind, f"{named_text(hit)}: {message}", file=path, key=hit[0].key, section=hit[0].section)


class _Sums:
    """The CRC-32 of every part that was read, by file."""

    def __init__(self) -> None:
        self._begins: dict[str, list[int]] = {}
        self._parts: dict[str, list[tuple[int, int]]] = {}

    def add(self, run: _Run, crcs: list[int]) -> None:
        """Add a run; the runs of one file come in their order."""
        parts = self._parts.setdefault(run.path, [])
        self._begins.setdefault(run.path, []).extend(run.cuts[:-1])
        parts.extend((high - low, crc) for (low, high), crc in zip(pairwise(run.cuts), crcs, strict=True))

    def judge(self, record: Record, tensors: TensorsInFiles | None) -> Problem | None:
        """None when the record has its checksum, or could not be read, which is reported already."""
        from isal.isal_zlib import crc32_combine

        begins, parts = self._begins.get(record.path, []), self._parts.get(record.path, [])
        total, at = 0, record.offset
        for number in range(bisect_left(begins, record.offset), len(begins)):
            if at >= record.end or begins[number] != at:
                break
            nbytes, crc = parts[number]
            total = crc32_combine(total, crc, nbytes)
            at += nbytes
        if at != record.end or total == record.crc:
            return None
        if record.stated_by:
            what = f"{record.path} ({record.nbytes} bytes) has CRC-32 {total:08x}, and {record.stated_by} says"
        else:
            place = f"{record.nbytes} bytes at offset {record.offset} of {record.path}"
            what = f"{place} have CRC-32 {total:08x}, and were written with"
        message = f"{what} {record.crc:08x}"
        return _problem("checksum", message, record.path, record.offset, record.end, tensors)


def _runs(wanted: Iterable[Record]) -> Iterator[_Run]:
    """What has to be read, file by file, in runs of at most ``READ_BYTES``, cut where a record begins or ends."""
    by_path: dict[str, list[Record]] = {}
    for record in wanted:
        if record.nbytes:
            by_path.setdefault(record.path, []).append(record)
    for path, in_file in by_path.items():
        cuts: list[int] = []
        for cut, covered in _cuts(in_file):
            if cuts and (cut - cuts[0] > READ_BYTES or (not covered and cut - cuts[-1] > READ_THROUGH)):
                yield from _closed(path, cuts)
                cuts = cuts[-1:] if covered else []
            cuts.append(cut)
        yield from _closed(path, cuts)


def _closed(path: str, cuts: list[int]) -> Iterator[_Run]:
    if len(cuts) > 1:
        yield _Run(path, list(cuts))


def _cuts(records: list[Record]) -> Iterator[tuple[int, bool]]:
    """(offset, covered) of each cut, ascending and at most ``READ_BYTES`` apart inside records.

    ``covered``: whether the bytes between the previous cut and this one belong to a record.
    """
    edges = sorted({edge for record in records for edge in (record.offset, record.end)})
    reach = 0  # the farthest end of the records that have begun
    begins = sorted((record.offset, record.end) for record in records)
    number = 0
    last: int | None = None
    for edge in edges:
        covered = last is not None and reach >= edge
        while last is not None and covered and edge - last > READ_BYTES:
            last += READ_BYTES
            yield last, True
        yield edge, covered
        last = edge
        while number < len(begins) and begins[number][0] <= edge:
            reach = max(reach, begins[number][1])
            number += 1


def stated_records(manifest: Manifest, sources: Sources) -> list[Record]:
    """The files that ``manifest`` lists, as records; only those that exist with the recorded length."""
    sizes = {name: entry.nbytes for name, entry in listed(manifest, sources).items()}
    return [
        Record(f"{manifest.directory}/{name}", 0, listed.nbytes, listed.crc, MANIFEST)
        for name, listed in manifest.files.items()
        if sizes.get(name) == listed.nbytes
    ]


def damaged_files(directory: str, sources: Sources) -> list[str]:
    """What ``fsdpckpt.json`` shows to be wrong with the files of a directory that does not read as a checkpoint."""
    entry = sources.stat(directory)
    if entry is None or not entry.directory:
        return []
    names = [entry.name for entry in sources.list_directory(directory)]
    manifest, problems = read_manifest(directory, names, sources)
    if manifest is None:
        return [problem.message for problem in problems]
    found = check_listing(manifest, listed(manifest, sources))
    found += check_records(stated_records(manifest, sources), sources=sources)
    return [problem.message for problem in found]
