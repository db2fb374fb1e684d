"""Locates the tensor items of a DCP file one after the other, each at little cost.

Every item of a ``.distcp`` file is a torch archive of its own holding one tensor (``FileSystemWriter`` calls
``torch.save`` for each). Items of the same shape have the same bytes except for the tensor's data and the checksums
that depend on it, so the structure of one is parsed once and only compared for the next.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

from fsdpckpt.errors import COPY_AGAIN, SourceCorruptError, SourceUnsupportedError
from fsdpckpt.formats.pickle.read import load
from fsdpckpt.formats.torch.archive import check_byteorder, read_pickle
from fsdpckpt.formats.torch.tensors import Refused, StoredTensor, TensorBuilder
from fsdpckpt.formats.zip import ZipRecord, read_directory
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.storage.local import MemoryFile
from fsdpckpt.storage.protocols import ByteSource
from fsdpckpt.storage.remote_file import prefetch

__all__ = ["ItemReader", "ItemTensor"]

_SMALL = 1 << 15  # items up to this many bytes are read whole, many at once
_WINDOW = 1 << 18  # bytes read at once while items are small
_END = 1 << 12  # bytes read at each end of a larger item: all its structure, unless its names are very long
_PREFETCHED = 4 << 20  # bytes of a remote file that are requested at a time
_MAX_TEMPLATES = 1 << 14  # different item structures remembered; a model has far fewer different shapes
_MAX_SAME_LENGTH = 16  # structures of one length remembered: comparing with more costs as much as parsing
_CENTRAL = struct.Struct("<4s24xHHH12x")  # signature, then the lengths of name, extra field and comment
_CRC_AT = 16  # of the CRC-32 in a central directory entry
_HEADER_AT = 42  # of the local header's offset there
_LOCAL_CRC_AT = 14  # of the CRC-32 in a local header
_END_RECORD = struct.Struct("<4s6xHIIH")  # signature, entries, bytes and offset of the central directory, comment


class ItemTensor(NamedTuple):
    """The tensor of one item. ``offset``: absolute byte offset of its first element; ``record_offset``,
    ``record_nbytes``, ``crc``: the zip record it lies in and its CRC-32 (None when the file carries none)."""

    dtype: DType
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    record_offset: int
    record_nbytes: int
    crc: int | None


class _Ends(NamedTuple):
    """Bytes of one item that were read: ``head`` from its begin at index ``head_at``; ``tail`` up to its end, such that
    the byte at offset x of the item is ``tail[tail_at + x]`` (tail_at may be negative)."""

    head: bytes
    head_at: int
    tail: bytes
    tail_at: int


class _Described(NamedTuple):
    """What one pickle says: the record its tensor lies in, its first and last byte there, and the tensor."""

    record: str
    first: int
    last: int
    tensor: StoredTensor


_Runs: TypeAlias = tuple[tuple[int, bytes], ...]


class _Template(NamedTuple):
    """The structure of one item, as runs (offset, bytes): what comes before the data, and the central directory, both
    without the checksums that differ from item to item. ``crc_at``: where the data's checksum is; offsets from the
    item's begin, as in ``tensor``."""

    head: _Runs
    directory: _Runs
    crc_at: int
    tensor: ItemTensor


