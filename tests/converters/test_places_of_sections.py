"""Sections that were saved to a directory each, at any place in it, and become one DCP directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import fsdpckpt
from tests.oracle.compare import require_parts

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("model_at", ["", "model", "app"])
@pytest.mark.parametrize("optimizer_at", ["", "optim"])
def test_sections_of_two_directories_do_not_end_inside_of_each_other(
    tmp_path: Path, model_at: str, optimizer_at: str
) -> None:
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    saved: dict[str, Any] = {"weights": get_model_state_dict(net), "states": get_optimizer_state_dict(net, optimizer)}
    for name, place in (("weights", model_at), ("states", optimizer_at)):
        content = {place: saved[name]} if place else saved[name]
        dcp.save(content, checkpoint_id=tmp_path / "source" / name)
    fsdpckpt.convert(tmp_path / "source", tmp_path / "out", to="sharded", world_size=2)
    assert fsdpckpt.diff(tmp_path / "source", tmp_path / "out").same
    fsdpckpt.convert(tmp_path / "out", tmp_path / "full.pt", to="full")
    full = torch.load(tmp_path / "full.pt", weights_only=True)
    require_parts(full["model"], saved["weights"])


MOVED: dict[str, tuple[Callable[[Any, Any], Any], list[str]]] = {
    "names of their own": (lambda net, states: {"net": net, "opt": states, "epoch": 3}, ["net", "opt"]),
    "a list": (lambda net, states: {"items": [net, states], "epoch": 3}, ["items.0", "items.1"]),
    "numbers": (lambda net, states: {0: net, 1: states, 2: 7}, ["0", "1"]),
    "deeper": (lambda net, states: {"train": {"model": net, "optim": states}}, ["train.model", "train.optim"]),
    "where they stay": (lambda net, states: {"model": net, "optimizer": states}, []),
}


@pytest.mark.parametrize("container", ["torch", "dcp"])
@pytest.mark.parametrize("saved", MOVED)
def test_a_section_that_gets_another_key_is_named_with_both(saved: str, container: Any, tmp_path: Path) -> None:
    """A plain target has one model and one optimizer under these names, not those of the script."""
    content, places = MOVED[saved]
    net, optimizer = nn.Linear(5, 3), {"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    torch.save(content(net.state_dict(), optimizer), tmp_path / "source.pt")
    target = tmp_path / ("out.pt" if container == "torch" else "out")
    report = fsdpckpt.convert(tmp_path / "source.pt", target, container=container)
    found = [note.message for note in report.notes if note.message.startswith("the target has")]
    moved = "the target has the model under model (SRC: {}) and the optimizer under optimizer (SRC: {})"
    assert found == ([moved.format(*places)] if places else [])
    again = fsdpckpt.convert(target, tmp_path / "again.pt", to="full", only="model")
    assert not [note for note in again.notes if note.message.startswith("the target has")]
