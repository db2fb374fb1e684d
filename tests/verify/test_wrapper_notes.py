"""``diff`` says that prefixes of wrappers do not count where names have some, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdpckpt
from fsdpckpt.verify.wrappers import UNWRAPPED


def saved(path: Path, **optim: Any) -> Path:
    weights = {"a": torch.ones(2, 3)}
    torch.save({"model": weights, **optim}, path)
    return path


@pytest.mark.parametrize("wrapped", [False, True])
def test_wrappers_are_spoken_of_where_there_are_any(tmp_path: Path, wrapped: bool) -> None:
    name = "_fsdp_wrapped_module.a" if wrapped else "a"
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2, 3))], lr=0.1, momentum=0.9)
    group = optimizer.state_dict()["param_groups"][0]
    state = {"momentum_buffer": torch.ones(2, 3)}
    plain = {"state": {"a": state}, "param_groups": [{**group, "params": ["a"]}]}
    other = {"state": {name: state}, "param_groups": [{**group, "params": [name]}]}
    a, b = saved(tmp_path / "a.pt", optimizer=plain), saved(tmp_path / "b.pt", optimizer=other)
    found = fsdpckpt.diff(a, b)
    assert found.same
    assert (UNWRAPPED in found.notes) is wrapped


@pytest.mark.parametrize("wrapped", [False, True])
def test_wrappers_in_the_names_of_one_of_several_models_are_spoken_of(tmp_path: Path, wrapped: bool) -> None:
    sides: list[Path] = []
    for side in ("a", "b"):
        name = "_fsdp_wrapped_module.w" if wrapped and side == "b" else "w"
        group = torch.optim.SGD([nn.Parameter(torch.ones(2, 3))], lr=0.1, momentum=0.9).state_dict()["param_groups"][0]
        state = {"state": {name: {"momentum_buffer": torch.ones(2, 3)}}, "param_groups": [{**group, "params": [name]}]}
        model = {"w": torch.ones(2, 3)}
        sides.append(tmp_path / f"{side}.pt")
        torch.save({"x": {"model": model, "optimizer": state}, "y": {"model": model, "optimizer": state}}, sides[-1])
    found = fsdpckpt.diff(*sides)
    assert found.same
    assert [note for note in found.notes if note.endswith(UNWRAPPED)] == (
        [f"optim:x: {UNWRAPPED}", f"optim:y: {UNWRAPPED}"] if wrapped else []
    )


@pytest.mark.parametrize("prefix", ["_orig_mod.", "_checkpoint_wrapped_module.", "other."])
def test_names_that_differ_only_in_wrappers_are_said_to(tmp_path: Path, prefix: str) -> None:
    weights = {"a.w": torch.ones(2, 3), "b": torch.ones(2)}
    torch.save({"model": weights}, tmp_path / "a.pt")
    torch.save({"model": {prefix + name: value for name, value in weights.items()}}, tmp_path / "b.pt")
    found = fsdpckpt.diff(tmp_path / "a.pt", tmp_path / "b.pt")
    said = [note for note in found.notes if "the names of 2 parameters differ only in the prefixes" in note]
    assert not found.same and len(said) == (prefix != "other.") == sum("--clean-names" in note for note in said)


def test_states_of_other_names_are_no_prefixes(tmp_path: Path) -> None:
    """SGD and AdamW have other states of the same parameters; the names of these do not differ."""
    group = torch.optim.SGD([nn.Parameter(torch.ones(2, 3))], lr=0.1, momentum=0.9).state_dict()["param_groups"][0]
    for name, key in (("a", "momentum_buffer"), ("b", "exp_avg")):
        optimizer = {"state": {"a": {key: torch.ones(2, 3)}}, "param_groups": [{**group, "params": ["a"]}]}
        saved(tmp_path / f"{name}.pt", optimizer=optimizer)
    found = fsdpckpt.diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert not found.same
    assert not any("prefixes" in note for note in found.notes)
