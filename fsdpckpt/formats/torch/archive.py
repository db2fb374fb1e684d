"""Reads a ``torch.save`` archive as values: the pickle's tree with its tensors located in the file.

Nothing is loaded or run. ``tree_walk`` makes the leaves of the unpickled tree. ``load_torch`` reads a whole torch file,
or one item of a DCP file; for the tensor items of a DCP file, one for each shard of each tensor, ``dcp.items`` is
faster.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from fsdpckpt.errors import COPY_AGAIN, SourceUnrecognisedError, SourceUnsupportedError, damaged
from fsdpckpt.formats.pickle import load
from fsdpckpt.formats.pickle.check import check_expansion, check_size
from fsdpckpt.formats.torch.distributed import DistributedParser
from fsdpckpt.formats.torch.tensors import StoredTensor, TensorBuilder
from fsdpckpt.formats.torch.tree_walk import TreeWalk
from fsdpckpt.formats.zip import SERIALIZATION_ID, ZipDirectory, ZipRecord, read_directory
from fsdpckpt.ir.checkpoint import Checksums, Note
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.values import Value
from fsdpckpt.storage import ByteSource
from fsdpckpt.text import bytes_text, plural, some_of

# Records of an archive that hold no tensor. Nothing else ever reads some of them, so that damage to them would be found
# by `verify` alone: whoever opens the archive compares their checksums.
_DESCRIPTIONS = ("byteorder", "version", ".format_version", ".storage_alignment", SERIALIZATION_ID)
_LARGEST_DESCRIPTION = 4096  # bytes; torch's have at most 40
_BLOCK = 1 << 20  # bytes of a record that are read at a time

ChecksumRow: TypeAlias = tuple[int, int, int, int]  # file, offset, nbytes, crc


@dataclass(frozen=True, slots=True)
class OpenedArchive:
    """One archive of which only the pickle's bytes were read: ``pickle``. ``source``: the file that contains it."""

    source: ByteSource
    records: ZipDirectory
    pickle: bytes

    def checksums(self, file_id: int) -> Checksums:
        """The CRC-32 of every record; empty if it was saved with ``set_crc32_options(False)``, which leaves all 0."""
        records = self.records
        if not records.crc.any():
            return Checksums.of([])
        return Checksums(np.full(len(records), file_id, np.int64), records.offset, records.nbytes, records.crc)


class ComparedRecords(ByteSource):
    """A file, for bytes that become part of a value and that nobody reads again: a mesh, a NumPy array. The record in
    which they are must have its checksum, if there are ``checksums``.
    """

    def __init__(self, source: ByteSource, checksums: Checksums) -> None:
        self.path, self.nbytes = source.path, source.nbytes
        self._source = source
        order = np.argsort(checksums.offset, kind="stable")
        self._records = np.stack([checksums.offset, checksums.nbytes, checksums.crc])[:, order]
        self._compared: set[int] = set()

    def read_into(self, offset: int, buffer: memoryview) -> None:
        number = int(self._records[0].searchsorted(offset, side="right")) - 1
        if number >= 0 and number not in self._compared:
            self._compare(*self._records[:, number].tolist())
            self._compared.add(number)
        self._source.read_into(offset, buffer)

    def _compare(self, offset: int, nbytes: int, stored: int) -> None:
        crc = 0
        for at in range(0, nbytes, _BLOCK):
            crc = zlib.crc32(self._source.read(offset + at, min(_BLOCK, nbytes - at)), crc)
        _require_checksum(self.path, f"{bytes_text(nbytes)} at offset {offset:,}", stored, crc)


