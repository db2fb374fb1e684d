"""Makes Tensors of chunks in columns, and decides from the chunks alone whether FSDP shards a tensor, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.tensors import Chunks, Tensor


class ChunkedTensor(NamedTuple):
    key: str
    dtype: DType
    shape: tuple[int, ...]
    chunks: Chunks


def build_tensors(tensors: Sequence[ChunkedTensor], *, world_size: int) -> dict[str, Tensor]:
    """A Tensor for each; ``world_size`` is how many ranks wrote them."""
    known: dict[tuple[tuple[int, ...], int], list[int] | None] = {}  # tensors that are cut alike share their sizes
    cuts = []
    for tensor in tensors:
        alike = (tensor.shape, id(tensor.chunks.size))
        if alike not in known:
            known[alike] = _cut_dimensions(tensor)
        cuts.append(known[alike])
    several = any(cut is not None for cut in cuts) and world_size > 1
    built: dict[str, Tensor] = {}
    for (key, dtype, shape, chunks), cut in zip(tensors, cuts, strict=True):
        sharded = None if shape else False
        if shape and cut is not None:
            sharded = True
        elif shape and several and shape[0] >= 2:  # one row is one chunk either way under FSDP1: it says nothing
            sharded = False
        placement = "[" + ", ".join(f"Shard({dim})" for dim in cut or [0]) + "]" if sharded else "whole"
        built[key] = Tensor(dtype, shape, chunks, sharded, placement)
    return built


def _cut_dimensions(tensor: ChunkedTensor) -> list[int] | None:
    """The dimensions along which the chunks divide the tensor; None when each chunk is all of it."""
    size, shape = tensor.chunks.size, tensor.shape
    if len(size) == 1 and tuple(size[0].tolist()) == shape:
        return None
    differs: npt.NDArray[np.bool_] = np.not_equal(size, np.array(shape, np.int64))
    if not differs.any():
        return None
    filled: npt.NDArray[np.bool_] = np.all(size > 0, axis=1, keepdims=True)
    differs[:, 1:] &= filled  # an empty chunk only says that rows are cut
    cut: list[int] = np.flatnonzero(differs.any(axis=0)).tolist()
    return cut
