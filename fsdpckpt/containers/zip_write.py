"""Lays out the zip archive of ``torch.save`` in a target file: stored records, data 64-byte aligned.

Records come in torch's order (``data.pkl``, ``byteorder``, ``data/0`` .., ``version``, ``.data/serialization_id``).
``.format_version`` and ``.storage_alignment`` are left out on purpose: a reader that sees them computes offsets
as torch's own writer would have placed them (``torch.serialization``, FakeTensorMode) instead of reading the headers.
Local headers carry real sizes, so no data descriptors follow the data. Offsets inside the archive count from its
first byte, which need not be the first byte of the file (a DCP item).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from isal import isal_zlib

from fsdpckpt.ir.targets import TargetFile

__all__ = ["ALIGNMENT", "TorchZip"]

ALIGNMENT = 64  # bytes; torch.serialization's storage alignment, what mmap=True loads rely on
_UTF8 = 0x0800
_DATE = 0x0021  # 1980-01-01, the earliest a zip can say: output does not depend on the clock
_LIMIT_32 = 0xFFFFFFFF
_LIMIT_16 = 0xFFFF
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")
_END_64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR_64 = struct.Struct("<IIQI")
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

    def pickle(self, data: bytes) -> None:
        """The first records: ``data.pkl`` and ``byteorder``."""
        self.record("data.pkl", data)
        self.record("byteorder", b"little")
        self._identity = f"{isal_zlib.crc32(data):040d}".encode()

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
        big = nbytes >= _LIMIT_32
        extra = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if big else b""
        padding = -(header - self._begin + 34 + len(name) + len(extra)) % ALIGNMENT
        extra += b"FB%b%b" % (padding.to_bytes(2, "little"), _PADDING[:padding])
        size = _LIMIT_32 if big else nbytes
        packed = _LOCAL.pack(
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
            if record.crc is None:
                end = record.data + record.nbytes
                file.checksum(record.data, end, (record.header + 14, at + len(directory) + 16))
            directory += _central(record, record.header - begin)
        file.literal(directory)
        file.literal(_end(len(self._records), len(directory), at - begin))
        return file.nbytes - begin


def _central(record: _Record, header: int) -> bytes:
    nbytes = record.nbytes
    wide = [value for value in (nbytes, nbytes, header) if value >= _LIMIT_32]
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    version = 45 if wide else 20
    size = min(nbytes, _LIMIT_32)
    packed = _CENTRAL.pack(
        0x02014B50, version, version, _UTF8, 0, 0, _DATE, record.crc or 0, size, size,
        len(record.name), len(extra), 0, 0, 0, 0, min(header, _LIMIT_32),
    )  # fmt: skip
    return b"%b%b%b" % (packed, record.name, extra)


def _end(records: int, nbytes: int, offset: int) -> bytes:
    """The end of the directory, in its 64-bit form too where a number needs it."""
    wide = b""
    if records >= _LIMIT_16 or nbytes >= _LIMIT_32 or offset >= _LIMIT_32:
        wide = _END_64.pack(0x06064B50, 44, 45, 45, 0, 0, records, records, nbytes, offset)
        wide += _LOCATOR_64.pack(0x07064B50, 0, offset + nbytes, 1)
    records, nbytes, offset = min(records, _LIMIT_16), min(nbytes, _LIMIT_32), min(offset, _LIMIT_32)
    return wide + _END.pack(0x06054B50, 0, 0, records, records, nbytes, offset, 0)
