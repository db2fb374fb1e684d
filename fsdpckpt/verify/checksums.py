"""Checks every CRC-32 that a checkpoint carries: of records in its containers, of whole files in ``fsdpckpt.json``.

``torch.load`` checks none of them. A file whose records all state 0 was saved without checksums
(``torch.serialization.set_crc32_options``) and is skipped. Every byte is read once, in file order: where a record and
its whole file both have a checksum, the file's is combined from the sums of its parts. Records are columns: a
checkpoint of a large run has millions of small ones, which are read many at a time. A problem names the tensors that
lie in the bytes that are wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fsdpckpt.errors import SourceCorruptError, SourceError, SourceUnrecognisedError
from fsdpckpt.formats.safetensors import read_header
from fsdpckpt.formats.torch import open_archive
from fsdpckpt.ir.checkpoint import Checkpoint, Manifest, NamedTensor, Problem, ProblemKind
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.tensors import Int64Array, Tensor
from fsdpckpt.progress import NoProgress, Progress
from fsdpckpt.readers.manifest import check_listing, present_files, read_manifest
from fsdpckpt.readers.protocol import MANIFEST
from fsdpckpt.storage import Entry
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import bytes_text
from fsdpckpt.verify.blocks import DEFAULT_THREADS, for_each

READ_BYTES = 4 * 1024 * 1024  # per read: large enough for a disk, small enough for a processor's cache
READ_THROUGH = 64 * 1024  # bytes between two parts: reading a gap this small costs less than another request


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """n ranges of bytes, in columns (n,): ``nbytes`` from ``offset`` of ``paths[file]`` should have the CRC-32 ``crc``.

    ``listed``: the checksum comes from ``fsdpckpt.json``, not from the file itself.
    """

    paths: tuple[str, ...]
    file: Int64Array
    offset: Int64Array
    nbytes: Int64Array
    crc: Int64Array
    listed: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.file)

    @classmethod
    def of(cls, rows: Iterable[tuple[str, int, int, int]], *, listed: bool = False) -> Records:
        """From rows of (path, offset, nbytes, crc)."""
        numbers: dict[str, int] = {}
        table = [(numbers.setdefault(path, len(numbers)), *row) for path, *row in rows]
        columns = np.array(table, np.int64).reshape(len(table), 4).T
        file, offset, nbytes, crc = columns
        return cls(tuple(numbers), file, offset, nbytes, crc, np.full(len(table), listed))

    def __add__(self, other: Records) -> Records:
        numbers = {path: number for number, path in enumerate(self.paths)}
        renumbered = np.array([numbers.setdefault(path, len(numbers)) for path in other.paths], np.int64)
        return Records(
            tuple(numbers),
            np.concatenate([self.file, renumbered[other.file]]),
            np.concatenate([self.offset, other.offset]),
            np.concatenate([self.nbytes, other.nbytes]),
            np.concatenate([self.crc, other.crc]),
            np.concatenate([self.listed, other.listed]),
        )


def records_of(checkpoint: Checkpoint, sources: Sources) -> Records:
    """The records stated by the containers themselves, in file order, then those of whole files in
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
    table = table[:, first]
    paths = tuple(file.path for file in checkpoint.files)
    file, offset, nbytes, crc = table
    records = Records(paths, file, offset, nbytes, crc, np.zeros(len(file), np.bool_))
    return records if checkpoint.manifest is None else records + _listed(checkpoint.manifest, sources)


