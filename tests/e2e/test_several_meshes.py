"""Experts on a mesh of their own, on 4 real Gloo ranks: saved, converted, loaded by FSDP2, and trained on.

Every path ends in the same weights and moments after one more step, bit for bit, as the run that went on. A path is
tried from one of the two cases; that the files are right for both is played in ``tests.writers``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

import fsdpckpt
from fsdpckpt import comm
from tests.comm.forked_workers import on_gloo
from tests.oracle.compare import differences
from tests.oracle.session import Oracle
from tests.writers.experts import ExpertMesh

CASES = {"shards": ExpertMesh(1, 4, 2), "replicas": ExpertMesh(2, 2, 2)}
OTHER = {"shards": "replicas", "replicas": "shards"}
PATHS = {
    "shards": ("back", "torchtitan", "reader-full", "gather"),
    "replicas": ("back", "like-the-other", "dcp", "reader-ranks", "scatter"),
}
LIMIT = 240.0


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.3 + 0.1
    optimizer.step()


def made(name: str, *, scale: float = 1.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = CASES[name].sharded()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state put together by PyTorch's own collectives, in the groups of this model's meshes: those that the files
    name are of another job, as in files of ``torch.save``."""
    named = dict(model.named_parameters())

    def full(value: Any, like: DTensor) -> torch.Tensor:
        if not isinstance(value, DTensor):
            return value
        assert (value.device_mesh, value.placements) == (like.device_mesh, like.placements)
        where = like.device_mesh, like.placements
        live = DTensor.from_local(value.to_local(), *where, run_check=False, shape=like.shape, stride=like.stride())
        return live.full_tensor()

    state = state_of(model, optimizer)
    return {
        "model": {name: full(value, named.get(name)) for name, value in state["model"].items()},
        "optimizer": {
            name: {key: full(value, named[name]) for key, value in states.items()}
            for name, states in state["optimizer"]["state"].items()
        },
        "groups": state["optimizer"]["param_groups"],
    }


def train(directory: Path) -> None:
    def body(rank: int) -> None:
        for name in CASES:
            model, optimizer = made(name)
            step(model, optimizer)
            step(model, optimizer)
            state, path = state_of(model, optimizer), directory / name
            path.mkdir(exist_ok=True)
            torch.save(state["model"], path / f"model_world_size_4_rank_{rank}.pt")
            torch.save(state["optimizer"], path / f"optim_world_size_4_rank_{rank}.pt")
            step(model, optimizer)
            expected = whole(model, optimizer)
            if not rank:
                torch.save(expected, directory / f"{name}-expected.pt")

    on_gloo(4, body, limit=LIMIT)


def filled(path: str, name: str, directory: Path, rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with other weights, loaded from the files of ``path``."""
    model, optimizer = made(name, scale=3.0)
    place = directory / f"{name}-{path}"
    step(model, optimizer)  # makes the states that are filled in place
    state = state_of(model, optimizer)
    if path in ("back", "like-the-other"):
        files = [place / f"{section}_world_size_4_rank_{rank}.pt" for section in ("model", "optim")]
        model.load_state_dict(torch.load(files[0], weights_only=True))
        set_optimizer_state_dict(model, optimizer, torch.load(files[1], weights_only=True))
        return model, optimizer
    if path in ("scatter", "gather"):
        whole_state = torch.load(directory / f"{name}.pt", weights_only=True)
        with comm.TorchGroup.over() as group:
            if path == "gather":
                dcp.load(state, storage_reader=fsdpckpt.StorageReader(directory / name))
                assert differences(comm.gather(group, state), whole_state) == []
                whole_state = comm.gather(group, state, to=0)
                state = state_of(*made(name, scale=5.0)) | {"optimizer": state["optimizer"]}
            state = comm.scatter(group, whole_state if not rank else None, like=state)
    elif path == "torchtitan":  # which has the model at the top, and the optimizer's keys dotted
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        content = {**state["model"], "optimizer": get_optimizer_state_dict(model, optimizer, options=flat)}
        dcp.load(content, checkpoint_id=place)
        model.load_state_dict({name: content[name] for name in state["model"]})
        set_optimizer_state_dict(model, optimizer, content["optimizer"], options=flat)
        return model, optimizer
    else:
        sources = {"reader-full": directory / f"{name}.pt", "reader-ranks": directory / OTHER[name]}
        reader = fsdpckpt.StorageReader(sources[path]) if path in sources else None
        dcp.load(state, storage_reader=reader, checkpoint_id=None if reader else place)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return model, optimizer


def go_on(directory: Path) -> None:
    def body(rank: int) -> None:
        problems: dict[str, list[str]] = {}
        for name in CASES:
            expected = torch.load(directory / f"{name}-expected.pt", weights_only=True)
            for path in PATHS[name]:
                model, optimizer = filled(path, name, directory, rank)
                step(model, optimizer)
                problems[f"{name}-{path}"] = differences(whole(model, optimizer), expected)
        (directory / f"problems-{rank}.json").write_text(json.dumps(problems))

    on_gloo(4, body, limit=LIMIT)


def _all(directory: Path) -> None:
    train(directory)
    for name, case in CASES.items():
        replicas = "dp_replicate=2," if case.replicate > 1 else ""
        there = (f"{replicas}fsdp={16 // case.replicate}", f"{replicas}efsdp={8 // case.replicate},ep=2")
        ranks: dict[str, Any] = {"to": "sharded", "container": "torch"}
        dcp_like: dict[str, Any] = {"to": "sharded", "container": "dcp", "like": directory / name}
        for source, target, options in (
            (name, f"{name}-there", {**ranks, "mesh": there}),
            (f"{name}-there", f"{name}-back", {**ranks, "world_size": 4}),
            (OTHER[name], f"{name}-like-the-other", {**ranks, "like": directory / name}),
            (name, f"{name}.pt", {"to": "full"}),
            (f"{name}.pt", f"{name}-dcp", dcp_like),
            (f"{name}.pt", f"{name}-torchtitan", {**dcp_like, "flavor": "torchtitan"}),
        ):
            fsdpckpt.convert(directory / source, directory / target, **options)
    go_on(directory)


@pytest.mark.timeout(500)
@pytest.mark.parametrize(("name", "path"), [(name, path) for name, paths in PATHS.items() for path in paths])
def test_every_path_goes_on_as_the_run_that_was_saved(oracle: Oracle, name: str, path: str) -> None:
    directory = oracle.once("several-meshes", _all)
    for rank in range(4):
        assert json.loads((directory / f"problems-{rank}.json").read_text())[f"{name}-{path}"] == []
