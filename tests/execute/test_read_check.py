"""What is read is compared with the checksum of every record that it touches, wherever the read begins and ends."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.execute.read_check import ReadCheck
from fsdpckpt.ir.checkpoint import Checkpoint, Checksums, Container, Layout, Origin
from fsdpckpt.ir.files import Stored
from fsdpckpt.storage.sources import Sources

HEAD, FIRST, GAP, SECOND, TAIL = b"h" * 7, bytes(range(40)), b"g" * 5, bytes(range(50, 90)), b"t" * 9
CONTENT = HEAD + FIRST + GAP + SECOND + TAIL
AT_FIRST, AT_SECOND = len(HEAD), len(HEAD + FIRST + GAP)


def read(path: Path, content: bytes, offset: int, nbytes: int) -> bytes:
    path.write_bytes(content)
    rows = [(0, AT_FIRST, 40, zlib.crc32(FIRST)), (0, AT_SECOND, 40, zlib.crc32(SECOND))]
    origin = Origin(str(path), Layout.FULL, Container.TORCH, "plain", 1)
    checkpoint = Checkpoint(origin, (Stored(str(path), len(content)),), checksums=Checksums.of(rows))
    with Sources() as sources:
        reads = ReadCheck(checkpoint, sources).reading()
        data = bytes(reads.open_file(checkpoint.files[0]).read(offset, nbytes))
        reads.finish()
    return data


RANGES = [
    (0, len(CONTENT)),  # both records, and what lies around them
    (AT_FIRST, 40),
    (AT_FIRST, AT_SECOND + 40 - AT_FIRST),
    (AT_FIRST + 20, 40),  # past the end of one, and into the other
    (0, AT_FIRST + 3),  # from before the first
    (AT_SECOND + 30, 19),  # past the last
]


@pytest.mark.parametrize(("offset", "nbytes"), RANGES)
def test_a_read_is_compared_with_every_record_that_it_touches(offset: int, nbytes: int, tmp_path: Path) -> None:
    path = tmp_path / "data"
    assert read(path, CONTENT, offset, nbytes) == CONTENT[offset : offset + nbytes]
    touched = 0
    for begin in (AT_FIRST, AT_SECOND):
        damaged = bytearray(CONTENT)
        damaged[begin + 25] ^= 1
        if offset < begin + 40 and begin < offset + nbytes:
            touched += 1
            with pytest.raises(SourceCorruptError):
                read(path, bytes(damaged), offset, nbytes)
        else:
            read(path, bytes(damaged), offset, nbytes)
    assert touched


def test_what_is_in_no_record_is_compared_with_none(tmp_path: Path) -> None:
    other = CONTENT.replace(HEAD, b"x" * 7).replace(TAIL, b"y" * 9)
    assert read(tmp_path / "data", other, 0, len(CONTENT)) == other
