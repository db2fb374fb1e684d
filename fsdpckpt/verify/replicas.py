"""Chunks that hold the same box must hold the same bytes: parameters of HYBRID_SHARD, buffers, ``step``."""

from __future__ import annotations

import numpy as np

from fsdpckpt.ir.checkpoint import NamedTensor, Problem
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.verify.blocks import BlockReader
from fsdpckpt.verify.parallel import Advance
from fsdpckpt.verify.tensors import lockstep

__all__ = ["check_replicas", "replica_bytes", "replica_sets"]


def replica_sets(tensor: Tensor) -> list[list[int]]:
    """Rows of ``tensor.chunks`` that hold the same box in different places, two or more each, lowest rank first."""
    chunks = tensor.chunks
    if len(chunks.file) < 2:
        return []
    sets: dict[tuple[int, ...], dict[tuple[int, ...], int]] = {}
    ranks = chunks.rank.tolist()
    columns = (chunks.start, chunks.size, chunks.file, chunks.offset, chunks.stride)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for row, (start, size, file, offset, stride) in enumerate(rows):
        if 0 not in size:
            sets.setdefault((*start, *size), {}).setdefault((file, offset, *stride), row)
    return [sorted(places.values(), key=lambda row: ranks[row]) for places in sets.values() if len(places) > 1]


def replica_bytes(tensor: Tensor, sets: list[list[int]]) -> int:
    """How many bytes comparing ``sets`` reads, counting each pair once."""
    sizes = tensor.chunks.size
    return sum((len(rows) - 1) * int(np.prod(sizes[rows[0]])) for rows in sets) * tensor.dtype.itemsize


def check_replicas(
    readers: tuple[BlockReader, BlockReader],
    named: NamedTensor,
    sets: list[list[int]],
    advance: Advance | None = None,
) -> list[Problem]:
    """A problem for each set of replicas that are not all equal, naming the ranks that differ from the lowest."""
    found: list[Problem] = []
    tensor = named.tensor
    ranks = tensor.chunks.rank.tolist()
    for rows in sets:
        differing = [row for row in rows[1:] if not _equal(readers, tensor, rows[0], row, advance)]
        if differing:
            others = ", ".join(str(ranks[row]) for row in differing)
            found.append(
                Problem(
                    "replica",
                    f"{named.section} {named.key}: the copies of rank {ranks[rows[0]]} and of rank {others} differ, "
                    "and they should be replicas",
                    key=named.key,
                    rank=ranks[differing[0]],
                    section=named.section,
                )
            )
    return found


def _equal(
    readers: tuple[BlockReader, BlockReader], tensor: Tensor, one: int, other: int, advance: Advance | None
) -> bool:
    for left, right in lockstep(readers[0].chunk(tensor, one), readers[1].chunk(tensor, other)):
        if advance is not None:
            advance(len(left))
        if not np.array_equal(left, right):
            return False
    return True
