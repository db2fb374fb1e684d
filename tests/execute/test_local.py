"""The local executor against a naive numpy oracle: any chunks, write items, strides, casts, windows and threads."""

from __future__ import annotations

import os
import random
import tempfile
import zlib
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.execute.job import Budget
from fsdpckpt.ir.checkpoint import Checksums
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.files import Stored
from fsdpckpt.ir.targets import Target, TargetFile
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.plan import copies, make_plan
from fsdpckpt.storage.sources import Sources
from tests.execute.random_files import Disk, random_files
from tests.execute.running import run_plan


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
def test_any_boxes_strides_casts_and_windows_give_the_bytes_numpy_gives(seed: int) -> None:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        disk = Disk(folder, [bytearray() for _ in range(3)], rng)
        files, wanted = random_files(rng, disk, 2, 1)
        with patch.object(copies, "_PAIRS_AT_ONCE", rng.choice([1, 3, copies._PAIRS_AT_ONCE])):  # pairs
            plan = make_plan(Target(files))
        with Sources() as sources:
            run_plan(
                plan,
                files=disk.save(),
                checksums=Checksums.of([]),
                sources=sources,
                locate=lambda path: os.path.join(folder, path),
                budget=Budget(threads=rng.choice([1, 3]), window=rng.choice([16, 48, 100, 4096])),
            )
        for file, expected in zip(files, wanted, strict=True):
            with open(os.path.join(folder, file.path), "rb") as stream:
                assert stream.read() == expected


def _one_record(folder: str, data: bytes, crc: int, *, cut: int = 0) -> None:
    path = os.path.join(folder, "source")
    with open(path, "wb") as stream:
        stream.write(data[: len(data) - cut])
    tensor = Tensor(DTYPES["uint8"], (len(data),), Chunks.whole(file=0, offset=0, shape=(len(data),)))
    file = TargetFile("out")
    file.add_write_item(tensor)
    with Sources() as sources:
        run_plan(
            make_plan(Target([file])),
            files=(Stored(path, len(data)),),
            checksums=Checksums.of([(0, 0, len(data), crc)]),
            sources=sources,
            locate=lambda name: os.path.join(folder, name),
            budget=Budget(threads=2, window=1000),
        )


@pytest.mark.parametrize("nbytes", [10, 999, 1000, 1001, 54321])
def test_a_flipped_byte_in_a_source_record_is_found_while_copying(tmp_path, nbytes: int) -> None:
    data = random.Random(nbytes).randbytes(nbytes)
    _one_record(str(tmp_path), data, zlib.crc32(data))
    os.unlink(tmp_path / "out")
    damaged = bytearray(data)
    damaged[nbytes // 2] ^= 4
    with pytest.raises(SourceCorruptError, match="does not match the checksum"):
        _one_record(str(tmp_path), bytes(damaged), zlib.crc32(data))


def test_a_source_that_ends_early_is_an_error_not_zeros_and_a_file_without_checksums_is_not_judged(tmp_path) -> None:
    data = random.Random(2).randbytes(5000)
    _one_record(str(tmp_path), data, 0)
    os.unlink(tmp_path / "out")
    with pytest.raises(SourceCorruptError, match="ends too early"):
        _one_record(str(tmp_path), data, zlib.crc32(data), cut=7)


@pytest.mark.parametrize("window", [4096, 10_000, 65_536, 1 << 20])
def test_files_large_enough_for_direct_writes_hold_the_same_bytes(tmp_path, window: int) -> None:
    rng = random.Random(window)
    disk = Disk(str(tmp_path), [bytearray()], rng)
    file, expected = TargetFile("out"), bytearray()
    for number in range(7):
        values = rng.randbytes(400_003 + number)
        source, offset = disk.put(values)
        shape = (len(values),)
        literal = bytes(4) + rng.randbytes(rng.randrange(9000))
        place = file.add_literal(literal)
        begin = file.add_write_item(
            Tensor(DTYPES["uint8"], shape, Chunks.whole(file=source, offset=offset, shape=shape))
        )
        file.add_checksum(begin, file.nbytes, [place])
        expected += zlib.crc32(values).to_bytes(4, "little") + literal[4:] + values
    with Sources() as sources:
        run_plan(
            make_plan(Target([file])),
            files=disk.save(),
            checksums=Checksums.of([]),
            sources=sources,
            locate=lambda path: os.path.join(tmp_path, path),
            budget=Budget(threads=3, window=window),
        )
    assert (tmp_path / "out").read_bytes() == expected
