"""Reads the zip archives of ``torch.save``: where each stored record is.

``torch.save`` writes stored (never compressed) records. Offsets are read, never computed: the true start of a record's
bytes is in its LOCAL header (alignment is in an extra field there), its true size and CRC-32 in the central directory.
PKWARE's APPNOTE is the format's source; the zip64 forms are 4.3.14, 4.3.15 and 4.5.3 there. Offsets inside the archive
count from its first byte, which need not be the first byte of the file (a DCP item).
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import numpy as np

from fsdpckpt.errors import COPY_AGAIN, SourceUnrecognisedError, SourceUnsupportedError, damaged
from fsdpckpt.ir.tensors import Int64Array
from fsdpckpt.storage import ByteSource
from fsdpckpt.text import bytes_text, plural

LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
CENTRAL_HEADER = struct.Struct("<4sHHHHHHIIIHHHHHII")  # one entry of the directory
END_RECORD = struct.Struct("<4sHHHHIIH")
END64_RECORD = struct.Struct("<4sQHHIIQQQQ")
LOCATOR64 = struct.Struct("<4sIQI")
_FIELDS = [
    *((name, "<u2") for name in ("needed", "flags", "method", "time", "date")),
    *((name, "<u4") for name in ("crc", "packed", "nbytes")),
    *((name, "<u2") for name in ("n_name", "n_extra")),
]
LOCAL_COLUMNS = np.dtype([("signature", "S4"), *_FIELDS])
CENTRAL_COLUMNS = np.dtype(
    [("signature", "S4"), ("made_by", "<u2"), *_FIELDS, ("n_comment", "<u2"), ("rest", "V8"), ("header", "<u4")]
)
LOCAL_CRC_AT, CENTRAL_CRC_AT = 14, 16  # of the checksum in a local header, and in an entry of the directory
_LENGTHS = struct.Struct("<4s24xHHH")  # of an entry: signature; lengths of the name, the extra field and the comment
LIMIT_32 = 0xFFFFFFFF  # in place of a number in a 64-bit field
_ENCRYPTED = 0x1
_MAX_COMMENT = 65535
# Bytes of a record's name: file systems allow 255 bytes for the folder, and data.pkl is the first record.
_MAX_NAME = 512
_FIRST_BLOCK = 1 << 15  # local headers are fetched in blocks of this many bytes, growing ...
_MAX_DIRECTORY_BYTES = 1 << 30  # ten million records
_BLOCK = 1 << 20  # ... up to this, while there are more of them: most archives of one tensor need no second block ...
_NEAR = 1 << 14  # ... when the next one is nearer than this: reading on is then cheaper than another request

_TOO_LARGE = 1 << 60  # larger than any file: numbers up to here can be added without overflow
_PREFETCHED = 1024  # local headers of a remote file that are requested at a time

SERIALIZATION_ID = ".data/serialization_id"  # torch computes this record from the checksums of the others

_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"
_RESAVE = "in Python, with a torch that reads it: torch.save(torch.load(path), new_path)"


class ZipRecord(NamedTuple):
    """One stored record. ``offset`` is the absolute byte offset of its data in the source, ``nbytes`` its size."""

    name: str
    offset: int
    nbytes: int
    crc: int


@dataclass(frozen=True, slots=True, eq=False)
class ZipDirectory(Mapping[str, ZipRecord]):
    """The records of one archive by name, without the archive's own folder, in the order of its directory.

    ``numbers``: the row of each name in the columns (n,), which have the fields of ``ZipRecord``; ``entry``: where the
    record's entry of the directory begins, ``header``: its local header; both count from the begin of the archive.
    """

    numbers: Mapping[str, int]
    offset: Int64Array
    nbytes: Int64Array
    crc: Int64Array
    entry: Int64Array
    header: Int64Array

    def __getitem__(self, name: str) -> ZipRecord:
        row = self.numbers[name]
        return ZipRecord(name, int(self.offset[row]), int(self.nbytes[row]), int(self.crc[row]))

    def __iter__(self) -> Iterator[str]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


class _Entries(NamedTuple):
    """What the directory says of the records, whose names include the archive's own folder."""

    names: list[str]
    nbytes: Int64Array
    crc: Int64Array
    entry: Int64Array
    header: Int64Array


