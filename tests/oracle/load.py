"""Load checkpoints into real FSDP and compare what every rank then holds with PyTorch's own loading of the truth.

``torchrun -m tests.oracle.load JOBS RESULTS``: JOBS is a JSON list of ``{"id", "kind", "path", "truth", "wraps"}``,
RESULTS becomes ``{id: [what is wrong, on which rank]}``. For every job a model with other weights is wrapped, the job's
checkpoint is loaded into it and its optimizer, and parameters, buffers, states and groups are compared bit for bit with
a model that got the truth through PyTorch's full state dict; then both take one step on the same data and are compared
again.

kind        what lies at ``path``                     ``wraps`` it can be loaded into
full        one torch file, name-keyed                f1, f1_flat, f2
dcp         a DCP directory, name-keyed               f1, f1_flat, f1_mesh, f2
dcp_flat    the same, the optimizer's keys flattened  f2
dcp_ids     a DCP directory, id-keyed                 f2
ranks       DTensor files by rank, name-keyed         f1_mesh, f2
ranks_ids   DTensor files by rank, id-keyed           f2
ranks_st    ShardedTensor files by rank, name-keyed   f1, f1_flat

Files by rank are also compared, value by value, with the state dicts PyTorch itself would save on that rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from tests.oracle.compare import differences, optimizer_by_id
from tests.oracle.generate import sharded1
from tests.oracle.jobs import by_rank, play_jobs
from tests.oracle.process import quiet_worker
from tests.oracle.toy import BUFFERS, adamw, seeded_model, shard1, shard2, step

Loaded = tuple[nn.Module, Optimizer]
FULL_OPTIONS = StateDictOptions(full_state_dict=True)


@cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "f1": shard1,
    "f1_flat": lambda model: shard1(model, use_orig_params=False),
    "f1_mesh": lambda model: shard1(model, mesh=mesh()),
    "f2": lambda model: shard2(model, mesh()),
}


def fresh(wrap: str) -> Loaded:
    """A wrapped model with weights unlike any truth, and an optimizer that has taken no step."""
    model = WRAPS[wrap](seeded_model(seed=5))
    return model, adamw(model)


def local(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value._local_tensor
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def held(loaded: Loaded) -> dict[str, Any]:
    """Everything this rank holds: local parameters and buffers, optimizer states and groups by parameter name."""
    model, optimizer = loaded
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {
        "model": {name: local(tensor) for name, tensor in tensors},
        "state": {
            names[p]: {key: local(value) for key, value in states.items()} for p, states in optimizer.state.items()
        },
        "groups": [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups],
    }


def held_now_and_after_a_step(loaded: Loaded) -> tuple[dict[str, Any], dict[str, Any]]:
    before = held(loaded)
    # FSDP1 with use_orig_params=False saves one ``step`` object for all parameters of a unit; loaded under
    # use_orig_params=True or FSDP2, every one of them would advance it.
    for states in loaded[1].state.values():
        states["step"] = states["step"].clone()
    step(*loaded, rank=dist.get_rank(), number=77)
    return before, held(loaded)


def read_truth(path: str) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def load_full1(loaded: Loaded, content: dict[str, Any]) -> None:
    model, optimizer = loaded
    with FullyShardedDataParallel.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=False, rank0_only=False),
        FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False),
    ):
        model.load_state_dict(content["model"])
        states = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, content["optimizer"])
    optimizer.load_state_dict(states)


def load_sharded1(loaded: Loaded, content: dict[str, Any]) -> None:
    model, optimizer = loaded
    with FullyShardedDataParallel.state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=False),
        ShardedOptimStateDictConfig(offload_to_cpu=False),
    ):
        model.load_state_dict(content["model"])
        states = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, content["optimizer"])
    optimizer.load_state_dict(states)


def load_full2(loaded: Loaded, content: dict[str, Any]) -> None:
    model, optimizer = loaded
    set_model_state_dict(model, content["model"], options=FULL_OPTIONS)
    set_optimizer_state_dict(model, optimizer, content["optimizer"], options=FULL_OPTIONS)
    for group in optimizer.param_groups:
        group["betas"] = tuple(group["betas"])  # that way of loading turns tuples into lists


def load_sharded2(loaded: Loaded, content: dict[str, Any], *, flattened: bool = False) -> None:
    model, optimizer = loaded
    set_model_state_dict(model, content["model"])
    options = StateDictOptions(flatten_optimizer_state_dict=flattened)
    set_optimizer_state_dict(model, optimizer, content["optimizer"], options=options)


@cache
def with_truth(truth: str, wrap: str) -> tuple[dict[str, Any], dict[str, Any]]:
    loaded = fresh(wrap)
    (load_full2 if wrap == "f2" else load_full1)(loaded, read_truth(truth))
    return held_now_and_after_a_step(loaded)


@cache
def sharded_truth(truth: str, wrap: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sharded state dicts PyTorch gives on this rank once it has loaded the truth."""
    model, optimizer = loaded = fresh(wrap)
    if wrap == "f2":
        load_full2(loaded, read_truth(truth))
        return get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    load_full1(loaded, read_truth(truth))
    return sharded1(model, optimizer)


