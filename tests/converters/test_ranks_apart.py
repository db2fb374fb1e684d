"""DTensor files of ranks that do not all hold the same: pipeline stages, and parameters that every rank has whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

from fsdpckpt.errors import SourceError
from tests.converters.jobs import converted, refused, states
from tests.converters.meshes import on_each_rank, save_each, to_ranks
from tests.oracle.compare import identical
from tests.oracle.fake_group import rows

STAGES = [torch.randn(4, 3, generator=torch.Generator().manual_seed(stage)) for stage in range(2)]


def save_stages(directory: Path, *, names: bool) -> None:
    """Two pipeline stages of one layer each, every one on two ranks, with an optimizer by id or by name."""
    directory.mkdir()
    for rank in on_each_rank(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]
        stage = rank // 2
        weight, moment = (
            DTensor.from_local(value.chunk(2)[rank % 2].clone(), mesh, [Shard(0)], run_check=False)
            for value in (STAGES[stage], STAGES[stage] + 1)
        )
        key = f"layers.{stage}.weight" if names else 0
        torch.save({f"layers.{stage}.weight": weight}, directory / f"model_world_size_4_rank_{rank}.pt")
        state = {key: {"step": torch.tensor(3.0), "exp_avg": moment}}
        optim = {"state": state, "param_groups": [{"lr": 0.1, "params": [key]}]}
        torch.save(optim, directory / f"optim_world_size_4_rank_{rank}.pt")


def test_ids_that_every_pipeline_stage_counts_anew_are_refused() -> None:
    save_stages(Path("stages"), names=False)
    refused(SourceError, "different parameters on different ranks", "stages", "full.pt", to="full")
    model = converted("stages", "model.pt", to="full", only="model")
    assert sorted(model) == ["layers.0.weight", "layers.1.weight"]


def test_pipeline_stages_by_name_are_joined() -> None:
    save_stages(Path("stages"), names=True)
    full = converted("stages", "full.pt", to="full")
    for stage, whole in enumerate(STAGES):
        assert identical(full["model"][f"layers.{stage}.weight"], whole)
        assert identical(states(full)[f"layers.{stage}.weight"]["exp_avg"], whole + 1)


@pytest.mark.parametrize("first", ["whole", "cut"])
def test_a_parameter_that_every_rank_holds_whole_may_come_first(first: str) -> None:
    """What is memoised in the pickle depends on the order."""
    values = {"whole": torch.randn(7), "cut": torch.randn(6, 5), "both": torch.randn(4, 4)}

    def state(rank: int) -> dict[str, DTensor]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        held = {}
        for key in sorted(values, key=lambda key: key != first):
            placement = Replicate() if key == "whole" else Shard(0)
            local = values[key] if key == "whole" else rows(values[key], rank, 2)
            held[key] = DTensor.from_local(local.clone(), mesh, [placement], run_check=False)
        return held

    to_ranks(save_each("source", 2, state), "four", world_size=4)
    for rank in on_each_rank(4):
        held = torch.load(f"four/model_world_size_4_rank_{rank}.pt")
        assert identical(held["whole"].to_local(), values["whole"])
        assert identical(held["cut"].to_local(), rows(values["cut"], rank, 4))