def read_directory(source: ByteSource, *, begin: int = 0, end: int | None = None) -> ZipDirectory:
    """The records of the zip in bytes [begin, end) of ``source``.

    Raises SourceCorruptError (truncated, overlapping, contradicting), SourceUnsupportedError (compressed or encrypted
    records, torch's formats before zip) and SourceUnrecognisedError (not a zip).
    """
    stop = source.nbytes if end is None else end
    if not 0 <= begin <= stop <= source.nbytes:
        what, found = "the end record places the archive outside the file", bytes_text(source.nbytes)
        _corrupt(source, what, f"[{begin}, {stop})", found)
    directory, count, start = _find_directory(source, begin, stop)
    entries = _parse_directory(source, directory, count, start)
    offsets = _data_offsets(source, entries, begin, begin + start)
    folder = entries.names[0].partition("/")[0] + "/" if entries.names else ""
    names = [name.removeprefix(folder) for name in entries.names]
    numbers = {name: number for number, name in enumerate(names)}
    if len(numbers) < len(names):
        repeated = next(name for name, count in Counter(names).items() if count > 1)
        _corrupt(source, f"two records are named {repeated!r}", "one", "two")
    return ZipDirectory(numbers, offsets, *entries[1:])


def checksummed_directory(source: ByteSource) -> bytes | None:
    """The directory of the zip that is all of ``source``, in which every record's name, place, length and CRC-32 is;
    None if it was saved without checksums. Raises what ``read_directory`` raises.
    """
    if not source.nbytes or not source.read(0, min(4, source.nbytes)).startswith(b"PK"):
        return None
    directory, count, start = _find_directory(source, 0, source.nbytes)
    return directory if _parse_directory(source, directory, count, start).crc.any() else None


def top_folder(source: ByteSource) -> str:
    """The folder that contains all records of the zip: for a ``torch.save`` file its name at that time, without suffix.

    "archive" if it was saved to a file object; "" if the zip does not begin with a record.
    """
    head = source.read(0, min(source.nbytes, LOCAL_HEADER.size + _MAX_NAME))
    if len(head) < LOCAL_HEADER.size or not head.startswith(b"PK\3\4"):
        return ""
    *_, n_name, _ = LOCAL_HEADER.unpack_from(head)
    return head[LOCAL_HEADER.size : LOCAL_HEADER.size + n_name].decode(errors="replace").partition("/")[0]


def _corrupt(source: ByteSource, what: str, expected: str, found: str) -> NoReturn:
    why = "the file is damaged or truncated, or is still being written"
    raise damaged(source.path, what, expected, found, why=why, next_step=COPY_AGAIN, run_again=True)


def _find_directory(source: ByteSource, begin: int, stop: int) -> tuple[bytes, int, int]:
    """The central directory of the zip in bytes [begin, stop): its bytes, its number of entries, and its offset from
    ``begin``.
    """
    tail_size = min(stop - begin, END_RECORD.size + LOCATOR64.size + END64_RECORD.size + 1024)
    tail = source.read(stop - tail_size, tail_size)
    at = tail.rfind(b"PK\5\6")
    if at < 0 and stop - begin > tail_size:
        tail_size = min(stop - begin, _MAX_COMMENT + END_RECORD.size + LOCATOR64.size + END64_RECORD.size)
        tail = source.read(stop - tail_size, tail_size)
        at = tail.rfind(b"PK\5\6")
    if at < 0 or len(tail) - at < END_RECORD.size:
        _explain_no_zip(source, begin, stop)
    _, _, _, _, count, size, start, comment = END_RECORD.unpack_from(tail, at)
    if len(tail) - at - END_RECORD.size < comment:
        _corrupt(source, "the zip's end record is cut off", f"a comment of {bytes_text(comment)}", "fewer")
    base = stop - tail_size
    locator = at - LOCATOR64.size
    if locator >= 0 and tail[locator : locator + 4] == b"PK\6\7":
        _, _, where, _ = LOCATOR64.unpack_from(tail, locator)
        if begin + where + END64_RECORD.size > stop:
            _corrupt(source, "the zip64 end record is outside the archive", f"below {stop - begin:,}", f"{where:,}")
        inside = begin + where - base
        at_hand = tail[inside : inside + END64_RECORD.size] if inside >= 0 else None
        raw = source.read(begin + where, END64_RECORD.size) if at_hand is None else at_hand
        signature, _, _, _, _, _, _, count, size, start = END64_RECORD.unpack(raw)
        if signature != b"PK\6\6" or where < start + size:
            _corrupt(source, "the zip64 end record is not where it should be", "PK\\6\\6", repr(signature))
    if size > _MAX_DIRECTORY_BYTES:
        most = f"up to {bytes_text(_MAX_DIRECTORY_BYTES)}"
        _corrupt(source, "the zip's directory is impossibly large", most, bytes_text(size))
    inside = begin + start - base
    if inside + size > at:
        needed, found = bytes_text(start + size), bytes_text(stop - begin)
        _corrupt(source, "the zip's directory is outside the archive", needed, found)
    directory = tail[inside : inside + size] if inside >= 0 else source.read(begin + start, size)
    return directory, count, start


