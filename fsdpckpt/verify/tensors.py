"""Comparison of two tensors element by element, streamed in lockstep through both readers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fsdpckpt.ir.dtypes import DType, numpy_dtype
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.verify.blocks import BlockReader, Bytes
from fsdpckpt.verify.parallel import Advance

__all__ = ["Tolerance", "compare_tensors", "lockstep"]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Equal when |a - b| <= atol + rtol * |b|, as ``torch.allclose``; NaN equals NaN."""

    rtol: float = 0.0
    atol: float = 0.0


@dataclass(slots=True)
class _Tally:
    """What differs so far. ``first``: a row-major index. ``largest``: the greatest |a - b|, None if no numbers."""

    elements: int = 0
    first: int = -1
    largest: float | None = None


def compare_tensors(
    reader_a: BlockReader,
    a: Tensor,
    reader_b: BlockReader,
    b: Tensor,
    tolerance: Tolerance | None,
    advance: Advance | None = None,
) -> str:
    """How they differ, "" if not. Shapes and dtypes have to be the same; ``tolerance`` None compares bytes."""
    if a.shape != b.shape or a.dtype is not b.dtype:
        if advance is not None:
            advance(a.nbytes)
        shapes = f"shape {list(a.shape)} vs {list(b.shape)}" if a.shape != b.shape else ""
        dtypes = f"dtype {a.dtype.name} vs {b.dtype.name}" if a.dtype is not b.dtype else ""
        return ", ".join(filter(None, (shapes, dtypes)))
    tally = _Tally()
    done = 0
    for one, other in lockstep(reader_a.blocks(a), reader_b.blocks(b)):
        if not np.array_equal(one, other):
            _count(one, other, a.dtype, tolerance, done, tally)
        done += len(one) // a.dtype.itemsize
        if advance is not None:
            advance(len(one))
    if not tally.elements:
        return ""
    index = [int(at) for at in np.unravel_index(tally.first, a.shape)] if a.shape else []
    text = f"{tally.elements} of {a.numel} elements differ, first at {index}"
    return text if tally.largest is None else f"{text}, by up to {tally.largest:.3g}"


def _count(one: Bytes, other: Bytes, dtype: DType, tolerance: Tolerance | None, done: int, tally: _Tally) -> None:
    raw_a, raw_b = one.reshape(-1, dtype.itemsize), other.reshape(-1, dtype.itemsize)
    unequal: npt.NDArray[np.bool_] = (raw_a != raw_b).any(axis=1)
    where = np.flatnonzero(unequal)
    if dtype.numpy is not None:
        wide = np.complex128 if dtype.kind == "complex" else np.float64
        left = np.ascontiguousarray(raw_a[where]).view(numpy_dtype(dtype)).reshape(-1).astype(wide)
        right = np.ascontiguousarray(raw_b[where]).view(numpy_dtype(dtype)).reshape(-1).astype(wide)
        with np.errstate(all="ignore"):
            apart = np.abs(left - right)
            if tolerance is not None:
                close = np.isfinite(apart) & (apart <= tolerance.atol + tolerance.rtol * np.abs(right))
                close |= (left == right) | (np.isnan(left) & np.isnan(right))
                where, apart = where[~close], apart[~close]
        numbers = apart[~np.isnan(apart)]
        if len(numbers):
            tally.largest = max(tally.largest or 0.0, float(numbers.max()))
    if len(where):
        tally.elements += len(where)
        if tally.first < 0:
            tally.first = done + int(where[0])


def lockstep(left: Iterator[Bytes], right: Iterator[Bytes]) -> Iterator[tuple[Bytes, Bytes]]:
    """Both streams in chunks of equal length; they end together, as tensors of one shape and dtype do."""
    one = other = np.empty(0, np.uint8)
    while True:
        if not len(one):
            one = next(left, one[:0])
        if not len(other):
            other = next(right, other[:0])
        count = min(len(one), len(other))
        if count == 0:
            return
        yield one[:count], other[:count]
        one, other = one[count:], other[count:]