def _listed(manifest: Manifest, sources: Sources) -> Records:
    """The files that ``manifest`` lists; only those that exist with the recorded length."""
    sizes = {name: entry.nbytes for name, entry in present_files(manifest, sources).items()}
    rows = (
        (f"{manifest.directory}/{name}", 0, file.nbytes, file.crc)
        for name, file in manifest.files.items()
        if sizes.get(name) == file.nbytes and file.crc is not None
    )
    return Records.of(rows, listed=True)


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """The bytes of all records, cut where one begins or ends and every ``READ_BYTES``, each once and in file order.

    ``file``, ``begin``, ``end`` (parts,). ``reads``: the first part of each read, and the number of parts. ``first``,
    ``stop`` (records,): the parts of each record.
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


def _parts(records: Records) -> _Parts:
    rows = np.flatnonzero(records.nbytes)
    begin, file = records.offset[rows], records.file[rows]
    at, files = np.concatenate([begin, begin + records.nbytes[rows]]), np.concatenate([file, file])
    order = np.lexsort((at, files))
    place = np.empty(len(order), np.intp)
    place[order] = np.arange(len(order))
    at, files = at[order], files[order]
    depth = np.cumsum(np.where(order < len(rows), 1, -1))  # how many records are open after this edge: 0 in gaps
    covered = np.flatnonzero((depth[:-1] > 0) & (at[1:] > at[:-1]))
    file, begin, end = files[covered], at[covered], at[covered + 1]
    reads = -(-(end - begin) // READ_BYTES)
    number = np.concatenate([[0], np.cumsum(reads)])
    begin = np.repeat(begin, reads) + (np.arange(number[-1]) - np.repeat(number[:-1], reads)) * READ_BYTES
    end = np.minimum(np.repeat(end, reads), begin + READ_BYTES)
    file = np.repeat(file, reads)
    first, stop = np.zeros((2, len(records)), np.int64)
    first[rows], stop[rows] = np.split(number[np.searchsorted(covered, place)], 2)
    return _Parts(file, begin, end, _reads(file, begin, end), first, stop)


def _reads(file: Int64Array, begin: Int64Array, end: Int64Array) -> list[int]:
    """Neighbouring parts of one file are read together, at most ``READ_BYTES``."""
    apart = (file[1:] != file[:-1]) | (begin[1:] - end[:-1] > READ_THROUGH)
    reads, first = [0], 0
    for stop in [*(np.flatnonzero(apart) + 1).tolist(), len(file)]:
        while first < stop:
            first += int(np.searchsorted(end[first:stop], begin[first] + READ_BYTES, "right"))
            reads.append(first)
    return reads


def check_records(
    records: Records,
    *,
    sources: Sources,
    tensors: TensorsInFiles | None = None,
    threads: int = DEFAULT_THREADS,
    progress: Progress | None = None,
) -> list[Problem]:
    """A problem for each record with another checksum, and for each range that cannot be read.

    ``tensors`` finds the tensors whose bytes are damaged.
    """
    from isal.isal_zlib import crc32

    parts = _parts(records)
    crcs = np.full(len(parts.file), -1, np.int64)  # -1: cannot be read
    stage = progress if progress is not None else NoProgress()

    def work(buffer: memoryview, read: tuple[int, int]) -> Problem | None:
        rows = slice(*read)
        path, at = records.paths[parts.file[rows.start]], int(parts.begin[rows.start])
        low, high = (parts.begin[rows] - at).tolist(), (parts.end[rows] - at).tolist()
        view = buffer[: high[-1]]
        try:
            sources.open(path).read_into(at, view)
        except SourceError as error:
            kind: ProblemKind = "truncated" if isinstance(error, SourceCorruptError) else "unreadable"
            return _problem(kind, str(error.what), path, at, at + len(view), tensors)
        finally:
            stage.advance(len(view))
        crcs[rows] = [crc32(view[first:stop]) for first, stop in zip(low, high, strict=True)]
        return None

    stage.begin("checksums", parts.nbytes)
    reads = list(zip(parts.reads[:-1], parts.reads[1:], strict=True))
    results = for_each(reads, work, make_reader=lambda: memoryview(bytearray(READ_BYTES)), threads=threads)
    stage.end()
    unreadable = [problem for problem in results if problem is not None]
    computed = _read_sums(parts, crcs)
    wrong = np.flatnonzero((computed >= 0) & (computed != records.crc))
    with_sums = frozenset(records.file[~records.listed].tolist())  # a tensor in these has a record of its own
    hit = frozenset(records.file[wrong][~records.listed[wrong]].tolist())
    problems = []
    for row in wrong.tolist():
        file, listed = int(records.file[row]), bool(records.listed[row])
        where = ", outside of its tensors" if listed and file in with_sums - hit else ""
        named = None if listed and file in with_sums else tensors
        problems.append(_mismatch(records, row, int(computed[row]), where, named))
    return [*unreadable, *problems]


def _read_sums(parts: _Parts, crcs: Int64Array) -> Int64Array:
    """The CRC-32 of each record, -1 if a part of it could not be read."""
    from isal.isal_zlib import crc32_combine

    count = parts.stop - parts.first
    sums = np.where(count == 1, np.append(crcs, 0)[parts.first], 0)
    for row in np.flatnonzero(count > 1).tolist():
        of_record = slice(int(parts.first[row]), int(parts.stop[row]))
        total = 0
        sizes = parts.end[of_record] - parts.begin[of_record]
        for crc, nbytes in zip(crcs[of_record].tolist(), sizes.tolist(), strict=True):
            total = crc32_combine(total, crc, nbytes) if min(total, crc) >= 0 else -1
        sums[row] = total
    return sums


def _mismatch(records: Records, row: int, computed: int, where: str, tensors: TensorsInFiles | None) -> Problem:
    """``where``: the place in the file, as far as it is known for a whole file."""
    path, offset, nbytes = records.paths[records.file[row]], int(records.offset[row]), int(records.nbytes[row])
    if records.listed[row]:
        what = f"{path} was changed{where}: it has CRC-32 {computed:08x}, and {MANIFEST} says"
    else:
        what = f"{bytes_text(nbytes)} at offset {offset:,} of {path} have CRC-32 {computed:08x}, and were written with"
    message = f"{what} {int(records.crc[row]):08x}"
    return _problem("checksum", message, path, offset, offset + nbytes, tensors)


def _problem(
    kind: ProblemKind, message: str, path: str, begin: int, end: int, tensors: TensorsInFiles | None
) -> Problem:
    """A problem of these bytes of a file, under the name of the tensor that they belong to."""
    hit = tensors.within(path, begin, end) if tensors is not None else []
    if not hit:
        return Problem(kind, message, file=path)
    return Problem(kind, f"{named_text(hit)}: {message}", file=path, key=hit[0].key, section=hit[0].section)


def damaged_files(directory: str, sources: Sources) -> list[Problem]:
    """What is wrong with the files in ``directory``, which cannot be read as a checkpoint.

    Uses ``fsdpckpt.json`` if there is one, else each file's own headers and checksums.
    """
    entries = [entry for entry in sources.list_directory(directory) if not entry.directory]
    read = read_manifest(directory, [entry.name for entry in entries], sources)
    manifest, problems = read.manifest, read.problems
    if manifest is not None:
        problems = (*problems, *check_listing(manifest, present_files(manifest, sources)))
        records = _listed(manifest, sources)
    else:
        rows: list[tuple[str, int, int, int]] = []
        for entry in entries:
            try:
                rows += _own_records(entry, sources)
            except SourceUnrecognisedError:  # a zip file of something else
                continue
            except SourceError as error:
                problems = (*problems, Problem("unreadable", error.what, file=entry.path))
        records = Records.of(rows)
    return [*problems, *check_records(records, sources=sources)]


def _own_records(entry: Entry, sources: Sources) -> list[tuple[str, int, int, int]]:
    """The checksums in a torch or safetensors file itself. Raises what reading its header raises."""
    source = sources.open(entry.path)
    head = source.read(0, min(16, entry.nbytes))
    if entry.name.endswith(".safetensors"):
        read_header(source)
    if not head.startswith(b"PK") or entry.name.endswith(".distcp"):  # many archives, which .metadata finds
        return []
    sums = open_archive(source).checksums(0)
    columns = (sums.offset.tolist(), sums.nbytes.tolist(), sums.crc.tolist())
    return [(entry.path, *row) for row in zip(*columns, strict=True)]


def chunk_ends(tensor: Tensor) -> Int64Array:
    """The offset behind the last byte of each chunk, in its file."""
    chunks = tensor.chunks
    ends: Int64Array = (
        chunks.offset + (((chunks.size - 1).clip(0) * chunks.stride).sum(axis=1) + 1) * tensor.dtype.itemsize
    )
    return ends


class TensorsInFiles:
    """The tensors of a checkpoint by the bytes that they are stored in. The first question builds the index."""

    def __init__(self, checkpoint: Checkpoint, named: Sequence[NamedTensor]) -> None:
        self._numbers = {file.path: number for number, file in enumerate(checkpoint.files)}
        self._named = named
        self._by_file: dict[int, Int64Array] | None = None

    def within(self, path: str, begin: int, end: int) -> list[NamedTensor]:
        """The tensors with bytes from ``begin`` to ``end`` of the file at ``path``, in the checkpoint's order."""
        if self._by_file is None:
            self._by_file = self._index()
        rows = self._by_file.get(self._numbers.get(path, -1))
        if rows is None:
            return []
        first, last = np.searchsorted(rows[3], begin, "right"), np.searchsorted(rows[0], end, "left")
        near = rows[:, first:last]
        return [self._named[at] for at in np.unique(near[2, near[1] > begin]).tolist()]

    def _index(self) -> dict[int, Int64Array]:
        """For each file its chunks as columns sorted by offset: offset, end, number of the tensor, and the farthest end
        so far.
        """
        parts: list[Int64Array] = []
        for number, one in enumerate(self._named):
            chunks = one.tensor.chunks
            filled = (chunks.size != 0).all(axis=1)
            columns = (chunks.file, chunks.offset, chunk_ends(one.tensor), np.full(len(chunks), number))
            parts.append(np.stack(columns)[:, filled])
        table = np.concatenate(parts, axis=1) if parts else np.zeros((4, 0), np.int64)
        table = table[:, np.lexsort((table[1], table[0]))]
        files, begins = np.unique(table[0], return_index=True)
        by_file = zip(files.tolist(), np.split(table[1:], begins[1:], axis=1), strict=True) if len(files) else ()
        return {file: np.vstack((rows, np.maximum.accumulate(rows[1]))) for file, rows in by_file}


