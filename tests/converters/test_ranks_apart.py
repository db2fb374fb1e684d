"""DTensor files of ranks that do not all hold the same: pipeline stages, and parameters that every rank has whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

import fsdpckpt
from fsdpckpt.errors import SourceError
from tests.oracle.compare import identical
from tests.readers.played_ranks import as_rank


def save_stages(directory: Path, *, names: bool) -> None:
    """Two pipeline stages of one layer each, every one on two ranks, with an optimizer by id or by name."""
    directory.mkdir()
    for rank in range(4):
        with as_rank(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]
            stage = rank // 2
            whole = torch.randn(4, 3, generator=torch.Generator().manual_seed(stage))

            def part(value: torch.Tensor, mesh: object = mesh, rank: int = rank) -> DTensor:
                return DTensor.from_local(value.chunk(2)[rank % 2].clone(), mesh, [Shard(0)], run_check=False)  # type: ignore[arg-type]

            key = f"layers.{stage}.weight" if names else 0
            state = {key: {"step": torch.tensor(3.0), "exp_avg": part(whole + 1)}}
            torch.save({f"layers.{stage}.weight": part(whole)}, directory / f"model_world_size_4_rank_{rank}.pt")
            optim = {"state": state, "param_groups": [{"lr": 0.1, "params": [key]}]}
            torch.save(optim, directory / f"optim_world_size_4_rank_{rank}.pt")


def test_ids_that_every_pipeline_stage_counts_anew_are_refused(tmp_path: Path) -> None:
    save_stages(tmp_path / "stages", names=False)
    with pytest.raises(SourceError, match="different parameters on different ranks"):
        fsdpckpt.convert(str(tmp_path / "stages"), str(tmp_path / "full.pt"), to="full")
    assert not (tmp_path / "full.pt").exists()
    fsdpckpt.convert(str(tmp_path / "stages"), str(tmp_path / "model.pt"), to="full", only="model")
    assert sorted(torch.load(tmp_path / "model.pt")) == ["layers.0.weight", "layers.1.weight"]


def test_pipeline_stages_by_name_are_joined(tmp_path: Path) -> None:
    save_stages(tmp_path / "stages", names=True)
    fsdpckpt.convert(str(tmp_path / "stages"), str(tmp_path / "full.pt"), to="full")
    full = torch.load(tmp_path / "full.pt")
    for stage in range(2):
        whole = torch.randn(4, 3, generator=torch.Generator().manual_seed(stage))
        assert identical(full["model"][f"layers.{stage}.weight"], whole)
        assert identical(full["optimizer"]["state"][f"layers.{stage}.weight"]["exp_avg"], whole + 1)


@pytest.mark.parametrize("first", ["whole", "cut"])
def test_a_parameter_that_every_rank_holds_whole_may_come_first(first: str, tmp_path: Path) -> None:
    """What is memoised in the pickle depends on the order."""
    source = tmp_path / "source"
    source.mkdir()
    values = {"whole": torch.randn(7), "cut": torch.randn(6, 5), "both": torch.randn(4, 4)}
    keys = sorted(values, key=lambda key: key != first)
    for rank in range(2):
        with as_rank(rank, 2):
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
            state = {
                key: DTensor.from_local(values[key].clone(), mesh, [Replicate()], run_check=False)
                if key == "whole"
                else DTensor.from_local(values[key].chunk(2)[rank].clone(), mesh, [Shard(0)], run_check=False)
                for key in keys
            }
            torch.save(state, source / f"model_world_size_2_rank_{rank}.pt")
    fsdpckpt.convert(str(source), str(tmp_path / "four"), to="sharded", container="torch", world_size=4)
    for rank in range(4):
        with as_rank(rank, 4):
            held = torch.load(tmp_path / "four" / f"model_world_size_4_rank_{rank}.pt", weights_only=False)
            assert identical(held["whole"].to_local(), values["whole"])
            expected = values["cut"].chunk(4)[rank] if rank < 3 else values["cut"][:0]
            assert identical(held["cut"].to_local(), expected)
