"""Random source and target files with what numpy says the target must hold."""

from __future__ import annotations

import itertools
import math
import os
import random
import zlib
from dataclasses import dataclass

import numpy as np

from fsdpckpt.ir.checkpoint import SourceFile
from fsdpckpt.ir.dtypes import DTYPES, DType, numpy_dtype
from fsdpckpt.ir.files import Stored
from fsdpckpt.ir.targets import TargetFile
from fsdpckpt.ir.tensors import Chunks, Tensor, contiguous_stride

__all__ = ["Disk", "random_files"]


@dataclass
class Disk:
    """Source files under construction: random bytes with tensors in between."""

    folder: str
    files: list[bytearray]
    rng: random.Random

    def put(self, data: bytes) -> tuple[int, int]:
        file = self.rng.randrange(len(self.files))
        self.files[file] += self.rng.randbytes(self.rng.randrange(40))
        offset = len(self.files[file])
        self.files[file] += data
        return file, offset

    def save(self) -> tuple[SourceFile, ...]:
        found = []
        for number, data in enumerate(self.files):
            path = os.path.join(self.folder, f"source{number}")
            with open(path, "wb") as stream:
                stream.write(data)
            found.append(Stored(path, len(data)))
        return tuple(found)


def _cuts(rng: random.Random, size: int) -> list[int]:
    inner = sorted({rng.randrange(size + 1) for _ in range(rng.randrange(3))}) if size else []
    return sorted({0, *inner, size})


def random_tensor(rng: random.Random, disk: Disk, dtype: DType) -> tuple[Tensor, np.ndarray]:
    shape = tuple(rng.choice([0, 1, 2, 3, 5, 7, 11]) for _ in range(rng.randrange(4)))
    raw = np.frombuffer(rng.randbytes(math.prod(shape) * dtype.itemsize), np.uint8)
    values = raw.view(numpy_dtype(dtype)).reshape(shape)
    rows: dict[str, list] = {name: [] for name in ("rank", "file", "offset", "start", "size", "stride")}
    grid = [list(itertools.pairwise(_cuts(rng, size))) or [(0, 0)] for size in shape]
    for rank, box in enumerate(itertools.product(*grid)):
        for _ in range(rng.choice([1, 1, 2])):  # a replica now and then
            part = values[tuple(slice(low, high) for low, high in box)]
            order = rng.sample(range(part.ndim), part.ndim)
            stored = part.transpose(order).copy()
            stride = [0] * part.ndim
            for dim, step in zip(order, contiguous_stride(stored.shape), strict=True):
                stride[dim] = step
            file, offset = disk.put(stored.tobytes())
            for name, value in (
                ("rank", rank), ("file", file), ("offset", offset),
                ("start", [low for low, _ in box]), ("size", [high - low for low, high in box]), ("stride", stride),
            ):  # fmt: skip
                rows[name].append(value)
    return Tensor(dtype, shape, Chunks.rows(ndim=len(shape), **rows)), values


def random_write_item(rng: random.Random, file: TargetFile, tensor: Tensor, values: np.ndarray, dtype: DType) -> bytes:
    low = [rng.randrange(size + 1) for size in tensor.shape]
    high = [rng.randrange(start, size + 1) for start, size in zip(low, tensor.shape, strict=True)]
    if rng.random() < 0.4:
        low, high = [0] * tensor.ndim, list(tensor.shape)
    order = tuple(rng.sample(range(tensor.ndim), tensor.ndim)) if rng.random() < 0.4 else None
    size = [end - start for start, end in zip(low, high, strict=True)]
    begin = file.add_write_item(tensor, start=low, size=size, dtype=dtype, order=order)
    part = values[tuple(slice(a, b) for a, b in zip(low, high, strict=True))]
    expected = part.transpose(order) if order is not None else part
    if dtype is not tensor.dtype:
        with np.errstate(all="ignore"):
            expected = expected.astype(numpy_dtype(dtype))
    if rng.random() < 0.5 and file.nbytes > begin:
        file.add_checksum(begin, file.nbytes, [place]) if (place := _place(rng, file)) is not None else None
    return expected.tobytes()  # row-major, whatever the strides


def _place(rng: random.Random, file: TargetFile) -> int | None:
    """A 4-byte hole in the last literal that no other checksum uses."""
    used = {place for _, _, places in file.checksums for place in places}
    holes = [at for at, _, nbytes in file.literals if nbytes >= 4 and at not in used]
    return rng.choice(holes) if holes else None


def random_files(
    rng: random.Random, disk: Disk, most_files: int, fewest_write_items: int
) -> tuple[list[TargetFile], list[bytes]]:
    """Target files of random write items, literals and checksums over random tensors on ``disk``, and their bytes."""
    dtypes = [DTYPES[name] for name in ("float32", "bfloat16", "float64", "uint8", "int64", "complex128")]
    tensors = [random_tensor(rng, disk, rng.choice(dtypes)) for _ in range(rng.randrange(1, 6))]
    files, wanted = [], []
    for number in range(rng.randrange(1, most_files + 1)):
        file, expected = TargetFile(f"out{number}"), bytearray()
        for _ in range(rng.randrange(fewest_write_items, 8)):
            literal = bytes(4) + rng.randbytes(rng.randrange(20)) if rng.random() < 0.8 else b""
            file.add_literal(literal)
            expected += literal
            tensor, values = rng.choice(tensors)
            dtype = DTYPES["float16"] if tensor.dtype.name == "float32" and rng.random() < 0.5 else tensor.dtype
            expected += random_write_item(rng, file, tensor, values, dtype)
        for begin, end, places in file.checksums:
            for place in places:
                expected[place : place + 4] = zlib.crc32(expected[begin:end]).to_bytes(4, "little")
        files.append(file)
        wanted.append(bytes(expected))
    return files, wanted
