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
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from tests.oracle import fake
from tests.oracle.compare import differences, optimizer_by_id
from tests.oracle.jobs import by_rank, play_jobs
from tests.oracle.process import quiet_worker
from tests.oracle.toy import BUFFERS, adamw, as_fsdp1, full1, seeded_model, shard1, shard2, sharded1, step

Loaded = tuple[nn.Module, Optimizer]


@cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "f1": shard1,
    "f1_flat": lambda model: shard1(model, use_orig_params=False),
    "f1_mesh": lambda model: shard1(model, device_mesh=mesh()),
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


def content_of(loaded: Loaded, wrap: str, form: str) -> dict[str, Any]:
    """What the job's own calls give on this rank: "full", "sharded", "flattened" (FSDP2's optimizer), or by "ids"."""
    model, optimizer = loaded
    if form == "ids":
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if wrap == "f2":
        options = StateDictOptions(full_state_dict=form == "full", flatten_optimizer_state_dict=form == "flattened")
        weights = get_model_state_dict(model, options=options)
        return {"model": weights, "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    weights, states = (full1 if form == "full" else sharded1)(model, optimizer)
    return {"model": weights, "optimizer": states}


def put(loaded: Loaded, wrap: str, form: str, content: dict[str, Any]) -> None:
    """Load what ``content_of`` gives, PyTorch's own way."""
    model, optimizer = loaded
    if form == "ids":
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
    elif wrap == "f2":
        options = StateDictOptions(full_state_dict=form == "full", flatten_optimizer_state_dict=form == "flattened")
        set_model_state_dict(model, content["model"], options=options)
        set_optimizer_state_dict(model, optimizer, content["optimizer"], options=options)
        for group in optimizer.param_groups if form == "full" else ():
            group["betas"] = tuple(group["betas"])  # that way of loading turns tuples into lists
    else:
        with as_fsdp1(model, form):
            model.load_state_dict(content["model"])
            states = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, content["optimizer"])
        optimizer.load_state_dict(states)


def filled(truth: str, wrap: str) -> Loaded:
    loaded = fresh(wrap)
    put(loaded, wrap, "full", read_truth(truth))
    return loaded


@cache
def with_truth(truth: str, wrap: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return held_now_and_after_a_step(filled(truth, wrap))


@cache
def sharded_truth(truth: str, wrap: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sharded state dicts PyTorch gives on this rank once it has loaded the truth."""
    content = content_of(filled(truth, wrap), wrap, "sharded")
    return content["model"], content["optimizer"]


def rank_file(directory: str, section: str) -> Any:
    return fake.rank_file(directory, section, dist.get_world_size(), dist.get_rank())


def initialised(wrap: str) -> Loaded:
    """A new pair whose optimizer has states, made by a real step: ``dcp.load`` needs a template."""
    loaded = fresh(wrap)
    step(*loaded, rank=dist.get_rank(), number=5)
    return loaded


FORMS = {"full": "full", "dcp_flat": "flattened", "dcp_ids": "ids", "ranks_ids": "ids"}


def load_job(kind: str, path: str, wrap: str) -> Loaded:
    form = FORMS.get(kind, "sharded")
    if kind.startswith("dcp"):
        loaded = initialised(wrap)
        fill(content := content_of(loaded, wrap, form), checkpoint_id=path)
    else:
        loaded = fresh(wrap)
        if kind == "full":
            content = read_truth(path)
        else:
            content = {"model": rank_file(path, "model"), "optimizer": rank_file(path, "optim")}
    put(loaded, wrap, form, content)
    return loaded


def fill(content: dict[str, Any], **source: Any) -> None:
    # By default the planner drops ShardedTensors without a local shard, then takes this for a checkpoint of torch 2.3.
    dcp.load(content, planner=DefaultLoadPlanner(flatten_sharded_tensors=False), **source)


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
    play = lambda job: list(check_job(job["kind"], job["path"], job["truth"], job["wraps"]))  # noqa: E731
    play_jobs(*sys.argv[1:], play, by_rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
