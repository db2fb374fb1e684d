"""Checkpoints made by hand over raw files: chunks wherever a test wants them, no container."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fsdpckpt.ir.checkpoint import Checkpoint, Checksums, Container, Layout, ModelState, Origin
from fsdpckpt.ir.dtypes import DTYPES, DType, numpy_dtype
from fsdpckpt.ir.files import Stored
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.placements import Shard, Sharded, Whole
from fsdpckpt.ir.tensors import Chunks, Tensor, contiguous_stride
from fsdpckpt.ir.values import Key, Value

Box = tuple[tuple[int, ...], tuple[int, ...]]


class Raw:
    """Files that grow as tensors are put into them; ``checkpoint`` writes them."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self.directory = directory
        self.data = [bytearray(b"\xee" * 5) for _ in range(ranks)]
        self.records: list[tuple[int, int, int, int]] = []

    def put(
        self,
        array: np.ndarray,
        boxes: Sequence[Box] | None = None,
        *,
        ranks: Sequence[int] | None = None,
        order: Sequence[int] | None = None,
        gap: int = 3,
        dtype: DType | None = None,
    ) -> Tensor:
        """``array`` cut into ``boxes``, box i into the file of rank i (or ``ranks[i]``).

        ``order``: the dimensions from slowest to fastest in the file; None is row-major.
        """
        boxes = [((0,) * array.ndim, array.shape)] if boxes is None else list(boxes)
        ranks = list(range(len(boxes))) if ranks is None else list(ranks)
        order = tuple(range(array.ndim)) if order is None else tuple(order)
        offsets, strides = [], []
        for rank, (start, size) in zip(ranks, boxes, strict=True):
            part = array[tuple(slice(at, at + n) for at, n in zip(start, size, strict=True))]
            laid = np.ascontiguousarray(part.transpose(order))
            file = self.data[rank]
            file += b"\xaa" * gap
            offsets.append(len(file))
            bytes_ = laid.tobytes()
            file += bytes_
            self.records.append((rank, offsets[-1], len(bytes_), zlib.crc32(bytes_)))
            memory = contiguous_stride(laid.shape)
            strides.append(tuple(memory[order.index(dimension)] for dimension in range(array.ndim)))
        stored_dtype = dtype if dtype is not None else DTYPES[array.dtype.name]
        chunks = Chunks.rows(
            ndim=array.ndim,
            rank=ranks,
            file=ranks,
            offset=offsets,
            start=[box[0] for box in boxes],
            size=[box[1] for box in boxes],
            stride=strides,
        )
        return Tensor(stored_dtype, array.shape, chunks, cut=Whole() if len(boxes) == 1 else Sharded((Shard(0),)))

    def checkpoint(
        self,
        model: Mapping[str, Tensor | Value] | None = None,
        optim: Optimizer | None = None,
        extra: Mapping[Key, Value] | None = None,
        rank_extra: Sequence[dict[Key, Value]] = (),
    ) -> Checkpoint:
        self.directory.mkdir(parents=True, exist_ok=True)
        files = []
        for rank, data in enumerate(self.data):
            path = self.directory / f"rank_{rank}.bin"
            path.write_bytes(data)
            files.append(Stored(str(path), len(data)))
        return Checkpoint(
            Origin(str(self.directory), Layout.SHARDED, Container.TORCH, "plain", len(self.data)),
            files=tuple(files),
            model=ModelState(dict(model)) if model is not None else None,
            optim=optim,
            extra=dict(extra or {}),
            rank_extra=tuple(rank_extra),
            checksums=Checksums.of(self.records),
        )

    def flip(self, tensor: Tensor, row: int = 0, byte: int = 0) -> None:
        """Change one byte of a chunk on disk."""
        path = self.directory / f"rank_{int(tensor.chunks.file[row])}.bin"
        data = bytearray(path.read_bytes())
        data[int(tensor.chunks.offset[row]) + byte] ^= 0x5A
        path.write_bytes(data)


def rows(shape: Sequence[int], ranks: int) -> list[Box]:
    """Dimension 0 as ``torch.chunk`` cuts it: ceil(rows / ranks) each, the last ones fewer or none."""
    step = -(-shape[0] // ranks)
    boxes = []
    for rank in range(ranks):
        begin, end = min(rank * step, shape[0]), min((rank + 1) * step, shape[0])
        boxes.append(((begin, *([0] * (len(shape) - 1))), (end - begin, *shape[1:])))
    return boxes


def random_array(seed: int, shape: Sequence[int], dtype: str = "float32") -> np.ndarray:
    """Random bytes as ``dtype``: every bit pattern, NaN included."""
    kind = numpy_dtype(DTYPES[dtype])
    count = int(np.prod(shape)) * kind.itemsize
    data = np.random.default_rng(seed).integers(0, 256, count, np.uint8)
    if dtype == "bool":
        data &= 1
    return data.view(kind).reshape(shape)


def numbers(seed: int, shape: Sequence[int], dtype: str = "float32") -> np.ndarray:
    """Finite random numbers."""
    return np.asarray(np.random.default_rng(seed).normal(2.0, 3.0, shape)).astype(numpy_dtype(DTYPES[dtype]))
