"""The items of DCP files, as ``ItemReader`` finds them and as torch reads them."""

from __future__ import annotations

import random
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from fsdpckpt.errors import SourceCorruptError, SourceUnsupportedError
from fsdpckpt.formats.dcp.items import ItemReader, Structures
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.storage import ByteSource
from fsdpckpt.storage.local import LocalFile, MemoryFile
from tests.formats.torch_saves import any_values, saved
from tests.materialise import gather
from tests.readers.contents import raw

STATE = {
    **{f"small.{i}": any_values((1 + i % 4, 5), torch.float32, i) for i in range(40)},
    **{f"other.{i}": any_values((3, 4), (torch.int64, torch.bfloat16, torch.uint16)[i % 3], i) for i in range(12)},
    **{f"large.{i}": any_values((97, 211), torch.float32, i) for i in range(4)},
    "scalar": any_values((), torch.float64),
    "empty": torch.empty(0, 3),
    "view": any_values((9, 7), torch.float32, 5).t(),
    "parameter": torch.nn.Parameter(torch.rand(4, 4)),
}


class Item(NamedTuple):
    """What ``ItemTensors`` has of one item."""

    dtype: DType
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    record_offset: int
    record_nbytes: int
    crc: int


class OneByOne:
    """Reads the items of one file one at a time."""

    def __init__(self, source: ByteSource) -> None:
        self._structures = Structures()
        self._reader = ItemReader(source, self._structures)

    def tensor(self, begin: int, end: int) -> Item:
        found = self._reader.tensors(np.array([begin]), np.array([end - begin]))
        columns = (found.offset, found.record_offset, found.record_nbytes, found.crc)
        return Item(*self._structures.kinds[int(found.kind[0])], *(int(column[0]) for column in columns))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dcp")
    dcp.save(dict(STATE), checkpoint_id=str(path))
    return path


def items(directory: Path) -> list[tuple[str, str, int, int]]:
    metadata = FileSystemReader(str(directory)).read_metadata()
    return [(i.fqn, at.relative_path, at.offset, at.offset + at.length) for i, at in metadata.storage_data.items()]


@pytest.mark.parametrize("order", ["of offsets", "shuffled", "twice"])
def test_every_item_is_the_tensor_that_was_saved(directory: Path, order: str) -> None:
    listed = sorted(items(directory), key=lambda item: item[1:])
    if order == "shuffled":
        random.Random(3).shuffle(listed)
    if order == "twice":
        listed = listed + listed[::-1]
    readers = {path: OneByOne(LocalFile(str(directory / path))) for _, path, _, _ in listed}
    contents = {path: (directory / path).read_bytes() for path in readers}
    for fqn, path, begin, end in listed:
        found = readers[path].tensor(begin, end)
        expected = STATE[fqn].detach()
        assert (found.dtype.name, found.shape) == (str(expected.dtype)[6:], tuple(expected.shape))
        assert begin <= found.offset <= end
        data = contents[path]
        assert zlib.crc32(data[found.record_offset : found.record_offset + found.record_nbytes]) == found.crc
        chunks = Chunks.whole(file=0, offset=found.offset, shape=found.shape, stride=found.stride)
        whole = gather(Tensor(found.dtype, found.shape, chunks), [data])
        assert whole.tobytes() == bytes(raw(expected)), fqn
        assert found.stride == expected.stride() or not expected.numel()


def batch(values: list[object]) -> tuple[bytes, list[tuple[int, int]]]:
    """Items one after the other, as a DCP file has them, and where each is."""
    data, places = b"", []
    for value in values:
        item = saved(value)
        places.append((len(data), len(data) + len(item)))
        data += item
    return data, places


