"""A mixture of experts as torchtitan shards it: dense weights on one mesh of all ranks, experts on another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

__all__ = ["Experts", "ExpertMesh", "mixture"]


class Experts(nn.Module):
    """6 experts of 5 x 3: on 2 ranks of experts 3 each, which 2 ranks of FSDP cut unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 5, 3))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(3, 11)
        self.experts = Experts()
        self.router = nn.Linear(3, 6, bias=False)
        self.register_buffer("counts", torch.arange(6.0))


def mixture() -> nn.Module:
    """The model whole, with the weights that every case has."""
    torch.manual_seed(7)
    return Mixture()


@dataclass(frozen=True)
class ExpertMesh:
    """``replicate`` x ``shard`` ranks, of which ``experts`` neighbours have different experts."""

    replicate: int
    shard: int
    experts: int

    @property
    def world_size(self) -> int:
        return self.replicate * self.shard

    @property
    def options(self) -> tuple[str, str]:
        """As ``--mesh`` takes them."""
        efsdp, replicas = self.shard // self.experts, f"dp_replicate={self.replicate}," if self.replicate > 1 else ""
        return f"{replicas}fsdp={self.shard}", f"{replicas}efsdp={efsdp},ep={self.experts}"

    @property
    def placements(self) -> dict[str, Any]:
        """What a placements file says of it."""
        replicas = {"dp_replicate": "Replicate()"} if self.replicate > 1 else {}
        return {
            "experts.*": {**replicas, "efsdp": "Shard(0)", "ep": "Shard(0)"},
            "counts": None,
            "*": {**replicas, "fsdp": "Shard(0)"},
        }

    def sharded(self) -> nn.Module:
        """This rank's model. Both meshes are views of one of all ranks, as torchtitan's ``ParallelDims`` makes them."""
        model = mixture()
        world = init_device_mesh("cpu", (self.world_size,), mesh_dim_names=("world",))
        names, sizes = ("dp_replicate", "fsdp"), (self.replicate, self.shard)
        dense = world._unflatten(0, sizes, names)
        efsdp = self.shard // self.experts
        sparse = world._unflatten(0, (self.replicate, efsdp, self.experts), ("dp_replicate", "efsdp", "ep"))

        def expert(_: str, module: nn.Module, mesh: Any) -> None:
            for name, parameter in module.named_parameters():
                placed = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
                module.register_parameter(name, nn.Parameter(placed))

        distribute_module(model.experts, sparse["ep"], expert)
        fully_shard(model.experts, mesh=sparse["dp_replicate", "efsdp"] if self.replicate > 1 else sparse["efsdp"])
        fully_shard(model, mesh=dense if self.replicate > 1 else dense["fsdp"])
        return model
