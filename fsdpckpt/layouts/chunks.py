"""How writers cut a tensor over ranks: boxes by ``torch.chunk``'s rule, or as the source had them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple, TypeAlias

from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.layouts.sharded import local_box

__all__ = ["Box", "RankBoxes", "chunk_boxes", "rank_box", "source_boxes", "whole_box"]


class Box(NamedTuple):
    """``size`` elements a dimension from ``start`` on, ``numel`` in all."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    numel: int


RankBoxes: TypeAlias = Sequence[tuple[int, Box]]
"""Who stores which boxes of one tensor."""


def whole_box(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape, prod(shape))


@lru_cache(maxsize=65536)
def rank_box(shape: tuple[int, ...], world_size: int, rank: int) -> Box:
    """What rank ``rank`` holds of a tensor cut along dimension 0 by ``torch.chunk``'s rule.

    ceil(rows / world_size) rows a rank, the last ones fewer or none; an empty shard begins at the end, as
    ``torch.distributed.tensor`` places it.
    """
    start, size = local_box(shape, rank, world_size)
    return Box(start, size, prod(size))


@lru_cache(maxsize=4096)
def chunk_boxes(shape: tuple[int, ...], world_size: int) -> RankBoxes:
    """The boxes ``dcp.save`` records for such a tensor: one for each rank with rows, one empty for all the others."""
    boxes = []
    for rank in range(world_size):
        box = rank_box(shape, world_size, rank)
        boxes.append((rank, box))
        if not box.size[0]:
            break
    return tuple(boxes)


def source_boxes(tensor: Tensor) -> RankBoxes:
    """Every different box the source holds; empty ones only when there is nothing else."""
    chunks = tensor.chunks
    seen: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for rank, start, size in zip(chunks.rank.tolist(), chunks.start.tolist(), chunks.size.tolist(), strict=True):
        if 0 not in size:
            seen.setdefault((tuple(start), tuple(size)), rank)
    if not seen:
        return [(0, whole_box(tensor.shape))]
    return [(rank, Box(start, size, prod(size))) for (start, size), rank in seen.items()]