class ItemReader:
    """Reads the items of one DCP file; fastest in the order of their offsets."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._window, self._at = b"", 0
        self._templates: dict[int, list[_Template]] = {}
        self._count = 0
        self._pickles: dict[bytes, _Described] = {}
        self._announced: list[tuple[int, int]] = []
        self._prefetched = False

    def announce(self, items: Iterable[tuple[int, int]]) -> None:
        """Name the items [begin, end) that will be read, in order, so that a remote file can fetch them ahead."""
        self._announced = list(items)[::-1]

    def tensor(self, begin: int, end: int) -> ItemTensor:
        """The tensor in the item at bytes [begin, end).

        Raises SourceCorruptError when the item is damaged or holds no tensor, SourceUnsupportedError when it is no
        strided tensor, and what ``zip.read_directory`` and ``pickle.read.load`` raise.
        """
        length = end - begin
        if not (0 <= begin < end <= self._source.nbytes):
            raise self._outside(begin, end)
        ends = self._ends(begin, end, length)
        head, head_at, tail, tail_at = ends
        for template in self._templates.get(length, ()):
            if _matches(template.head, head, head_at) and _matches(template.directory, tail, tail_at):
                return _moved(template, tail, tail_at, begin)
        return self._parse(begin, end, ends)

    def _ends(self, begin: int, end: int, length: int) -> _Ends:
        if self._announced and self._announced[-1][0] <= begin:
            self._prefetch()
        if length > _SMALL:
            return _Ends(self._source.read(begin, _END), 0, self._source.read(end - _END, _END), _END - length)
        if not self._at <= begin <= end <= self._at + len(self._window):
            size = length if self._prefetched else min(max(_WINDOW, length), self._source.nbytes - begin)
            self._window, self._at = self._source.read(begin, size), begin
        return _Ends(self._window, begin - self._at, self._window, begin - self._at)

    def _prefetch(self) -> None:
        """Have a remote file fetch the next items."""
        ahead: list[tuple[int, int]] = []
        nbytes = 0
        while self._announced and nbytes < _PREFETCHED:
            begin, end = self._announced.pop()
            ahead += [(begin, end - begin)] if end - begin <= _SMALL else [(begin, _END), (end - _END, _END)]
            nbytes += min(end - begin, 2 * _END)
        self._prefetched = prefetch(self._source, ahead)

    def _parse(self, begin: int, end: int, ends: _Ends) -> ItemTensor:
        """Parse the item's zip directory and pickle: the slow path."""
        records = self._records(begin, end, ends)
        pickled = records.get("data.pkl")
        if pickled is None:
            raise self._no_tensor(begin, "no data.pkl")
        data = read_pickle(self._source, records, pickled)
        described = self._pickles.get(data)
        if described is None or described.record not in records or records[described.record].nbytes < described.last:
            described = self._pickles[data] = self._describe(data, records, begin)
        record, tensor = records[described.record], described.tensor
        checked = any(entry.crc for entry in records.values())
        item = ItemTensor(
            tensor.dtype,
            tensor.shape,
            tensor.stride,
            record.offset + described.first,
            record.offset,
            record.nbytes,
            record.crc if checked else None,
        )
        template = _template(item, f"/{described.record}".encode(), begin, end - begin, ends)
        known = self._templates.setdefault(end - begin, [])
        if template is not None and len(known) < _MAX_SAME_LENGTH and self._count < _MAX_TEMPLATES:
            known.append(template)
            self._count += 1
        return item

    def _records(self, begin: int, end: int, ends: _Ends) -> Mapping[str, ZipRecord]:
        if end - begin > _SMALL:
            records = read_directory(self._source, begin=begin, end=end)
        else:
            # A small item is at hand as a whole, and its structure is spread over all of it.
            item = MemoryFile(ends.head[ends.head_at : ends.head_at + end - begin], self._source.path)
            entries = read_directory(item).items()
            records = {name: record._replace(offset=record.offset + begin) for name, record in entries}
        check_byteorder(self._source, records)
        return records

    def _describe(self, data: bytes, records: Mapping[str, ZipRecord], begin: int) -> _Described:
        tensor: object = load(data, file=self._source.path, tensors=TensorBuilder(records, self._source.path))
        if isinstance(tensor, Refused):
            raise SourceUnsupportedError(
                f"{self._source.path} holds {tensor.what} at byte {begin}, which fsdpckpt does not convert",
                file=self._source.path,
            )
        if not isinstance(tensor, StoredTensor):
            raise self._no_tensor(begin, f"a {type(tensor).__name__}")
        for name, record in records.items():
            first = tensor.offset - record.offset
            if name.startswith("data/") and 0 <= first <= record.nbytes:
                steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))
                reach = 0 if 0 in tensor.shape else (1 + steps) * tensor.dtype.itemsize
                return _Described(name, first, first + reach, tensor)
        raise self._no_tensor(begin, "a tensor without data")

    def _no_tensor(self, begin: int, found: str) -> SourceCorruptError:
        return SourceCorruptError(
            f"{self._source.path} holds no tensor at byte {begin}, where the metadata says one is",
            file=self._source.path,
            expected="what torch.save writes for one tensor",
            found=found,
            why="the data file belongs to another checkpoint, or is damaged",
        )

    def _outside(self, begin: int, end: int) -> SourceCorruptError:
        return SourceCorruptError(
            f"{self._source.path} is too short for what the metadata says lies in it",
            file=self._source.path,
            expected=f"an item at bytes {begin} to {end}",
            found=f"{self._source.nbytes} bytes",
            why="the file is truncated, or belongs to another checkpoint",
            next_step=COPY_AGAIN,
        )