def _parse_directory(source: ByteSource, directory: bytes, count: int, start: int) -> _Entries:
    """The entries of the directory, which is at ``start`` of the archive."""
    begins: list[int] = []
    names: list[str] = []
    at, limit, unpack = 0, len(directory), _LENGTHS.unpack_from
    for _ in range(count):
        if at + CENTRAL_HEADER.size > limit:
            _corrupt(source, "the zip's directory is cut off", plural(count, "record"), f"{len(begins):,}")
        signature, n_name, n_extra, n_comment = unpack(directory, at)
        if signature != b"PK\1\2":
            _corrupt(source, f"record {len(begins)} of the zip's directory is damaged", "PK\\1\\2", repr(signature))
        begins.append(at)
        name = directory[at + CENTRAL_HEADER.size : at + CENTRAL_HEADER.size + n_name]
        try:
            names.append(name.decode())
        except UnicodeDecodeError:
            _corrupt(source, "a record's name is not UTF-8", "text", repr(name))
        at += CENTRAL_HEADER.size + n_name + n_extra + n_comment
    if at != limit:
        _corrupt(source, "the zip's directory does not end where it should", bytes_text(limit), bytes_text(at))
    headers = [directory[at : at + CENTRAL_HEADER.size] for at in begins]
    fields = np.frombuffer(b"".join(headers), CENTRAL_COLUMNS)
    nbytes, packed, header = (fields[name].astype(np.int64) for name in ("nbytes", "packed", "header"))
    for i in np.flatnonzero((nbytes == LIMIT_32) | (packed == LIMIT_32) | (header == LIMIT_32)).tolist():
        at = begins[i] + CENTRAL_HEADER.size + int(fields["n_name"][i])
        extra = directory[at : at + int(fields["n_extra"][i])]
        wide = _zip64(source, extra, [int(nbytes[i]), int(packed[i]), int(header[i])])
        nbytes[i], packed[i], header[i] = (min(number, _TOO_LARGE) for number in wide)
    encrypted = (fields["flags"] & _ENCRYPTED) != 0
    refused = [
        f"{names[i]}: " + ("encrypted" if encrypted[i] else f"compression method {fields['method'][i]}")
        for i in np.flatnonzero((fields["method"] != 0) | encrypted | (packed != nbytes)).tolist()
    ]
    if refused and any(name.endswith("/constants.pkl") for name in names):
        raise SourceUnrecognisedError(
            f"{source.path} is a TorchScript module, not a checkpoint",
            file=source.path,
            next_step="in Python: torch.save(torch.jit.load(path).state_dict(), new_path)",
        )
    if refused:
        raise SourceUnsupportedError(
            f"{source.path} contains compressed or encrypted records",
            details=refused,
            file=source.path,
            why="torch.save stores records as they are; another program packed this file",
            next_step=_RESAVE,
        )
    return _Entries(names, nbytes, fields["crc"].astype(np.int64), start + np.array(begins, np.int64), header)