def rank_file(directory: str, section: str) -> Any:
    name = f"{section}_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    # ShardedTensor is on no allow-list of torch.load.
    return torch.load(os.path.join(directory, name), weights_only=False)


def initialised(wrap: str) -> Loaded:
    """A new pair whose optimizer has states, made by a real step: ``dcp.load`` needs a template."""
    loaded = fresh(wrap)
    step(*loaded, rank=dist.get_rank(), number=5)
    return loaded


def load_dcp(path: str, wrap: str, *, flattened: bool = False) -> Loaded:
    model, optimizer = loaded = initialised(wrap)
    if wrap == "f2":
        options = StateDictOptions(flatten_optimizer_state_dict=flattened)
        states = get_optimizer_state_dict(model, optimizer, options=options)
        content = {"model": get_model_state_dict(model), "optimizer": states}
    else:
        weights, states = sharded1(model, optimizer)
        content = {"model": weights, "optimizer": states}
    # By default the planner drops ShardedTensors without a local shard, then takes this for a checkpoint of torch 2.3.
    dcp.load(content, checkpoint_id=path, planner=DefaultLoadPlanner(flatten_sharded_tensors=False))
    if wrap == "f2":
        load_sharded2(loaded, content, flattened=flattened)
    else:
        load_sharded1(loaded, content)
    return loaded


def load_job(kind: str, path: str, wrap: str) -> Loaded:
    if kind in ("dcp", "dcp_flat"):
        return load_dcp(path, wrap, flattened=kind == "dcp_flat")
    if kind == "full":
        loaded = fresh(wrap)
        (load_full2 if wrap == "f2" else load_full1)(loaded, torch.load(path, weights_only=True))
        return loaded
    if kind == "dcp_ids":
        model, optimizer = loaded = initialised(wrap)
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(content, checkpoint_id=path)
    else:
        model, optimizer = loaded = fresh(wrap)
        content = {"model": rank_file(path, "model"), "optimizer": rank_file(path, "optim")}
    if kind.endswith("_ids"):
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
    else:
        (load_sharded2 if wrap == "f2" else load_sharded1)(loaded, content)
    return loaded


def distributed(value: Any, *, plain: bool = False) -> Any:
    """A full state dict as DTensors, cut by PyTorch; 0-dim tensors and everything under ``plain`` unchanged."""
    if isinstance(value, dict):
        whole = (*BUFFERS, "param_groups")
        return {key: distributed(child, plain=plain or key in whole) for key, child in value.items()}
    if isinstance(value, torch.Tensor) and value.ndim and not plain:
        return distribute_tensor(value, mesh(), [Shard(0)], src_data_rank=None)  # every rank has all of it
    return value


def check_files(kind: str, path: str, truth: str, wraps: list[str]) -> Iterator[str]:
    """Differences between this rank's files and the state dicts PyTorch would save on this rank."""
    weights, states = rank_file(path, "model"), rank_file(path, "optim")
    content = read_truth(truth)
    expected = [(distributed(content["model"]), distributed(content["optimizer"]), "distribute_tensor")]
    if kind == "ranks" and "f2" in wraps:
        expected.append((*sharded_truth(truth, "f2"), "FSDP2"))
    elif kind == "ranks_ids":
        expected = [(model, optimizer_by_id(optimizer), source) for model, optimizer, source in expected]
    elif kind == "ranks_st":
        expected = [(*sharded_truth(truth, "f1"), "FSDP1")]
    for model, optimizer, source in expected:
        yield from differences(weights, model, f"model file against {source}: ")
        yield from differences(states, optimizer, f"optim file against {source}: ")


def check_job(kind: str, path: str, truth: str, wraps: list[str]) -> Iterator[str]:
    if kind.startswith("ranks") and dist.get_world_size() > 1:
        yield from check_files(kind, path, truth, wraps)
    for wrap in wraps:
        before, after = with_truth(truth, wrap)
        found_before, found_after = held_now_and_after_a_step(load_job(kind, path, wrap))
        yield from differences(found_before, before, f"loaded into {wrap}: ")
        yield from differences(found_after, after, f"one step after loading into {wrap}: ")


def main() -> None:
    quiet_worker(limit=150)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    play_jobs(
        *sys.argv[1:],
        lambda job: list(check_job(job["kind"], job["path"], job["truth"], job["wraps"])),
        by_rank,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
