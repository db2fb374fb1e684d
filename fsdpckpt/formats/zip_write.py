"""Lays out the zip archives of ``torch.save``: stored records in torch's order, their data 64-byte aligned.

The order is ``data.pkl``, ``byteorder``, ``data/0`` .., ``version``, ``.data/serialization_id``. ``.format_version``
and ``.storage_alignment`` are left out on purpose: a reader that sees them computes offsets as torch's own writer would
have placed them (``torch.serialization``, FakeTensorMode) instead of reading the headers. Local headers have real
sizes, so no data descriptors follow the data. Offsets inside the archive count from its first byte, which need not be
the first byte of the file (a DCP item). The format's source is that of ``formats.zip``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from fsdpckpt.errors import InternalError
from fsdpckpt.formats.zip import (
    CENTRAL_COLUMNS,
    CENTRAL_CRC_AT,
    CENTRAL_HEADER,
    END64_RECORD,
    END_RECORD,
    LIMIT_32,
    LOCAL_COLUMNS,
    LOCAL_CRC_AT,
    LOCAL_HEADER,
    LOCATOR64,
    SERIALIZATION_ID,
)
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.targets import TargetFile, WrittenTensor
from fsdpckpt.ir.tensors import Box, Int64Array, Tensor

ALIGNMENT = 64  # bytes; torch.serialization's storage alignment, what mmap=True loads rely on
_UTF8 = 0x0800
_DATE = 0x0021  # 1980-01-01, the earliest date of a zip: output does not depend on the clock
_LIMIT_16 = 0xFFFF
_VERSION, _VERSION_64 = 20, 45  # of the format: 2.0, and 4.5 for zip64
_PADDING = b"Z" * (ALIGNMENT + 4)
_HEADERS_AT_ONCE = 1 << 13
_LONG_RUN = 16  # records: fewer are faster one by one


class _Record(NamedTuple):
    name: bytes
    header: int
    data: int
    nbytes: int
    crc: int | None


class _RecordColumns(NamedTuple):
    """Consecutive records of data, in columns."""

    name: list[bytes]
    header: Int64Array
    data: Int64Array
    nbytes: Int64Array

    def records(self) -> Iterator[_Record]:
        columns = (self.header.tolist(), self.data.tolist(), self.nbytes.tolist())
        for name, header, data, nbytes in zip(self.name, *columns, strict=True):
            yield _Record(name, header, data, nbytes, None if nbytes else 0)


class TorchZip:
    """One archive, written front to back at the current end of ``file``.

    ``stem``: the folder that contains every record: the file's stem, or ``archive`` for DCP items.
    """

    def __init__(self, file: TargetFile, *, stem: str) -> None:
        self._file = file
        self._begin = file.nbytes
        self._stem = stem.encode()
        self._records: list[_Record | _RecordColumns] = []
        self._crc_places: list[Int64Array] = []  # of each, (n, 2)

    def pickle(self, data: bytes) -> None:
        """The first records: ``data.pkl`` and ``byteorder``."""
        self.record("data.pkl", data)
        self.record("byteorder", b"little")
        self._serialization_id = _serialization_id(data)

    def record(self, name: str, data: bytes) -> None:
        """A record whose bytes are known already."""
        self._header(name.encode(), len(data), isal_zlib.crc32(data))
        self._file.add_literal(data)

    def begin_data(self, key: str, nbytes: int) -> None:
        """Write the header of ``data/<key>``: the caller then appends exactly ``nbytes`` to the file."""
        self._header(b"data/" + key.encode(), nbytes, None if nbytes else 0)

    def _header(self, name: bytes, nbytes: int, crc: int | None) -> None:
        file = self._file
        name = b"%b/%b" % (self._stem, name)
        header = file.nbytes
        big = nbytes >= LIMIT_32
        extra = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if big else b""
        padding = -(header - self._begin + 34 + len(name) + len(extra)) % ALIGNMENT
        extra += b"FB%b%b" % (padding.to_bytes(2, "little"), _PADDING[:padding])
        size = LIMIT_32 if big else nbytes
        packed = LOCAL_HEADER.pack(
            b"PK\3\4",
            _VERSION_64 if big else _VERSION,
            _UTF8,
            0,
            0,
            _DATE,
            crc or 0,
            size,
            size,
            len(name),
            len(extra),
        )
        file.add_literal(b"%b%b%b" % (packed, name, extra))
        self._records.append(_Record(name, header, file.nbytes, nbytes, crc))

    def begin_records(self, first: int, nbytes: Int64Array) -> Int64Array:
        """Write the headers of ``data/<first>`` and those after it, each followed by ``nbytes`` (below 4 GiB) that the
        caller fills; return where these bytes begin in the file.
        """
        file, begin = self._file, self._begin
        names = [b"%b/data/%d" % (self._stem, key) for key in range(first, first + len(nbytes))]
        length = np.array([len(name) for name in names], np.int64)
        needed = np.append(file.nbytes - begin, nbytes[:-1]) + LOCAL_HEADER.size + 4 + length
        data = begin + np.cumsum(-(-needed // ALIGNMENT) * ALIGNMENT)
        header = np.append(file.nbytes, (data + nbytes)[:-1])
        at = len(file.blob)
        for low in range(0, len(names), _HEADERS_AT_ONCE):
            rows = slice(low, low + _HEADERS_AT_ONCE)
            file.blob += _local_headers(names[rows], length[rows], nbytes[rows], (data - header)[rows])
        places = at + np.cumsum(data - header) - (data - header)
        file.literal_columns.frombytes(np.stack([header, places, data - header], axis=1).tobytes())
        file.nbytes = int(data[-1] + nbytes[-1])
        self._records.append(_RecordColumns(names, header, data, nbytes))
        return data

    def finish(self) -> int:
        """Write the last records and the directory; return the archive's length in bytes."""
        self.record("version", b"3\n")
        self.record(SERIALIZATION_ID, self._serialization_id)
        file, begin = self._file, self._begin
        directory = bytearray()
        at = file.nbytes
        count = 0
        for each in self._records:
            if isinstance(each, _RecordColumns) and each.header[-1] - begin < LIMIT_32:
                entries, inside = _directory_entries(each, begin)
                places = np.stack([each.header + LOCAL_CRC_AT, at + len(directory) + inside + CENTRAL_CRC_AT], axis=1)
                rows = np.column_stack([each.data, each.data + each.nbytes, places])[each.nbytes > 0]
                file.checksum_columns.frombytes(rows.tobytes())
                directory += entries
                self._crc_places.append(places)
                count += len(places)
                continue
            for record in each.records() if isinstance(each, _RecordColumns) else [each]:
                pair = (record.header + LOCAL_CRC_AT, at + len(directory) + CENTRAL_CRC_AT)
                self._crc_places.append(np.array([pair], np.int64))
                if record.crc is None:
                    file.add_checksum(record.data, record.data + record.nbytes, pair)
                directory += _central(record, record.header - begin)
                count += 1
        file.add_literal(directory)
        file.add_literal(_end_records(count, len(directory), at - begin))
        return file.nbytes - begin

    @property
    def pickle_at(self) -> int:
        """The file offset of the pickle."""
        return self._literal_record(0).data

    @property
    def pickle_nbytes(self) -> int:
        return self._literal_record(0).nbytes

    def _literal_record(self, number: int) -> _Record:
        """The first record or the last one, which are never part of a run."""
        record = self._records[number]
        if not isinstance(record, _Record):
            raise InternalError("an archive begins and ends with a record of known bytes")
        return record

    def names(self) -> list[int]:
        """The file offsets of the records' names in a finished archive: in their headers and in the directory."""
        return [at for pairs in self._crc_places for at in (pairs + np.array([16, 30])).ravel().tolist()]

    def with_pickle(self, data: bytes | bytearray) -> list[tuple[int, bytes]]:
        """The bytes of a finished archive that change, with their file offsets, if its pickle becomes ``data`` of the
        same length.
        """
        changes = [
            (self._literal_record(0).data, bytes(data)),
            (self._literal_record(-1).data, _serialization_id(data)),
        ]
        for number, (_, content) in zip((0, -1), changes[:2], strict=True):
            crc = isal_zlib.crc32(content).to_bytes(4, "little")
            changes += [(place, crc) for place in self._crc_places[number].ravel().tolist()]
        return changes


