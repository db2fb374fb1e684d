"""Parts that are missing, and that only another part of the checkpoint shows to be missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fsdpckpt
from fsdpckpt.errors import SourceCorruptError
from tests.converters.jobs import converted, refused, save
from tests.oracle.compare import require_identical
from tests.readers.played_ranks import save_as_ranks

SHAPES = {"a.weight": (7, 4), "a.bias": (7,), "b.weight": (5, 7)}


def model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def optimizer(*, named: bool) -> dict[str, Any]:
    keys: list[Any] = list(SHAPES) if named else list(range(len(SHAPES)))
    state = {
        key: {"step": torch.tensor(3.0), "exp_avg": torch.ones(s)} for key, s in zip(keys, SHAPES.values(), strict=True)
    }
    return {"state": state, "param_groups": [{"lr": 0.1, "params": keys}]}


def require_refused(key: str, **options: Any) -> None:
    """``verify`` lists the shape, ``inspect`` shows it, and ``convert`` writes nothing."""
    assert ("shape", key) in {(problem.kind, problem.key) for problem in fsdpckpt.verify("s").problems}
    assert any(problem.key == key for problem in fsdpckpt.inspect("s").checkpoint.problems)
    assert refused(SourceCorruptError, "different shapes", "s", "o.pt", **options).exit_code == 3


@pytest.mark.parametrize("world_size", [3, 7])
def test_the_last_shards_of_dcps_safetensors_are_missed_by_the_optimizer(world_size: int) -> None:
    """The shards record neither the shapes of whole tensors nor how many there are."""
    whole = model()

    def state_of(_rank: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (world_size,))
        return {n: distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for n, t in whole.items()}

    def writer(path: str) -> HuggingFaceStorageWriter:
        return HuggingFaceStorageWriter(path, save_distributed=True)

    save_as_ranks(Path("s/model"), state_of, world_size, writer=writer)
    save(optimizer(named=True), "s/optimizer.pt")
    require_identical(converted("s", "whole.pt")["model"], whole)
    sorted(Path("s/model").glob("shard-*"))[-1].unlink()
    require_refused("a.weight")
    require_refused("a.weight", only="model")
    fsdpckpt.convert("s", "optim.pt", only="optim")


@pytest.mark.parametrize("named", [True, False])
def test_one_ranks_rows_beside_whole_states(named: bool) -> None:
    Path("s").mkdir()
    save_file({name: tensor.chunk(2)[1].clone() for name, tensor in model().items()}, "s/model.safetensors")
    save(optimizer(named=named), "s/optimizer.pt")
    for only in ({}, {"only": "model"}):
        require_refused("a.weight" if named else "0.exp_avg", **only)


@pytest.mark.parametrize("rows", [True, False])
def test_an_adapter_that_is_one_ranks_part(rows: bool) -> None:
    """Its names are those of the whole adapter, and PEFT takes the adapter's own name out of them."""
    whole = {f"base_model.model.l.{at}.lora_A.{{}}weight": torch.randn(8, 6) for at in range(2)}
    part = {name.format(""): (tensor[:4] if rows else tensor).clone() for name, tensor in whole.items()}
    Path("s").mkdir()
    save_file(part, "s/adapter_model.safetensors")
    Path("s/adapter_config.json").write_text(json.dumps({"r": 4 if rows else 8}))
    state = {name.format("default."): {"exp_avg": tensor} for name, tensor in whole.items()}
    save({"state": state, "param_groups": [{"params": list(state)}]}, "s/optimizer.pt")
    assert [problem.kind for problem in fsdpckpt.verify("s").problems] == (["shape"] * 2 if rows else [])
    if rows:
        refused(SourceCorruptError, "different shapes", "s", "o.pt")


def test_a_state_that_was_cut_as_one_rank_has_it() -> None:
    states = optimizer(named=True)
    for entry in states["state"].values():
        entry["exp_avg"] = entry["exp_avg"].chunk(2)[0].clone()
    dcp.save({"model": model(), "optimizer": states}, checkpoint_id="s")
    for name in SHAPES:
        require_refused(f"{name}.exp_avg")
    fsdpckpt.convert("s", "o.pt", only="model")
