"""Replicas of slices: ranks of several sharding groups (HYBRID_SHARD), or all (NO_SHARD), hold the same bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fsdpckpt.flat.match import FlatMatch
from fsdpckpt.flat.slice_lengths import is_flat_key
from fsdpckpt.ir.checkpoint import Checkpoint, Note, Problem, Section
from fsdpckpt.ir.tensors import SLICES, Tensor

__all__ = ["compare_replicas"]


def compare_replicas(checkpoint: Checkpoint, match: FlatMatch) -> tuple[list[Problem], list[Note]]:
    """Problems of slices whose replicas differ, by the CRC-32 that the source's files carry; a note on the comparison.

    Only records with checksums can be compared here, without reading data: ``fsdpckpt verify`` reads the others.
    """
    groups = checkpoint.world_size // match.shard_size
    if groups < 2 and all(layout.shards > 1 for layout in match.layouts.values()):
        return [], []
    columns = (checkpoint.checksums.file, checkpoint.checksums.offset, checkpoint.checksums.crc)
    crcs = {(file, offset): crc for file, offset, crc in zip(*(column.tolist() for column in columns), strict=True)}
    found: list[Problem] = []
    compared = unknown = 0
    for section, key, tensor in _sliced(checkpoint):
        shards = _shards(key, section, match)
        for rank, first in _differing(tensor, shards, crcs):
            if rank < 0:
                unknown += 1
                continue
            compared += 1
            if first >= 0:
                message = (
                    f"{section} {key}: the copies of rank {first} and of rank {rank} differ, and they are replicas"
                )
                found.append(Problem("replica", message, key=key, rank=rank, section=section))
    notes = []
    if compared:
        notes.append(Note("replicas", f"{compared} replicas of slices compared by checksum, one of each is taken"))
    if unknown:
        notes.append(Note("replicas", f"{unknown} replicas of slices carry no checksum and were not compared"))
    return found, notes


def _sliced(checkpoint: Checkpoint) -> Iterator[tuple[Section, str, Tensor]]:
    for named in checkpoint.tensors():
        flat = named.section is Section.MODEL and is_flat_key(named.key)
        if flat or named.tensor.placement == SLICES:
            yield named.section, named.key, named.tensor


def _shards(key: str, section: Section, match: FlatMatch) -> int:
    """How many different slices the ranks of one group hold of a tensor."""
    shards = max(layout.shards for layout in match.layouts.values())
    if section is Section.MODEL and key in match.layouts:
        shards = match.layouts[key].shards
    return shards


def _differing(tensor: Tensor, shards: int, crcs: Mapping[tuple[int, int], int]) -> Iterator[tuple[int, int]]:
    """For each replica (rank, first rank with other bytes or -1 when equal); (-1, -1) when it has no checksum."""
    chunks = tensor.chunks
    rows = zip(
        chunks.rank.tolist(), chunks.file.tolist(), chunks.offset.tolist(), chunks.size[:, 0].tolist(), strict=True
    )
    first: dict[tuple[int, int], tuple[int, int | None]] = {}
    for rank, file, offset, size in sorted(rows):
        if not size:
            continue
        place = (rank % shards, size)
        crc = crcs.get((file, offset))
        if place not in first:
            first[place] = (rank, crc)
            continue
        known_rank, known = first[place]
        if crc is None or known is None:
            yield -1, -1
        else:
            yield rank, known_rank if crc != known else -1
