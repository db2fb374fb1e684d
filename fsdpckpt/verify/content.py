"""Two tensors, element for element, streamed from wherever each lies."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from fsdpckpt.ir.checkpoint import SourceFile
from fsdpckpt.ir.dtypes import DType, cast, numpy_dtype
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.blocks import BLOCK_BYTES, BlockReader, Bytes
from fsdpckpt.verify.tensors import lockstep

__all__ = ["Located", "first_difference"]

_BUFFERS = 8  # a block, what it is gathered from, and a block cast to a wider dtype, on either side
_LEAST = 16 * 1024  # bytes: the widest element there is fits many times

Located: TypeAlias = tuple[Tensor, Sequence[SourceFile], Sources]
"""A tensor, the files its chunks index, and what opens them."""


def first_difference(
    source: Located, written: Located, total: hashlib._Hash | None = None, *, max_memory: int | None = None
) -> int | None:
    """The row-major index of the first element where ``written`` is not ``source`` cast to its dtype; None when equal.

    Elements are compared as bytes, so NaN equals the same NaN and 0.0 differs from -0.0. ``total`` is fed with what
    ``written`` holds, in the same pass: when all is equal it has the tensor's digest (``verify.digests``). Of
    ``max_memory`` bytes all buffers together take no more.
    """
    have, want = source[0].dtype, written[0].dtype
    done = 0
    limit = BLOCK_BYTES if max_memory is None else min(max(max_memory // _BUFFERS, _LEAST), BLOCK_BYTES)
    for expected, found in lockstep(_cast(_blocks(source, limit), have, want), _blocks(written, limit)):
        if not np.array_equal(found, expected):
            return (done + int(np.flatnonzero(found != expected)[0])) // want.itemsize
        if total is not None:
            total.update(found.data)
        done += len(found)
    return None


def _blocks(located: Located, limit: int) -> Iterator[Bytes]:
    tensor, files, sources = located
    return BlockReader(files, sources, limit).blocks(tensor)


def _cast(blocks: Iterator[Bytes], have: DType, want: DType) -> Iterator[Bytes]:
    if have is want:
        return blocks
    return (cast(block.view(numpy_dtype(have)), numpy_dtype(want)).view(np.uint8) for block in blocks)
