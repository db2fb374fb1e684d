"""Two tensors, element for element, streamed from wherever each lies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from fsdpckpt.ir.checkpoint import SourceFile
from fsdpckpt.ir.dtypes import numpy_dtype
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.blocks import BLOCK_BYTES, BlockReader, Bytes

__all__ = ["Located", "first_difference"]

Located: TypeAlias = tuple[Tensor, Sequence[SourceFile], Sources]
"""A tensor, the files its pieces index, and what opens them."""


def first_difference(source: Located, written: Located) -> int | None:
    """The row-major index of the first element where ``written`` is not ``source`` cast to its dtype; None when equal.

    Elements are compared as bytes, so NaN equals the same NaN and 0.0 differs from -0.0.
    """
    have, want = source[0].dtype, written[0].dtype
    done = 0
    stream = _Rest(_blocks(written))
    for block in _blocks(source):
        expected = block
        if have is not want:
            with np.errstate(all="ignore"):
                expected = block.view(numpy_dtype(have)).astype(numpy_dtype(want)).view(np.uint8)
        found = stream.take(len(expected))
        if not np.array_equal(found, expected):
            return done + int(np.flatnonzero(found != expected)[0]) // want.itemsize
        done += len(expected) // want.itemsize
    return None


def _blocks(located: Located) -> Iterator[Bytes]:
    tensor, files, sources = located
    return BlockReader(files, sources, BLOCK_BYTES).blocks(tensor)


class _Rest:
    """Hands out a stream of blocks in other lengths than they come."""

    def __init__(self, blocks: Iterator[Bytes]) -> None:
        self._blocks = blocks
        self._left: Bytes = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> Bytes:
        """The next ``nbytes``; fewer only at the end."""
        if len(self._left) < nbytes:
            parts = [self._left.copy()]
            missing = nbytes - len(self._left)
            while missing > 0 and (block := next(self._blocks, None)) is not None:
                parts.append(block.copy())
                missing -= len(block)
            self._left = np.concatenate(parts)
        taken, self._left = self._left[:nbytes], self._left[nbytes:]
        return taken
