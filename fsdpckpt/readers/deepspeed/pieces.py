"""Computes where the parts that ZeRO makes of the shards of model-parallel ranks are in the whole parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from operator import mul

from fsdpckpt.formats.torch.distributed import BoxInFile, Distributed
from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.ir.tensors import Box, contiguous_stride
from fsdpckpt.layouts.flattened import flat_boxes
from fsdpckpt.readers.deepspeed.partitions import Slice
from fsdpckpt.readers.model_shards import Piece, RankGrid, Shape, Shards, shard_of

MAP_INFO = "universal_checkpoint_info"
"""The key of a file of module states under which tensor-parallel ranks say how their parameters are cut."""


@dataclass(slots=True)
class Partitions:
    """Joins the parts that ZeRO's data-parallel ranks hold of the shards of ``parameters``.

    ZeRO cuts the flat tensor of every model-parallel rank by itself, so that replicas of one piece may be cut
    differently. ``cuts``: for such pieces, by parameter, all elements at which any rank's part begins or ends: parts
    are divided there, and replicas are equal boxes again.
    """

    grid: RankGrid
    parameters: Mapping[str, Shards]
    cuts: dict[tuple[str, Box], set[int]] = field(default_factory=dict)

    def add(self, model_rank: int, slices: Iterable[Slice]) -> None:
        """Take note of where the parts of one rank begin and end. All ranks' come before ``part``."""
        for part in slices:
            shards = self.parameters[part.name]
            shard = shards.by_rank[model_rank]
            for piece in shard.pieces if shards.replicated else ():
                if piece.whole in shards.replicated:
                    self.cuts.setdefault((part.name, piece.whole), set()).update(_range_of(piece, shard.shape, part))

    def part(self, rank: int, model_rank: int, name: str, stored: StoredTensor, where: Slice | None) -> Distributed:
        """What ``rank`` holds of the parameter ``name`` in the flat tensor ``stored``; None: nothing."""
        shards = self.parameters[name]
        boxes = [] if where is None else self._boxes(shards, model_rank, stored, where)
        return shard_of("ZeRO partition", self.grid, rank, shards, stored, boxes)

    def _boxes(self, shards: Shards, model_rank: int, stored: StoredTensor, where: Slice) -> list[BoxInFile]:
        (step,) = stored.stride
        shard = shards.by_rank[model_rank]
        rows = contiguous_stride(shard.shape)
        stride = tuple(extent * step for extent in rows)
        boxes: list[BoxInFile] = []
        for piece in shard.pieces:
            low, high = _range_of(piece, shard.shape, where)
            inside = [cut for cut in self.cuts.get((where.name, piece.whole), ()) if low < cut < high]
            edges = [low, *sorted(inside), high]
            for begin, end in pairwise(edges):
                for box in flat_boxes(piece.whole.sizes, begin, end - begin):
                    in_shard = _moved(piece.shard.offsets, box.offsets)
                    element = sum(map(mul, in_shard, rows)) - where.begin + where.at
                    offset = stored.offset + element * step * stored.dtype.itemsize
                    boxes.append(BoxInFile(_moved(piece.whole.offsets, box.offsets), box.sizes, offset, stride))
        return boxes


def _moved(start: Shape, by: Shape) -> Shape:
    return tuple(at + more for at, more in zip(start, by, strict=True))


def _range_of(piece: Piece, shape: Shape, part: Slice) -> tuple[int, int]:
    """Which elements of ``piece``, counted row by row, are in ``part`` of the shard of ``shape``. They follow each
    other: the order of a box's elements is that of the tensor around it.
    """
    ends = (part.begin, part.begin + part.count)
    first, last = (_elements_before(piece.shard, shape, end) for end in ends)
    return first, last


def _elements_before(box: Box, shape: Shape, element: int) -> int:
    """How many elements of ``box`` are before the one with the number ``element`` in a tensor of ``shape``."""
    if element >= prod(shape):
        return box.numel
    count, inner = 0, box.numel
    for start, size, step in zip(box.offsets, box.sizes, contiguous_stride(shape), strict=True):
        if not size:
            return 0
        inner //= size
        at, element = divmod(element, step)
        count += min(max(at - start, 0), size) * inner
        if not start <= at < start + size:
            break
    return count