def named_text(tensors: Sequence[NamedTensor]) -> str:
    """``model a.weight``, ``model a.weight and 3 more tensors``."""
    first = f"{tensors[0].section} {tensors[0].key}"
    more = len(tensors) - 1
    return f"{first} and {more} more {'tensor' if more == 1 else 'tensors'}" if more else first


def buffer_keys(checkpoint: Checkpoint) -> frozenset[str]:
    """The model's keys that are not parameters, as far as this is known; frozen parameters may be among them.

    A parameter is what the optimizer lists by name, or what FSDP shards. Of the others, those are buffers that every
    rank holds whole although parameters are sharded, and, if nothing is sharded, those that the optimizer does not
    list. Without either (an optimizer by ids or none, in one full file) nothing counts as a buffer.
    """
    if checkpoint.model is None:
        return frozenset()
    tensors = {key: leaf for key, leaf in checkpoint.model.params.items() if isinstance(leaf, Tensor)}
    optim = checkpoint.optim
    listed: set[str] = set()
    if optim is not None:
        listed = {clean(name) for name in (*optim.grouped_keys(), *optim.state) if isinstance(name, str)}
    if listed.isdisjoint(map(clean, tensors)):  # by ids, or under other names than the model's
        listed = set()
    return frozenset(
        key
        for key, tensor in tensors.items()
        if clean(key) not in listed
        and tensor.sharded is not True
        and (bool(listed) or (tensor.sharded is False and tensor.ndim > 0))
    )
