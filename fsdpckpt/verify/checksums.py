"""Checks every CRC-32 that a checkpoint carries: of records in its containers, of whole files in ``fsdpckpt.json``.

``torch.load`` checks none of them. A file whose records all state 0 was saved without checksums
(``torch.serialization.set_crc32_options``) and is skipped. Every byte is read once, in file order: where a record and
its whole file both have a checksum, the file's is combined from the sums of its segments. These ranges of bytes are
columns: a checkpoint of a large run has millions of small ones, which are read many at a time. A problem names the
tensors that lie in the bytes that are wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fsdpckpt.errors import SourceCorruptError, SourceError, SourceUnrecognisedError
from fsdpckpt.formats.safetensors import read_header
from fsdpckpt.formats.torch import checksums_of
from fsdpckpt.ir.checkpoint import Checkpoint, Checksums, Manifest, NamedTensor, Problem, ProblemKind, problem_of
from fsdpckpt.ir.files import stored_by_number
from fsdpckpt.ir.spans import chunk_ends
from fsdpckpt.ir.tensors import Int64Array, distinct
from fsdpckpt.progress import NO_PROGRESS, Progress
from fsdpckpt.readers.manifest import check_listing, present_files, read_manifest
from fsdpckpt.readers.protocol import MANIFEST
from fsdpckpt.storage import Entry
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import bytes_text
from fsdpckpt.verify.blocks import DEFAULT_THREADS, for_each

READ_BYTES = 4 * 1024 * 1024  # per read: large enough for a disk, small enough for a processor's cache
LARGEST_GAP = 64 * 1024  # bytes between two segments that are read through: less work than another request


@dataclass(frozen=True, slots=True, eq=False)
class ChecksummedRanges:
    """Ranges of bytes with their checksums; ``sums.file`` is the index of a path.

    ``in_manifest`` (ranges,): whether the checksum comes from ``fsdpckpt.json``, and not from the file itself.
    """

    paths: Sequence[str]
    sums: Checksums
    in_manifest: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.sums.file)


def ranges_of(
    paths: Sequence[str], sums: Checksums, whole_files: Sequence[tuple[str, int, int]] = ()
) -> ChecksummedRanges:
    """The ranges of ``sums``, whose files are ``paths``, then ``whole_files`` of the manifest: (path, nbytes, crc)."""
    paths = [*paths, *(path for path, _, _ in whole_files)]
    numbers: dict[str, int] = {}
    for number, path in enumerate(paths):
        numbers.setdefault(path, number)
    of_files = Checksums.of([(numbers[path], 0, nbytes, crc) for path, nbytes, crc in whole_files])
    in_manifest = np.repeat([False, True], [len(sums.file), len(of_files.file)])
    return ChecksummedRanges(paths, Checksums.joined([sums, of_files]), in_manifest)


def checksummed_ranges(checkpoint: Checkpoint, sources: Sources) -> ChecksummedRanges:
    """The ranges whose checksums are in the containers themselves, in file order, then the whole files in
    ``fsdpckpt.json``.
    """
    sums = checkpoint.checksums
    table = np.stack([sums.file, sums.offset, sums.nbytes, sums.crc])
    has_sums = np.zeros(len(checkpoint.files), np.bool_)
    has_sums[sums.file[sums.crc != 0]] = True
    table = table[:, has_sums[sums.file]]
    table = table[:, np.lexsort(table[::-1])]
    first = np.ones(table.shape[1], np.bool_)
    first[1:] = (table[:, 1:] != table[:, :-1]).any(axis=0)
    manifest = checkpoint.origin.manifest
    whole_files = _manifest_files(manifest, sources) if manifest is not None else ()
    return ranges_of(list(map(str, checkpoint.files)), Checksums(*table[:, first]), whole_files)


def _manifest_files(manifest: Manifest, sources: Sources) -> list[tuple[str, int, int]]:
    """(path, nbytes, crc) of the files in ``manifest`` that exist with the recorded length."""
    sizes = {name: entry.nbytes for name, entry in present_files(manifest, sources).items()}
    return [
        (manifest.path_of(name), file.nbytes, file.crc)
        for name, file in manifest.files.items()
        if sizes.get(name) == file.nbytes and file.crc is not None
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _Segments:
    """The bytes of all ranges, cut where one begins or ends and every ``READ_BYTES``, each once and in file order.

    ``file``, ``begin``, ``end`` (segments,). ``reads``: the first segment of each read, then the number of segments.
    ``first``, ``stop`` (ranges,): the first segment of each range, and the one after its last.
    """

    file: Int64Array
    begin: Int64Array
    end: Int64Array
    reads: list[int]
    first: Int64Array
    stop: Int64Array

    @property
    def nbytes(self) -> int:
        """The number of bytes to read, including the gaps that are read through."""
        begins, ends = self.begin[self.reads[:-1]], self.end[np.array(self.reads[1:], np.intp) - 1]
        return int((ends - begins).sum())


def _segments(sums: Checksums) -> _Segments:
    rows = np.flatnonzero(sums.nbytes)
    begin, file = sums.offset[rows], sums.file[rows]
    edges, files = np.concatenate([begin, begin + sums.nbytes[rows]]), np.concatenate([file, file])
    order = np.lexsort((edges, files))
    position = np.empty(len(order), np.intp)
    position[order] = np.arange(len(order))
    edges, files = edges[order], files[order]
    depth = np.cumsum(np.where(order < len(rows), 1, -1))  # how many ranges are open after this edge: 0 in gaps
    covered = np.flatnonzero((depth[:-1] > 0) & (edges[1:] > edges[:-1]))
    file, begin, end = files[covered], edges[covered], edges[covered + 1]
    reads = -(-(end - begin) // READ_BYTES)
    number = np.concatenate([[0], np.cumsum(reads)])
    begin = np.repeat(begin, reads) + (np.arange(number[-1]) - np.repeat(number[:-1], reads)) * READ_BYTES
    end = np.minimum(np.repeat(end, reads), begin + READ_BYTES)
    file = np.repeat(file, reads)
    first, stop = np.zeros((2, len(sums.file)), np.int64)
    first[rows], stop[rows] = np.split(number[np.searchsorted(covered, position)], 2)
    return _Segments(file, begin, end, _reads(file, begin, end), first, stop)


def _reads(file: Int64Array, begin: Int64Array, end: Int64Array) -> list[int]:
    """Group neighbouring segments of one file into reads of at most ``READ_BYTES``; returns ``_Segments.reads``."""
    separate = (file[1:] != file[:-1]) | (begin[1:] - end[:-1] > LARGEST_GAP)
    reads, first = [0], 0
    for stop in [*(np.flatnonzero(separate) + 1).tolist(), len(file)]:
        while first < stop:
            first += int(np.searchsorted(end[first:stop], begin[first] + READ_BYTES, "right"))
            reads.append(first)
    return reads


def check_ranges(
    ranges: ChecksummedRanges,
    *,
    sources: Sources,
    in_files: TensorsInFiles | None = None,
    threads: int = DEFAULT_THREADS,
    progress: Progress = NO_PROGRESS,
) -> list[Problem]:
    """A problem for each range whose bytes do not have its checksum, and for each read that fails.

    ``in_files`` finds the tensors whose bytes are damaged.
    """
    from isal.isal_zlib import crc32

    sums = ranges.sums
    segments = _segments(sums)
    crcs = np.full(len(segments.file), -1, np.int64)  # -1: cannot be read

    def work(buffer: memoryview, read: tuple[int, int]) -> Problem | None:
        rows = slice(*read)
        path, offset = ranges.paths[segments.file[rows.start]], int(segments.begin[rows.start])
        low, high = (segments.begin[rows] - offset).tolist(), (segments.end[rows] - offset).tolist()
        view = buffer[: high[-1]]
        try:
            sources.open(path).read_into(offset, view)
        except SourceError as error:
            kind: ProblemKind = "truncated" if isinstance(error, SourceCorruptError) else "unreadable"
            tensors = in_files.overlapping(path, offset, offset + len(view)) if in_files is not None else []
            return problem_of(kind, tensors, error.what, file=path)
        finally:
            progress.advance(len(view))
        crcs[rows] = [crc32(view[first:stop]) for first, stop in zip(low, high, strict=True)]
        return None

    progress.begin("checksums", segments.nbytes)
    reads = list(zip(segments.reads[:-1], segments.reads[1:], strict=True))
    results = for_each(reads, work, make_reader=lambda: memoryview(bytearray(READ_BYTES)), threads=threads)
    progress.end()
    unreadable = [problem for problem in results if problem is not None]
    computed = _range_sums(segments, crcs)
    wrong = np.flatnonzero((computed >= 0) & (computed != sums.crc))
    with_records = frozenset(sums.file[~ranges.in_manifest].tolist())  # files whose tensors have checksums themselves
    with_wrong_records = frozenset(sums.file[wrong][~ranges.in_manifest[wrong]].tolist())
    problems = []
    for row in wrong.tolist():
        file, in_manifest = int(sums.file[row]), bool(ranges.in_manifest[row])
        where = ", outside its tensors" if in_manifest and file in with_records - with_wrong_records else ""
        tensors_in = None if in_manifest and file in with_records else in_files
        problems.append(_mismatch(ranges, row, int(computed[row]), where, tensors_in))
    return [*unreadable, *problems]


def _range_sums(segments: _Segments, crcs: Int64Array) -> Int64Array:
    """The CRC-32 of each range, -1 if a part of it could not be read."""
    from isal.isal_zlib import crc32_combine

    count = segments.stop - segments.first
    sums = np.where(count == 1, np.append(crcs, 0)[segments.first], 0)
    for row in np.flatnonzero(count > 1).tolist():
        of_range = slice(int(segments.first[row]), int(segments.stop[row]))
        total = 0
        sizes = segments.end[of_range] - segments.begin[of_range]
        for crc, nbytes in zip(crcs[of_range].tolist(), sizes.tolist(), strict=True):
            total = crc32_combine(total, crc, nbytes) if min(total, crc) >= 0 else -1
        sums[row] = total
    return sums


def _mismatch(
    ranges: ChecksummedRanges, row: int, computed: int, where: str, in_files: TensorsInFiles | None
) -> Problem:
    """The problem of a range with the CRC-32 ``computed``. ``where``: where in the file, if that is known."""
    sums = ranges.sums
    path, offset, nbytes = ranges.paths[sums.file[row]], int(sums.offset[row]), int(sums.nbytes[row])
    expected = f"{int(sums.crc[row]):08x}"
    if ranges.in_manifest[row]:
        message = f"{path} was changed{where}: its CRC-32 is {computed:08x}, {MANIFEST} recorded {expected}"
    else:
        message = f"checksum mismatch in {bytes_text(nbytes)} at offset {offset:,} of {path}: "
        message += f"CRC-32 is {computed:08x}, expected {expected}"
    tensors = in_files.overlapping(path, offset, offset + nbytes) if in_files is not None else []
    return problem_of("checksum", tensors, message, file=path)


def damaged_files(place: str, sources: Sources) -> list[Problem]:
    """The problems of the files in the directory ``place``, which cannot be read as a checkpoint, or of that file.

    Uses ``fsdpckpt.json`` if there is one in the directory, else each file's own headers and checksums.
    """
    top = sources.stat(place)
    alone = top is not None and not top.directory
    if top is not None and alone:
        entries = [top]
    else:
        entries = [entry for entry in sources.list_directory(place) if not entry.directory]
    read = read_manifest(place, [] if alone else [entry.name for entry in entries], sources)
    manifest, problems = read.manifest, read.problems
    if manifest is not None:
        problems = (*problems, *check_listing(manifest, present_files(manifest, sources)))
        ranges = ranges_of([], Checksums.of([]), _manifest_files(manifest, sources))
    else:
        sums: list[Checksums] = []
        for number, entry in enumerate(entries):
            try:
                sums.append(_stored_checksums(number, entry, sources))
            except SourceUnrecognisedError:  # a zip archive that torch did not write
                continue
            except SourceError as error:
                problems = (*problems, Problem("unreadable", error.what, file=entry.path))
        ranges = ranges_of([entry.path for entry in entries], Checksums.joined(sums))
    return [*problems, *check_ranges(ranges, sources=sources)]


def _stored_checksums(number: int, entry: Entry, sources: Sources) -> Checksums:
    """The checksums in a torch or safetensors file itself. Raises what reading its header raises."""
    source = sources.open(entry.path)
    head = source.read(0, min(16, entry.nbytes))
    if entry.name.endswith(".safetensors"):
        read_header(source)
    if not head.startswith(b"PK") or entry.name.endswith(".distcp"):  # .distcp: many archives, listed in .metadata
        return Checksums.of([])
    return checksums_of(source, number)


class TensorsInFiles:
    """Finds the tensors of a checkpoint that are stored in given bytes. The first search builds the index."""

    def __init__(self, checkpoint: Checkpoint, tensors: Sequence[NamedTensor]) -> None:
        self._numbers = {file.path: number for number, file in stored_by_number(checkpoint.files).items()}
        self._tensors = tensors
        self._by_file: dict[int, Int64Array] | None = None

    def overlapping(self, path: str, begin: int, end: int) -> list[NamedTensor]:
        """The tensors with bytes from ``begin`` to ``end`` of the file at ``path``, in the checkpoint's order."""
        if self._by_file is None:
            self._by_file = self._index()
        rows = self._by_file.get(self._numbers.get(path, -1))
        if rows is None:
            return []
        first, last = np.searchsorted(rows[3], begin, "right"), np.searchsorted(rows[0], end, "left")
        near = rows[:, first:last]
        return [self._tensors[number] for number in distinct(near[2, near[1] > begin]).tolist()]

    def _index(self) -> dict[int, Int64Array]:
        """The chunks of each file, sorted by offset, in rows of offset, end, number of the tensor, and largest end so
        far.
        """
        parts: list[Int64Array] = []
        for number, named in enumerate(self._tensors):
            chunks = named.tensor.chunks
            stored = (chunks.size != 0).all(axis=1) & (chunks.file >= 0)
            columns = (chunks.file, chunks.offset, chunk_ends(named.tensor), np.full(len(chunks), number))
            parts.append(np.stack(columns)[:, stored])
        table = np.concatenate(parts, axis=1) if parts else np.zeros((4, 0), np.int64)
        table = table[:, np.lexsort((table[1], table[0]))]
        files, begins = np.unique(table[0], return_index=True)
        by_file = zip(files.tolist(), np.split(table[1:], begins[1:], axis=1), strict=True) if len(files) else ()
        return {file: np.vstack((rows, np.maximum.accumulate(rows[1]))) for file, rows in by_file}
