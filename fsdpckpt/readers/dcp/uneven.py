"""Places the rows of tensors for which ``.metadata`` declares wrong chunks.

When FSDP2 and tensor parallelism both shard dimension 0 and the rows do not divide evenly,
``compute_local_shape_and_global_offset`` (``torch/distributed/tensor/_utils.py``, seen up to torch 2.14) computes other
boxes than the ranks hold, and DCP stores the computed ones. The items carry their true number of rows, and the ranks
that wrote them say where these lie: as ``layouts.strided`` has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.ir.checkpoint import Note
from fsdpckpt.ir.tensors import Chunks, MeshShape, Shard
from fsdpckpt.layouts import mesh_box, strided
from fsdpckpt.readers.dcp import DcpDirectory
from fsdpckpt.readers.protocol import ChunkedTensor, Tree
from fsdpckpt.text import plural


class _StoredRows(NamedTuple):
    """One item: who wrote it, how many rows it really has, and what the metadata says."""

    rank: int
    rows: int
    declared_start: int
    declared_rows: int


def correct_uneven(
    directory: DcpDirectory, uneven: Sequence[ChunkedTensor], located: dict[str, ChunkedTensor], tree: Tree
) -> None:
    """Tensors whose items have other sizes than declared: place them by the true rule, or refuse.

    ``uneven``: as declared. One mesh must explain every such tensor.
    """
    rows = {tensor.key: _stored_rows(tensor, located[tensor.key].chunks) for tensor in uneven}
    meshes = set.intersection(
        *(_fitting_meshes(tensor, rows[tensor.key], world_size=directory.world_size) for tensor in uneven)
    )
    unexplained: dict[str, str] = {}
    for tensor in uneven:
        chunks = located[tensor.key].chunks
        starts = _true_starts(tensor, rows[tensor.key], meshes)
        if starts is None:
            unexplained[tensor.key] = _difference(tensor, chunks)
            continue
        start = chunks.start.copy()
        start[:, 0] = starts
        located[tensor.key] = tensor._replace(chunks=replace(chunks, start=start))
    if unexplained:
        raise SourceCorruptError(
            f"{directory.path}: {plural(len(unexplained), 'tensor', 'have')} items of another size than declared",
            details=list(unexplained.values())[:50],
            file=directory.path,
            key=next(iter(unexplained)),
            why="FSDP2 x tensor parallel with uneven rows makes torch declare wrong chunks; here several ranks "
            "declared the same one, so that rows were never stored, or no single mesh explains the sizes; or two saves "
            "are mixed",
            next_step="save full state dicts, or one torch.save file per rank",
        )
    message = (
        f"the metadata declares wrong chunks for {plural(len(uneven), 'tensor')} (uneven rows, FSDP2 x TP); they were "
        "placed by the sizes the items really have"
    )
    tree.notes.append(Note("chunks-corrected", message, uneven[0].key))


def _stored_rows(declared: ChunkedTensor, chunks: Chunks) -> list[_StoredRows] | None:
    """The items as rows of dimension 0; None when another dimension is cut as well."""
    if not declared.shape or (chunks.size[:, 1:] != np.array(declared.shape[1:], np.int64)).any():
        return None
    start, rows = declared.chunks.start[:, 0], declared.chunks.size[:, 0]
    columns = (chunks.rank, chunks.size[:, 0], start, rows)
    return [_StoredRows(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _difference(declared: ChunkedTensor, chunks: Chunks) -> str:
    differs = np.flatnonzero((declared.chunks.size != chunks.size).any(axis=1))[:4]
    columns = (declared.chunks.start, declared.chunks.size, chunks.size)
    rows = zip(*(map(tuple, column[differs].tolist()) for column in columns), strict=True)
    texts = [f"at {start} declared {size}, stored {held}" for start, size, held in rows]
    return f"{declared.key}: {'; '.join(texts)}"


def _fitting_meshes(tensor: ChunkedTensor, items: list[_StoredRows] | None, *, world_size: int) -> set[MeshShape]:
    """Every mesh (FSDP's ranks, tensor-parallel ranks) under which each item has exactly its rank's rows, and all rows
    are there once."""
    sizes = (size for size in range(2, world_size // 2 + 1) if items is not None and world_size % size == 0)
    meshes = (MeshShape((world_size // size, size)) for size in sizes)
    return {mesh for mesh in meshes if _fits(tensor.shape[0], items or [], mesh)}


def _rows_of(rows: int, mesh: MeshShape, rank: int) -> tuple[int, int]:
    box = mesh_box((rows,), strided(mesh, (Shard(0), Shard(0))), rank)
    return box.offsets[0], box.sizes[0]


def _fits(rows: int, items: list[_StoredRows], mesh: MeshShape) -> bool:
    total = 0
    for item in items:
        start, count = _rows_of(rows, mesh, item.rank)
        if count != item.rows:
            return False
        # Where the declared size is right, torch's declared place is right too: no combination was seen otherwise.
        if count and item.declared_rows == count and item.declared_start != start:
            return False
        total += count
    return total == rows and len({item.rank for item in items}) == len(items)


def _true_starts(tensor: ChunkedTensor, items: list[_StoredRows] | None, meshes: set[MeshShape]) -> list[int] | None:
    """The first row of each item, when all ``meshes`` agree on it; None when they do not or there is none."""
    answers = {tuple(_rows_of(tensor.shape[0], mesh, item.rank)[0] for item in items or ()) for mesh in meshes}
    return list(answers.pop()) if len(answers) == 1 else None
