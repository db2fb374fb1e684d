"""Carries out a ``Target`` the plain way: whole tensors in memory, numpy indexing, zlib. The oracle of the executor."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence

import numpy as np

from fsdpckpt.ir.checkpoint import SourceFile
from fsdpckpt.ir.dtypes import numpy_dtype
from fsdpckpt.ir.targets import Target, TargetFile, WriteItem
from fsdpckpt.ir.tensors import Tensor


def gather(tensor: Tensor, files: Sequence[bytes]) -> np.ndarray:
    """The whole tensor, from all its chunks; every element must be covered."""
    dtype = numpy_dtype(tensor.dtype)
    whole = np.zeros(tensor.shape, dtype)
    seen = np.zeros(tensor.shape, bool)
    chunks = tensor.chunks
    for row in range(len(chunks)):
        size, start = chunks.size[row].tolist(), chunks.start[row].tolist()
        if 0 in size:
            continue
        stride = [step * dtype.itemsize for step in chunks.stride[row].tolist()]
        data = np.ndarray(size, dtype, files[chunks.file[row]], int(chunks.offset[row]), stride)
        box = tuple(slice(at, at + n) for at, n in zip(start, size, strict=True))
        whole[box] = data
        seen[box] = True
    assert seen.all(), "elements that no chunk holds"
    return whole


def write_item_bytes(write_item: WriteItem, files: Sequence[bytes]) -> bytes:
    whole = gather(write_item.tensor, files)
    box = whole[tuple(slice(at, at + n) for at, n in zip(write_item.start, write_item.size, strict=True))]
    if write_item.dtype is not write_item.tensor.dtype:
        box = box.astype(numpy_dtype(write_item.dtype))
    if write_item.order is not None:
        box = box.transpose(write_item.order)
    data = np.ascontiguousarray(box).tobytes()
    assert len(data) == write_item.nbytes
    return data


def file_bytes(file: TargetFile, files: Sequence[bytes]) -> bytes:
    file = file.built()
    out = bytearray(file.nbytes)
    written = np.zeros(file.nbytes, np.int8)
    literal = np.zeros(file.nbytes, bool)
    for offset, begin, nbytes in file.literals:
        out[offset : offset + nbytes] = file.blob[begin : begin + nbytes]
        written[offset : offset + nbytes] += 1
        literal[offset : offset + nbytes] = True
    for write_item in file.write_items:
        out[write_item.offset : write_item.offset + write_item.nbytes] = write_item_bytes(write_item, files)
        written[write_item.offset : write_item.offset + write_item.nbytes] += 1
    assert (written == 1).all(), "a byte of the target that is written never, or twice"
    for begin, end, places in file.checksums:
        crc = zlib.crc32(out[begin:end]).to_bytes(4, "little")
        for place in places:
            assert out[place : place + 4] == b"\0\0\0\0" and literal[place : place + 4].all()
            out[place : place + 4] = crc
    return bytes(out)


def materialise(target: Target, sources: Sequence[SourceFile] | Sequence[bytes], path: str) -> None:
    """Write ``target`` at ``path``; ``sources`` are the checkpoint's files, or their bytes."""
    files = []
    for source in sources:
        if isinstance(source, bytes):
            files.append(source)
        else:
            with open(source.path, "rb") as stream:
                files.append(stream.read())
    for file in target.files:
        at = os.path.join(path, file.path) if file.path else path
        os.makedirs(os.path.dirname(at) or ".", exist_ok=True)
        with open(at, "wb") as stream:
            stream.write(file_bytes(file, files))
