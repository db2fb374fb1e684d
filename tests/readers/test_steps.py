"""A checkpoint beside directories of steps is one of a run, unless it is a Trainer's final model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fsdpckpt
from fsdpckpt.cli.app import app
from fsdpckpt.errors import SeveralCheckpointsError
from tests.makers import save

MODEL = {"l.weight": torch.randn(4, 3), "l.bias": torch.randn(4)}
OPTIM = {"state": {0: {"exp_avg": torch.randn(4, 3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
BOTH = {"model": MODEL, "optimizer": OPTIM}


def inspected(run: Path, *options: str) -> str:
    shown = CliRunner().invoke(app, ["inspect", str(run), *options])
    assert shown.exit_code == 0
    return shown.stdout


def rows(run: Path) -> dict[str, Any]:
    return {row["name"]: row for row in json.loads(inspected(run, "--json"))["checkpoints"]}


@pytest.mark.parametrize("content", [BOTH, MODEL, OPTIM, {"opt_d": OPTIM, "opt_g": OPTIM}])
@pytest.mark.parametrize("above", ["", "checkpoints/"])
def test_a_file_beside_steps_is_asked_for_wherever_they_are(tmp_path: Path, content: Any, above: str) -> None:
    file = save(content, tmp_path / "best.pt")
    step = save(BOTH, tmp_path / f"{above}step_10" / "all.pt").parent
    with pytest.raises(SeveralCheckpointsError) as error:
        fsdpckpt.convert(tmp_path, tmp_path.with_suffix(".pt"), to="full")
    assert error.value.exit_code == 4 and error.value.details == (str(file), str(step))
    assert error.value.next_step == f"name the one to read, for example {step}; or {file}"
    assert list(rows(tmp_path)) == sorted(["best.pt", f"{above}step_10"])


@pytest.mark.parametrize("names", [("model.pt", "optimizer.pt"), ("dcp",)])
def test_several_files_beside_steps_are_read_without_them(tmp_path: Path, names: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    if names == ("dcp",):
        save(BOTH, run)
    else:
        for name, content in zip(names, (MODEL, OPTIM), strict=True):
            save(content, run / name)
    save(BOTH, run / "step_9" / "all.pt")
    save(BOTH, run / "step_10" / "all.pt")
    with pytest.raises(SeveralCheckpointsError) as error:
        fsdpckpt.verify(run)
    assert error.value.next_step is not None and "--ignore-file 'step_*'" in f"{error.value.next_step}"
    assert fsdpckpt.inspect(run, ignore_file=["step_*"]).sections["model"].tensors == 2
    found = rows(run)
    assert list(found) == [".", "step_9", "step_10"] and found["."]["sections"] == ["model", "optim"]


def test_a_damaged_step_is_one_too_and_an_empty_directory_is_none(tmp_path: Path) -> None:
    save(BOTH, tmp_path / "final.pt")
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_2").mkdir()
    (tmp_path / "step_2" / "notes.txt").write_text("x")
    assert fsdpckpt.verify(tmp_path).whole
    data = save(BOTH, tmp_path / "step_3") / "__0_0.distcp"
    data.unlink()
    with pytest.raises(SeveralCheckpointsError):
        fsdpckpt.verify(tmp_path)
    assert rows(tmp_path)["step_3"]["complete"] is False
    assert "newest complete: final.pt" in inspected(tmp_path)


def test_the_final_model_of_the_trainer_is_read_and_is_a_row_of_its_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(MODEL, run / "model.safetensors")
    save({"lr": 0.1}, run / "training_args.bin")
    for number in (500, 1000):
        save(MODEL, run / f"checkpoint-{number}" / "model.safetensors")
        save(OPTIM, run / f"checkpoint-{number}" / "optimizer.pt")
    assert list(rows(run)) == [".", "checkpoint-500", "checkpoint-1000"]
    assert fsdpckpt.inspect(run).sections["model"].tensors == 2
    fsdpckpt.convert(run, tmp_path / "out.pt", to="full", flavor="plain")
    assert torch.load(tmp_path / "out.pt", weights_only=True)["model"]["l.bias"].equal(MODEL["l.bias"])
    save(OPTIM, run / "optimizer.pt")  # which the Trainer never writes there
    with pytest.raises(SeveralCheckpointsError):
        fsdpckpt.inspect(run)


def test_the_newest_complete_step_is_said_although_an_earlier_epoch_has_a_higher_number(tmp_path: Path) -> None:
    for name in ("epoch=1-step=500", "epoch=2-step=100", "epoch=3-step=50"):
        save(BOTH, tmp_path / name)
    (tmp_path / "epoch=3-step=50" / ".metadata").unlink()
    assert "newest complete: epoch=2-step=100" in inspected(tmp_path)
