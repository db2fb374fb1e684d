"""Real DCP saves of any world size in one process: PyTorch's "fake" process group plays one rank after another.

Planning, deduplication and writing are torch's own steps, in the order in which ``dcp.save`` runs them on each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.oracle.fake_group import as_rank

__all__ = ["StackOf", "save_as_ranks", "shard", "shard_rows_twice"]


def save_as_ranks(
    directory: Path,
    state_of: Callable[[int], dict[str, Any]],
    world_size: int,
    *,
    writer: Callable[[str], FileSystemWriter] = FileSystemWriter,
    planner: Callable[[], DefaultSavePlanner] = DefaultSavePlanner,
) -> None:
    """What ``dcp.save(state, storage_writer=writer(directory), planner=planner())`` writes on ``world_size`` ranks."""
    planners, plans = [], []
    storage = writer(str(directory))
    storage.reset(str(directory))
    for rank in range(world_size):
        with as_rank(rank, world_size):
            mine = planner()
            mine.set_up_planner(state_of(rank), storage.storage_meta(), is_coordinator=rank == 0)
            storage.set_up_storage_writer(rank == 0)
            plans.append(storage.prepare_local_plan(mine.create_local_plan()))
            planners.append(mine)
    plans, metadata = planners[0].create_global_plan(plans)
    plans = storage.prepare_global_plan(plans)
    written = []
    for mine, plan in zip(planners, plans, strict=True):
        future = storage.write_data(mine.finish_plan(plan), mine)
        future.wait()
        written.append(future.value())
    storage.finish(metadata, written)


class StackOf(nn.Module):
    """Linear layers, one a shape: nothing but parameters to shard."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, weight in weights.items():
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            layer.weight = nn.Parameter(weight.clone())
            self.add_module(name, layer)


def shard(weights: dict[str, torch.Tensor], world_size: int) -> dict[str, Any]:
    """This rank's FSDP2 state dict of those weights."""
    model = StackOf(weights)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    return model.state_dict()


def shard_rows_twice(weights: dict[str, torch.Tensor], data: int, tensor: int) -> dict[str, Any]:
    """This rank's state dict under FSDP2 over tensor parallelism, both of which cut dimension 0."""
    mesh: DeviceMesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("dp", "tp"))
    model = StackOf(weights)
    parallelize_module(model, mesh["tp"], {name: ColwiseParallel() for name in weights}, src_data_rank=None)
    fully_shard(model, mesh=mesh["dp"])
    return model.state_dict()