class Filling(Protocol):
    """Content of a record that is not one whole tensor."""

    @property
    def nbytes(self) -> int: ...

    def fill(self, file: TargetFile) -> None:
        """Append exactly ``nbytes`` of write items and literals to ``file``."""


@dataclass(frozen=True, slots=True, eq=False)
class CastBox:
    """``box`` of ``tensor``, cast to ``dtype``."""

    tensor: Tensor
    dtype: DType
    box: Box

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.dtype.itemsize

    def fill(self, file: TargetFile) -> None:
        file.add_write_item(self.tensor, start=self.box.offsets, size=self.box.sizes, dtype=self.dtype)


class Records:
    """The contents of the data records of one archive, which a pickle refers to by their keys: 0, 1, ..."""

    def __init__(self) -> None:
        self._contents: list[WrittenTensor | Filling | bytes] = []

    def add(self, content: WrittenTensor | Filling | bytes) -> str:
        """Returns the key of the new record."""
        self._contents.append(content)
        return str(len(self._contents) - 1)

    def write(self, file: TargetFile, pickle: bytes, *, stem: str) -> TorchZip:
        """Append an archive of ``pickle`` and the records to ``file``."""
        archive = TorchZip(file, stem=stem)
        archive.pickle(pickle)
        key = 0
        for small, contents in groupby(self._contents, _is_small_tensor):
            run = list(contents)
            if small and len(run) >= _LONG_RUN:
                tensors = cast("list[WrittenTensor]", run)
                nbytes = np.fromiter((tensor.nbytes for tensor in tensors), np.int64, len(tensors))
                file.add_whole_tensors(tensors, archive.begin_records(key, nbytes), nbytes)
                key += len(run)
                continue
            for content in run:
                if isinstance(content, bytes):
                    archive.record(f"data/{key}", content)
                else:
                    archive.begin_data(str(key), content.nbytes)
                    if isinstance(content, WrittenTensor):
                        file.add_write_item(content.tensor, dtype=content.dtype, order=content.order)
                    else:
                        content.fill(file)
                key += 1
        archive.finish()
        return archive


