"""Sections that were saved to a directory each, at any place in it, and become one DCP directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import fsdpckpt
from tests.oracle.compare import identical

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
    assert all(identical(full["model"][key], value) for key, value in saved["weights"].items())
