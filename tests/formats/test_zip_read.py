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
from fsdpckpt.formats.zip import read_directory
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
    agrees_with_zipfile(saved(VALUE))


def test_an_archive_that_another_writer_wrote_again_has_other_offsets() -> None:
    """torch's own offset rule is wrong on such a file."""
    agrees_with_zipfile(rewritten(saved(VALUE), {}))


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


def test_the_forms_for_more_than_four_gibibytes() -> None:
    agrees_with_zipfile(with_zip64(saved(VALUE)))


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


def test_compressed_records_are_refused_and_named() -> None:
    data = rewritten(saved(VALUE), {}, method=zipfile.ZIP_DEFLATED)
    with pytest.raises(SourceUnsupportedError) as error:
        read_directory(MemoryFile(data))
    assert any(line.startswith("archive/data/0:") for line in error.value.details)
    assert "torch.save(torch.load(path), new_path)" in (error.value.next_step or "")


def field(data: bytes, record: str, at: int, form: str, value: int) -> bytes:
    """``data`` with one field of a record's central directory entry changed."""
    name = f"archive/{record}".encode()
    entry = data.rindex(name) - 46
    assert data[entry : entry + 4] == b"PK\1\2"
    changed = bytearray(data)
    struct.pack_into(form, changed, entry + at, value)
    return bytes(changed)


@pytest.mark.parametrize(
    ("at", "form", "value"),
    [
        (0, "<I", 0),  # signature
        (20, "<I", 7),  # one size
        (24, "<I", 1 << 20),  # the other
        (42, "<I", 3),  # place: no header there
        (42, "<I", 1 << 30),  # place outside
        (42, "<I", 0xFFFFFFFF),  # zip64 without an extra field
        (28, "<H", 60000),  # length of the name
        (32, "<H", 5),  # length of the comment
    ],
)
def test_a_directory_that_contradicts_the_file_is_refused(at: int, form: str, value: int) -> None:
    with pytest.raises((SourceCorruptError, SourceUnsupportedError)):
        read_directory(MemoryFile(field(saved(VALUE), "data/0", at, form, value)))


def test_a_record_larger_than_its_place_is_refused() -> None:
    data = saved(VALUE)
    larger = field(field(data, "data/0", 20, "<I", 4000), "data/0", 24, "<I", 4000)
    with pytest.raises(SourceCorruptError, match=r"data/0.*larger than its place"):
        read_directory(MemoryFile(larger))


def test_two_records_in_one_place_are_refused() -> None:
    data = saved(VALUE)
    first = read_directory(MemoryFile(data))["data/0"]
    header = data.rindex(b"PK\3\4", 0, first.offset)
    with pytest.raises(SourceCorruptError, match=r"overlaps|larger than its place"):
        read_directory(MemoryFile(field(data, "data/1", 42, "<I", header)))


def test_two_records_of_one_name_are_refused() -> None:
    data = saved(VALUE)
    assert data.count(b"archive/data/1") == 2
    with pytest.raises(SourceCorruptError, match="two records are named 'data/0'"):
        read_directory(MemoryFile(data.replace(b"archive/data/1", b"archive/data/0")))


def test_a_local_header_that_moves_the_data_past_its_place_is_refused() -> None:
    data = bytearray(saved(VALUE))
    at = data.index(b"archive/data/0") - 30
    struct.pack_into("<H", data, at + 28, 60000)
    with pytest.raises(SourceCorruptError, match="larger than its place"):
        read_directory(MemoryFile(bytes(data)))


def test_the_format_before_zip_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    torch.save(VALUE, path, _use_new_zipfile_serialization=False)
    with pytest.raises(SourceUnsupportedError, match=r"before version 1.6") as error:
        read_directory(LocalFile(str(path)))
    assert "torch.save(torch.load(path), new_path)" in (error.value.next_step or "")


def test_a_tar_file_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "old.tar"
    with tarfile.open(path, "w") as archive:
        archive.add(__file__, "storages")
    with pytest.raises(SourceUnsupportedError, match="tar file"):
        read_directory(LocalFile(str(path)))


def test_something_else_is_not_recognised() -> None:
    with pytest.raises(SourceUnrecognisedError, match=r"torch.save"):
        read_directory(MemoryFile(b"\x89HDF\r\n" * 100))
