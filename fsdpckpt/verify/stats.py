"""Minimum, maximum, mean, standard deviation, norm and NaN/Inf counts of one tensor, streamed in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fsdpckpt.ir.checkpoint import Checkpoint, NamedTensor
from fsdpckpt.ir.dtypes import DType, numpy_dtype
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.blocks import BlockReader, Bytes
from fsdpckpt.verify.parallel import DEFAULT_THREADS, Advance, for_each, in_file_order

__all__ = ["Stats", "count_not_finite", "stats", "stats_of"]

AT_ONCE = 1 << 17  # elements converted to float64 at a time: 1 MiB, which stays in the cache


@dataclass(frozen=True, slots=True)
class Stats:
    """Of the finite elements: ``min``, ``max``, ``mean``, ``std`` (population), ``norm`` (Euclidean), or None.

    A complex tensor counts its real and imaginary parts as elements of their own.
    """

    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    norm: float | None
    nan: int
    inf: int


def _values(block: Bytes, dtype: DType) -> npt.NDArray[np.generic]:
    """The elements of ``block`` as a numeric type; complex ones as pairs of reals, bool as 0 and 1."""
    if dtype.name == "bool":
        return block
    values = block.view(numpy_dtype(dtype))
    if dtype.kind == "complex":
        return values.view(np.float32 if dtype.itemsize == 8 else np.float64)
    return values


def stats(reader: BlockReader, tensor: Tensor, advance: Advance | None = None) -> Stats | None:
    """The statistics of ``tensor``, None for a dtype without arithmetic (bits, complex32)."""
    if tensor.dtype.numpy is None:
        return None
    count, mean, squares, total = 0, 0.0, 0.0, 0.0
    low, high = math.inf, -math.inf
    nan = inf = 0
    for block in reader.blocks(tensor):
        values = _values(block, tensor.dtype)
        for begin in range(0, len(values), AT_ONCE):
            part = values[begin : begin + AT_ONCE].astype(np.float64)
            finite = np.isfinite(part)
            if not finite.all():
                nans = int(np.isnan(part).sum())
                nan += nans
                inf += int(len(part) - finite.sum()) - nans
                part = part[finite]
            if not len(part):
                continue
            low, high = min(low, float(part.min())), max(high, float(part.max()))
            total += float(np.dot(part, part))
            # Chan's update of mean and squared deviations: exact where summing squares would cancel.
            part_mean = float(part.mean())
            delta = part_mean - mean
            both = count + len(part)
            squares += float(np.square(part - part_mean).sum()) + delta * delta * count * len(part) / both
            mean += delta * len(part) / both
            count = both
        if advance is not None:
            advance(len(block))
    if not count:
        return Stats(None, None, None, None, None, nan, inf)
    return Stats(low, high, mean, math.sqrt(squares / count), math.sqrt(total), nan, inf)


def stats_of(
    checkpoint: Checkpoint,
    tensors: Sequence[NamedTensor],
    *,
    sources: Sources,
    threads: int = DEFAULT_THREADS,
    advance: Advance | None = None,
) -> list[Stats | None]:
    """The statistics of each of ``tensors``, in their order."""

    def work(reader: BlockReader, named: NamedTensor) -> Stats | None:
        return stats(reader, named.tensor, advance)

    def reader() -> BlockReader:
        return BlockReader(checkpoint.files, sources)

    return for_each(tensors, work, reader=reader, threads=threads, order=in_file_order(tensors))


def count_not_finite(reader: BlockReader, tensor: Tensor, advance: Advance | None = None) -> tuple[int, int]:
    """(NaN, Inf) elements of ``tensor``; (0, 0) for a dtype that has neither."""
    if tensor.dtype.numpy is None or tensor.dtype.kind not in ("float", "complex"):
        if advance is not None:
            advance(tensor.nbytes)
        return 0, 0
    nan = inf = 0
    small = tensor.dtype.itemsize == 1  # numpy's own tests do not know every 8-bit float
    for block in reader.blocks(tensor):
        values = _values(block, tensor.dtype)
        for begin in range(0, len(values), AT_ONCE):
            part = values[begin : begin + AT_ONCE]
            if small or tensor.dtype.name == "bfloat16":
                part = part.astype(np.float32)
            finite = np.isfinite(part)
            if not finite.all():
                nans = int(np.isnan(part).sum())
                nan += nans
                inf += int(len(part) - finite.sum()) - nans
        if advance is not None:
            advance(len(block))
    return nan, inf
