"""What the files of a job say of its progress, one of them of another step: ``verify`` says so."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import fsdpckpt

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 3
Content = dict[str, Any]


def trained(groups: int = 1) -> tuple[nn.Module, torch.optim.AdamW, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    params = [{"params": list(each.parameters())} for each in model] if groups == 2 else model.parameters()
    optimizer = torch.optim.AdamW(params, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(STEPS):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


@pytest.fixture(scope="module")
def content() -> Content:
    model, optimizer, scheduler = trained()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}


def by_trainer(content: Content, at: Path) -> Path:
    """What the Trainer of transformers saves, as far as it is read."""
    directory = at / content.get("directory", f"checkpoint-{STEPS}")
    directory.mkdir()
    save_file(content["model"], directory / "model.safetensors", {"format": "pt"})
    for name in ("optimizer", "scheduler"):
        torch.save(content[name], directory / f"{name}.pt")
    torch.save({"cpu": torch.get_rng_state()}, directory / "rng_state.pth")
    state = {"global_step": content.get("count", STEPS), "log_history": []}
    (directory / "trainer_state.json").write_text(content.get("trainer_state", json.dumps(state)))
    return directory


def by_lightning(content: Content, at: Path) -> Path:
    saved = {
        "epoch": 1, "global_step": content.get("count", STEPS), "pytorch-lightning_version": "2.5.0",
        "state_dict": content["model"], "loops": {}, "callbacks": {}, "optimizer_states": [content["optimizer"]],
        "lr_schedulers": [content["scheduler"]],
    }  # fmt: skip
    torch.save(saved, at / "last.ckpt")
    return at / "last.ckpt"


def by_torchtitan(content: Content, at: Path) -> Path:
    """Each tensor of the model at the top, the optimizer under its names, and a step that is a tensor."""
    directory = at / content.get("directory", f"step-{STEPS}")
    names = list(content["model"])
    optimizer = content["optimizer"]
    states = {
        f"optimizer.state.{name}.{state}": value
        for name, entry in zip(names, optimizer["state"].values(), strict=True)
        for state, value in entry.items()
    }
    (group,) = optimizer["param_groups"]
    settings = {f"optimizer.param_groups.{name}.lr": group["lr"] for name in names}
    count = {"train_state": {"step": torch.tensor(content.get("count", STEPS))}}
    saved = {**content["model"], **states, **settings, **count, "lr_scheduler": content["scheduler"]}
    dcp.save(saved, checkpoint_id=str(directory))
    return directory


def by_script(content: Content, at: Path) -> Path:
    torch.save({key: content[key] for key in ("model", "optimizer", "scheduler")}, at / "own.pt")
    return at / "own.pt"


SAVED = {"trainer": by_trainer, "lightning": by_lightning, "torchtitan": by_torchtitan, "script": by_script}


def later_optimizer(content: Content) -> None:
    for entry in content["optimizer"]["state"].values():
        entry["step"] += 4


def earlier_schedule(content: Content) -> None:
    content["scheduler"]["_last_lr"] = [0.05]


def schedule_of_two_groups(content: Content) -> None:
    content["scheduler"] = trained(groups=2)[2].state_dict()


def said(path: Path) -> list[str]:
    found = fsdpckpt.verify(path)
    return [*(problem.message for problem in found.problems), *found.notes]


@pytest.mark.parametrize("framework", SAVED)
def test_parts_of_one_step_are_whole(framework: str, content: Content, tmp_path: Path) -> None:
    assert said(SAVED[framework](content, tmp_path)) == []


CHANGES: dict[str, tuple[Callable[[Content], None], list[str], str, bool]] = {
    "an optimizer of a later step": (
        later_optimizer, ["trainer", "lightning", "torchtitan"], "the optimizer has made 7 steps, and ", False,
    ),
    "a schedule of another step": (
        earlier_schedule, [*SAVED], "set the learning rates 0.05 last, and the optimizer has 0.025", False,
    ),
    "a schedule of more groups": (
        schedule_of_two_groups, ["trainer", "lightning", "script"], "base_lrs of 2 param groups",
        True,
    ),
    "a directory of another step": (
        lambda content: content.update(directory="checkpoint-9"), ["trainer"], "is named checkpoint-9, and ",
        False,
    ),
    "torchtitan's directory of another step": (
        lambda content: content.update(directory="step-9"), ["torchtitan"], "is named step-9, and ", False,
    ),
    "a torn state of the Trainer": (
        lambda content: content.update(trainer_state='{"global_'), ["trainer"], "trainer_state.json is not JSON", True,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "framework"), [(name, each) for name in CHANGES for each in CHANGES[name][1]])
def test_a_part_of_another_step_is_named(change: str, framework: str, content: Content, tmp_path: Path) -> None:
    edit, _, message, problem = CHANGES[change]
    changed = copy.deepcopy(content)
    edit(changed)
    path = SAVED[framework](changed, tmp_path)
    (found,) = said(path)
    assert message in found
    assert fsdpckpt.verify(path).whole is not problem


def test_fewer_steps_than_the_job_counted_are_usual(content: Content, tmp_path: Path) -> None:
    """With float16 the first steps overflow and are skipped."""
    assert said(by_lightning({**content, "count": STEPS + 2}, tmp_path)) == []


def test_a_learning_rate_that_was_rounded_to_float32_is_the_same(content: Content, tmp_path: Path) -> None:
    changed = copy.deepcopy(content)
    changed["optimizer"]["param_groups"][0]["lr"] = torch.tensor(0.1 / 3).item()
    changed["scheduler"]["_last_lr"] = [0.1 / 3]
    assert said(by_script(changed, tmp_path)) == []


def test_torch_itself_stops_at_a_schedule_of_other_groups(content: Content) -> None:
    changed = copy.deepcopy(content)
    schedule_of_two_groups(changed)
    _, optimizer, scheduler = trained()
    scheduler.load_state_dict(changed["scheduler"])
    optimizer.step()
    with pytest.raises((ValueError, IndexError)):
        scheduler.step()
