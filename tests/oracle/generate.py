"""Make real FSDP checkpoints of every form at one world size: ``torchrun -m tests.oracle.generate DIRECTORY``.

Each training run (FSDP1 three ways, FSDP2, HSDP, FSDP x TP) leaves ``truth/<run>.pt``, written by PyTorch from the live
model: the full model and the full optimizer by name, plain tensors. The forms are listed in ``tests.oracle.forms``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Optimizer

from tests.oracle.compare import optimizer_by_id, plain
from tests.oracle.process import quiet_worker
from tests.oracle.toy import adamw, full1, seeded_model, shard1, shard2, sharded1, sharding_groups, step

STEPS = 3


class Files:
    """Where checkpoints go, and the ways to write them."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def path(self, *parts: str) -> str:
        path = os.path.join(self.directory, *parts)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return path

    def of_rank(self, form: str, section: str) -> str:
        return self.path(form, f"{section}_world_size_{self.world}_rank_{self.rank}.pt")

    def one_file(self, form: str, content: object) -> None:
        if self.rank == 0:
            torch.save(content, self.path(form))

    def ranks(self, form: str, **sections: object) -> None:
        for section, content in sections.items():
            torch.save(content, self.of_rank(form, section))

    def dcp(self, form: str, content: dict[str, Any]) -> None:
        dcp.save(content, checkpoint_id=self.path(form, "")[:-1])

    def truth(self, run: str, model: object, optimizer: object) -> None:
        self.one_file(f"truth/{run}.pt", {"model": plain(model), "optimizer": plain(optimizer)})


def fsdp1(run: Files, name: str, model: nn.Module) -> None:
    optimizer = adamw(model)
    for number in range(STEPS):
        step(model, optimizer, rank=run.rank, number=number)
    weights, states = full1(model, optimizer)
    run.truth(name, weights, states)
    run.one_file(f"{name}_full.pt", {"model": weights, "optimizer": states})
    weights, states = sharded1(model, optimizer)
    run.ranks(f"{name}_ranks", model=weights, optim=states)
    run.dcp(f"{name}_dcp", {"model": weights, "optimizer": states})


def full2(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    # Without cpu_offload every rank gets the full state.
    options = StateDictOptions(full_state_dict=True)
    return get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optimizer, options=options)


def fsdp2(run: Files, name: str, model: nn.Module) -> None:
    optimizer = adamw(model)
    for number in range(STEPS):
        step(model, optimizer, rank=run.rank, number=number)
    save2(run, name, model, optimizer)


def save2(run: Files, name: str, model: nn.Module, optimizer: Optimizer) -> None:
    full_weights, full_states = full2(model, optimizer)
    run.truth(name, full_weights, full_states)
    run.one_file(f"{name}_full.pt", {"model": full_weights, "optimizer": full_states, "epoch": 7})
    run.one_file(f"{name}_full_ids.pt", {"model": full_weights, "optimizer": optimizer_by_id(full_states)})
    run.one_file(f"{name}_model.pt", full_weights)

    weights, states = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    flattened = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    progress = {"step": STEPS, "seen": torch.tensor(12 * STEPS)}
    extra = {"rng": {"cpu": torch.get_rng_state(), "rank": run.rank}, "lr_scheduler": {"last_epoch": 3, "base": [0.1]}}
    run.dcp(f"{name}_dcp", {"model": weights, "optimizer": states, "progress": progress})
    run.dcp(f"{name}_dcp_flattened", {"model": weights, "optimizer": flattened})
    run.dcp(f"{name}_dcp_ids", {"model": weights, "optimizer": optimizer.state_dict()})
    run.ranks(f"{name}_ranks", model=weights, optim=states)
    run.ranks(f"{name}_ranks_ids", model=model.state_dict(), optim=optimizer.state_dict(), extra_state=extra)

    enrich(optimizer)
    full_weights, full_states = full2(model, optimizer)
    run.truth(f"{name}_rich", full_weights, full_states)
    states = get_optimizer_state_dict(model, optimizer)
    run.dcp(f"{name}_rich_dcp", {"model": weights, "optimizer": states})
    run.ranks(f"{name}_rich_ranks", model=weights, optim=states)


