"""Producers that are read only: what they wrote becomes one torch file, and any other producer's form."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from fsdpckpt.api import inspect
from fsdpckpt.comm.protocol import Solo
from fsdpckpt.converters.pipeline import convert
from fsdpckpt.ir.checkpoint import Container, Layout
from fsdpckpt.options import ConvertOptions
from fsdpckpt.progress import NoProgress
from tests.oracle.compare import identical, optimizer_by_name, require_parts

Trained = tuple[nn.Module, torch.optim.Optimizer]


@pytest.fixture
def trained() -> Trained:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03, betas=(0.8, 0.93))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def save_dcp(content: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(content, checkpoint_id=str(path))


def full(source: Path, target: Path) -> dict[str, Any]:
    options = ConvertOptions(to=Layout.FULL, container=Container.TORCH)
    convert(Solo(), str(source), str(target), options, NoProgress())
    content: dict[str, Any] = torch.load(target, weights_only=True)
    return content


def test_composers_nested_state_is_read(trained: Trained, tmp_path: Path) -> None:
    model, optimizer = trained
    path = tmp_path / "ep1-ba20"
    state = {"model": model.state_dict(), "optimizers": {"AdamW": optimizer_by_name(model, optimizer)}, "timestamp": 5}
    save_dcp({"state": state, "rng": [{"python": [1, 2]}]}, path)
    assert inspect(path).checkpoint.flavor == "composer"
    found = full(path, tmp_path / "full.pt")
    assert identical(found["model"], model.state_dict())
    assert identical(found["optimizer"], optimizer_by_name(model, optimizer))
    assert found["state"] == {"timestamp": 5} and found["rng"] == [{"python": [1, 2]}]


def test_torchtunes_weights_and_recipe_state_are_one_checkpoint(trained: Trained, tmp_path: Path) -> None:
    model, optimizer = trained
    path = tmp_path / "epoch_1"
    path.mkdir()
    tensors = list(model.state_dict().items())
    for number, part in enumerate((tensors[:2], tensors[2:])):
        save_file(dict(part), path / f"ft-model-{number + 1:05d}-of-00002.safetensors")
    torch.save({"optimizer": optimizer_by_name(model, optimizer), "epochs_run": 1, "seed": 3}, path / "recipe_state.pt")
    assert inspect(path).checkpoint.flavor == "torchtune"
    found = full(path, tmp_path / "full.pt")
    assert identical(found["model"], model.state_dict())
    assert identical(found["optimizer"], optimizer_by_name(model, optimizer))


def test_torchtunes_distributed_state_keeps_its_ids(trained: Trained, tmp_path: Path) -> None:
    model, optimizer = trained
    path = tmp_path / "epoch_0"
    save_dcp({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs_run": 1}, path)
    assert inspect(path).checkpoint.flavor == "torchtune"
    found = full(path, tmp_path / "full.pt")
    assert identical(found["optimizer"], optimizer.state_dict()) and found["epochs_run"] == 1


def test_a_composer_run_goes_on_under_torchtitan(trained: Trained, tmp_path: Path) -> None:
    model, optimizer = trained
    named = optimizer_by_name(model, optimizer)
    save_dcp({"state": {"model": model.state_dict(), "optimizers": {"AdamW": named}}}, tmp_path / "ep1-ba20")
    options = ConvertOptions(flavor="torchtitan", world_size=2)
    convert(Solo(), str(tmp_path / "ep1-ba20"), str(tmp_path / "step-20"), options, NoProgress())
    content = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    states = {
        f"state.{name}.{key}": torch.zeros_like(value)
        for name, entry in named["state"].items()
        for key, value in entry.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(loaded := {**content, "optimizer": states}, checkpoint_id=str(tmp_path / "step-20"))
    require_parts(loaded, model.state_dict())
    for name, entry in named["state"].items():
        assert all(identical(states[f"state.{name}.{key}"], value) for key, value in entry.items())


@pytest.mark.parametrize(
    ("flavor", "expected"),
    [
        ("fabric", {}),
        ("lightning", {"pytorch-lightning_version": "2.0.0", "epoch": 0, "global_step": 2, "lr_schedulers": []}),
    ],
)
def test_lightnings_directories_have_the_file_that_its_loaders_open(
    trained: Trained, tmp_path: Path, flavor: str, expected: dict[str, Any]
) -> None:
    model, optimizer = trained
    torch.save({"model": model.state_dict(), "optimizer": optimizer_by_name(model, optimizer)}, tmp_path / "full.pt")
    options = ConvertOptions(flavor=flavor, world_size=2)
    report = convert(Solo(), str(tmp_path / "full.pt"), str(tmp_path / "out"), options, NoProgress())
    assert torch.load(tmp_path / "out" / "meta.pt", weights_only=True) == expected
    assert bool(expected) == any("added what flavor" in note.message for note in report.notes)
