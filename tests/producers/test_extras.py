"""What verl's loader opens besides model and optimizer is there, and is what it takes, whatever the source was."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.optim.lr_scheduler import LambdaLR, StepLR

import fsdpckpt
from tests.oracle.compare import optimizer_by_name

SOURCES = ("trainer", "accelerate", "lightning")


class Trained:
    """A model, its optimizer keyed by name, and its schedule after three steps."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.model = torch.nn.Linear(5, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule: LambdaLR | StepLR = LambdaLR(self.optimizer, lambda step: 0.5**step)
        for _ in range(3):
            self.model(torch.randn(4, 5)).sum().backward()
            self.optimizer.step()
            self.schedule.step()

    def save(self, producer: str, path: Path) -> Path:
        """Save as ``producer`` does, with the schedule where it keeps it."""
        state = self.schedule.state_dict()
        if producer == "lightning":
            content = {"state_dict": self.model.state_dict(), "optimizer_states": [self.optimizer.state_dict()]}
            version = {"pytorch-lightning_version": "2.6.6", "epoch": 1, "global_step": 3}
            torch.save({**content, "lr_schedulers": [state], **version}, path / "last.ckpt")
            return path / "last.ckpt"
        torch.save(dict(self.model.state_dict()), path / "pytorch_model_fsdp.bin")
        torch.save(optimizer_by_name(self.model, self.optimizer), path / "optimizer.bin")
        torch.save(state, path / ("scheduler.pt" if producer == "trainer" else "scheduler.bin"))
        if producer == "trainer":
            (path / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
        return path


def to_verl(source: Path, target: Path) -> tuple[dict[str, Any], str]:
    """The extras of the last of two ranks, and what was said of them."""
    options: Any = {"flavor": "verl", "to": "sharded", "world_size": 2, "buffers": ["none"], "mesh_device": "cpu"}
    report = fsdpckpt.convert(str(source), str(target), **options)
    extra: dict[str, Any] = torch.load(target / "extra_state_world_size_2_rank_1.pt", weights_only=False)
    return extra, "\n".join(note.message for note in report.notes)


@pytest.mark.parametrize("producer", SOURCES)
def test_the_schedule_of_another_producer_goes_where_verl_opens_it(producer: str, tmp_path: Path) -> None:
    trained = Trained()
    (tmp_path / "source").mkdir()
    extra, said = to_verl(trained.save(producer, tmp_path / "source"), tmp_path / "out")
    assert extra["lr_scheduler"] == trained.schedule.state_dict()
    assert "lr_scheduler is the state of the source's LR scheduler" in said
    fresh = Trained()
    fresh.schedule = LambdaLR(fresh.optimizer, lambda step: 0.5**step)
    fresh.schedule.load_state_dict(extra["lr_scheduler"])
    assert fresh.schedule.last_epoch == 3 and fresh.schedule.get_last_lr() == trained.schedule.get_last_lr()
    assert "rng" not in extra  # which verl then leaves as it is
    assert "accelerate counts" not in said


def test_a_schedule_that_accelerate_counted_for_each_of_two_processes_is_named(tmp_path: Path) -> None:
    trained = Trained()
    for _ in range(3):
        trained.schedule.step()
    (tmp_path / "source").mkdir()
    _, said = to_verl(trained.save("accelerate", tmp_path / "source"), tmp_path / "out")
    assert "it counts 6 steps, and the optimizer 3: accelerate counts one for each process" in said


@pytest.mark.parametrize("producer", SOURCES)
def test_a_schedule_that_verls_would_stumble_over_is_left_out_and_said(producer: str, tmp_path: Path) -> None:
    trained = Trained()
    trained.schedule = StepLR(trained.optimizer, step_size=2)
    (tmp_path / "source").mkdir()
    extra, said = to_verl(trained.save(producer, tmp_path / "source"), tmp_path / "out")
    assert extra["lr_scheduler"] is None and "lacks: lr_scheduler = None" in said


def test_entries_of_the_same_name_but_of_another_make_are_left_out_and_said(tmp_path: Path) -> None:
    trained = Trained()
    named = optimizer_by_name(trained.model, trained.optimizer)
    (group,) = named["param_groups"]
    flat = {f"state.{name}.{key}": value for name, state in named["state"].items() for key, value in state.items()}
    settings = [key for key in group if key != "params"]
    flat |= {f"param_groups.{name}.{key}": group[key] for name in ("weight", "bias") for key in settings}
    own = {"lr_scheduler": {"last_epoch": 3}, "train_state": {"step": 3, "ntokens_seen": 71}, "rng": [{"torch": 1}]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({**trained.model.state_dict(), "optimizer": flat, **own}, checkpoint_id=tmp_path / "step-3")
    extra, said = to_verl(tmp_path / "step-3", tmp_path / "out")
    assert extra == {"train_state": {"step": 3, "ntokens_seen": 71}, "lr_scheduler": None}
    assert "keeps something else under that name: lr_scheduler, rng" in said


def test_verls_own_extras_stay_what_they_are(tmp_path: Path) -> None:
    trained = Trained()
    (tmp_path / "source").mkdir()
    source = trained.save("trainer", tmp_path / "source")
    schedule = StepLR(trained.optimizer, step_size=2).state_dict()
    own = {"lr_scheduler": schedule, "rng": {"cpu": 1, "numpy": 2, "random": 3}}
    to_verl(source, tmp_path / "first")
    for rank in range(2):
        torch.save(own, tmp_path / "first" / f"extra_state_world_size_2_rank_{rank}.pt")
    (tmp_path / "first" / "fsdpckpt.json").unlink()
    extra, said = to_verl(tmp_path / "first", tmp_path / "again")
    assert extra == own and "lr_scheduler" not in said
