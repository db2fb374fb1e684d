"""A folder of the Trainer without FSDP moves to FSDP with its LR schedule, random states and progress."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import fsdpckpt
from tests.converters.jobs import Job, listed, messages, notes
from tests.oracle.compare import identical

GROUPS = [["0.weight", "2.weight"], ["0.bias", "1.weight", "1.bias", "2.bias"]]
SOURCE = Path("checkpoint-3")
NAMED: dict[str, Any] = {"world_size": 2, "buffers": "none"}


def saved_by_trainer(*, weights: str = "model.safetensors", ranks: int = 2) -> dict[str, torch.Tensor]:
    """As ``Trainer._save_checkpoint`` does under DistributedDataParallel. Returns the first moment of each name."""
    SOURCE.mkdir()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))
    job = Job(model, GROUPS, lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(job.optimizer, lambda step: 1 / (step + 1))
    for _ in range(3):
        job.optimizer.step()
        schedule.step()
    if weights.endswith(".bin"):
        torch.save(job.model, SOURCE / weights)
    else:
        save_file(job.model, SOURCE / weights, metadata={"format": "pt"})
    torch.save(job.ids, SOURCE / "optimizer.pt")
    torch.save(schedule.state_dict(), SOURCE / "scheduler.pt")
    for rank in range(ranks):
        name = "rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth"
        torch.save({"cpu": torch.get_rng_state(), "python": rank}, SOURCE / name)
    (SOURCE / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    (SOURCE / "config.json").write_text("{}")
    return job.moments


@pytest.mark.parametrize(("weights", "ranks"), [("model.safetensors", 2), ("pytorch_model.bin", 1)])
def test_it_becomes_the_trainers_with_fsdp_with_all_side_files(weights: str, ranks: int) -> None:
    moments = saved_by_trainer(weights=weights, ranks=ranks)
    assert fsdpckpt.inspect(SOURCE).checkpoint.flavor == "trainer-ddp"
    fsdpckpt.convert(SOURCE, "on-2", flavor="trainer", parameters=listed(GROUPS), **NAMED)
    side_files = ["config.json", "rng_state_0.pth", "rng_state_1.pth", "scheduler.pt", "trainer_state.json"]
    names = {path.name for path in Path("on-2").iterdir()}
    assert {*side_files, "pytorch_model_fsdp_0", "optimizer_0"} <= names
    assert "optimizer.pt" not in names and not any(name.endswith(".safetensors") for name in names)
    resumption = fsdpckpt.verify("on-2", flavor="trainer", world_size=2).resumption
    assert resumption.resumes and resumption.changes == ()
    with fsdpckpt.open("on-2") as found:
        assert all(identical(found[f"{name}.exp_avg"].torch(), moment) for name, moment in moments.items())


def test_its_schedule_goes_on_in_accelerate_and_what_stays_behind_is_said() -> None:
    saved_by_trainer()
    report = fsdpckpt.convert(SOURCE, "accelerate", flavor="accelerate", parameters=listed(GROUPS), **NAMED)
    assert torch.load("accelerate/scheduler.bin")["last_epoch"] == 3
    (left,) = notes(report, "not-carried")
    assert {"rng_state_0.pth", "trainer_state.json"} <= set(left.keys)
    assert not messages(report, "no place")
    plain = {"to": "sharded", "key_type": "name", "parameters": "order.txt"}
    report = fsdpckpt.convert(SOURCE, "out", **plain, **NAMED)
    assert any("--flavor trainer" in note.message for note in notes(report, "plain")), "what would resume"


def test_a_folder_without_the_optimizer_that_it_was_saved_with_is_not_whole() -> None:
    saved_by_trainer()
    (SOURCE / "optimizer.pt").unlink()
    (problem,) = fsdpckpt.verify(SOURCE).problems
    assert problem.kind == "missing-section" and "optimizer" in problem.message
    for name in ("scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"):  # save_only_model
        (SOURCE / name).unlink()
    assert fsdpckpt.verify(SOURCE).whole
