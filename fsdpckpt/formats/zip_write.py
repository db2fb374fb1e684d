"""Lays out the zip archives of ``torch.save``: stored records in torch's order, their data 64-byte aligned.

The order is ``data.pkl``, ``byteorder``, ``data/0`` .., ``version``, ``.data/serialization_id``. ``.format_version``
and ``.storage_alignment`` are left out on purpose: a reader that sees them computes offsets as torch's own writer would
have placed them (``torch.serialization``, FakeTensorMode) instead of reading the headers. Local headers carry real
sizes, so no data descriptors follow the data. Offsets inside the archive count from its first byte, which need not be
the first byte of the file (a DCP item). The format's source is that of ``formats.zip``.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from isal import isal_zlib

from fsdpckpt.formats.zip import LIMIT_32
from fsdpckpt.ir.targets import TargetFile

ALIGNMENT = 64  # bytes; torch.serialization's storage alignment, what mmap=True loads rely on
_UTF8 = 0x0800
_DATE = 0x0021  # 1980-01-01, the earliest a zip can say: output does not depend on the clock
_LIMIT_16 = 0xFFFF
_LOCAL_HEADER = struct.Struct("<IHHHHHIIIHH")
_CENTRAL_HEADER = struct.Struct("<IHHHHHHIIIHHHHHII")
_END_RECORD = struct.Struct("<IHHHHIIH")
_END64_RECORD = struct.Struct("<IQHHIIQQQQ")
_LOCATOR64_RECORD = struct.Struct("<IIQI")
_PADDING = b"Z" * (ALIGNMENT + 4)


class _Record(NamedTuple):
    name: bytes
    header: int
    data: int
    nbytes: int
    crc: int | None


class TorchZip:
    """One archive, written front to back into ``file`` from where it stands now.

    ``stem`` is the folder every record lies in: the file's stem, or ``archive`` for DCP items.
    """

    def __init__(self, file: TargetFile, *, stem: str) -> None:
        self._file = file
        self._begin = file.nbytes
        self._stem = stem.encode()
        self._records: list[_Record] = []
        self._crc_places: list[tuple[int, int]] = []

    def pickle(self, data: bytes) -> None:
        """The first records: ``data.pkl`` and ``byteorder``."""
        self.record("data.pkl", data)
        self.record("byteorder", b"little")
        self._identity = _identity(data)

    def record(self, name: str, data: bytes) -> None:
        """A record whose bytes are known now."""
        self._header(name.encode(), len(data), isal_zlib.crc32(data))
        self._file.literal(data)

    def begin_data(self, key: str, nbytes: int) -> None:
        """The header of ``data/<key>``: the caller appends exactly ``nbytes`` to the file next."""
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
        packed = _LOCAL_HEADER.pack(
            0x04034B50, 45 if big else 20, _UTF8, 0, 0, _DATE, crc or 0, size, size, len(name), len(extra)
        )
        file.literal(b"%b%b%b" % (packed, name, extra))
        self._records.append(_Record(name, header, file.nbytes, nbytes, crc))

    def finish(self) -> int:
        """The last records and the directory; returns the archive's length in bytes."""
        self.record("version", b"3\n")
        self.record(".data/serialization_id", self._identity)
        file, begin = self._file, self._begin
        directory = bytearray()
        at = file.nbytes
        for record in self._records:
            places = (record.header + 14, at + len(directory) + 16)
            self._crc_places.append(places)
            if record.crc is None:
                file.checksum(record.data, record.data + record.nbytes, places)
            directory += _central(record, record.header - begin)
        file.literal(directory)
        file.literal(_end(len(self._records), len(directory), at - begin))
        return file.nbytes - begin

    @property
    def pickle_at(self) -> int:
        """The file offset of the pickle."""
        return self._records[0].data

    @property
    def pickle_nbytes(self) -> int:
        return self._records[0].nbytes

    def names(self) -> list[int]:
        """Where in the file the names of the records of a finished archive are: in their headers, in the directory."""
        return [at for local, central in self._crc_places for at in (local + 16, central + 30)]

    def with_pickle(self, data: bytes | bytearray) -> list[tuple[int, bytes]]:
        """What a finished archive has at which file offset, in whose pickle is ``data`` of the same length instead."""
        changes = [(self._records[0].data, bytes(data)), (self._records[-1].data, _identity(data))]
        for number, (_, content) in zip((0, -1), changes[:2], strict=True):
            crc = isal_zlib.crc32(content).to_bytes(4, "little")
            changes += [(place, crc) for place in self._crc_places[number]]
        return changes


def _identity(pickle: bytes | bytearray) -> bytes:
    return f"{isal_zlib.crc32(pickle):040d}".encode()


def _central(record: _Record, header: int) -> bytes:
    nbytes = record.nbytes
    wide = [value for value in (nbytes, nbytes, header) if value >= LIMIT_32]
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    version = 45 if wide else 20
    size = min(nbytes, LIMIT_32)
    packed = _CENTRAL_HEADER.pack(
        0x02014B50, version, version, _UTF8, 0, 0, _DATE, record.crc or 0, size, size,
        len(record.name), len(extra), 0, 0, 0, 0, min(header, LIMIT_32),
    )  # fmt: skip
    return b"%b%b%b" % (packed, record.name, extra)


def _end(records: int, nbytes: int, offset: int) -> bytes:
    """The end of the directory, in its 64-bit form too where a number needs it."""
    wide = b""
    if records >= _LIMIT_16 or nbytes >= LIMIT_32 or offset >= LIMIT_32:
        wide = _END64_RECORD.pack(0x06064B50, 44, 45, 45, 0, 0, records, records, nbytes, offset)
        wide += _LOCATOR64_RECORD.pack(0x07064B50, 0, offset + nbytes, 1)
    records, nbytes, offset = min(records, _LIMIT_16), min(nbytes, LIMIT_32), min(offset, LIMIT_32)
    return wide + _END_RECORD.pack(0x06054B50, 0, 0, records, records, nbytes, offset, 0)