@pytest.mark.parametrize("shape", [(5, 3), (200, 100)], ids=["small", "large"])
def test_an_item_like_the_one_before_but_damaged_is_not_taken_for_it(shape: tuple[int, ...]) -> None:
    data, places = batch([any_values(shape, torch.float32, seed) for seed in range(3)])
    reader = OneByOne(MemoryFile(data))
    whole = [reader.tensor(*place) for place in places]
    assert whole[1]._replace(crc=0) == whole[0]._replace(
        crc=0,
        offset=whole[0].offset + places[1][0],
        record_offset=whole[0].record_offset + places[1][0],
    )
    assert len({tensor.crc for tensor in whole}) == 3
    begin, end = places[1]
    for at in (begin + 2, end - 30, end - 100, begin + 26):  # header, end record, directory, length of a name
        damaged = data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]
        fresh = OneByOne(MemoryFile(damaged, "x.distcp"))
        assert fresh.tensor(*places[0]) == whole[0]
        with pytest.raises(SourceCorruptError):
            fresh.tensor(*places[1])


def test_items_of_one_length_and_different_shapes_are_told_apart() -> None:
    values = [any_values(shape, torch.float32, 1) for shape in [(4, 6), (6, 4), (3, 8), (4, 6), (8, 3)]]
    values.append(any_values((4, 6), torch.int32, 2))
    data, places = batch(values)
    reader = OneByOne(MemoryFile(data))
    found = [reader.tensor(*place) for place in places * 2]
    assert [tensor.shape for tensor in found[:6]] == [(4, 6), (6, 4), (3, 8), (4, 6), (8, 3), (4, 6)]
    assert [tensor.dtype.name for tensor in found] == (["float32"] * 5 + ["int32"]) * 2
    assert found[:6] == found[6:]


def test_an_item_without_checksums_has_none() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        data, places = batch([any_values((5,), torch.float32, seed) for seed in range(2)])
    finally:
        torch.serialization.set_crc32_options(True)
    reader = OneByOne(MemoryFile(data))
    assert [reader.tensor(*place).crc for place in places] == [-1, -1]


def test_places_that_hold_no_tensor_are_refused() -> None:
    data, places = batch([{"lr": 0.1}, [torch.rand(2)]])
    reader = OneByOne(MemoryFile(data, "x.distcp"))
    for place in places:
        with pytest.raises(SourceCorruptError, match="holds no tensor"):
            reader.tensor(*place)
    for place in [(0, len(data) + 1), (-1, 10), (5, 5), (len(data), len(data) + 10)]:
        with pytest.raises(SourceCorruptError, match="too short"):
            reader.tensor(*place)
    with pytest.raises(SourceCorruptError):
        reader.tensor(places[0][0] + 1, places[0][1])


def test_a_tensor_that_is_not_strided_is_refused() -> None:
    data, places = batch([torch.eye(3).to_sparse()])
    with pytest.raises(SourceUnsupportedError, match="sparse"):
        OneByOne(MemoryFile(data)).tensor(*places[0])


def with_zip64_end(item: bytes) -> bytes:
    """The same archive, where only a zip64 end record says where the directory is."""
    signature, disk, disk_too, here, count, size, start, comment = struct.unpack("<4sHHHHIIH", item[-22:])
    assert signature == b"PK\5\6"
    end64 = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, here, count, size, start)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, len(item) - 22, 1)
    end = struct.pack("<4sHHHHIIH", signature, disk, disk_too, here, count, 0xFFFFFFFF, 0xFFFFFFFF, comment)
    return item[:-22] + end64 + locator + end


@pytest.mark.parametrize("shape", [(5, 3), (200, 100)], ids=["small", "large"])
def test_items_whose_directory_is_told_by_a_zip64_record_are_read_like_any_other(shape: tuple[int, ...]) -> None:
    items = [saved(any_values(shape, torch.float32, seed)) for seed in range(3)]
    plain = OneByOne(MemoryFile(items[0])).tensor(0, len(items[0]))
    wide = [with_zip64_end(item) for item in items]
    reader = OneByOne(MemoryFile(b"".join(wide)))
    begin = 0
    for item in wide:
        found = reader.tensor(begin, begin + len(item))
        assert found._replace(crc=plain.crc) == plain._replace(
            offset=plain.offset + begin, record_offset=plain.record_offset + begin
        )
        begin += len(item)
