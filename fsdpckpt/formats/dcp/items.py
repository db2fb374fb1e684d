"""Locates the tensor items of DCP files, many at once.

Every item of a ``.distcp`` file is a separate torch archive with one tensor (``FileSystemWriter`` calls ``torch.save``
for each). Items of the same shape have the same bytes except for the tensor's data and its checksums, so the structure
of one is parsed once and all others are only compared with it, eight bytes at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from fsdpckpt.errors import COPY_AGAIN, SourceUnsupportedError, damaged
from fsdpckpt.formats.pickle import load
from fsdpckpt.formats.torch import check_byteorder, read_pickle
from fsdpckpt.formats.torch.tensors import Refused, StoredTensor, TensorBuilder
from fsdpckpt.formats.zip import (
    CENTRAL_CRC_AT,
    LOCAL_CRC_AT,
    SERIALIZATION_ID,
    ZipDirectory,
    ZipRecord,
    read_directory,
)
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.tensors import Int64Array
from fsdpckpt.storage import ByteSource
from fsdpckpt.text import bytes_text

_MASK = np.array([(1 << (8 * width)) - 1 for width in range(9)], np.uint64)  # of so many bytes of a word
_END = 1 << 12  # bytes read at each end of an item: all its structure, unless its names are very long
_NEAR = 24 << 10  # bytes between two ranges: a smaller gap is read rather than making two requests
_BATCH = 2 << 20  # bytes read before they are compared
_MAX_TEMPLATES = 1 << 14  # different item structures remembered; a model has far fewer different shapes
_MAX_SAME_LENGTH = 16  # structures of one length remembered: comparing with more costs as much as parsing


@dataclass(frozen=True, slots=True, eq=False)
class ItemTensors:
    """The tensors of n items, in columns (n,).

    ``kind``: a position in ``Structures.kinds``. ``offset``: absolute byte offset of the first element.
    ``record_offset``, ``record_nbytes``, ``crc``: the zip record it lies in and its CRC-32, -1 when the file carries
    none.
    """

    kind: Int64Array
    offset: Int64Array
    record_offset: Int64Array
    record_nbytes: Int64Array
    crc: Int64Array


class _ItemTensor(NamedTuple):
    """One row of ``ItemTensors``, with offsets from the begin of the item."""

    kind: int
    offset: int
    record_offset: int
    record_nbytes: int
    crc: int


class _Ends(NamedTuple):
    """The bytes of one item that were read: ``head`` from its begin; ``tail`` up to its end, such that the byte at
    offset x of the item is ``tail[tail_at + x]`` (tail_at may be negative).
    """

    head: bytes
    tail: bytes
    tail_at: int


class _Described(NamedTuple):
    """The content of one pickle: the tensor, the record that holds it, and its first and last byte there."""

    record: str
    first: int
    last: int
    tensor: StoredTensor


_Segments: TypeAlias = list[tuple[int, bytes]]


class _ItemTemplate(NamedTuple):
    """The structure of one item: the ``words`` at ``offsets`` from its begin, under their ``masks``.

    These are the bytes before the data and, from number ``head`` on, the central directory, both without the checksums
    that differ from item to item. ``crc_at``: the offset of the data's checksum.
    """

    offsets: Int64Array
    words: npt.NDArray[np.uint64]
    masks: npt.NDArray[np.uint64]
    head: int
    crc_at: int
    tensor: _ItemTensor


class Structures:
    """The known structures of the items of one checkpoint, shared by the readers of its files.

    ``kinds``: the different dtypes, shapes and strides of the tensors.
    """

    def __init__(self) -> None:
        self.kinds: list[tuple[DType, tuple[int, ...], tuple[int, ...]]] = []
        self._numbers: dict[tuple[str, tuple[int, ...], tuple[int, ...]], int] = {}
        self.templates: dict[int, list[_ItemTemplate]] = {}  # by the length of the item
        self.pickles: dict[bytes, _Described] = {}
        self._count = 0

    def kind(self, dtype: DType, shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
        number = self._numbers.setdefault((dtype.name, shape, stride), len(self.kinds))
        if number == len(self.kinds):
            self.kinds.append((dtype, shape, stride))
        return number

    def remember(self, length: int, template: _ItemTemplate) -> None:
        known = self.templates.setdefault(length, [])
        if len(known) < _MAX_SAME_LENGTH and self._count < _MAX_TEMPLATES:
            known.append(template)
            self._count += 1


def item_ends(begin: Int64Array, length: Int64Array) -> list[tuple[int, int]]:
    """The ranges (offset, nbytes) that contain the structures of the items of ``length`` bytes at ``begin``."""
    nbytes = np.minimum(length, _END)
    first = np.stack([begin, begin + length - nbytes], axis=1)
    return list(zip(first.ravel().tolist(), np.repeat(nbytes, 2).tolist(), strict=True))


class ItemReader:
    """Reads the items of one DCP file. ``failed_item``: after an error, the number of the item that cannot be read."""

    def __init__(self, source: ByteSource, structures: Structures) -> None:
        self._source = source
        self._structures = structures
        self.failed_item = 0

    def tensors(self, begin: Int64Array, length: Int64Array) -> ItemTensors:
        """The tensors in the items of ``length`` bytes at ``begin``; fastest in the order of the file.

        Raises SourceCorruptError if an item is damaged or holds no tensor, SourceUnsupportedError if the tensor is not
        strided, and what ``zip.read_directory`` and ``pickle.load`` raise.
        """
        nbytes = self._source.nbytes
        inside = (begin >= 0) & (length > 0) & (length <= nbytes) & (begin <= nbytes - np.minimum(length, nbytes))
        if not inside.all():
            self.failed_item = first = int(np.argmin(inside))
            raise damaged(
                self._source.path,
                "the file is too short for the items that the metadata places in it",
                f"an item at bytes {begin[first]} to {begin[first] + length[first]}",
                bytes_text(nbytes),
                why="the file is truncated, or belongs to another checkpoint",
                next_step=COPY_AGAIN,
            )
        tensors = ItemTensors(*np.full((5, len(begin)), -1, np.int64))
        gaps = np.clip(begin - np.concatenate([begin[:1], begin[:-1] + length[:-1]]), 0, _NEAR)
        needed = np.cumsum(2 * np.minimum(length, _END) + gaps)
        first = 0
        while first < len(begin):
            before = needed[first - 1] if first else 0
            end = max(int(np.searchsorted(needed, before + _BATCH, "right")), first + 1)
            self._read_batch(tensors, begin, length, slice(first, end))
            first = end
        return tensors

    def _read_batch(self, tensors: ItemTensors, begin: Int64Array, length: Int64Array, rows: slice) -> None:
        """Locate the tensors of some items: read their ends, compare them with the known structures, parse the rest."""
        ends = _BatchEnds(self._source, begin[rows], length[rows])
        order = np.argsort(length[rows], kind="stable")
        of_length = length[rows][order]
        for same in np.split(order, np.flatnonzero(np.diff(of_length)) + 1):
            templates = self._structures.templates.setdefault(int(length[rows.start + same[0]]), [])
            left, tried = same, 0
            while len(left):
                if tried == len(templates):
                    number = int(left[0])
                    self.failed_item = rows.start + number
                    at = self.failed_item
                    tensor = self._parse(int(begin[at]), int(length[at]), ends.of(number))
                    self._put(tensors, tensor, begin, left[:1] + rows.start, tensor.crc)
                    left = left[1:]
                for template in templates[tried:]:
                    fits = ends.match(template, left)
                    crcs = ends.crcs(template, left[fits])
                    self._put(tensors, template.tensor, begin, left[fits] + rows.start, crcs)
                    left = left[~fits]
                tried = len(templates)

    def _put(
        self,
        tensors: ItemTensors,
        tensor: _ItemTensor,
        begin: Int64Array,
        rows: npt.NDArray[np.intp],
        crcs: Int64Array | int,
    ) -> None:
        """Store ``tensor`` for some items, with their own checksums."""
        tensors.kind[rows] = tensor.kind
        tensors.offset[rows] = begin[rows] + tensor.offset
        tensors.record_offset[rows] = begin[rows] + tensor.record_offset
        tensors.record_nbytes[rows] = tensor.record_nbytes
        if tensor.crc >= 0:
            tensors.crc[rows] = crcs

    def _parse(self, begin: int, length: int, ends: _Ends) -> _ItemTensor:
        """Parse the item's zip directory and pickle: the slow path."""
        records = read_directory(self._source, begin=begin, end=begin + length)
        if "byteorder" in records:
            check_byteorder(self._source, records["byteorder"])
        pickled = records.get("data.pkl")
        if pickled is None:
            self._refuse(begin, "no data.pkl")
        has_checksums = bool(records.crc.any())
        data = read_pickle(self._source, pickled, verify_checksum=has_checksums)
        pickles = self._structures.pickles
        described = pickles.get(data)
        record = None if described is None else records.get(described.record)
        if described is None or record is None or record.nbytes < described.last:
            described = pickles[data] = self._describe(data, records, begin)
        record, stored = records[described.record], described.tensor
        kind = self._structures.kind(stored.dtype, stored.shape, stored.stride)
        data_at = record.offset - begin
        tensor = _ItemTensor(
            kind, data_at + described.first, data_at, record.nbytes, record.crc if has_checksums else -1
        )
        template = _make_template(tensor, described.record, records, length, ends)
        if template is not None:
            self._structures.remember(length, template)
        return tensor

    def _describe(self, data: bytes, records: Mapping[str, ZipRecord], begin: int) -> _Described:
        tensor: object = load(data, file=self._source.path, tensors=TensorBuilder(records, self._source.path))
        if isinstance(tensor, Refused):
            raise SourceUnsupportedError(
                f"{self._source.path} holds {tensor.what} at byte {begin}, which fsdpckpt does not convert",
                file=self._source.path,
            )
        if not isinstance(tensor, StoredTensor):
            self._refuse(begin, f"a {type(tensor).__name__}")
        for name, record in records.items():
            first = tensor.offset - record.offset
            if name.startswith("data/") and 0 <= first <= record.nbytes:
                break
        else:
            self._refuse(begin, "a tensor without data")
        steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))
        nbytes = 0 if 0 in tensor.shape else (1 + steps) * tensor.dtype.itemsize
        return _Described(name, first, first + nbytes, tensor)

    def _refuse(self, begin: int, found: str) -> NoReturn:
        raise damaged(
            self._source.path,
            f"it holds no tensor at byte {begin}, where the metadata says one is",
            "what torch.save writes for one tensor",
            found,
            why="the data file belongs to another checkpoint, or is damaged",
        )


