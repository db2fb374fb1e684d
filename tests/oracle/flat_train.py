"""Wrap a scenario's model with real FSDP1, train it, and take its state dicts in every form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.optim import Optimizer

from tests.oracle.flat_models import fill
from tests.oracle.flat_scenarios import Scenario
from tests.oracle.toy import as_fsdp1, full1, sharding_groups

__all__ = [
    "Run", "built", "full", "local", "started", "step", "trained", "wrap",
]  # fmt: skip

STEPS = 2
Run = tuple[nn.Module, Optimizer]


def built(entry: Scenario, seed: int = 0) -> nn.Module:
    """The bare model, with the random weights of ``seed``, before FSDP wraps it."""
    model = entry.build()
    fill(model, seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(entry.frozen is None or not entry.frozen(name))
    return model


def _mesh(entry: Scenario) -> DeviceMesh:
    world = dist.get_world_size()
    if entry.group is None:
        return init_device_mesh("cpu", (world,))
    return init_device_mesh("cpu", (world // entry.group, entry.group), mesh_dim_names=("ddp", "fsdp"))


def wrap(entry: Scenario, model: nn.Module, *, orig: bool, mesh: bool = False) -> nn.Module:
    """The model wrapped with FSDP1 as the scenario says; ``mesh`` makes it save DTensors instead of ShardedTensors."""
    where: dict[str, Any] = {}
    if mesh:
        where["device_mesh"] = _mesh(entry)
    elif entry.group is not None:
        where["process_group"] = sharding_groups(entry.group)
    named = dict(model.named_parameters())
    chosen = {model.get_submodule(name) for name in entry.units if name}
    precision = MixedPrecision(param_dtype=entry.param_dtype, reduce_dtype=torch.float32)
    options = {
        **where,
        "auto_wrap_policy": CustomPolicy(lambda module: module in chosen),
        "sharding_strategy": entry.strategy,
        "mixed_precision": precision if entry.param_dtype else None,
        "ignored_states": [named[name] for name in entry.ignored] or None,
        "use_orig_params": orig,
        "device_id": torch.device("cpu"),
    }
    if "" in entry.units:
        return FullyShardedDataParallel(model, **options)
    for name, child in list(model.named_children()):
        if child in chosen:
            setattr(model, name, FullyShardedDataParallel(child, **options))
    return model


def started(entry: Scenario, *, orig: bool, seed: int = 0, mesh: bool = False) -> Run:
    """A wrapped model and an optimizer that has taken no step."""
    model = wrap(entry, built(entry, seed), orig=orig, mesh=mesh)
    return model, entry.optimizer(model)


def step(run: Run, *, number: int) -> None:
    """One step on random data of this rank; what FSDP does not manage gets the mean gradient, as under DDP."""
    model, optimizer = run
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    # The model of a scenario computes its own loss; FSDP passes arguments on.
    model(generator).backward()
    sharded = {id(parameter) for module in FullyShardedDataParallel.fsdp_modules(model) for parameter in _own(module)}
    for parameter in model.parameters():
        if id(parameter) not in sharded and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    optimizer.step()
    model.zero_grad(set_to_none=True)


def _own(module: FullyShardedDataParallel) -> Iterator[nn.Parameter]:
    if module._handle is not None:
        yield module._handle.flat_param
        yield from module._handle.flat_param._params or ()


def trained(entry: Scenario, *, orig: bool, mesh: bool = False) -> Run:
    """A run after its training steps, on whatever world size this is."""
    run = started(entry, orig=orig, mesh=mesh)
    for number in range(STEPS):
        step(run, number=number)
    if entry.name == "odd_states":
        history = [1, 2.5] if orig else (1, 2.5)  # FSDP1 hashes values to flatten them: no lists
        for states in run[1].state.values():
            states.update(master=None, kind="dense", calls=3, history=history, ratio=0.25)
    return run


def full(run: Run) -> dict[str, Any]:
    """The full model and optimizer by name, on every rank, as FSDP1 gives them."""
    model, optimizer = full1(*run)
    return {"model": model, "optimizer": optimizer}


def local(model: nn.Module) -> dict[str, Any]:
    """This rank's ``LOCAL_STATE_DICT``."""
    with as_fsdp1(model, "local"):
        return model.state_dict()
