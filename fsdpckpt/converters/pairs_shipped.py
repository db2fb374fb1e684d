"""Pairs of tensors as plain columns, so that one worker finds them and others compare them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias, cast

import numpy as np

from fsdpckpt.converters.check import Pair
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.tensors import Chunks, Int64Array, Tensor

__all__ = ["packed_pairs", "unpacked_pairs"]

Packed: TypeAlias = "list[object]"


def packed_pairs(pairs: Sequence[Pair]) -> Packed:
    """``pairs`` as text and arrays."""
    return [
        [pair.name for pair in pairs],
        _packed([pair.source for pair in pairs]),
        _packed([pair.written for pair in pairs]),
    ]


def unpacked_pairs(value: object) -> list[Pair]:
    """The pairs that ``packed_pairs`` made ``value`` of; of their tensors what is needed to read them."""
    names, sources, written = cast("tuple[list[str], Packed, Packed]", value)
    return [Pair(*each) for each in zip(names, _unpacked(sources), _unpacked(written), strict=True)]


def _packed(tensors: Sequence[Tensor]) -> Packed:
    chunks = [tensor.chunks for tensor in tensors]
    return [
        [tensor.dtype.name for tensor in tensors],
        _joined(np.asarray(tensor.shape, np.int64) for tensor in tensors),
        np.asarray([(tensor.ndim, len(tensor.chunks)) for tensor in tensors], np.int64).reshape(-1, 2),
        _joined(np.stack([each.rank, each.file, each.offset]) for each in chunks),
        _joined(np.stack([each.start, each.size, each.stride]) for each in chunks),
    ]


def _joined(arrays: Iterable[Int64Array]) -> Int64Array:
    found = [array.ravel() for array in arrays]
    return np.concatenate(found).astype(np.int64) if found else np.zeros(0, np.int64)


def _unpacked(value: Packed) -> list[Tensor]:
    dtypes, shapes, counts, columns, boxes = cast(
        "tuple[list[str], Int64Array, Int64Array, Int64Array, Int64Array]", value
    )
    found = []
    shape_at = column_at = box_at = 0
    for dtype, (ndim, count) in zip(dtypes, counts.tolist(), strict=True):
        shape = tuple(shapes[shape_at : shape_at + ndim].tolist())
        rank, file, offset = columns[column_at : column_at + 3 * count].reshape(3, count)
        start, size, stride = boxes[box_at : box_at + 3 * count * ndim].reshape(3, count, ndim)
        found.append(Tensor(DTYPES[dtype], shape, Chunks(rank, file, offset, start, size, stride)))
        shape_at, column_at, box_at = shape_at + ndim, column_at + 3 * count, box_at + 3 * count * ndim
    return found
