"""Row-major bytes of a tensor in bounded blocks, whatever holds it."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpckpt.errors import SourceCorruptError, SourceIncompleteError
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.files import Stored
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.storage.local import MemoryFile
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.blocks import BlockReader, rows_to_read
from tests.opened_by import OpenedBy
from tests.verify.raw import Raw, random_array, rows


def reader(raw: Raw, limit: int) -> BlockReader:
    """Over the data in memory: hypothesis makes hundreds."""
    files = [Stored(str(rank), len(data)) for rank, data in enumerate(raw.data)]
    sources = OpenedBy(lambda path: MemoryFile(bytes(raw.data[int(path)]), path))
    return BlockReader(files, sources, limit)


def joined(block_reader: BlockReader, tensor: Tensor, limit: int) -> bytes:
    parts = []
    for block in block_reader.blocks(tensor):
        assert 0 < len(block) <= max(limit, tensor.dtype.itemsize)
        assert len(block) % tensor.dtype.itemsize == 0
        parts.append(block.tobytes())
    return b"".join(parts)


@settings(deadline=None, max_examples=120)
@given(st.data())
def test_any_grid_in_any_memory_order_comes_out_row_major(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "uint8", "complex128"]))
    array = random_array(data.draw(st.integers(0, 999)), shape, dtype)
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    boxes = [
        (tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
        for cell in product(*(list(pairwise(cut)) for cut in cuts))
    ]
    boxes = data.draw(st.permutations(boxes))
    ranks = [data.draw(st.integers(0, 2)) for _ in boxes]
    raw = Raw(Path(), 3)
    tensor = raw.put(
        array, boxes, ranks=ranks, order=data.draw(st.permutations(range(len(shape)))), dtype=DTYPES[dtype]
    )
    limit = data.draw(st.sampled_from([16, 24, 100, 1000, 1 << 20]))
    assert joined(reader(raw, limit), tensor, limit) == array.tobytes()


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_elements_at_any_strides_come_out_row_major(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    stride = tuple(data.draw(st.integers(0, 6)) for _ in shape)
    values = np.arange(1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)), dtype=np.float32)
    raw = Raw(Path(), 1)
    raw.data[0] += values.tobytes()
    tensor = Tensor(DTYPES["float32"], shape, Chunks.whole(file=0, offset=5, shape=shape, stride=stride))
    limit = data.draw(st.sampled_from([16, 24, 1024]))
    expected = np.lib.stride_tricks.as_strided(values, shape, [4 * step for step in stride]).tobytes()
    assert joined(reader(raw, limit), tensor, limit) == expected


def test_of_replicas_the_lowest_rank_is_read_and_the_other_file_is_not_opened() -> None:
    array = random_array(2, (5, 3))
    whole = ((0, 0), (5, 3))
    raw = Raw(Path(), 3)
    tensor = raw.put(array, [whole, whole], ranks=[2, 1])
    assert [int(tensor.chunks.rank[row]) for row in rows_to_read(tensor.chunks)] == [1]
    raw.data[2][:] = b""
    assert joined(reader(raw, 64), tensor, 64) == array.tobytes()


def test_missing_rows_are_an_error_never_zeros(tmp_path: Path) -> None:
    array = random_array(3, (7, 2))
    raw = Raw(tmp_path, 3)
    boxes = rows(array.shape, 3)
    tensor = raw.put(array, [boxes[0], boxes[2]], ranks=[0, 2])
    with pytest.raises(SourceIncompleteError, match=r"\[3:6, 0:2\]"):
        next(reader(raw, 64).blocks(tensor))


def test_a_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    raw = Raw(tmp_path, 1)
    tensor = raw.put(random_array(4, (5, 3)))
    del raw.data[0][-1:]
    with pytest.raises(SourceCorruptError):
        list(reader(raw, 64).blocks(tensor))


def test_empty_and_zero_dimensional_tensors() -> None:
    raw = Raw(Path(), 1)
    empty, scalar = raw.put(np.zeros((0, 4), np.float32)), raw.put(np.array(7.25, np.float32))
    block_reader = reader(raw, 64)
    assert list(block_reader.blocks(empty)) == []
    assert joined(block_reader, scalar, 64) == np.float32(7.25).tobytes()


def test_memory_does_not_grow_with_the_tensor(tmp_path: Path) -> None:
    array = random_array(5, (4096, 4096))  # 64 MiB, cut along both dimensions
    boxes = [((i, j), (2048, 2048)) for i in (0, 2048) for j in (0, 2048)]
    raw = Raw(tmp_path, 4)
    tensor = raw.put(array, boxes)
    checkpoint = raw.checkpoint({"w": tensor})
    expected = array.tobytes()
    with Sources() as sources:
        block_reader = BlockReader(checkpoint.files, sources, 1 << 20)
        tracemalloc.start()
        position = 0
        for block in block_reader.blocks(tensor):
            assert block.data == memoryview(expected)[position : position + len(block)]
            position += len(block)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert position == len(expected)
    assert peak < 4 << 20