@dataclass(frozen=True, slots=True)
class TorchArchive:
    """The content of one archive. ``root``'s leaves are ``StoredTensor`` (or what ``leaf`` made of them),
    ``Distributed`` or ir values. ``path``: of the file; ``dropped``: the Python attributes of its tensors, which are
    left out; ``defaultdicts``: the keys of those that became plain dicts. ``ranks``: the ranks that saved its
    distributed tensors, ``worlds``: all ranks, both according to these tensors; ``forms``: ``DTensor``,
    ``ShardedTensor``; ``devices``: the device types of DTensors' meshes. All empty if it holds none.
    """

    root: Value
    checksums: Checksums
    path: str
    dropped: frozenset[str]
    defaultdicts: frozenset[str]
    ranks: frozenset[int]
    worlds: tuple[tuple[int, ...], ...]
    forms: frozenset[str]
    devices: frozenset[str]


def notes_on_dropped(archives: Iterable[TorchArchive]) -> list[Note]:
    """Notes on Python attributes of tensors, and on defaultdicts: one for all files with the same."""
    paths: dict[tuple[bool, frozenset[str]], list[str]] = {}
    for archive in archives:
        paths.setdefault((False, archive.dropped), []).append(archive.path)
        paths.setdefault((True, archive.defaultdicts), []).append(archive.path)
    notes = []
    for (defaultdicts, names), files in paths.items():
        where = files[0] if len(files) == 1 else f"{files[0]} and {plural(len(files) - 1, 'more file')}"
        if defaultdicts:
            notes += notes_on_defaultdicts(where, names)
        elif names:
            message = f"Python attributes of tensors in {where} are left out: {', '.join(sorted(names))}"
            notes.append(Note("dropped", message))
    return notes


def notes_on_defaultdicts(where: str, keys: Iterable[str]) -> list[Note]:
    """A note on the defaultdicts at ``keys`` that became plain dicts, if there are any."""
    ordered = sorted(keys)
    message = f"defaultdicts in {where} become plain dicts: {some_of(ordered, 6)}"
    return [Note("dropped", message, keys=tuple(ordered))] if ordered else []


def checksums_of(source: ByteSource, file_id: int) -> Checksums:
    """The CRC-32 of every record of the torch file ``source``, none for another zip. Compares nothing.

    Raises what ``zip.read_directory`` raises.
    """
    records = read_directory(source)
    return OpenedArchive(source, records, b"").checksums(file_id) if "data.pkl" in records else Checksums.of([])


def load_torch(
    source: ByteSource, file_id: int, *, begin: int = 0, end: int | None = None, rank: int = 0
) -> tuple[Value, list[ChecksumRow], frozenset[str]]:
    """The value in the torch archive at bytes [begin, end), its tensors as ir ``Tensor`` with one chunk in file
    ``file_id`` held by ``rank``, its checksum rows, and the keys of its defaultdicts, which are plain dicts now.
    DTensor and ShardedTensor leaves are ``Distributed``.

    Raises what ``read_archive`` raises.
    """
    opened = open_archive(source, begin=begin, end=end)
    archive = parse_archive(opened, file_id, lambda stored: local_tensor(stored, file_id, rank))
    sums = archive.checksums
    columns = (sums.file.tolist(), sums.offset.tolist(), sums.nbytes.tolist(), sums.crc.tolist())
    return archive.root, list(zip(*columns, strict=True)), archive.defaultdicts


def local_tensor(stored: StoredTensor, file_id: int, rank: int = 0, *, offset: int | None = None) -> Tensor:
    """The ir tensor that is whole in one file, at its own offset or at another one."""
    at = stored.offset if offset is None else offset
    chunks = Chunks.whole(file=file_id, offset=at, shape=stored.shape, stride=stored.stride, rank=rank)
    return Tensor(stored.dtype, stored.shape, chunks, stored.sharded)


def read_archive(source: ByteSource, file_id: int) -> TorchArchive:
    """Read the torch file ``source``. Raises what ``open_archive`` and ``parse_archive`` raise."""
    return parse_archive(open_archive(source), file_id)


