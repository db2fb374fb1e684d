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
from tests.oracle.compare import identical
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


def refused(source: Path, target: Path, key: str, **options: Any) -> None:
    """``verify`` lists the shape, ``inspect`` shows it, and ``convert`` writes nothing."""
    kinds = {(problem.kind, problem.key) for problem in fsdpckpt.verify(source).problems}
    assert ("shape", key) in kinds
    assert any(problem.key == key for problem in fsdpckpt.inspect(source).checkpoint.problems)
    with pytest.raises(SourceCorruptError, match="different shapes") as error:
        fsdpckpt.convert(source, target, **options)
    assert error.value.exit_code == 3 and not target.exists()


@pytest.mark.parametrize("world_size", [3, 7])
def test_the_last_shards_of_dcps_safetensors_are_missed_by_the_optimizer(world_size: int, tmp_path: Path) -> None:
    """The shards record neither the shapes of whole tensors nor how many there are."""
    whole = model()

    def state_of(_rank: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (world_size,))
        return {n: distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for n, t in whole.items()}

    save_as_ranks(
        tmp_path / "s" / "model", state_of, world_size,
        writer=lambda path: HuggingFaceStorageWriter(path, save_distributed=True),
    )  # fmt: skip
    torch.save(optimizer(named=True), tmp_path / "s" / "optimizer.pt")
    fsdpckpt.convert(tmp_path / "s", tmp_path / "whole.pt")
    assert all(identical(t, whole[n]) for n, t in torch.load(tmp_path / "whole.pt")["model"].items())
    last = sorted((tmp_path / "s" / "model").glob("shard-*"))[-1]
    last.unlink()
    for only in ({}, {"only": "model"}):
        refused(tmp_path / "s", tmp_path / "o.pt", "a.weight", **only)
    fsdpckpt.convert(tmp_path / "s", tmp_path / "optim.pt", only="optim")


@pytest.mark.parametrize("named", [True, False])
def test_one_ranks_rows_beside_whole_states(named: bool, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    part = {name: tensor.chunk(2)[1].clone() for name, tensor in model().items()}
    save_file(part, tmp_path / "s" / "model.safetensors")
    torch.save(optimizer(named=named), tmp_path / "s" / "optimizer.pt")
    key = "a.weight" if named else "0.exp_avg"
    refused(tmp_path / "s", tmp_path / "o.pt", key)
    refused(tmp_path / "s", tmp_path / "o.pt", key, only="model")


@pytest.mark.parametrize("rows", [True, False])
def test_an_adapter_that_is_one_ranks_part(rows: bool, tmp_path: Path) -> None:
    """Its names are those of the whole adapter, and PEFT takes the adapter's own name out of them."""
    whole = {f"base_model.model.l.{at}.lora_A.{{}}weight": torch.randn(8, 6) for at in range(2)}
    part = {name: tensor[:4] if rows else tensor for name, tensor in whole.items()}
    (tmp_path / "s").mkdir()
    save_file({n.format(""): t.clone() for n, t in part.items()}, tmp_path / "s" / "adapter_model.safetensors")
    (tmp_path / "s" / "adapter_config.json").write_text(json.dumps({"r": 4 if rows else 8}))
    names = [name.format("default.") for name in whole]
    state = {name: {"exp_avg": tensor} for name, tensor in zip(names, whole.values(), strict=True)}
    torch.save({"state": state, "param_groups": [{"params": names}]}, tmp_path / "s" / "optimizer.pt")
    problems = fsdpckpt.verify(tmp_path / "s").problems
    assert [problem.kind for problem in problems] == (["shape"] * 2 if rows else [])
    if rows:
        with pytest.raises(SourceCorruptError, match="different shapes"):
            fsdpckpt.convert(tmp_path / "s", tmp_path / "o.pt")


def test_a_state_that_was_cut_as_one_rank_has_it(tmp_path: Path) -> None:
    states = optimizer(named=True)
    for entry in states["state"].values():
        entry["exp_avg"] = entry["exp_avg"].chunk(2)[0].clone()
    dcp.save({"model": model(), "optimizer": states}, checkpoint_id=str(tmp_path / "s"))
    kinds = {(problem.kind, problem.key) for problem in fsdpckpt.verify(tmp_path / "s").problems}
    assert {("shape", f"{name}.exp_avg") for name in SHAPES} <= kinds
    with pytest.raises(SourceCorruptError, match="different shapes"):
        fsdpckpt.convert(tmp_path / "s", tmp_path / "o.pt")
    fsdpckpt.convert(tmp_path / "s", tmp_path / "o.pt", only="model")
