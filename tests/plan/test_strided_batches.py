"""Tensors whose elements lie in the source in another order: each part of it is read a few times, and proved."""

from __future__ import annotations

import os
import random
import zlib
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.execute import window
from fsdpckpt.execute.job import Budget
from fsdpckpt.ir.checkpoint import Checksums
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.files import Stored
from fsdpckpt.ir.targets import Target, TargetFile
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.plan import make_plan
from fsdpckpt.storage.sources import Sources
from tests.execute.running import run_plan

AT = 7  # where the tensor begins in its file
EVERYTHING = (slice(None),) * 4
ORDERS = [(1, 0), (0, 2, 3, 1), (2, 0, 1)]  # transposed; channels last; the last dimension slowest
SHAPES = {2: (61, 157), 3: (13, 17, 31), 4: (5, 11, 7, 9)}


def source(folder: Path, order: tuple[int, ...], data: bytes = b"") -> tuple[Tensor, np.ndarray]:
    """A float32 tensor of which ``order`` says from slowest to fastest in what order its dimensions are stored."""
    shape = SHAPES[len(order)]
    stored = np.random.default_rng(len(order)).random([shape[dim] for dim in order], np.float32)
    (folder / "source").write_bytes(os.urandom(AT) + (data or stored.tobytes()))
    back = np.argsort(order)
    stride = [stored.strides[dim] // 4 for dim in back]
    chunks = Chunks.whole(file=0, offset=AT, shape=shape)
    chunks = chunks.with_boxes(stride=np.asarray([stride], np.int64))
    return Tensor(DTYPES["float32"], shape, chunks), stored.transpose(back)


def copied(
    folder: Path,
    tensor: Tensor,
    *,
    dtype: str = "float32",
    window: int = 1 << 16,
    part: tuple[slice, ...] = (),
    crc: int = 0,
) -> bytes:
    """What the executor writes of ``tensor``, or of a ``part`` of it."""
    ranges = [each.indices(length) for each, length in zip(part or EVERYTHING, tensor.shape, strict=False)]
    file = TargetFile("out")
    start, size = [begin for begin, _, _ in ranges], [end - begin for begin, end, _ in ranges]
    file.add_write_item(tensor, start=start, size=size, dtype=DTYPES[dtype])
    with Sources() as sources:
        run_plan(
            make_plan(Target([file])),
            files=(Stored(str(folder / "source"), AT + tensor.nbytes),),
            checksums=Checksums.of([(0, AT, tensor.nbytes, crc)] if crc else []),
            sources=sources,
            locate=lambda name: str(folder / name),
            budget=Budget(threads=1, window=window),
        )
    return (folder / "out").read_bytes()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("nbytes", [100, 999, 5000, 1 << 16])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_elements_come_in_the_order_of_the_target_whatever_that_of_the_source(
    tmp_path: Path, order: tuple[int, ...], nbytes: int, dtype: str
) -> None:
    tensor, expected = source(tmp_path, order)
    with patch.object(window, "MAX_GAP", random.Random(nbytes).choice([0, 100, window.MAX_GAP])):
        assert copied(tmp_path, tensor, dtype=dtype, window=nbytes) == expected.astype(dtype).tobytes()


def test_a_part_of_a_tensor_begins_anew_in_every_row_of_the_source(tmp_path: Path) -> None:
    tensor, expected = source(tmp_path, ORDERS[2])
    part = (slice(2, 9), slice(4, 11), slice(1, 30))
    for nbytes in (900, 1 << 16):
        assert copied(tmp_path, tensor, part=part, window=nbytes) == expected[part].tobytes()
        (tmp_path / "out").unlink()


@pytest.mark.parametrize("order", ORDERS)
def test_a_tensor_that_fits_in_one_window_is_read_no_more_than_twice(tmp_path: Path, order: tuple[int, ...]) -> None:
    tensor, _ = source(tmp_path, order)
    read: list[int] = []
    with patch.object(window.SourceReader, "read_into", _counted(window.SourceReader.read_into, read)):
        copied(tmp_path, tensor, window=1 << 18)
    assert tensor.nbytes <= sum(read) <= 2 * tensor.nbytes
    assert len(read) <= 2 * tensor.shape[0]


def _counted(real, read):
    def counted(self, file, offset, view):
        read.append(len(view))
        real(self, file, offset, view)

    return counted


@pytest.mark.parametrize(
    ("order", "part"),
    [
        (ORDERS[0], ()),
        (ORDERS[1], ()),
        ((0, 1), (slice(None), slice(0, 57))),
        ((0, 1), (slice(None), slice(100, None))),
    ],
)
@pytest.mark.parametrize("nbytes", [999, 1 << 18])
def test_a_flipped_bit_is_found_where_elements_are_read_with_gaps(
    tmp_path: Path, order: tuple[int, ...], part: tuple[slice, ...], nbytes: int
) -> None:
    tensor, _ = source(tmp_path, order)
    data = bytearray((tmp_path / "source").read_bytes()[AT:])
    crc = zlib.crc32(data)
    copied(tmp_path, tensor, part=part, window=nbytes, crc=crc)
    (tmp_path / "out").unlink()
    data[len(data) // 2] ^= 4
    source(tmp_path, order, bytes(data))
    with pytest.raises(SourceCorruptError, match="does not match its checksum"):
        copied(tmp_path, tensor, part=part, window=nbytes, crc=crc)


def test_rows_that_overlap_in_the_source_and_are_nearly_as_long_as_a_buffer_fit_into_it(tmp_path: Path) -> None:
    stored = np.random.default_rng(3).random(700, np.float32)
    (tmp_path / "source").write_bytes(stored.tobytes())
    one = Chunks.whole(file=0, offset=0, shape=(9, 240))
    chunks = one.with_boxes(stride=np.asarray([[50, 1]], np.int64))
    expected = np.lib.stride_tricks.sliding_window_view(stored, 240)[:401:50]
    tensor = Tensor(DTYPES["float32"], (9, 240), chunks)
    assert copied(tmp_path, tensor, dtype="float16", window=1000) == expected.astype("float16").tobytes()
