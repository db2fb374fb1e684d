"""Experts that a job saved on their own are those of a model of fused ones, on any number of ranks with experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import fsdpckpt
from tests.oracle.compare import identical, require_identical
from tests.oracle.fake import rank_file
from tests.oracle.fake_group import as_rank
from tests.writers.experts import ExpertMesh, mixture

MAP = {
    "format": 1,
    "rest": "keep",
    "rule": [{"from": "experts.{expert}.weight", "to": "experts.weight", "steps": [{"stack": "expert"}]}],
}


@pytest.mark.parametrize("mesh", [ExpertMesh(1, 4, 2), ExpertMesh(1, 6, 3), ExpertMesh(2, 4, 4)], ids=str)
def test_each_rank_holds_its_experts_and_their_states(tmp_path: Path, mesh: ExpertMesh) -> None:
    (tmp_path / "map.json").write_text(json.dumps(MAP))
    (tmp_path / "placements.json").write_text(json.dumps(mesh.placements))
    whole = mixture()
    model = dict(whole.state_dict())
    for number, expert in enumerate(model.pop("experts.weight")):
        model[f"experts.{number}.weight"] = expert.clone()
    trained = [name for name in model if name != "counts"]
    states = {name: {"step": torch.tensor(2.0), "exp_avg": model[name] * 3} for name in trained}
    optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": trained}]}
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "apart.pt")
    options: dict[str, Any] = {
        "map": tmp_path / "map.json",
        "mesh": mesh.options,
        "placements": tmp_path / "placements.json",
    }
    targets: dict[str, dict[str, Any]] = {"ranks": {"container": "torch"}, "dcp": {}}
    for target, more in targets.items():
        fsdpckpt.convert(
            tmp_path / "apart.pt", tmp_path / target, to="sharded", world_size=mesh.world_size, verify="full",
            **options, **more,
        )  # fmt: skip
    for rank in range(mesh.world_size):
        with as_rank(rank, mesh.world_size):
            held = mesh.sharded().state_dict()
            made = rank_file(tmp_path / "ranks", "model", mesh.world_size, rank)
            moments = rank_file(tmp_path / "ranks", "optim", mesh.world_size, rank)["state"]
            assert made.keys() == held.keys()
            for key, value in held.items():
                if isinstance(value, DTensor):
                    assert made[key].placements == value.placements, key
                    assert identical(made[key].to_local(), value.to_local()), key
                    assert identical(moments[key]["exp_avg"].to_local(), value.to_local() * 3), key
    fsdpckpt.convert(tmp_path / "dcp", tmp_path / "back.pt", to="full", map=tmp_path / "map.json", inverse=True)
    again = torch.load(tmp_path / "back.pt")
    require_identical(again["model"], model)
    for key in trained:
        assert identical(again["optimizer"]["state"][key]["exp_avg"], states[key]["exp_avg"]), key
