"""A folder of the Trainer without FSDP moves to FSDP with its LR schedule, random states and progress."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import fsdpckpt
from tests.oracle.compare import identical

NAMES = "0.weight\n2.weight\n\n0.bias\n1.weight\n1.bias\n2.bias\n"  # group by group, as --parameters takes them


def saved_by_trainer(path: Path, *, weights: str = "model.safetensors", ranks: int = 2) -> dict[str, torch.Tensor]:
    """As ``Trainer._save_checkpoint`` does under DistributedDataParallel. Returns the first moment of each name."""
    path.mkdir()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))
    by_name = dict(model.named_parameters())
    groups = [[by_name[name] for name in part.split()] for part in NAMES.split("\n\n")]
    optimizer = torch.optim.AdamW([{"params": part} for part in groups], lr=0.01, foreach=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for _ in range(3):
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
        schedule.step()
    if weights.endswith(".bin"):
        torch.save(model.state_dict(), path / weights)
    else:
        save_file(model.state_dict(), path / weights, metadata={"format": "pt"})
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    torch.save(schedule.state_dict(), path / "scheduler.pt")
    for rank in range(ranks):
        name = "rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth"
        torch.save({"cpu": torch.get_rng_state(), "python": rank}, path / name)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    (path / "config.json").write_text("{}")
    return {name: optimizer.state[param]["exp_avg"] for name, param in by_name.items()}


@pytest.fixture
def order(tmp_path: Path) -> Path:
    path = tmp_path / "order.txt"
    path.write_text(NAMES)
    return path


@pytest.mark.parametrize(("weights", "ranks"), [("model.safetensors", 2), ("pytorch_model.bin", 1)])
def test_it_becomes_the_trainers_with_fsdp_with_all_side_files(
    tmp_path: Path, order: Path, weights: str, ranks: int
) -> None:
    source, target = tmp_path / "checkpoint-3", tmp_path / "on-2"
    moments = saved_by_trainer(source, weights=weights, ranks=ranks)
    assert fsdpckpt.inspect(source).checkpoint.flavor == "trainer-ddp"
    fsdpckpt.convert(source, target, flavor="trainer", world_size=2, parameters=order, buffers="none")
    side_files = ["config.json", "rng_state_0.pth", "rng_state_1.pth", "scheduler.pt", "trainer_state.json"]
    assert {*side_files, "pytorch_model_fsdp_0", "optimizer_0"} <= {path.name for path in target.iterdir()}
    assert not list(target.glob("*.safetensors")) and not (target / "optimizer.pt").exists()
    resumption: Any = fsdpckpt.verify(target, flavor="trainer", world_size=2).resumption
    assert resumption.resumes and resumption.changes == ()
    with fsdpckpt.open(target) as found:
        assert all(identical(found[f"{name}.exp_avg"].torch(), moment) for name, moment in moments.items())


def test_its_schedule_goes_on_in_accelerate_and_what_stays_behind_is_said(tmp_path: Path, order: Path) -> None:
    source, target = tmp_path / "checkpoint-3", tmp_path / "accelerate"
    saved_by_trainer(source)
    report = fsdpckpt.convert(source, target, flavor="accelerate", world_size=2, parameters=order, buffers="none")
    assert torch.load(target / "scheduler.bin")["last_epoch"] == 3
    (left,) = [note for note in report.notes if note.kind == "not-carried"]
    assert {"rng_state_0.pth", "trainer_state.json"} <= set(left.keys)
    assert not any("no place" in note.message for note in report.notes)


def test_a_folder_without_the_optimizer_that_it_was_saved_with_is_not_whole(tmp_path: Path) -> None:
    source = tmp_path / "checkpoint-3"
    saved_by_trainer(source)
    (source / "optimizer.pt").unlink()
    (problem,) = fsdpckpt.verify(source).problems
    assert problem.kind == "missing-section" and "optimizer" in problem.message
    for name in ("scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"):  # save_only_model
        (source / name).unlink()
    assert fsdpckpt.verify(source).whole


def test_a_target_that_is_plain_names_what_would_resume(tmp_path: Path, order: Path) -> None:
    saved_by_trainer(tmp_path / "checkpoint-3")
    options: dict[str, Any] = {"to": "sharded", "world_size": 2, "key_type": "name"}
    report = fsdpckpt.convert(tmp_path / "checkpoint-3", tmp_path / "out", parameters=order, buffers="none", **options)
    assert any("--flavor trainer" in note.message for note in report.notes if note.kind == "plain")