def open_archive(source: ByteSource, *, begin: int = 0, end: int | None = None) -> OpenedArchive:
    """Open the torch archive at bytes [begin, end) of ``source``.

    Raises SourceUnrecognisedError (a zip of something else), SourceUnsupportedError (big-endian) and
    SourceCorruptError.
    """
    records = read_directory(source, begin=begin, end=end)
    if "data.pkl" not in records or "constants.pkl" in records:
        raise SourceUnrecognisedError(
            f"{source.path} is a zip file, but not one that torch.save writes",
            file=source.path,
            expected="a record data.pkl and no constants.pkl",
            found=", ".join(sorted(records)[:8]) or "an empty zip",
            why="it may be a TorchScript module, or an archive that holds a checkpoint",
            next_step="give the checkpoint itself: unpack the archive, or torch.save(module.state_dict(), new_path)",
        )
    has_checksums = bool(records.crc.any())
    for name in _DESCRIPTIONS if has_checksums else ():
        if name in records and records[name].nbytes <= _LARGEST_DESCRIPTION:
            read_record(source, records[name], verify_checksum=True)
    if "byteorder" in records:
        check_byteorder(source, records["byteorder"])
    pickle = read_pickle(source, records["data.pkl"], verify_checksum=has_checksums)
    return OpenedArchive(source, records, pickle)


def parse_archive(
    opened: OpenedArchive,
    file_id: int,
    leaf: Callable[[StoredTensor], object] = lambda stored: stored,
    builder: TensorBuilder | None = None,
    parser: DistributedParser | None = None,
) -> TorchArchive:
    """Parse the archive; ``leaf`` makes the leaves from stored tensors. ``builder``: replaces that of its records, and
    may make ir tensors; ``parser``: replaces that of its distributed tensors.

    Raises SourceUnsupportedError (lists the keys of all values that are not strided tensors), SourceUnsafeError and
    SourceCorruptError.
    """
    source = ComparedRecords(opened.source, opened.checksums(file_id))
    if builder is None:
        builder = TensorBuilder(opened.records, source.path)
    walk = TreeWalk(source, builder, leaf, parser or DistributedParser(source))
    root = walk.value(load(opened.pickle, file=source.path, tensors=builder))
    walk.finish()
    check_expansion(root, source.path)
    return TorchArchive(
        root,
        opened.checksums(file_id),
        source.path,
        frozenset(builder.dropped),
        frozenset(walk.defaultdicts),
        frozenset(walk.ranks),
        tuple(walk.worlds.values()),
        frozenset(walk.forms),
        frozenset(walk.devices),
    )


def read_pickle(source: ByteSource, record: ZipRecord, *, verify_checksum: bool) -> bytes:
    """The bytes of the record, which is a pickle.

    ``verify_checksum``: the archive has checksums, which torch.load does not check. Raises SourceCorruptError if that
    of the record is wrong.
    """
    check_size(record.nbytes, source.path)
    return read_record(source, record, verify_checksum=verify_checksum)


def read_record(source: ByteSource, record: ZipRecord, *, verify_checksum: bool) -> bytes:
    """All bytes of the record. Raises as ``read_pickle``."""
    data = source.read(record.offset, record.nbytes)
    if verify_checksum:
        _require_checksum(source.path, record.name, record.crc, zlib.crc32(data))
    return data


def _require_checksum(path: str, name: str, stored: int, computed: int) -> None:
    if computed != stored:
        what, why = f"the checksum of {name} is wrong", "bytes of the file were changed after it was saved"
        raise damaged(path, what, f"{stored:#010x}", f"{computed:#010x}", why=why, next_step=COPY_AGAIN, run_again=True)


def check_byteorder(source: ByteSource, record: ZipRecord) -> None:
    order = source.read(record.offset, min(record.nbytes, 16))
    if order != b"little":
        raise SourceUnsupportedError(
            f"{source.path} was written on a big-endian machine",
            file=source.path,
            expected="byteorder little",
            found=repr(order),
            next_step="in Python, on any machine: torch.save(torch.load(path), new_path)",
        )