class _BatchEnds:
    """The bytes of some items that contain their structures, read in few requests."""

    def __init__(self, source: ByteSource, begin: Int64Array, length: Int64Array) -> None:
        self._nbytes = np.minimum(length, _END)
        first = np.stack([begin, begin + length - self._nbytes], axis=1)
        end = first + self._nbytes[:, None]
        ranges = first.ravel(), end.ravel()
        fetched = source.prefetch(zip(ranges[0].tolist(), (ranges[1] - ranges[0]).tolist(), strict=True))
        at, reads, size = _plan_reads(*ranges, near=-1 if fetched else _NEAR)
        self._buffer = bytearray(size + 8)
        view = memoryview(self._buffer)
        for position, offset, nbytes in reads:
            if fetched:
                view[position : position + nbytes] = source.read(offset, nbytes)
            else:
                source.read_into(offset, view[position : position + nbytes])
        # Where each item would begin in the buffer if it were there entirely: by its head, and by its tail.
        self._head = at[0::2]
        self._tail = at[1::2] - (first[:, 1] - begin)
        self._length = length
        self._masked_words: npt.NDArray[np.uint64] = np.ndarray((size + 1,), "<u8", self._buffer, strides=(1,))

    def of(self, number: int) -> _Ends:
        head, nbytes, length = int(self._head[number]), int(self._nbytes[number]), int(self._length[number])
        end = int(self._tail[number]) + length
        return _Ends(
            bytes(self._buffer[head : head + nbytes]), bytes(self._buffer[end - nbytes : end]), nbytes - length
        )

    def match(self, template: _ItemTemplate, numbers: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """Which of the items have this structure."""
        head = self._head[numbers, None] + template.offsets[: template.head]
        tail = self._tail[numbers, None] + template.offsets[template.head :]
        words = self._masked_words[np.concatenate([head, tail], axis=1)] & template.masks
        fits: npt.NDArray[np.bool_] = np.all(words == template.words, axis=1)
        return fits

    def crcs(self, template: _ItemTemplate, numbers: npt.NDArray[np.intp]) -> Int64Array:
        words = self._masked_words[self._tail[numbers] + template.crc_at]
        crcs: Int64Array = (words & _MASK[4]).astype(np.int64)
        return crcs


def _plan_reads(
    begin: Int64Array, end: Int64Array, *, near: int
) -> tuple[Int64Array, Iterator[tuple[int, int, int]], int]:
    """The position of each range in a buffer; the reads that fill it (position, offset, bytes); its size.

    Consecutive ranges with at most ``near`` bytes between them are read together.
    """
    apart = np.concatenate([[True], (begin[1:] > end[:-1] + near) | (begin[1:] < begin[:-1])])
    first = np.flatnonzero(apart)
    offset, last = begin[first], np.maximum.reduceat(end, first)
    position = np.concatenate([[0], np.cumsum(last - offset)])
    request = np.cumsum(apart) - 1
    at = position[request] + begin - offset[request]
    reads = zip(position.tolist(), offset.tolist(), (last - offset).tolist(), strict=False)
    return at, reads, int(position[-1])


def _make_template(
    tensor: _ItemTensor, record: str, directory: ZipDirectory, length: int, ends: _Ends
) -> _ItemTemplate | None:
    """The structure to compare the next item of this length with; None if the bytes that were read do not
    contain it.
    """
    data_at, directory_at = tensor.record_offset, int(directory.entry[0])
    head = ends.head[:data_at]
    if len(head) < data_at or ends.tail_at + directory_at < 0:
        return None
    row = directory.numbers[record]
    crc_at = int(directory.entry[row]) + CENTRAL_CRC_AT
    # Two checksums depend on the data: its own, and that of the id which torch computes from the checksums.
    id_row = directory.numbers.get(SERIALIZATION_ID, row)
    cuts = sorted({crc_at, int(directory.entry[id_row]) + CENTRAL_CRC_AT})
    limits = zip([directory_at, *(cut + 4 for cut in cuts)], [*cuts, length], strict=True)
    tail = [(begin, ends.tail[ends.tail_at + begin : ends.tail_at + end]) for begin, end in limits]
    # torch leaves the checksum in the local header 0, other writers fill it in.
    local_crc_at = int(directory.header[row]) + LOCAL_CRC_AT
    before_data = _masked_words([(0, head[:local_crc_at]), (local_crc_at + 4, head[local_crc_at + 4 :])])
    offsets, words, masks = map(np.array, zip(*before_data, *_masked_words(tail), strict=True))
    return _ItemTemplate(offsets, words, masks, len(before_data), crc_at, tensor)


def _masked_words(segments: _Segments) -> list[tuple[np.int64, np.uint64, np.uint64]]:
    """``segments`` (offset, bytes) as words: offset, value, and a mask of the bytes that count."""
    return [
        (np.int64(offset + at), np.uint64(int.from_bytes(word, "little")), _MASK[len(word)])
        for offset, segment in segments
        for at in range(0, len(segment), 8)
        if (word := segment[at : at + 8])
    ]
