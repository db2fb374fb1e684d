"""Joins the shards that model-parallel ranks hold of parameters, which are plain tensors in their files.

A pipeline stage has whole parameters; a tied one is on several stages. A tensor-parallel rank has *pieces* of them:
boxes, which need not follow each other in the parameter, as in fused weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import mul
from typing import TypeAlias

from fsdpckpt.formats.torch.distributed import BoxInFile, Distributed
from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.ir.placements import Flattened
from fsdpckpt.ir.tensors import Box

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """``shard``: a box of a rank's shard; ``whole``: the one of the parameter that it is."""

    shard: Box
    whole: Box


@dataclass(frozen=True, slots=True)
class ModelShard:
    """What one model-parallel rank holds of a parameter: a tensor of ``shape``, made of ``pieces``."""

    shape: Shape
    pieces: tuple[Piece, ...]

    @classmethod
    def of_whole(cls, shape: Shape) -> ModelShard:
        """A shard that is the parameter itself."""
        return cls(shape, (Piece(Box.whole(shape), Box.whole(shape)),))


@dataclass(frozen=True)
class Shards:
    """A parameter of ``shape``, by model-parallel rank."""

    shape: Shape
    by_rank: Mapping[int, ModelShard]

    @cached_property
    def replicated(self) -> frozenset[Box]:
        """The boxes that several ranks hold."""
        counts: dict[Box, int] = {}
        for shard in self.by_rank.values():
            for piece in shard.pieces:
                counts[piece.whole] = counts.get(piece.whole, 0) + 1
        return frozenset(box for box, count in counts.items() if count > 1)


def shards_of_parts(local: Sequence[Shape], dim: int, widths: Sequence[Sequence[int]]) -> Shards:
    """A tensor of parts that follow each other along ``dim``, each divided among the ranks.

    ``local``: the shape of each rank's shard; ``widths``: of each part on the ranks.
    """
    first = local[0]
    shape = (*first[:dim], sum(map(sum, widths)), *first[dim + 1 :])

    def box(start: int, width: int) -> Box:
        sizes = (*first[:dim], width, *first[dim + 1 :])
        return Box(tuple(start if axis == dim else 0 for axis in range(len(first))), sizes)

    by_rank = {}
    for rank, own in enumerate(local):
        pieces, in_shard, before = [], 0, 0
        for of_part in widths:
            width, start = of_part[rank], before + sum(of_part[:rank])
            pieces.append(Piece(box(in_shard, width), box(start, width)))
            in_shard, before = in_shard + width, before + sum(of_part)
        by_rank[rank] = ModelShard(own, tuple(piece for piece in pieces if piece.shard.numel))
    return Shards(shape, by_rank)


@dataclass(frozen=True)
class RankGrid:
    """The ranks of a job: ``data`` ranks, among which ZeRO cuts the flat tensors of each of ``model`` model-parallel
    ranks. They are numbered as tensor parallelism places them: the model-parallel ranks of one data rank follow each
    other.
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


def whole_shard(grid: RankGrid, rank: int, model_rank: int, shards: Shards, stored: StoredTensor) -> Distributed:
    """What ``rank`` holds of a parameter of which it has all of its shard, in ``stored``."""
    boxes = []
    for piece in shards.by_rank[model_rank].pieces:
        offset = stored.offset + sum(map(mul, piece.shard.offsets, stored.stride)) * stored.dtype.itemsize
        boxes.append(BoxInFile(piece.whole.offsets, piece.whole.sizes, offset, stored.stride))
    return shard_of("shard", grid, rank, shards, stored, boxes)


def shard_of(
    form: str, grid: RankGrid, rank: int, shards: Shards, stored: StoredTensor, boxes: Sequence[BoxInFile]
) -> Distributed:
    holders = grid.holders(tuple(shards.by_rank))
    return Distributed(form, stored.dtype, shards.shape, Flattened(), rank, holders, grid.world, tuple(boxes))
