"""Puts back into their shape the tensors that Megatron-core 0.7 to 0.15 saved as slices of flattened local shards.

The distributed optimizer gives each rank a range of elements of a parameter's local shard (``flattened_range``). Local
shards are all of one shape and form a grid; the tensor is saved with the shape of that grid and one dimension more, for
the elements of a flattened shard, which is what the ranges cut. ``mcore_data`` in ``.metadata`` has the true shape
(``megatron/core/dist_checkpointing/strategies/torch.py``, ``sharded_tensor_to_torch_sharded_tensor``).
"""

from __future__ import annotations

from itertools import accumulate
from math import prod

import numpy as np

from fsdpckpt.errors import damaged
from fsdpckpt.ir.tensors import Chunks, contiguous_strides
from fsdpckpt.layouts.flattened import flat_boxes
from fsdpckpt.readers.chunks import ChunkedTensor


def in_shape(tensor: ChunkedTensor, shape: tuple[int, ...], *, file: str) -> ChunkedTensor:
    """``tensor``, whose chunks are ranges of flattened local shards, with boxes of a tensor of ``shape``.

    Raises SourceCorruptError where the grid of shards does not make up that shape.
    """
    grid, elements = tensor.shape[:-1], tensor.shape[-1]
    fits = len(grid) == len(shape) and all(
        cells > 0 and extent % cells == 0 for extent, cells in zip(shape, grid, strict=True)
    )
    local = tuple(extent // cells for extent, cells in zip(shape, grid, strict=True)) if fits else ()
    chunks = tensor.chunks
    if not fits or prod(local) != elements or (chunks.size[chunks.size[:, -1] > 0, :-1] != 1).any():
        raise damaged(
            file,
            f"the slices of {tensor.key} do not make up its shape",
            f"a grid of equal shards of {list(shape)}",
            f"shape {list(tensor.shape)}",
            key=tensor.key,
            why="the metadata was damaged or edited, or a version of Megatron-core that is not known wrote it",
        )
    ranges = zip(chunks.start[:, -1].tolist(), chunks.size[:, -1].tolist(), strict=True)
    boxes = [flat_boxes(local, begin, count) for begin, count in ranges]
    row = np.repeat(np.arange(len(boxes)), list(map(len, boxes)))
    start = np.array([box.offsets for each in boxes for box in each], np.int64).reshape(len(row), len(shape))
    size = np.array([box.sizes for each in boxes for box in each], np.int64).reshape(len(row), len(shape))
    before = np.array([at for each in boxes for at in list(accumulate((box.numel for box in each), initial=0))[:-1]])
    step = chunks.stride[row, -1]
    offset = chunks.offset[row]
    offset = np.where(offset < 0, offset, offset + before.astype(np.int64) * step * tensor.dtype.itemsize)
    start += chunks.start[row, :-1] * np.array(local, np.int64)
    strides = contiguous_strides(size) * step[:, None]
    # An item holds a range, in another shape than its boxes: no target may point to it as the item of one.
    item = chunks.item[row] if chunks.item is not None and (offset < 0).any() else None
    boxed = Chunks(chunks.rank[row], chunks.file[row], offset, start, size, strides, item)
    return tensor._replace(shape=shape, chunks=boxed)
