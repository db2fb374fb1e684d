"""Which boxes of a parameter the shards of several model-parallel ranks hold, and where ZeRO's parts of a shard are in
the parameter.

A pipeline stage has whole parameters; a tied one is on several stages. A tensor-parallel rank has *pieces* of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod
from operator import mul
from typing import TypeAlias

from fsdpckpt.formats.torch.distributed import BoxInFile, Distributed
from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.ir.tensors import Box, Flattened, contiguous_stride
from fsdpckpt.layouts.flattened import flat_boxes
from fsdpckpt.readers.deepspeed.partitions import Slice

Shape: TypeAlias = tuple[int, ...]

MAP_INFO = "universal_checkpoint_info"
"""The key of a file of module states under which tensor-parallel ranks say how their parameters are cut."""


@dataclass(frozen=True, slots=True)
class Piece:
    """``shard``: a box of a rank's shard; ``whole``: the one of the parameter that it is."""

    shard: Box
    whole: Box


@dataclass(frozen=True, slots=True)
class Shard:
    """What one model-parallel rank holds of a parameter: a tensor of ``shape``, made of ``pieces``."""

    shape: Shape
    pieces: tuple[Piece, ...]

    @classmethod
    def of_whole(cls, shape: Shape) -> Shard:
        """A shard that is the parameter itself."""
        return cls(shape, (Piece(Box.whole(shape), Box.whole(shape)),))


@dataclass(frozen=True)
class Shards:
    """A parameter of ``shape``, by model-parallel rank."""

    shape: Shape
    by_rank: Mapping[int, Shard]

    @cached_property
    def replicated(self) -> frozenset[Box]:
        """The boxes that several ranks hold."""
        counts: dict[Box, int] = {}
        for shard in self.by_rank.values():
            for piece in shard.pieces:
                counts[piece.whole] = counts.get(piece.whole, 0) + 1
        return frozenset(box for box, count in counts.items() if count > 1)


# The parts that ZeRO makes of shards


@dataclass(frozen=True)
class RankGrid:
    """The ranks of a job: ``data`` ranks, among which ZeRO cuts the flat tensors of each of ``model`` model-parallel
    ranks. They are numbered as AutoTP places them: the model-parallel ranks of one data rank are neighbours.
    """

    data: int
    model: int = 1
    _holders: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    def number(self, data_rank: int, model_rank: int) -> int:
        return data_rank * self.model + model_rank

    @cached_property
    def world(self) -> tuple[int, ...]:
        """Every rank."""
        return tuple(range(self.data * self.model))

    def holders(self, model_ranks: tuple[int, ...]) -> tuple[int, ...]:
        """All ranks that hold a parameter of these model-parallel ranks; one tuple for all parameters."""
        if model_ranks not in self._holders:
            ranks = (self.number(data, model) for data in range(self.data) for model in model_ranks)
            self._holders[model_ranks] = tuple(sorted(ranks))
        return self._holders[model_ranks]


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
        return _distributed("ZeRO partition", self.grid, rank, shards, stored, boxes)

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


def whole_shard(grid: RankGrid, rank: int, model_rank: int, shards: Shards, stored: StoredTensor) -> Distributed:
    """What ``rank`` holds of a parameter of which it has all of its shard, in ``stored``."""
    boxes = []
    for piece in shards.by_rank[model_rank].pieces:
        offset = stored.offset + sum(map(mul, piece.shard.offsets, stored.stride)) * stored.dtype.itemsize
        boxes.append(BoxInFile(piece.whole.offsets, piece.whole.sizes, offset, stored.stride))
    return _distributed("shard", grid, rank, shards, stored, boxes)


def _distributed(
    form: str, grid: RankGrid, rank: int, shards: Shards, stored: StoredTensor, boxes: Sequence[BoxInFile]
) -> Distributed:
    holders = grid.holders(tuple(shards.by_rank))
    return Distributed(form, stored.dtype, shards.shape, Flattened(), rank, holders, grid.world, tuple(boxes))


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