def _zip64(source: ByteSource, extra: bytes, short: list[int]) -> list[int]:
    """The sizes and the offset; those that do not fit in 32 bits are in the zip64 extra field (id 1)."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            numbers = struct.unpack_from(f"<{min(size, len(extra) - at - 4) // 8}Q", extra, at + 4)
            if short.count(LIMIT_32) > len(numbers):
                break
            wide = iter(numbers)
            return [next(wide) if number == LIMIT_32 else number for number in short]
        at += 4 + size
    _corrupt(source, "a record larger than 4 GiB has no zip64 sizes", "an extra field", "none")


def _data_offsets(source: ByteSource, entries: _Entries, begin: int, directory: int) -> Int64Array:
    """The absolute offset of each record's data, read from the local headers, which must not overlap."""
    order = np.argsort(entries.header, kind="stable")
    headers = begin + entries.header[order]
    limits = np.minimum(np.append(headers[1:], directory), directory)
    overlapping = np.flatnonzero(headers + LOCAL_HEADER.size > limits)
    if len(overlapping):
        first = overlapping[0]
        name, limit, header = entries.names[order[first]], limits[first], headers[first]
        _corrupt(source, f"record {name!r} overlaps the next", f"room before {limit}", str(header))
    heads = _local_headers(source, headers.tolist(), limits.tolist(), directory)
    fields = np.frombuffer(b"".join(heads), LOCAL_COLUMNS)
    damaged_at = np.flatnonzero(fields["signature"] != b"PK\3\4")
    if len(damaged_at):
        name, found = entries.names[order[damaged_at[0]]], heads[damaged_at[0]][:4]
        _corrupt(source, f"record {name!r} has no header where it should be", "PK\\3\\4", repr(found))
    starts = headers + LOCAL_HEADER.size + fields["n_name"] + fields["n_extra"]
    oversized = np.flatnonzero(starts + entries.nbytes[order] > limits)
    if len(oversized):
        i, room = order[oversized[0]], limits[oversized[0]] - starts[oversized[0]]
        what = f"record {entries.names[i]!r} is larger than its place in the file"
        _corrupt(source, what, bytes_text(int(entries.nbytes[i])), f"{room}")
    offsets = np.empty(len(order), np.int64)
    offsets[order] = starts
    return offsets


def _local_headers(source: ByteSource, headers: list[int], limits: list[int], directory: int) -> list[bytes]:
    """The fixed part of the local header at each of ``headers`` (ascending); each must end before its limit."""
    heads: list[bytes] = []
    block, block_at = b"", 0
    grown = _FIRST_BLOCK
    prefetched = False
    for position, header in enumerate(headers):
        if position % _PREFETCHED == 0:
            prefetched = source.prefetch([(at, LOCAL_HEADER.size) for at in headers[position : position + _PREFETCHED]])
        inside = header - block_at
        if inside + LOCAL_HEADER.size > len(block):
            wanted = grown if limits[position] - header < _NEAR and not prefetched else LOCAL_HEADER.size
            grown = min(max(grown, 2 * wanted), _BLOCK)
            block, block_at = source.read(header, min(wanted, directory - header)), header
            inside = 0
        heads.append(block[inside : inside + LOCAL_HEADER.size])
    return heads


def _explain_no_zip(source: ByteSource, begin: int, stop: int) -> NoReturn:
    """Raises the error for a file without a zip end record: an older torch format, a truncated zip, or
    something else.
    """
    head = source.read(begin, min(stop - begin, 512))
    if head.startswith(_LEGACY_MAGIC):
        raise SourceUnsupportedError(
            f"{source.path} is in torch's format from before version 1.6, which is not a zip file",
            file=source.path,
            why="that format has no offsets and no checksums, and is read by running it",
            next_step=_RESAVE,
        )
    if head[257:262] == b"ustar":
        raise SourceUnsupportedError(
            f"{source.path} is a tar file",
            file=source.path,
            why="torch wrote tar files before version 0.1.10; some trainers pack checkpoints into tar themselves",
            next_step="unpack it first: tar -xf PATH; or, if torch wrote it, " + _RESAVE,
        )
    if not head or head.startswith(b"PK\3\4"):
        _corrupt(
            source, "truncated: the zip end record is missing" if head else "the file is empty", "an end record", "none"
        )
    raise SourceUnrecognisedError(
        f"{source.path} is not a file that torch.save writes",
        file=source.path,
        expected="a zip file",
        found=f"bytes {head[:8].hex(' ')}",
        next_step="give the checkpoint file or directory itself",
    )
