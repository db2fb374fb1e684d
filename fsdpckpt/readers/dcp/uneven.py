"""Corrects the boxes of tensors whose rows do not divide evenly: torch can declare others than the ranks hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.ir.checkpoint import Note
from fsdpckpt.ir.placements import MeshShape, Shard
from fsdpckpt.ir.tensors import Chunks, Int64Array, distinct
from fsdpckpt.layouts import as_fully_shard, mesh_box
from fsdpckpt.readers.dcp.directory import DcpDirectory
from fsdpckpt.readers.protocol import ChunkedTensor, PartContents
from fsdpckpt.text import plural


def correct_uneven(
    directory: DcpDirectory, uneven: Sequence[ChunkedTensor], located: dict[str, ChunkedTensor], tree: PartContents
) -> None:
    """Give the tensors ``uneven`` (as declared), whose items have other sizes, the boxes that the ranks held, or refuse
    them.

    If FSDP2 and tensor parallelism both shard dimension 0 and the rows do not divide evenly,
    ``compute_local_shape_and_global_offset`` (``torch/distributed/tensor/_utils.py``, seen up to torch 2.14) computes
    other boxes than the ranks hold, and DCP stores the computed ones. The items have their true number of rows, and the
    ranks that wrote them determine which rows these are, by the rule in ``layouts.as_fully_shard``. One mesh must
    explain all items.
    """
    world_size = directory.world_size
    sizes = [size for size in range(2, world_size // 2 + 1) if world_size % size == 0]
    answers: dict[str, list[Int64Array]] = {tensor.key: [] for tensor in uneven}
    for size in sizes:
        starts = _starts_on(MeshShape((world_size // size, size)), uneven, located)
        for key, start in starts.items():
            answers[key].append(start)
    unexplained: dict[str, str] = {}
    for tensor in uneven:
        chunks, possible = located[tensor.key].chunks, answers[tensor.key]
        if not possible or any(not np.array_equal(start, possible[0]) for start in possible[1:]):
            unexplained[tensor.key] = _difference(tensor, chunks)
            continue
        start = np.column_stack([possible[0], chunks.start[:, 1:]])
        located[tensor.key] = tensor._replace(chunks=chunks.with_boxes(start=start))
    if unexplained:
        raise SourceCorruptError(
            f"{directory.path}: {plural(len(unexplained), 'tensor', 'have')} items that do not have the declared size",
            details=list(unexplained.values())[:50],
            file=directory.path,
            key=next(iter(unexplained)),
            why="FSDP2 x tensor parallel with uneven rows makes torch declare wrong chunks; here several ranks "
            "declared the same chunk, so that rows were never stored, or no single mesh explains the sizes; or two "
            "saves are mixed",
            next_step="save full state dicts, or one torch.save file per rank",
        )
    message = (
        f"the metadata declares wrong chunks for {plural(len(uneven), 'tensor')} (uneven rows, FSDP2 x TP); they were "
        "placed by the sizes the items really have"
    )
    tree.notes.append(Note("chunks-corrected", message, uneven[0].key))


def _starts_on(
    mesh: MeshShape, uneven: Sequence[ChunkedTensor], located: Mapping[str, ChunkedTensor]
) -> dict[str, Int64Array]:
    """For each of the tensors ``uneven``, by key, the first row of each item; {} unless ``mesh`` (FSDP's ranks, tensor
    parallel ranks) explains all of them: each item has exactly its rank's rows, and every row exists once.
    """
    starts: dict[str, Int64Array] = {}
    for tensor in uneven:
        declared, chunks = tensor.chunks, located[tensor.key].chunks
        if not tensor.shape or (chunks.size[:, 1:] != np.array(tensor.shape[1:], np.int64)).any():
            return {}
        start, size = _rows_on(mesh, tensor.shape[0], tuple(chunks.rank.tolist()))
        # If the declared size is right, torch's declared place is right too: no counterexample was seen.
        declared_right = (size > 0) & (declared.size[:, 0] == size)
        if (
            (size != chunks.size[:, 0]).any()
            or (start != declared.start[:, 0])[declared_right].any()
            or size.sum() != tensor.shape[0]
            or len(distinct(chunks.rank)) < len(chunks)
        ):
            return {}
        starts[tensor.key] = start
    return starts


@lru_cache(maxsize=256)  # many tensors have the same rows
def _rows_on(mesh: MeshShape, rows: int, ranks: tuple[int, ...]) -> tuple[Int64Array, Int64Array]:
    """The first row that each of ``ranks`` holds, and how many, if both dimensions of ``mesh`` shard ``rows``."""
    sharding = as_fully_shard(mesh, (Shard(0), Shard(0)))
    boxes = [mesh_box((rows,), sharding, rank) for rank in ranks]
    start = np.array([box.offsets[0] for box in boxes], np.int64)
    return start, np.array([box.sizes[0] for box in boxes], np.int64)


def _difference(declared: ChunkedTensor, chunks: Chunks) -> str:
    differs = np.flatnonzero((declared.chunks.size != chunks.size).any(axis=1))[:4]
    columns = (declared.chunks.start, declared.chunks.size, chunks.size)
    rows = zip(*(map(tuple, column[differs].tolist()) for column in columns), strict=True)
    texts = [f"at {start} declared {size}, stored {stored}" for start, size, stored in rows]
    return f"{declared.key}: {'; '.join(texts)}"
