"""Optimizers of which parameters have None, an empty dict or nothing in place of states, as PyTorch sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import fsdpckpt
from tests.oracle.compare import identical

pytestmark = pytest.mark.filterwarnings("ignore")

ABSENT = object()
NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))


def optimizer_dict(bare: Any, *, ids: tuple[int, ...] = (1,), groups: bool = True) -> dict[str, Any]:
    """That of SGD with momentum, which loads None; ``ids`` have ``bare`` in place of their states."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    state = {key: bare if key in ids else states for key, states in saved["state"].items()}
    saved["state"] = {key: states for key, states in state.items() if states is not ABSENT}
    return saved if groups else {"state": saved["state"]}


def loaded_state(state_dict: dict[str, Any]) -> dict[str, Any]:
    """What SGD has of each parameter after ``load_state_dict``."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer.load_state_dict(state_dict)
    return {name: optimizer.state.get(param) for name, param in net.named_parameters()}


@pytest.mark.parametrize("bare", [None, {}, ABSENT], ids=["None", "empty", "absent"])
@pytest.mark.parametrize("container", ["torch", "dcp"])
def test_pytorch_loads_what_it_loaded_from_the_source(bare: Any, container: str, tmp_path: Path) -> None:
    source = {"model": network().state_dict(), "opt": optimizer_dict(bare)}
    torch.save(source, tmp_path / "source.pt")
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "on-2", to="sharded", container=container, world_size=2)
    fsdpckpt.convert(tmp_path / "on-2", tmp_path / "full.pt", to="full")
    full = torch.load(tmp_path / "full.pt", weights_only=True)["optimizer"]
    expected, found = loaded_state(source["opt"]), loaded_state(full)
    # A DCP directory keeps no empty dict: then PyTorch has nothing for the parameter, and not an empty dict.
    assert all(identical(expected[name] or None, found[name] or None) for name in NAMES)
    if bare is None:
        assert full["state"][1] is None


@pytest.mark.parametrize("bare", [None, {}], ids=["None", "empty"])
@pytest.mark.parametrize("groups", [True, False])
def test_what_is_bare_is_that_of_a_parameter_and_has_its_name(bare: Any, groups: bool, tmp_path: Path) -> None:
    torch.save({"model": network().state_dict(), "opt": optimizer_dict(bare, groups=groups)}, tmp_path / "source.pt")
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "full.pt", to="full", key_type="name", rename=["0=first"])
    state = torch.load(tmp_path / "full.pt", weights_only=True)["optimizer"]["state"]
    assert list(state) == ["first.weight", "first.bias", "1.weight", "1.bias"]
    assert state["first.bias"] == bare


def test_missing_states_of_a_parameter_with_none_can_be_filled(tmp_path: Path) -> None:
    torch.save({"model": network().state_dict(), "opt": optimizer_dict(None)}, tmp_path / "source.pt")
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "full.pt", to="full", missing_state="zeros")
    state = torch.load(tmp_path / "full.pt", weights_only=True)["optimizer"]["state"]
    assert identical(state[1]["momentum_buffer"], torch.zeros(3))


def test_verify_names_a_parameter_with_none(tmp_path: Path) -> None:
    torch.save({"model": network().state_dict(), "opt": optimizer_dict(None)}, tmp_path / "source.pt")
    assert [problem.key for problem in fsdpckpt.verify(tmp_path / "source.pt").problems] == ["1"]


NEW = {"state": {}, "param_groups": torch.optim.Adam(network().parameters()).state_dict()["param_groups"]}


@pytest.mark.parametrize(
    ("tree", "labels"),
    [
        (lambda model: NEW, ["optim"]),
        (lambda model: {"model": model, "x": NEW}, ["optim"]),
        (lambda model: {"a": {"b": {"model": model, "x": NEW}}}, ["optim"]),
        (lambda model: {"model": model, "x": [NEW]}, ["optim"]),
        (lambda model: {"a": [{"m": model, "x": NEW}, {"m": model, "x": NEW}]}, ["optim:a.0.x", "optim:a.1.x"]),
        (lambda model: {"model": model, "x": {0: NEW, 1: NEW}}, ["optim:x.0", "optim:x.1"]),
    ],
)
@pytest.mark.parametrize("through_dcp", [False, True])
def test_an_optimizer_before_its_first_step_is_one_anywhere(
    tree: Any, labels: list[str], through_dcp: bool, tmp_path: Path
) -> None:
    """A DCP directory has only its param groups."""
    content = tree(network().state_dict())
    if through_dcp:
        dcp.save(content, checkpoint_id=tmp_path / "source", no_dist=True)
    else:
        torch.save(content, tmp_path / "source")
    found = fsdpckpt.open(tmp_path / "source").checkpoint
    named = [f"optim:{each.name}" for each in found.named if each.section == "optim"]
    assert [*(["optim"] if found.optim is not None else []), *named] == labels


def test_flat_parameters_have_no_place_for_none_and_that_is_no_difference(tmp_path: Path) -> None:
    source, flat = tmp_path / "source.pt", tmp_path / "flat"
    torch.save({"model": network().state_dict(), "optimizer": optimizer_dict(None)}, source)
    fsdpckpt.convert(source, flat, to="flattened", world_size=2, unit=["0"], use_orig_params=True)
    assert fsdpckpt.diff(source, flat).same and fsdpckpt.diff(flat, source).same
    assert not fsdpckpt.diff(source, flat, strict=True).same