def _is_small_tensor(content: WrittenTensor | Filling | bytes) -> bool:
    return isinstance(content, WrittenTensor) and content.nbytes < LIMIT_32


def _serialization_id(pickle: bytes | bytearray) -> bytes:
    return f"{isal_zlib.crc32(pickle):040d}".encode()


def _central(record: _Record, header: int) -> bytes:
    nbytes = record.nbytes
    wide = [value for value in (nbytes, nbytes, header) if value >= LIMIT_32]
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    version = _VERSION_64 if wide else _VERSION
    size = min(nbytes, LIMIT_32)
    packed = CENTRAL_HEADER.pack(
        b"PK\1\2", version, version, _UTF8, 0, 0, _DATE, record.crc or 0, size, size,
        len(record.name), len(extra), 0, 0, 0, 0, min(header, LIMIT_32),
    )  # fmt: skip
    return b"%b%b%b" % (packed, record.name, extra)


def _local_headers(names: list[bytes], length: Int64Array, nbytes: Int64Array, size: Int64Array) -> bytes:
    """The headers before the data of records, of ``size`` bytes with the padding."""
    fixed = np.zeros(len(names), LOCAL_COLUMNS)
    fixed["signature"] = b"PK\3\4"
    _fill(fixed, length, nbytes)
    fixed["n_extra"] = size - length - LOCAL_HEADER.size
    out = np.full(int(size.sum()), _PADDING[0], np.uint8)
    end = _put_rows(out, np.cumsum(size) - size, fixed, names, length)
    extra = np.zeros(len(names), np.dtype([("id", "S2"), ("nbytes", "<u2")]))
    extra["id"], extra["nbytes"] = b"FB", fixed["n_extra"] - 4
    out[end[:, None] + np.arange(4)] = extra.view(np.uint8).reshape(-1, 4)
    return out.tobytes()


def _directory_entries(run: _RecordColumns, begin: int) -> tuple[bytes, Int64Array]:
    """The entries of the directory, and where each of them begins; ``begin``: of the archive in its file."""
    length = np.array([len(name) for name in run.name], np.int64)
    fixed = np.zeros(len(length), CENTRAL_COLUMNS)
    fixed["signature"], fixed["made_by"] = b"PK\1\2", _VERSION
    _fill(fixed, length, run.nbytes)
    fixed["header"] = run.header - begin
    size = length + CENTRAL_HEADER.size
    places = np.cumsum(size) - size
    out = np.empty(int(size.sum()), np.uint8)
    for low in range(0, len(length), _HEADERS_AT_ONCE):
        rows = slice(low, low + _HEADERS_AT_ONCE)
        _put_rows(out, places[rows], fixed[rows], run.name[rows], length[rows])
    return out.tobytes(), places


def _fill(rows: npt.NDArray[np.void], length: Int64Array, nbytes: Int64Array) -> None:
    """Fill the fields that local headers and entries of the directory share. ``length``: of the names."""
    rows["needed"], rows["flags"], rows["date"] = _VERSION, _UTF8, _DATE
    rows["packed"] = rows["nbytes"] = nbytes
    rows["n_name"] = length


def _put_rows(
    out: npt.NDArray[np.uint8],
    places: Int64Array,
    fixed: npt.NDArray[np.void],
    names: list[bytes],
    length: Int64Array,
) -> Int64Array:
    """Write rows of equal length to ``out``, each followed by a name; return where the names end."""
    width = fixed.dtype.itemsize
    out[places[:, None] + np.arange(width)] = np.ascontiguousarray(fixed).view(np.uint8).reshape(-1, width)
    begin = np.cumsum(length) - length
    joined = np.frombuffer(b"".join(names), np.uint8)
    out[np.arange(len(joined)) + np.repeat(places + width - begin, length)] = joined
    return places + width + length


def _end_records(records: int, nbytes: int, offset: int) -> bytes:
    """The end of the directory, including its 64-bit form if a number needs it."""
    wide = b""
    if records >= _LIMIT_16 or nbytes >= LIMIT_32 or offset >= LIMIT_32:
        wide = END64_RECORD.pack(b"PK\6\6", 44, _VERSION_64, _VERSION_64, 0, 0, records, records, nbytes, offset)
        wide += LOCATOR64.pack(b"PK\6\7", 0, offset + nbytes, 1)
    records, nbytes, offset = min(records, _LIMIT_16), min(nbytes, LIMIT_32), min(offset, LIMIT_32)
    return wide + END_RECORD.pack(b"PK\5\6", 0, 0, records, records, nbytes, offset, 0)
