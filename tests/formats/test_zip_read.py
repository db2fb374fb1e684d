"""The zip reader: true data offsets from local headers, and every kind of damage refused."""

from __future__ import annotations

import io
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from fsdpckpt.errors import SourceCorruptError, SourceUnrecognisedError, SourceUnsupportedError
from fsdpckpt.formats.zip import checksummed_directory, read_directory, top_folder
from fsdpckpt.storage.local import LocalFile, MemoryFile
from tests.formats.torch_saves import any_values, rewritten, saved

GOLDEN = Path(__file__).parent.parent / "golden"
VALUE = {"a": any_values((5, 7), torch.float32), "b": any_values((3,), torch.int64, 1), "c": torch.empty(0)}


def agrees_with_zipfile(data: bytes) -> None:
    records = dict(read_directory(MemoryFile(data)))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            record = records.pop(info.filename.partition("/")[2])
            assert data[record.offset : record.offset + record.nbytes] == archive.read(info)
            assert record.crc == info.CRC == zlib.crc32(archive.read(info))
    assert not records


def test_records_lie_where_zipfile_reads_them() -> None:
    """torch's own offset rule is wrong on a file that another writer wrote again."""
    for data in (saved(VALUE), rewritten(saved(VALUE), {}), with_zip64(saved(VALUE))):
        agrees_with_zipfile(data)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*/*/model*.pt")), ids=lambda path: "/".join(path.parts[-3:]))
def test_files_of_old_torch_versions(path: Path) -> None:
    agrees_with_zipfile(path.read_bytes())


def test_a_file_on_disk_larger_than_one_read(tmp_path: Path) -> None:
    value = {str(i): any_values((1 + i % 977,), torch.uint8, i) for i in range(3000)}
    path = tmp_path / "many.pt"
    torch.save(value, path)
    source = LocalFile(str(path))
    records = read_directory(source)
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist()[::50]:
            record = records[info.filename.partition("/")[2]]
            assert source.read(record.offset, record.nbytes) == archive.read(info)
    assert len(records) == len(archive.infolist())


def test_an_archive_in_the_middle_of_a_file() -> None:
    first, second = saved({"x": any_values((4,), torch.float64)}), saved(VALUE)
    data = b"junk!" + first + second + b"tail"
    begin = 5 + len(first)
    records = read_directory(MemoryFile(data), begin=begin, end=begin + len(second))
    alone = read_directory(MemoryFile(second))
    assert {name: record.offset - begin for name, record in records.items()} == {
        name: record.offset for name, record in alone.items()
    }


def test_an_archive_that_is_placed_outside_of_its_file_is_refused() -> None:
    data = saved(VALUE)
    for begin, end in ((5, len(data) + 1), (-1, len(data)), (9, 8)):
        with pytest.raises(SourceCorruptError, match=rf"(?s)outside the file.*\[{begin}, {end}\)"):
            read_directory(MemoryFile(data), begin=begin, end=end)


def test_the_folder_and_the_checksums_of_a_file_are_found() -> None:
    data, without = saved(VALUE), rewritten(saved(VALUE), {"data/0": b""})
    assert top_folder(MemoryFile(data)) == top_folder(MemoryFile(without)) == "archive"
    assert [top_folder(MemoryFile(other)) for other in (b"", b"PK\3\4", b"x" * 100)] == ["", "", ""]
    directory = checksummed_directory(MemoryFile(data))
    assert directory is not None and b"archive/data/0" in directory and directory in data
    torch.serialization.set_crc32_options(False)
    try:
        assert checksummed_directory(MemoryFile(saved(VALUE))) is None
    finally:
        torch.serialization.set_crc32_options(True)
    assert checksummed_directory(MemoryFile(b"")) is None is checksummed_directory(MemoryFile(b"x" * 100))


def with_zip64(data: bytes) -> bytes:
    """The same archive in the forms for more than 4 GiB: zip64 sizes and offsets, zip64 end record."""
    end = data.rindex(b"PK\5\6")
    count, size, start = struct.unpack_from("<HII", data, end + 10)
    directory = b""
    at = start
    while at < start + size:
        name, extra, comment = struct.unpack_from("<HHH", data, at + 28)
        packed, nbytes = struct.unpack_from("<II", data, at + 20)
        header = struct.unpack_from("<I", data, at + 42)[0]
        fixed = bytearray(data[at : at + 46])
        struct.pack_into("<II", fixed, 20, 0xFFFFFFFF, 0xFFFFFFFF)
        struct.pack_into("<I", fixed, 42, 0xFFFFFFFF)
        large = struct.pack("<HHH", 0x9999, 2, 7) + struct.pack("<HHQQQ", 1, 24, nbytes, packed, header)
        struct.pack_into("<H", fixed, 30, len(large))
        directory += bytes(fixed) + data[at + 46 : at + 46 + name] + large
        at += 46 + name + extra + comment
    end64 = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(directory), start)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, start + len(directory), 1)
    last = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return data[:start] + directory + end64 + locator + last


def test_more_records_than_sixteen_bits_count() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for i in range(65600):
            archive.writestr(f"archive/data/{i}", b"")
    assert len(read_directory(MemoryFile(stream.getvalue()))) == 65600


@pytest.mark.parametrize("whole", [saved(VALUE), with_zip64(saved(VALUE))], ids=["plain", "zip64"])
def test_truncation_anywhere_is_refused(whole: bytes) -> None:
    for length in range(4, len(whole), 7):
        with pytest.raises(SourceCorruptError) as error:
            read_directory(MemoryFile(whole[:length], "cut.pt"))
        assert error.value.file == "cut.pt"
    with pytest.raises(SourceCorruptError, match=r"the zip end record is missing[^$]*truncated"):
        read_directory(MemoryFile(whole[:-100]))
    with pytest.raises(SourceCorruptError, match="empty"):
        read_directory(MemoryFile(b""))


def field(data: bytes, record: str, at: int, form: str, value: int) -> bytes:
    """``data`` with one field of a record's central directory entry changed."""
    name = f"archive/{record}".encode()
    entry = data.rindex(name) - 46
    assert data[entry : entry + 4] == b"PK\1\2"
    changed = bytearray(data)
    struct.pack_into(form, changed, entry + at, value)
    return bytes(changed)


def in_one_place(data: bytes) -> bytes:
    """Of two records."""
    first = read_directory(MemoryFile(data))["data/0"]
    return field(data, "data/1", 42, "<I", data.rindex(b"PK\3\4", 0, first.offset))


def past_its_place(data: bytes) -> bytes:
    """A local header that moves the data."""
    changed = bytearray(data)
    struct.pack_into("<H", changed, data.index(b"archive/data/0") - 30 + 28, 60000)
    return bytes(changed)


def end_elsewhere(data: bytes) -> bytes:
    """The locator of the zip64 end record says another place."""
    changed = bytearray(data)
    struct.pack_into("<Q", changed, data.rindex(b"PK\6\7") + 8, 1 << 40)
    return bytes(changed)


def before_zip() -> bytes:
    stream = io.BytesIO()
    torch.save(VALUE, stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()


def tar_file() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.add(__file__, "storages")
    return stream.getvalue()


WHOLE = saved(VALUE)
LARGER = field(field(WHOLE, "data/0", 20, "<I", 4000), "data/0", 24, "<I", 4000)
CONTRADICTING = (SourceCorruptError, SourceUnsupportedError)
AGAIN = "torch.save(torch.load(path), new_path)"
# fmt: off
REFUSED: dict[str, tuple[bytes, type[Exception] | tuple[type[Exception], ...], str | None]] = {
    **{f"in the directory: {what}, {value}": (field(WHOLE, "data/0", at, form, value), CONTRADICTING, None)
       for at, form, value, what in (
           (0, "<I", 0, "no signature"), (20, "<I", 7, "one size"), (24, "<I", 1 << 20, "the other size"),
           (42, "<I", 3, "no header there"), (42, "<I", 1 << 30, "outside"),
           (42, "<I", 0xFFFFFFFF, "zip64 without an extra field"), (28, "<H", 60000, "length of the name"),
           (32, "<H", 5, "length of the comment"))},
    "a record larger than its place": (LARGER, SourceCorruptError, r"data/0.*larger than its place"),
    "two records in one place": (in_one_place(WHOLE), SourceCorruptError, r"overlaps|larger than its place"),
    "two records of one name": (
        WHOLE.replace(b"archive/data/1", b"archive/data/0"), SourceCorruptError, "two records are named 'data/0'"),
    "data past its place": (past_its_place(WHOLE), SourceCorruptError, "larger than its place"),
    "compressed records": (
        rewritten(WHOLE, {}, method=zipfile.ZIP_DEFLATED), SourceUnsupportedError, "archive/data/0:"),
    "the format before zip": (before_zip(), SourceUnsupportedError, r"before version 1.6"),
    "a zip64 end record outside": (
        end_elsewhere(with_zip64(WHOLE)), SourceCorruptError,
        f"(?s)outside the archive.*below {len(with_zip64(WHOLE)):,}.*{1 << 40:,}"),
    "a tar file": (tar_file(), SourceUnsupportedError, "tar file"),
    "something else": (b"\x89HDF\r\n" * 100, SourceUnrecognisedError, r"torch.save"),
}
# fmt: on


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_plain_archive_is_refused(name: str) -> None:
    data, errors, words = REFUSED[name]
    with pytest.raises(errors, match=words) as error:
        read_directory(MemoryFile(data, "it.pt"))
    if name in ("compressed records", "the format before zip"):
        assert AGAIN in str(error.value)
