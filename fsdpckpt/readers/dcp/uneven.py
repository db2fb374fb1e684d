"""Where the chunks of an FSDP2 x tensor-parallel tensor really lie, when the metadata says it wrongly.

When both meshes shard dimension 0 and the rows do not divide evenly, ``compute_local_shape_and_global_offset``
(``torch/distributed/tensor/_utils.py``, seen up to torch 2.14) computes other boxes than the ranks hold, and DCP
stores the computed ones. The items themselves carry their true number of rows. The true rule: ``torch.chunk`` of the
rows over the tensor-parallel ranks, then ``torch.chunk`` of that chunk over the FSDP ranks; rank = dp * TP + tp.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

__all__ = ["Mesh", "StoredRows", "fitting_meshes", "true_starts"]


class Mesh(NamedTuple):
    """``data`` FSDP ranks times ``tensor`` tensor-parallel ranks; the latter are neighbours."""

    data: int
    tensor: int


class StoredRows(NamedTuple):
    """One item: who wrote it, how many rows it really has, and what the metadata says."""

    rank: int
    rows: int
    declared_start: int
    declared_rows: int


def _chunk(rows: int, parts: int, index: int) -> tuple[int, int]:
    """First row and number of rows of part ``index`` under ``torch.chunk``."""
    size = -(-rows // parts)
    begin = min(index * size, rows)
    return begin, min(begin + size, rows) - begin


def _true_box(rows: int, mesh: Mesh, rank: int) -> tuple[int, int]:
    data, tensor = divmod(rank, mesh.tensor)
    begin, extent = _chunk(rows, mesh.tensor, tensor)
    inner, count = _chunk(extent, mesh.data, data)
    return begin + inner, count


@lru_cache(maxsize=8)
def _meshes(world_size: int) -> tuple[Mesh, ...]:
    sizes = (tensor for tensor in range(2, world_size // 2 + 1) if world_size % tensor == 0)
    return tuple(Mesh(world_size // tensor, tensor) for tensor in sizes)


def fitting_meshes(rows: int, items: Sequence[StoredRows], *, world_size: int) -> set[Mesh]:
    """Every mesh under which each item has exactly its rank's rows, and all rows are there once."""
    return {mesh for mesh in _meshes(world_size) if _fits(rows, items, mesh)}


def _fits(rows: int, items: Sequence[StoredRows], mesh: Mesh) -> bool:
    total = 0
    for item in items:
        start, count = _true_box(rows, mesh, item.rank)
        if count != item.rows:
            return False
        # Where the declared size is right, torch's declared place is right too: no combination was seen otherwise.
        if count and item.declared_rows == count and item.declared_start != start:
            return False
        total += count
    return total == rows and len({item.rank for item in items}) == len(items)


def true_starts(rows: int, items: Sequence[StoredRows], meshes: Iterable[Mesh]) -> list[int] | None:
    """The first row of each item, when all ``meshes`` agree on it; None when they do not or there is none."""
    answers = {tuple(_true_box(rows, mesh, item.rank)[0] for item in items) for mesh in meshes}
    return list(answers.pop()) if len(answers) == 1 else None
