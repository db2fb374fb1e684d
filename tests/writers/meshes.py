"""Models on meshes of two and three dimensions, sharded by torch itself on the fake process group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from fsdpckpt.ir import mesh as ir_mesh
from fsdpckpt.ir.mesh import MeshShape, Sharding

__all__ = ["MESHES", "MeshCase", "Net", "our_sharding", "sharded_model"]


class Net(nn.Module):
    """Weights that tensor parallelism cuts by columns, by rows, replicates, and leaves alone; and a buffer."""

    def __init__(self, scale: int, odd: int) -> None:
        super().__init__()
        width = 4 * scale + odd
        self.col = nn.Linear(6, width)
        self.row = nn.Linear(width, 6)
        self.norm = nn.LayerNorm(6)
        self.free = nn.Linear(6, 3)
        self.register_buffer("seen", torch.arange(4.0))


@dataclass(frozen=True)
class MeshCase:
    """A mesh: which of its dimensions FSDP has, and tensor parallelism (None: there is none)."""

    shape: Mapping[str, int]
    fsdp: tuple[str, ...]
    tp: str | None = None
    rows: int = 0  # the dimension that FSDP cuts

    @property
    def world_size(self) -> int:
        return torch.Size(self.shape.values()).numel()

    @property
    def mesh(self) -> MeshShape:
        return MeshShape(tuple(self.shape.values()), tuple(self.shape))

    def __str__(self) -> str:
        return f"{self.mesh}-Shard({self.rows})".replace(",", "-")


def _hsdp(replicate: int, shard: int) -> MeshCase:
    return MeshCase({"dp_replicate": replicate, "dp_shard": shard}, ("dp_replicate", "dp_shard"))


def _tp(shard: int, tp: int) -> MeshCase:
    return MeshCase({"dp_shard": shard, "tp": tp}, ("dp_shard",), "tp")


def _all(replicate: int, shard: int, tp: int) -> MeshCase:
    return MeshCase({"dp_replicate": replicate, "dp_shard": shard, "tp": tp}, ("dp_replicate", "dp_shard"), "tp")


MESHES = [
    _hsdp(1, 2), _hsdp(2, 1), _hsdp(2, 2), _hsdp(2, 4), _hsdp(4, 4), _hsdp(8, 8),
    _tp(1, 2), _tp(2, 1), _tp(2, 2), _tp(4, 2), _tp(2, 4), _tp(4, 4), _tp(8, 8),
    _all(2, 1, 2), _all(2, 2, 2), _all(2, 4, 2), _all(4, 4, 4),
    MeshCase({"fsdp": 4}, ("fsdp",), rows=1), MeshCase({"a": 2, "b": 2}, ("a", "b"), rows=1),
]  # fmt: skip


def sharded_model(case: MeshCase, build: Callable[[], nn.Module]) -> nn.Module:
    """This rank's model, sharded as a training script would."""
    mesh: DeviceMesh = init_device_mesh("cpu", tuple(case.shape.values()), mesh_dim_names=tuple(case.shape))
    model = build()
    if case.tp is not None:
        plan = {"col": ColwiseParallel(), "row": RowwiseParallel(), "norm": SequenceParallel()}
        parallelize_module(model, mesh[case.tp], plan, src_data_rank=None)

    def columns(parameter: nn.Parameter) -> Shard:
        ranks = list(case.shape.values())[-1]
        return Shard(1 if parameter.ndim > 1 and parameter.shape[1] % ranks == 0 else 0)

    fully_shard(
        model,
        mesh=mesh[case.fsdp] if len(case.fsdp) < len(case.shape) else mesh,
        shard_placement_fn=columns if case.rows else None,
    )
    return model


def our_sharding(case: MeshCase, value: Any) -> Sharding:
    """What torch says of a DTensor, on the whole mesh."""
    said = dict(zip(value.device_mesh.mesh_dim_names, value.placements, strict=True))
    placements = [said.get(name) for name in case.shape]
    return Sharding(case.mesh, tuple(None if one is None else _ours(one) for one in placements))


def _ours(placement: Any) -> ir_mesh.Placement:
    if isinstance(placement, _StridedShard):
        return ir_mesh.StridedShard(placement.dim, placement.split_factor)
    return ir_mesh.Replicate() if isinstance(placement, Replicate) else ir_mesh.Shard(placement.dim)
