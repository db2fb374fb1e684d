"""What a rank holds of a tensor: boxes of the global tensor, each as a view of memory here.

A plain tensor is one box on every rank; a DTensor's and a ShardedTensor's boxes follow their own metadata, by the rules
of ``layouts.sharded``. Nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

from fsdpckpt.errors import UsageError
from fsdpckpt.layouts import sharded
from fsdpckpt.layouts.boxes import Box

__all__ = ["HeldBox", "held", "kind_of", "mesh_boxes", "view_of"]


@dataclass(frozen=True, slots=True)
class HeldBox:
    """``box`` of the global tensor lies in ``data``, a view of its size."""

    box: Box
    data: torch.Tensor


def kind_of(tensor: torch.Tensor) -> str:
    """``DTensor``, ``ShardedTensor`` or ``Tensor``. UsageError for what has no elements in strided memory."""
    if isinstance(tensor, DTensor):
        return "DTensor"
    if isinstance(tensor, ShardedTensor):
        return "ShardedTensor"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise UsageError(f"a tensor of layout {tensor.layout} cannot cross between workers", next_step="make it dense")
    return "Tensor"


def held(tensor: torch.Tensor, key: str) -> list[HeldBox]:
    """The boxes of ``tensor`` on this rank; none where the rank holds nothing. ``key`` names it in messages."""
    if isinstance(tensor, ShardedTensor):
        shards = tensor.local_shards()
        found = [
            HeldBox(Box(tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes)), s.tensor.detach())
            for s in shards
        ]
        return [each for each in found if each.data.numel()]
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            local = tensor.to_local()
        if hasattr(local, "wait"):  # a result of a collective that is still on its way
            local = local.wait()
        spec = tensor._spec
        boxes = mesh_boxes(tuple(tensor.shape), spec.mesh, spec.placements, _order(spec), key)
        return [HeldBox(one.box, view_of(local, Box(one.local_offsets, one.box.sizes))) for one in boxes]
    plain = tensor.detach()
    return [HeldBox(Box.whole(tuple(plain.shape)), plain)] if plain.numel() else []


def mesh_boxes(
    shape: Sequence[int],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    order: Mapping[int, Sequence[int]] | None,
    key: str,
) -> tuple[sharded.LocalBox, ...]:
    """The boxes of a tensor of ``shape`` that this rank holds on ``mesh``; none outside of it."""
    coordinate = mesh.get_coordinate()
    ours = [_placement(placement, len(shape), key) for placement in placements]
    if coordinate is None:
        return ()
    return sharded.local_boxes(shape, tuple(mesh.mesh.shape), ours, coordinate, order)


def _placement(placement: Placement, dimensions: int, key: str) -> sharded.Placement:
    if placement.is_replicate():
        return sharded.Replicate()
    dim = getattr(placement, "dim", None)
    if dim is None:
        raise UsageError(
            f"a tensor placed {placement} has no values yet, only summands on each rank",
            key=key,
            next_step="redistribute it to Replicate() or Shard(dim) first",
        )
    dim = dim + dimensions if dim < 0 else dim
    if not 0 <= dim < dimensions:
        raise UsageError(f"{placement} cuts a dimension that a tensor of {dimensions} dimensions has not", key=key)
    factor = getattr(placement, "split_factor", None)
    return sharded.Shard(dim) if factor is None or type(placement) is Shard else sharded.StridedShard(dim, factor)


def _order(spec: object) -> Mapping[int, Sequence[int]] | None:
    """``DTensorSpec.shard_order`` (torch 2.10+), None where there is none."""
    entries = getattr(spec, "shard_order", None) or ()
    return {entry.tensor_dim: tuple(entry.mesh_dims) for entry in entries} or None


def view_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The elements of ``box`` in ``tensor``, as a view."""
    for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor
