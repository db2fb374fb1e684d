"""Computes which box of a tensor each rank holds when it is cut along its dimensions; ``flattened``: FSDP1's layout.

Rules, from PyTorch: ``torch.chunk`` (parts of ``ceil(n / parts)``, the last ones shorter or empty) is what FSDP1's
``_ext_chunk_tensor`` and ``_ext_chunk_dtensor``, FSDP2's ``_chunk_with_empty`` and DTensor's ``Shard`` cut with.
On a mesh, ``torch.distributed.tensor.placement_types`` applies one placement per mesh dimension: in the order of the
mesh dimensions, or in the order that ``DTensorSpec.shard_order`` or the split factors of ``_StridedShard`` say.

What torch 2.13 holds and saves on meshes of two and three dimensions (observed, and covered by tests):

- ``fully_shard`` on a mesh (replicate, shard) gives ``[Replicate(), Shard(0)]``; with ``shard_placement_fn``
  ``Shard(1)``, which has to divide evenly (``_fsdp_param.py``, ``_init_sharded_param``).
- After ``parallelize_module``, FSDP cuts each rank's tensor-parallel shard. Where both cut one dimension FSDP's
  placement is ``_StridedShard(dim, split_factor=<tensor-parallel shards>)`` (``_init_sharding_spec_tp``), else plain.
  A parameter that tensor parallelism leaves alone is a DTensor on FSDP's own submesh.
- A local tensor without elements has the sizes that the cuts give it, but FSDP2, which cuts last, takes no row of a
  tensor-parallel shard without elements: it is empty along FSDP's dimension too, ``(0, 0)`` and not ``(4, 0)``
  (``length = ... if sharded_param.numel() > 0 else 0``; torch 2.4 and 2.5 slice, and keep ``(4, 0)``).
- ``dcp.save`` declares the sizes that the cuts give, and stores the local tensor as it is: a declared ``(4, 0)`` is
  stored as ``(0, 0)``. It stores one item for each distinct offset of a tensor. An empty shard's offset is the end of
  every dimension that leaves it empty (``compute_local_shape_and_global_offset`` in ``tensor/_utils.py``), and all
  empty ones there are one item. For ``_StridedShard`` and sizes that do not divide evenly that function computes other
  boxes than the ranks hold; here are those they hold.
- Among the ranks that hold an item, the first with the fewest bytes so far writes it
  (``checkpoint/_dedup_save_plans.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, product
from math import prod
from operator import add, mul
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fsdpckpt.errors import InternalError
from fsdpckpt.ir.placements import MeshShape, Placement, Replicate, Shard, Sharding, StridedShard
from fsdpckpt.ir.tensors import Box, Int64Array, Tensor, contiguous_stride, first_equal

_Runs: TypeAlias = tuple[tuple[int, int], ...]  # (global start, length) one after the other in the local tensor


@dataclass(frozen=True, slots=True)
class LocalBox:
    """``box`` of the global tensor, which a rank holds at ``local_offsets`` (elements) of its local tensor."""

    box: Box
    local_offsets: tuple[int, ...]


def chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """(start, size) of part ``index`` when ``torch.chunk`` cuts ``length`` into ``parts``; size 0 past the end."""
    step = -(-length // parts)
    start = min(index * step, length)
    return start, min(step, length - start)


@lru_cache(maxsize=64)
def row_sharding(world_size: int, names: tuple[str, ...] | None = None) -> Sharding:
    """A mesh of all ranks that cuts rows: FSDP without replicas and without other parallelism."""
    return Sharding(MeshShape((world_size,), names), (Shard(0),))


def as_fully_shard(
    mesh: MeshShape, placements: Sequence[Placement | None], dims: Sequence[int] | None = None
) -> Sharding:
    """``placements`` (plain shards) as ``fully_shard`` makes them: of the mesh dimensions that cut the same tensor
    dimension the last one cuts first, so the others are ``_StridedShard``.

    ``dims``: all mesh dimensions in the order in which the DTensors list them; None is their order in ``mesh``.
    """
    listed = tuple(range(len(mesh.sizes))) if dims is None else tuple(dims)
    order: dict[int, tuple[int, ...]] = {}
    for mesh_dim in listed:
        placement = placements[mesh_dim]
        if isinstance(placement, Shard):
            order[placement.dim] = (mesh_dim, *order.get(placement.dim, ()))
    own = tuple(dim for dim in listed if placements[dim] is not None)
    ascending = own == tuple(sorted(own))
    return Sharding(mesh, _with_order(mesh, placements, order, listed), order=None if ascending else own)


def on_mesh(sharding: Sharding, mesh: MeshShape) -> Sharding:
    """The same cuts in the same order on ``mesh``, which has the same dimensions in other sizes."""
    order = _shard_order(sharding)
    if order is None:
        raise InternalError(f"{sharding} on {sharding.mesh} has no shard order")
    dims = sharding.order or tuple(range(len(mesh.sizes)))
    return replace(sharding, mesh=mesh, placements=_with_order(mesh, sharding.placements, order, dims))


def on_dimensions(sharding: Sharding, dims: Sequence[int]) -> Sharding | None:
    """The same cuts without those of other mesh dimensions than ``dims`` (ascending); None if the tensor is on none of
    them: then every rank holds it whole, as a plain tensor.
    """
    order = _shard_order(sharding)
    if order is None:
        raise InternalError(f"{sharding} on {sharding.mesh} has no shard order")
    kept = [dim for dim in sharding.dims if dim in dims]
    if not kept:
        return None
    mesh, new = sharding.mesh, {dim: number for number, dim in enumerate(dims)}
    names = None if mesh.names is None else tuple(mesh.names[dim] for dim in dims)
    smaller = MeshShape(tuple(mesh.sizes[dim] for dim in dims), names)
    remaining: dict[int, list[int]] = {}
    for dim, mesh_dims in order.items():
        remaining[dim] = [new[each] for each in mesh_dims if each in new]
    own = tuple(new[dim] for dim in kept)
    placements = _with_order(smaller, [sharding.placements[dim] for dim in dims], remaining, own)
    by_fsdp = sharding.by_fsdp and sharding.fsdp_dimension in (None, *dims)
    fsdp = None if sharding.fsdp is None else new.get(sharding.fsdp)
    return Sharding(smaller, placements, by_fsdp, None if own == tuple(sorted(own)) else own, fsdp)


def _with_order(
    mesh: MeshShape,
    placements: Sequence[Placement | None],
    order: Mapping[int, Sequence[int]],
    dims: Sequence[int],
) -> tuple[Placement | None, ...]:
    """The placements that cut in ``order``, of a DTensor whose mesh lists the dimensions of ``mesh`` as ``dims``.

    As ``DTensorSpec._convert_shard_order_to_StridedShard``; ``shard_order_of`` is the inverse.
    """
    ordered = list(placements)
    for dim, mesh_dims in order.items():
        for number, mesh_dim in enumerate(mesh_dims):
            later = dims[dims.index(mesh_dim) + 1 :]
            factor = prod(mesh.sizes[before] for before in mesh_dims[:number] if before in later)
            ordered[mesh_dim] = StridedShard(dim, factor) if factor > 1 else Shard(dim)
    return tuple(ordered)


@lru_cache(maxsize=65536)
def mesh_box(shape: tuple[int, ...], sharding: Sharding, rank: int) -> Box:
    """The box that ``rank`` holds; an empty one begins at the end of each dimension that leaves it empty.

    Raises InternalError for split factors that no order explains (packed weights): these ranks hold several boxes.
    """
    mesh = sharding.mesh
    order = _shard_order(sharding)
    if order is None:
        raise InternalError(f"{sharding} on {mesh} is not a single box")
    coordinate = mesh.coordinate(rank)
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, mesh_dims in order.items():
        for mesh_dim in mesh_dims:
            start, sizes[dim] = chunk(sizes[dim], mesh.sizes[mesh_dim], coordinate[mesh_dim])
            offsets[dim] += start
        if not sizes[dim]:
            offsets[dim] = shape[dim]
    return Box(tuple(offsets), tuple(sizes))


def emptied_dimension(sharding: Sharding) -> int | None:
    """The tensor dimension along which every local tensor without elements is empty: the one that FSDP2 cuts. None if
    it is not FSDP2 that cuts.
    """
    dim = sharding.fsdp_dimension
    placement = None if dim is None else sharding.placements[dim]
    return placement.dim if isinstance(placement, Shard | StridedShard) else None


def emptied(size: tuple[int, ...], dim: int | None) -> tuple[int, ...]:
    """``size``, with 0 in dimension ``dim`` if it has no elements anyway."""
    return size if dim is None or 0 not in size else (*size[:dim], 0, *size[dim + 1 :])


def is_cut_unevenly(shape: tuple[int, ...], sharding: Sharding, mesh_dim: int) -> bool:
    """Whether ``mesh_dim`` is FSDP2's and gives its ranks different parts of another tensor dimension than the first:
    ``fully_shard`` refuses that (``_init_sharded_param``).
    """
    placement, order = sharding.placements[mesh_dim], _shard_order(sharding)
    if not sharding.by_fsdp or not isinstance(placement, Shard | StridedShard) or not placement.dim or order is None:
        return False
    lengths = {shape[placement.dim]}  # before FSDP's cut, which is the last
    for other in order[placement.dim]:
        parts = sharding.mesh.sizes[other]
        if other == mesh_dim:
            return any(length % parts for length in lengths)
        lengths = {chunk(length, parts, index)[1] for length in lengths for index in range(parts)}
    return False


def last_cuts_of_empty(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    placements: tuple[Placement, ...],
    coordinate: tuple[int, ...],
    size: tuple[int, ...],
) -> frozenset[int | None]:
    """The mesh dimensions that may be FSDP2's if the rank at ``coordinate``, which holds no element, has a local tensor
    of ``size``; with None if DTensor alone (or FSDP2 of torch 2.4 and 2.5) may have cut it.
    """
    rank = 0
    for at, extent in zip(coordinate, mesh, strict=True):
        rank = rank * extent + at
    cut = mesh_box(shape, Sharding(MeshShape(mesh), placements), rank).sizes
    dims: dict[int | None, int | None] = {None: None}  # and the tensor dimension that each cuts
    for mesh_dim, placement in enumerate(placements):
        if not isinstance(placement, Replicate):
            dims[mesh_dim] = placement.dim
    return frozenset(mesh_dim for mesh_dim, dim in dims.items() if emptied(cut, dim) == size)


@lru_cache(maxsize=4096)
def _shard_order(sharding: Sharding) -> Mapping[int, tuple[int, ...]] | None:
    dims = sharding.order or tuple(range(len(sharding.placements)))  # in the order that the split factors are for
    own = shard_order_of(
        [sharding.mesh.sizes[dim] for dim in dims], [sharding.placements[dim] or Replicate() for dim in dims]
    )
    if own is None or sharding.order is None:
        return own
    return {dim: tuple(map(dims.__getitem__, mesh_dims)) for dim, mesh_dims in own.items()}


class SharedChunk(NamedTuple):
    """A box of a tensor that several ranks hold, in order."""

    box: Box
    ranks: tuple[int, ...]


@dataclass(slots=True, eq=False)
class RankBoxes:
    """Which rank stores which box of one tensor, in columns. ``rank`` (n,); ``start``, ``size`` (n, d) in elements."""

    rank: Final[Int64Array]
    start: Final[Int64Array]
    size: Final[Int64Array]

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, Box]], ndim: int) -> RankBoxes:
        """From a few pairs of rank and box."""
        boxes = np.array([(box.offsets, box.sizes) for _, box in pairs], np.int64).reshape(len(pairs), 2, ndim)
        return cls(np.array([rank for rank, _ in pairs], np.int64), boxes[:, 0], boxes[:, 1])

    def take(self, rows: npt.NDArray[np.bool_]) -> RankBoxes:
        """The rows that ``rows`` selects."""
        return RankBoxes(self.rank[rows], self.start[rows], self.size[rows])

    def merged_with(self, more: RankBoxes) -> RankBoxes:
        """The rows of both, in the order of the ranks."""
        rank = np.concatenate([self.rank, more.rank])
        order = np.argsort(rank, kind="stable")
        start, size = np.concatenate([self.start, more.start]), np.concatenate([self.size, more.size])
        return RankBoxes(rank[order], start[order], size[order])


@dataclass(slots=True, eq=False)
class DistinctChunks:
    """The distinct boxes of a tensor: those on one rank alone (``unshared``, on the ``unshared_ranks``) and those on
    several (``shared``).
    """

    unshared: Final[RankBoxes]
    unshared_ranks: Final[frozenset[int]]
    shared: Final[tuple[SharedChunk, ...]] = ()


@lru_cache(maxsize=4096)
def mesh_chunks(shape: tuple[int, ...], sharding: Sharding) -> DistinctChunks:
    """The items that ``dcp.save`` makes of such a tensor, shared or not, in the order of their first ranks."""
    items: dict[tuple[int, ...], tuple[Box, list[int]]] = {}  # by offset
    for rank in range(sharding.mesh.world_size):
        box = mesh_box(shape, sharding, rank)
        items.setdefault(box.offsets, (box, []))[1].append(rank)
    unshared = [(ranks[0], box) for box, ranks in items.values() if len(ranks) == 1]
    shared = tuple(SharedChunk(box, tuple(ranks)) for box, ranks in items.values() if len(ranks) > 1)
    return DistinctChunks(RankBoxes.of(unshared, len(shape)), frozenset(rank for rank, _ in unshared), shared)


def source_chunks(tensor: Tensor) -> DistinctChunks:
    """Each distinct box of the source, on the rank of its first chunk alone, even if several ranks hold it. Empty boxes
    are left out, unless there is no other: then one whole box on rank 0.
    """
    chunks = tensor.chunks
    full = np.flatnonzero((chunks.size > 0).all(axis=1))
    if not len(full):
        whole = RankBoxes.of([(0, Box.whole(tensor.shape))], tensor.ndim)
        return DistinctChunks(whole, frozenset((0,)))
    equal = first_equal(np.concatenate([chunks.start[full], chunks.size[full]], axis=1))
    first = full[equal == np.arange(len(full))]
    return DistinctChunks(
        RankBoxes(chunks.rank[first], chunks.start[first], chunks.size[first]), frozenset(chunks.rank[first].tolist())
    )


def shard_order_of(
    mesh: Sequence[int], placements: Sequence[Placement], *, first_of_equals: bool = False
) -> Mapping[int, tuple[int, ...]] | None:
    """Tensor dimension -> mesh dimensions in the order in which they cut it; None if no order explains the split
    factors.

    A split factor is the product of the sizes of the mesh dimensions that cut before and come later in the mesh
    (``DTensorSpec._convert_shard_order_to_StridedShard``). With mesh dimensions of one rank several orders are equal:
    FSDP cuts last, and its inverse in PyTorch (``_maybe_convert_StridedShard_to_shard_order``) takes the first.
    """
    order: dict[int, list[int]] = {}
    for mesh_dim in reversed(range(len(placements))):
        placement = placements[mesh_dim]
        if isinstance(placement, Replicate):
            continue
        factor = placement.split_factor if isinstance(placement, StridedShard) else 1
        dims = order.setdefault(placement.dim, [])
        # The split factor at each place among the dimensions that cut already, the first to the last.
        factors = list(accumulate((mesh[dim] for dim in dims), mul, initial=1))
        if factor not in factors:
            return None
        place = factors.index(factor) if first_of_equals else len(dims) - factors[::-1].index(factor)
        dims.insert(place, mesh_dim)
    return {dim: tuple(mesh_dims) for dim, mesh_dims in order.items()}


def group_coordinate(coordinate: Sequence[int], mesh: Sequence[int], ranks: Sequence[int]) -> tuple[int, ...]:
    """The coordinate that the rank at ``coordinate`` has in the process groups of its mesh, one for each dimension.

    A mesh may list its ``ranks`` (row-major) in any order, as ``DeviceMesh("cpu", [2, 0, 3, 1])`` does, but torch sorts
    those of a process group. ``fully_shard``, ``distribute_tensor`` and ``full_tensor`` go by the group: rank 2 has the
    third shard there, and not the first.
    """
    strides = contiguous_stride(mesh)
    at = sum(map(mul, coordinate, strides))
    places = []
    for index, extent, stride in zip(coordinate, mesh, strides, strict=True):
        first = at - index * stride
        group = ranks[first : first + extent * stride : stride]
        places.append(sum(other < ranks[at] for other in group))
    return tuple(places)


def local_boxes(
    shape: Sequence[int],
    mesh: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
    shard_order: Mapping[int, Sequence[int]] | None = None,
) -> tuple[LocalBox, ...]:
    """The boxes that the rank at ``coordinate`` of a mesh of shape ``mesh`` holds; empty if it holds nothing.

    One box, unless a ``StridedShard`` cuts without a mesh dimension before it (packed weights): then interleaved rows.
    If several mesh dimensions cut one tensor dimension, they cut in ``shard_order`` or in the order of the split
    factors, each cutting what the one before left.
    """
    order = shard_order if shard_order is not None else shard_order_of(mesh, placements)
    if order is None:
        return distribute_tensor_boxes(shape, mesh, placements, coordinate)
    runs: list[_Runs] = [((0, size),) for size in shape]
    for dim, mesh_dims in order.items():
        for mesh_dim in mesh_dims:
            runs[dim] = _cut(runs[dim], mesh[mesh_dim], coordinate[mesh_dim])
    return _boxes(runs)


def distribute_tensor_boxes(
    shape: Sequence[int], mesh: Sequence[int], placements: Sequence[Placement], coordinate: Sequence[int]
) -> tuple[LocalBox, ...]:
    """``local_boxes`` for what ``distribute_tensor`` itself cuts: the placements one after the other, a
    ``StridedShard`` cutting each of its ``split_factor`` parts (``_StridedShard._split_tensor``).
    """
    runs: list[_Runs] = [((0, size),) for size in shape]
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            continue
        factor = placement.split_factor if isinstance(placement, StridedShard) else 1
        parts = (_cut(runs[placement.dim], factor, index) for index in range(factor))
        shards = (_cut(part, mesh[mesh_dim], coordinate[mesh_dim]) for part in parts)
        runs[placement.dim] = _join_runs([run for shard in shards for run in shard])
    return _boxes(runs)


def local_shape(boxes: Sequence[LocalBox]) -> tuple[int, ...] | None:
    """The shape of the local tensor that ``boxes`` fill; None if there is no box (one dimension is 0 then)."""
    if not boxes:
        return None
    ends = [tuple(map(add, part.local_offsets, part.box.sizes)) for part in boxes]
    return tuple(map(max, zip(*ends, strict=True)))


def _cut(runs: _Runs, parts: int, index: int) -> _Runs:
    """Part ``index`` of the ``parts`` that torch.chunk cuts the concatenated ``runs`` into."""
    low, size = chunk(sum(length for _, length in runs), parts, index)
    high = low + size
    cut: list[tuple[int, int]] = []
    at = 0
    for start, length in runs:
        first, last = max(low, at), min(high, at + length)
        if first < last:
            cut.append((start + first - at, last - first))
        at += length
    return tuple(cut)


def _join_runs(runs: list[tuple[int, int]]) -> _Runs:
    """Merge neighbouring runs."""
    joined: list[tuple[int, int]] = []
    for start, length in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return tuple(joined)


def _boxes(runs: Sequence[_Runs]) -> tuple[LocalBox, ...]:
    """A box for each way to take a run of every dimension."""
    dimensions: list[list[tuple[int, int, int]]] = []  # start, length, and start in the local tensor
    for of_dim in runs:
        local_start, filled = 0, []
        for start, length in of_dim:
            if length:
                filled.append((start, length, local_start))
            local_start += length
        dimensions.append(filled)
    boxes: list[LocalBox] = []
    for chosen in product(*dimensions):
        offsets, sizes, local_offsets = zip(*chosen, strict=True) if chosen else ((), (), ())
        boxes.append(LocalBox(Box(offsets, sizes), local_offsets))
    return tuple(boxes)
