"""Where the parts of a whole tensor go on this rank: like a tensor that is there already, or by mesh and placements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from fsdpckpt.comm.boxes import HeldBox, held, mesh_boxes, view_of
from fsdpckpt.ir.tensors import contiguous_stride
from fsdpckpt.layouts import sharded
from fsdpckpt.layouts.boxes import Box

__all__ = ["Place", "Placements", "place_like", "place_on_mesh", "place_whole"]

Placements: TypeAlias = Sequence[Placement] | Callable[[str, tuple[int, ...]], Sequence[Placement] | None]
"""One for all tensors, or a function of key and shape; None from it: the tensor stays whole on every rank."""


@dataclass(frozen=True, slots=True)
class Place:
    """``boxes``: what this rank wants, and the memory it goes to. ``tensor``: what has it once that is filled.

    ``filled``: it is already.
    """

    boxes: list[HeldBox]
    tensor: torch.Tensor
    filled: bool = False


def place_whole(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Place:
    """A whole tensor in new memory."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
    return Place(held(tensor, ""), tensor)


def place_like(like: torch.Tensor, key: str, device: torch.device) -> Place:
    """In the memory of ``like`` itself; where that is on the meta device, in new memory on ``device``, cut the same."""
    if isinstance(like, ShardedTensor):  # asked about its shards: one without shards answers nothing itself
        on_meta = any(each.tensor.is_meta for each in like.local_shards())
        return _new_sharded_tensor(like, device) if on_meta else Place(held(like, key), like)
    if not like.is_meta:
        return Place(held(like, key), like)
    if isinstance(like, DTensor):
        local = torch.empty(like.to_local().shape, dtype=like.dtype, device=device)
        made = DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        return Place(held(made, key), made)
    return place_whole(like.shape, like.dtype, device)


def _new_sharded_tensor(like: ShardedTensor, device: torch.device) -> Place:
    shards = [
        LocalShard(torch.empty(shard.tensor.shape, dtype=shard.tensor.dtype, device=device), shard.metadata)
        for shard in like.local_shards()
    ]
    made = ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, like.metadata(), process_group=like._process_group, sharding_spec=like.sharding_spec()
    )
    return Place(held(made, ""), made)


def place_on_mesh(
    shape: Sequence[int],
    dtype: torch.dtype,
    key: str,
    device: torch.device,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
) -> Place:
    """A new DTensor: what ``distribute_tensor`` would make of a whole contiguous tensor."""
    boxes = mesh_boxes(shape, mesh, placements, None, key)
    local_shape = sharded.local_shape(boxes, shape)
    if local_shape is None:
        # Nothing here: the shape of nothing is torch's to say.
        local_shape = tuple(compute_local_shape_and_global_offset(tuple(shape), mesh, list(placements))[0])
    local = torch.empty(local_shape, dtype=dtype, device=device)
    made = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=contiguous_stride(shape)
    )
    return Place([HeldBox(one.box, view_of(local, Box(one.local_offsets, one.box.sizes))) for one in boxes], made)