def enrich(optimizer: Optimizer) -> None:
    """Add states that mixed-precision and custom optimizers have: fp32 moments of bf16 parameters, None, int."""
    for number, states in enumerate(optimizer.state.values()):
        for key in ("exp_avg", "exp_avg_sq"):
            states[key] = states[key].float()
        states["master"] = None
        states["calls"] = number


def tensor_parallel(run: Files) -> None:
    """FSDP2 over ``dp`` of blocks sharded over ``tp``: up by rows (twice over dim 0), down by columns."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = seeded_model()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    shard2(model, mesh["dp"])
    optimizer = adamw(model)
    reference = seeded_model()
    reference_optimizer = adamw(reference)
    whole = dict(reference.named_parameters())
    for _ in range(STEPS):
        # Gradients of one element from that element alone, so that a single process gives the same values.
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                gradient = whole[name].detach().sin()
                assert isinstance(parameter, DTensor)
                parameter.grad = like(gradient, parameter)
                whole[name].grad = gradient
        optimizer.step()
        reference_optimizer.step()

    weights, states = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    run.truth("tp", *full2(reference, reference_optimizer))
    run.ranks("tp_ranks", model=weights, optim=states)
    run.dcp("tp_dcp", {"model": weights, "optimizer": states})


def like(full: torch.Tensor, model: DTensor) -> DTensor:
    """``full`` cut as ``model`` is: first over tp, then over dp, as FSDP2 cuts a tensor-parallel parameter."""
    if model.device_mesh.ndim == 1:
        return distribute_tensor(full, model.device_mesh, model.placements)
    dp, tp = model.placements
    piece = full
    for size, place, coordinate in (
        (model.device_mesh.size(1), tp, model.device_mesh.get_local_rank(1)),
        (model.device_mesh.size(0), dp, model.device_mesh.get_local_rank(0)),
    ):
        if place.is_replicate():
            continue
        chunks = piece.chunk(size, place.dim)
        piece = chunks[coordinate] if coordinate < len(chunks) else piece.narrow(place.dim, 0, 0)
    shape, stride = model.shape, model.stride()
    mesh, placements = model.device_mesh, model.placements
    return DTensor.from_local(piece.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride)


def main() -> None:
    directory = sys.argv[1]
    quiet_worker(limit=110)
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    run = Files(directory)
    mesh = init_device_mesh("cpu", (run.world,))
    runs: dict[str, Callable[[], None]] = {
        "f1": lambda: fsdp1(run, "f1", shard1(seeded_model())),
        "f1_flat": lambda: fsdp1(run, "f1_flat", shard1(seeded_model(), use_orig_params=False)),
        "f1_mesh": lambda: fsdp1(run, "f1_mesh", shard1(seeded_model(), device_mesh=mesh)),
        "f2": lambda: fsdp2(run, "f2", shard2(seeded_model(), mesh)),
    }
    if run.world == 4:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        hybrid = ShardingStrategy.HYBRID_SHARD
        runs["h1_mesh"] = lambda: fsdp1(
            run, "h1_mesh", shard1(seeded_model(), device_mesh=grid, sharding_strategy=hybrid)
        )
        # With process groups instead of a mesh it saves ShardedTensor.
        groups = sharding_groups(2)
        runs["h1"] = lambda: fsdp1(run, "h1", shard1(seeded_model(), process_group=groups, sharding_strategy=hybrid))
        runs["h2"] = lambda: fsdp2(run, "h2", shard2(seeded_model(), grid))
        runs["tp"] = lambda: tensor_parallel(run)
    for make in runs.values():
        make()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
