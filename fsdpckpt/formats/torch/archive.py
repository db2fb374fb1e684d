"""A torch.save archive as values: the pickle's tree with its tensors located in the file; nothing is loaded or run.

``load_torch`` reads a whole torch file, or one item of a DCP file; for the tensor items of a DCP file, of which there
is one for each shard of each tensor, ``containers.torch_items`` is quicker.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from fsdpckpt.errors import SourceCorruptError, SourceUnrecognisedError, SourceUnsupportedError
from fsdpckpt.formats.pickle.check import check_size
from fsdpckpt.formats.pickle.cost import check_expansion
from fsdpckpt.formats.pickle.read import load
from fsdpckpt.formats.torch.tensors import StoredTensor, TensorBuilder
from fsdpckpt.formats.torch.tree import TreeWalk
from fsdpckpt.formats.zip import ZipRecord, read_directory
from fsdpckpt.ir.checkpoint import Note
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.values import Value
from fsdpckpt.storage.protocols import ByteSource

__all__ = [
    "ChecksumRow",
    "TorchArchive",
    "check_byteorder",
    "checksum_rows",
    "load_torch",
    "local_tensor",
    "read_archive",
    "read_pickle",
]

ChecksumRow: TypeAlias = tuple[int, int, int, int]  # file, offset, nbytes, crc


@dataclass(frozen=True, slots=True)
class TorchArchive:
    """One archive, read. ``root``'s leaves are ``StoredTensor`` (or what ``leaf`` made of them), ``Distributed`` or ir
    values. ``ranks``: the ranks that its distributed tensors say saved them; ``worlds``: the ranks that they say there
    are; ``forms``: ``DTensor``, ``ShardedTensor``; ``devices``: the device types of DTensors' meshes. All empty when it
    holds none."""

    root: Value
    checksums: list[ChecksumRow]
    notes: list[Note]
    ranks: frozenset[int]
    worlds: tuple[tuple[int, ...], ...]
    forms: frozenset[str]
    devices: frozenset[str]


def load_torch(
    source: ByteSource, file_id: int, *, begin: int = 0, end: int | None = None, rank: int = 0
) -> tuple[Value, list[ChecksumRow]]:
    """The value in the torch archive at bytes [begin, end), its tensors as ir ``Tensor`` with one chunk in file
    ``file_id`` held by ``rank``, and its checksum rows. DTensor and ShardedTensor leaves are ``Distributed``.

    Raises what ``read_archive`` raises.
    """
    archive = read_archive(
        source, file_id, begin=begin, end=end, leaf=lambda stored: local_tensor(stored, file_id, rank)
    )
    return archive.root, archive.checksums


def local_tensor(stored: StoredTensor, file_id: int, rank: int = 0) -> Tensor:
    """The ir tensor that is whole in one file."""
    chunks = Chunks.whole(file=file_id, offset=stored.offset, shape=stored.shape, stride=stored.stride, rank=rank)
    return Tensor(stored.dtype, stored.shape, chunks, stored.sharded)


def read_archive(
    source: ByteSource,
    file_id: int,
    *,
    begin: int = 0,
    end: int | None = None,
    leaf: Callable[[StoredTensor], object] | None = None,
) -> TorchArchive:
    """Read the torch archive at bytes [begin, end) of ``source``; ``leaf`` makes the leaves from stored tensors.

    Raises SourceUnrecognisedError (a zip of something else), SourceUnsupportedError (big-endian; values that are no
    strided tensors, all named by key), SourceUnsafeError and SourceCorruptError.
    """
    records = read_directory(source, begin=begin, end=end)
    pickled = records.get("data.pkl")
    if pickled is None or "constants.pkl" in records:
        raise SourceUnrecognisedError(
            f"{source.path} is a zip file, but not one that torch.save writes",
            file=source.path,
            expected="a record data.pkl and no constants.pkl",
            found=", ".join(sorted(records)[:8]) or "an empty zip",
            why="it may be a TorchScript module, or an archive that holds a checkpoint",
            next_step="give the checkpoint itself: unpack the archive, or torch.save(module.state_dict(), new_path)",
        )
    check_byteorder(source, records)
    builder = TensorBuilder(records, source.path)
    walk = TreeWalk(source, builder, leaf)
    data = read_pickle(source, records, pickled)
    root = load(data, file=source.path, tensors=builder)
    root = walk.value(root)
    walk.finish()
    check_expansion(root, source.path)
    rows = checksum_rows(records, file_id)
    return TorchArchive(
        root,
        rows,
        walk.notes(),
        frozenset(walk.ranks),
        tuple(walk.worlds.values()),
        frozenset(walk.forms),
        frozenset(walk.devices),
    )


def checksum_rows(records: Mapping[str, ZipRecord], file_id: int) -> list[ChecksumRow]:
    """The CRC-32 rows of an archive; none when it was saved with ``set_crc32_options(False)``, which leaves all 0."""
    if not any(record.crc for record in records.values()):
        return []
    return [(file_id, record.offset, record.nbytes, record.crc) for record in records.values()]


def read_pickle(source: ByteSource, records: Mapping[str, ZipRecord], record: ZipRecord) -> bytes:
    """The bytes of the record. Raises SourceCorruptError when its checksum is wrong; torch.load checks none."""
    check_size(record.nbytes, source.path)
    data = source.read(record.offset, record.nbytes)
    if not any(entry.crc for entry in records.values()):
        return data
    found = zlib.crc32(data)
    if found != record.crc:
        raise SourceCorruptError(
            f"{source.path}: the checksum of {record.name} is wrong",
            file=source.path,
            expected=f"{record.crc:#010x}",
            found=f"{found:#010x}",
            why="bytes of the file were changed after it was saved",
            next_step="copy or save the checkpoint again",
            run_again=True,
        )
    return data


def check_byteorder(source: ByteSource, records: Mapping[str, ZipRecord]) -> None:
    record = records.get("byteorder")
    if record is None:
        return
    order = source.read(record.offset, min(record.nbytes, 16))
    if order != b"little":
        raise SourceUnsupportedError(
            f"{source.path} was written on a big-endian machine",
            file=source.path,
            expected="byteorder little",
            found=repr(order),
            next_step="in Python, on any machine: torch.save(torch.load(path), new_path)",
        )
