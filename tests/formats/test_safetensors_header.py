"""The safetensors header: what the library writes is read, what the format forbids is refused by name."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from fsdpckpt.errors import SourceCorruptError, SourceUnsupportedError
from fsdpckpt.formats.safetensors import MAX_HEADER_BYTES, looks_like_safetensors, read_header
from fsdpckpt.storage.local import MemoryFile

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def blob(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def refused(data: bytes) -> SourceCorruptError:
    with pytest.raises(SourceCorruptError) as error:
        read_header(MemoryFile(data, "w.safetensors"))
    assert error.value.file == "w.safetensors"
    return error.value


def test_what_the_library_writes_is_found_byte_for_byte() -> None:
    dtypes = [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.bool, torch.complex64),
    ]
    raw = {str(dtype)[6:]: torch.randint(0, 2, (3, 5, dtype.itemsize), dtype=torch.uint8) for dtype in dtypes}
    tensors = {name: data.view(getattr(torch, name)).reshape(3, 5) for name, data in raw.items()}
    tensors["scalar"], tensors["empty"] = torch.tensor(2.5), torch.empty(0, 7)
    data = save(tensors, metadata={"format": "pt", "note": "ü"})
    header = read_header(MemoryFile(data))
    assert header.metadata == {"format": "pt", "note": "ü"}
    assert header.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        found = header.tensors[name]
        assert (found.dtype.name, found.shape) == (str(tensor.dtype)[6:], tuple(tensor.shape))
        expected = tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.ndim else np.float32(2.5).tobytes()
        assert data[found.offset : found.offset + found.nbytes] == expected


def test_a_blob_inside_a_larger_file_is_found_at_its_place() -> None:
    data = save({"w": torch.arange(5)})
    header = read_header(MemoryFile(b"before!" + data + b"after"), begin=7, end=7 + len(data))
    at = header.tensors["w"].offset
    assert (b"before!" + data)[at : at + 40] == torch.arange(5).numpy().tobytes()


def test_a_file_without_tensors_is_whole() -> None:
    assert read_header(MemoryFile(blob({"__metadata__": {}}))).tensors == {}


def test_null_in_place_of_the_metadata_is_none_as_for_the_library() -> None:
    data = blob({"__metadata__": None, "w": {"dtype": "I8", "shape": [2], "data_offsets": [0, 2]}}, b"ab")
    assert load(data)["w"].tolist() == [97, 98]
    header = read_header(MemoryFile(data))
    assert (list(header.tensors), header.metadata) == (["w"], {})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "too short"),
        (b"\x02\0\0\0\0\0\0", "too short"),
        (blob({"w": F32}, bytes(8))[:20], "ends after the file"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "impossibly long"),
        (blob(b" {}"), "begin with"),
        (blob(b"{}x"), "not valid JSON"),
        (blob(b'{"a":NaN}'), "not valid JSON"),
        (blob(b'{"\xff":1}'), "not valid JSON"),
        (blob(b'{"a":' * 50_000), "not valid JSON"),
        (blob(b'{"w":%s,"w":%s}' % ((json.dumps(F32).encode(),) * 2), bytes(8)), "twice"),
        (blob(b'{"__metadata__":{"a":"1","a":"2"}}'), "twice"),
        (blob({"__metadata__": {"a": 1}}), "__metadata__"),
        (blob({"__metadata__": []}), "__metadata__"),
        (blob({"w": {**F32, "strides": [1]}}, bytes(8)), "dtype, shape and data_offsets"),
        (blob({"w": {"dtype": "F32", "shape": [2]}}, bytes(8)), "dtype, shape and data_offsets"),
        (blob({"w": [1]}), "dtype, shape and data_offsets"),
        (blob({"w": {**F32, "dtype": 3}}, bytes(8)), "dtype"),
        (blob({"w": {**F32, "shape": [-2]}}, bytes(8)), "shape"),
        (blob({"w": {**F32, "shape": [2.0]}}, bytes(8)), "shape"),
        (blob({"w": {**F32, "shape": [True, 2]}}, bytes(8)), "shape"),
        (blob({"w": {**F32, "data_offsets": [8, 0]}}, bytes(8)), "data_offsets"),
        (blob({"w": {**F32, "data_offsets": [0]}}, bytes(8)), "data_offsets"),
        (blob({"w": {**F32, "data_offsets": [0, 4]}}, bytes(4)), "bytes as its shape"),
        (blob({"w": {**F32, "shape": [1 << 62, 1 << 62]}}, bytes(8)), "larger than any"),
        (blob({"w": {**F32, "shape": [0, 1 << 40, 1 << 40]}}, bytes(8)), "larger than any"),
        (blob({"w": F32}, bytes(7)), "length that the header says"),
        (blob({"w": F32}, bytes(9)), "length that the header says"),
        (blob({"w": {**F32, "data_offsets": [4, 12]}}, bytes(12)), "belong to no tensor"),
        (blob({"v": F32, "w": {**F32, "data_offsets": [4, 12]}}, bytes(12)), "overlaps"),
        (blob({"v": F32, "w": F32}, bytes(8)), "overlaps"),
    ],
)
def test_a_header_the_format_forbids_is_refused_saying_what_is_wrong(data: bytes, words: str) -> None:
    assert words in str(refused(data))


def test_all_tensors_of_unknown_dtypes_are_named() -> None:
    header = {
        "a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]},
        "b": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [1, 4]},
    }
    with pytest.raises(SourceUnsupportedError) as error:
        read_header(MemoryFile(blob(header, bytes(4)), "w.safetensors"))
    assert error.value.details == ("a: F4", "b: F6_E2M3")


def test_only_a_plausible_beginning_looks_like_safetensors() -> None:
    data = save({"w": torch.arange(5)})
    assert looks_like_safetensors(data[:16], len(data))
    assert not looks_like_safetensors(data[:16], 20)
    assert not looks_like_safetensors(b"PK\x03\x04" + bytes(12), 10_000)
    assert not looks_like_safetensors(b"", 0)
