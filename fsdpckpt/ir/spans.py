"""Where the bytes of tensors lie in files, and how many bytes many ranges cover together."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fsdpckpt.ir.tensors import Int64Array, Tensor, ranges_of

_FILE_BITS = 42  # files of less than 2**42 bytes: file and offset fit into one number


def covered_bytes(file: Int64Array, begin: Int64Array, end: Int64Array) -> dict[int, int]:
    """By file, how many of its bytes the ranges [begin, end) cover; bytes in several ranges count once."""
    if not len(file):
        return {}
    order = np.lexsort((begin, file))
    base = file[order] << np.int64(_FILE_BITS)
    begins, ends = base + begin[order], base + end[order].clip(max=(1 << _FILE_BITS) - 1)
    # In file order a range adds what lies behind the ends of all ranges before it.
    reached = np.maximum.accumulate(np.concatenate([[-1], ends[:-1]]))
    added = (ends - np.maximum(begins, reached)).clip(min=0)
    files, first = np.unique(file[order], return_index=True)
    return dict(zip(files.tolist(), np.add.reduceat(added, first).tolist(), strict=True))


def chunk_ends(tensor: Tensor) -> Int64Array:
    """The offset behind the last byte of each chunk, in its file."""
    chunks = tensor.chunks
    ends: Int64Array = (
        chunks.offset + (((chunks.size - 1).clip(0) * chunks.stride).sum(axis=1) + 1) * tensor.dtype.itemsize
    )
    return ends


def tensor_bytes_by_file(tensors: Iterable[Tensor]) -> dict[int, int] | None:
    """By file, how many of its bytes belong to ``tensors``; None if some of them have not been located in a file."""
    file, begin, end = ranges_of(list(tensors))
    filled = end > begin
    if (begin[filled] < 0).any():
        return None
    return covered_bytes(file[filled], begin[filled], end[filled])
