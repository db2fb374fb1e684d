"""Tensors that stand for more elements than are stored: expanded ones, sliding windows over one storage.

``torch.save`` keeps strides: a file of 1 KB may hold a tensor of a terabyte that is one number, 2**40 times. What its
values are costs what is stored; only what needs every element in order (a SHA-256) costs what it stands for.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.verify.blocks import rows_to_read

_FREE_BYTES = 1 << 30  # what may be read of any tensor ...
_PER_STORED_BYTE = 1024  # ... and for each byte that is stored


def collapsed(*tensors: Tensor) -> tuple[list[Tensor], int]:
    """``tensors``, of one shape, without the dimensions along which each of them repeats one value (a stride of 0), and
    how often an element of the result stands in them. Unchanged if one of them is in several chunks.
    """
    shape = tensors[0].shape
    rows = [row for tensor in tensors if (row := _whole_row(tensor)) is not None]
    if not shape or len(rows) < len(tensors):
        return list(tensors), 1
    strides = np.array([tensor.chunks.stride[row] for tensor, row in zip(tensors, rows, strict=True)])
    repeated = [bool(alike) and length > 1 for alike, length in zip((strides == 0).all(axis=0), shape, strict=True)]
    if not any(repeated):
        return list(tensors), 1
    kept = tuple(1 if repeats else length for length, repeats in zip(shape, repeated, strict=True))
    results = [_with_shape(tensor, row, kept) for tensor, row in zip(tensors, rows, strict=True)]
    return results, prod(length for length, repeats in zip(shape, repeated, strict=True) if repeats)


def _whole_row(tensor: Tensor) -> int | None:
    """The row of the one chunk that is all of ``tensor``."""
    rows = rows_to_read(tensor.chunks)
    return rows[0] if len(rows) == 1 and tuple(tensor.chunks.size[rows[0]].tolist()) == tensor.shape else None


def _with_shape(tensor: Tensor, row: int, shape: tuple[int, ...]) -> Tensor:
    """The elements of the chunk in ``row``, which is all of ``tensor``, from the first on in each dimension."""
    chunks = tensor.chunks.take(np.array([row], np.intp))
    return replace(tensor, shape=shape, chunks=chunks.with_boxes(size=np.array([shape], np.int64)))


def stored_nbytes(tensor: Tensor) -> int:
    """How many bytes of files the elements of ``tensor`` lie in, at most its own."""
    chunks = tensor.chunks
    total = 0
    for row in rows_to_read(chunks):
        size, stride = chunks.size[row].tolist(), chunks.stride[row].tolist()
        reach = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        total += min(reach, prod(size)) * tensor.dtype.itemsize
    return total


def is_endless(tensor: Tensor) -> bool:
    """Whether ``tensor`` stands for so many more bytes than are stored that none of its elements are read in order."""
    return tensor.nbytes > _FREE_BYTES and tensor.nbytes > _PER_STORED_BYTE * stored_nbytes(tensor)


def extent(tensor: Tensor) -> Tensor:
    """The stored bytes that the elements of ``tensor``, which is one chunk, lie in: one dimension, in their order."""
    row = rows_to_read(tensor.chunks)[0]
    chunks = tensor.chunks
    size, stride = chunks.size[row].tolist(), chunks.stride[row].tolist()
    length = 1 + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
    return replace(
        tensor,
        shape=(length,),
        chunks=Chunks.whole(
            rank=int(chunks.rank[row]), file=int(chunks.file[row]), offset=int(chunks.offset[row]), shape=(length,)
        ),
    )


def nbytes_to_read(tensor: Tensor) -> int:
    """How many bytes are read to look at every value of ``tensor``: each that is repeated, once."""
    return collapsed(tensor)[0][0].nbytes