def _matches(runs: _Runs, data: bytes, at: int) -> bool:
    """Whether the item whose first byte would be at index ``at`` of ``data`` has all of ``runs``."""
    return all(data.startswith(run, at + offset) for offset, run in runs)


def _moved(template: _Template, tail: bytes, tail_at: int, begin: int) -> ItemTensor:
    """The template's tensor for an item at ``begin``, with that item's own checksum."""
    dtype, shape, stride, offset, record_offset, record_nbytes, crc = template.tensor
    if crc is not None:
        at = tail_at + template.crc_at
        crc = int.from_bytes(tail[at : at + 4], "little")
    return ItemTensor(dtype, shape, stride, offset + begin, record_offset + begin, record_nbytes, crc)


def _template(made: ItemTensor, record: bytes, begin: int, length: int, ends: _Ends) -> _Template | None:
    """What the next item of this length is compared with; None when the bytes at hand do not hold the structure."""
    data_at = made.record_offset - begin
    head = ends.head[ends.head_at : ends.head_at + data_at]
    end_record = ends.tail_at + length - _END_RECORD.size
    signature, _, size, start, comment = _END_RECORD.unpack_from(ends.tail, end_record)
    if len(head) < data_at or signature != b"PK\5\6" or comment or ends.tail_at + start < 0:
        return None
    if start + size > length - _END_RECORD.size:  # these are the 32-bit fields, and the zip64 ones were believed
        return None
    # Two checksums depend on the data: its own, and that of the id which torch computes from the checksums.
    runs: list[tuple[int, bytes]] = []
    at, kept, crc_at, local = start, start, -1, -1
    while at + _CENTRAL.size <= start + size:
        index = ends.tail_at + at
        _, n_name, n_extra, n_comment = _CENTRAL.unpack_from(ends.tail, index)
        name = ends.tail[index + _CENTRAL.size : index + _CENTRAL.size + n_name]
        if name.endswith((record, b"/.data/serialization_id")):
            runs.append((kept, ends.tail[ends.tail_at + kept : index + _CRC_AT]))
            kept = at + _CRC_AT + 4
            if name.endswith(record):
                crc_at = at + _CRC_AT
                local = int.from_bytes(ends.tail[index + _HEADER_AT : index + _HEADER_AT + 4], "little") + _LOCAL_CRC_AT
        at += _CENTRAL.size + n_name + n_extra + n_comment
    runs.append((kept, ends.tail[ends.tail_at + kept : ends.tail_at + length]))
    if crc_at < 0 or at != start + size or local + 4 > data_at:
        return None
    # torch leaves the checksum in the local header 0, other writers fill it in.
    opening = ((0, head[:local]), (local + 4, head[local + 4 :]))
    moved = made._replace(offset=made.offset - begin, record_offset=data_at)
    return _Template(opening, tuple(runs), crc_at, moved)
