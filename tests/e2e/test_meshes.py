"""Trained on a mesh, converted there and back, loaded by FSDP: the next losses are those of the run that went on.

Real Gloo ranks, forked once to train and save, and once for each world size that loads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard import load_with_process_group
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)

import fsdpckpt
from tests.comm.forked_workers import on_gloo
from tests.oracle.session import Oracle
from tests.writers.meshes import MeshCase, all_three, hsdp, net, over_tp, sharded_model

SIZE, ODD, LIMIT = 4, 2, 240.0  # tensor parallelism divides the 18 columns, FSDP what is left of them does not
MESHES: dict[str, MeshCase] = {
    "tp4": over_tp(2, 2),
    "tp2": over_tp(1, 2),
    "hsdp4": hsdp(2, 2),
    "hsdp2": hsdp(2, 1),
    "three4": all_three(2, 1, 2),
    "columns4": MeshCase({"dp_shard": 4}, ("dp_shard",), rows=1),
}
SAVED = ("tp4", "hsdp4", "three4", "columns4", "hybrid4")
# What each source becomes, at which world size it is loaded, and by what: FSDP2 (else FSDP1) on which mesh.
Job = tuple[str, str, str, dict[str, Any]]
JOBS: tuple[Job, ...] = (
    *((name, name, f"{name}-back", {}) for name in SAVED[:-1]),
    ("hybrid4", "hybrid4", "hybrid4-back", {"tensor": "sharded-tensor", "mesh": "replicate=2,shard=2"}),
    ("tp4", "tp2", "tp-on-2", {"world_size": 2}),
    ("hsdp4", "hsdp2", "hsdp-on-2", {"world_size": 2}),
    ("tp4", "tp4", "tp-dcp", {"container": "dcp", "world_size": 4}),
    ("three4", "hsdp4", "three-to-hsdp", {"like": "hsdp4"}),
    ("hsdp4", "three4", "hsdp-to-three", {"like": "three4"}),
    ("tp4", "hybrid4", "tp-to-hybrid", {"tensor": "sharded-tensor", "mesh": "replicate=2,shard=2"}),
)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """One step on the batch ``number``, which is the same on every rank; its loss."""
    data = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
    loss = model(data).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def wrapped(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    if name == "hybrid4":
        shards = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        replicas = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        rank = dist.get_rank()
        model: nn.Module = FullyShardedDataParallel(
            net(SIZE, ODD),
            process_group=(shards[rank // 2], replicas[rank % 2]),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        FullyShardedDataParallel.set_state_dict_type(
            model,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=False),
            ShardedOptimStateDictConfig(offload_to_cpu=False),
        )
    else:
        model = sharded_model(MESHES[name], lambda: net(SIZE, ODD))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    if isinstance(model, FullyShardedDataParallel):
        return {"model": model.state_dict(), "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer)}
    names = {parameter: key for key, parameter in model.named_parameters()}
    own = optimizer.state_dict()
    ids = dict(enumerate(names.values()))
    groups = [{**group, "params": [ids[number] for number in group["params"]]} for group in own["param_groups"]]
    state = {ids[number]: states for number, states in own["state"].items()}
    return {"model": model.state_dict(), "optim": {"state": state, "param_groups": groups}}


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    if (path / ".metadata").exists():
        step(model, optimizer, 99)  # makes the states that are filled
        state = state_of(model, optimizer)
        content = {"model": state["model"], "optimizer": {"state": state["optim"]["state"]}}
        dcp.load(content, checkpoint_id=path)
        return
    files = [path / f"{section}_world_size_{world}_rank_{rank}.pt" for section in ("model", "optim")]
    if isinstance(model, FullyShardedDataParallel):
        with load_with_process_group(model.process_group):
            weights, states = (torch.load(file, weights_only=False) for file in files)
        model.load_state_dict(weights)
        optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, states))
        return
    weights, states = (torch.load(file, weights_only=True) for file in files)
    model.load_state_dict(weights)
    ids = {key: number for number, (key, _) in enumerate(model.named_parameters())}
    groups = [{**group, "params": [ids[key] for key in group["params"]]} for group in states["param_groups"]]
    state = {ids[key]: entry for key, entry in states["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def train(directory: Path) -> None:
    def body(rank: int) -> None:
        losses: dict[str, list[float]] = {}
        for name in SAVED:
            model, optimizer = wrapped(name)
            for number in range(2):
                step(model, optimizer, number)
            path = directory / name
            path.mkdir(exist_ok=True)
            for section, value in state_of(model, optimizer).items():
                torch.save(value, path / f"{section}_world_size_4_rank_{rank}.pt")
            losses[name] = [step(model, optimizer, number) for number in range(2, 5)]
        if not rank:
            (directory / "losses.json").write_text(json.dumps(losses))

    on_gloo(4, body, limit=LIMIT)


def go_on(directory: Path, world_size: int, jobs: list[Job]) -> None:
    def body(rank: int) -> None:
        losses: dict[str, list[float]] = {}
        for _, name, target, _ in jobs:
            model, optimizer = wrapped(name)
            load(directory / target, model, optimizer)
            losses[target] = [step(model, optimizer, number) for number in range(2, 5)]
        if not rank:
            (directory / f"losses-{world_size}.json").write_text(json.dumps(losses))

    on_gloo(world_size, body, limit=LIMIT)


def _all(directory: Path) -> None:
    train(directory)
    for name, _, target, options in JOBS:
        source, given = directory / name, {"to": "sharded", "container": "torch", "world_size": 4, **options}
        if target.endswith("-back"):
            there = {**given, "world_size": 12 if name != "columns4" else 2}  # of which every mesh has a resized one
            there.pop("mesh", None)
            fsdpckpt.convert(source, directory / f"{name}-there", **there)
            source = directory / f"{name}-there"
        if "like" in given:
            given["like"] = directory / given["like"]
        fsdpckpt.convert(source, directory / target, **given)
    for world_size in (2, 4):
        go_on(directory, world_size, [job for job in JOBS if ranks_of(job) == world_size])


def ranks_of(job: Job) -> int:
    return 2 if job[1].endswith("2") else 4


@pytest.mark.timeout(600)
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job[2])
def test_the_next_losses_are_those_of_the_run_that_went_on(oracle: Oracle, job: Job) -> None:
    directory = oracle.once("meshes", _all)
    source, name, target, _ = job
    expected = json.loads((directory / "losses.json").read_text())[source]
    found = json.loads((directory / f"losses-{ranks_of(job)}.json").read_text())[target]
    assert len(set(expected)) == 3
    if source == name:
        assert found == expected
    else:  # the same numbers, summed in another order
        assert found == pytest.approx(expected, rel=1e-5)
