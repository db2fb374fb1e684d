"""``diff`` says that prefixes of wrappers do not count where names have some, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdpckpt
from fsdpckpt.verify.wrappers import UNWRAPPED


def part(name: str, state: str = "momentum_buffer") -> dict[str, Any]:
    """A model of one weight, and its optimizer keyed by ``name``."""
    group = torch.optim.SGD([nn.Parameter(torch.ones(2, 3))], lr=0.1, momentum=0.9).state_dict()["param_groups"][0]
    optimizer = {"state": {name: {state: torch.ones(2, 3)}}, "param_groups": [{**group, "params": [name]}]}
    return {"model": {"a": torch.ones(2, 3)}, "optimizer": optimizer}


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_wrappers_are_spoken_of_where_there_are_any(tmp_path: Path, wrapped: bool, several: bool) -> None:
    for side, name in (("a", "a"), ("b", "_fsdp_wrapped_module.a" if wrapped else "a")):
        torch.save({"x": part(name), "y": part(name)} if several else part(name), tmp_path / f"{side}.pt")
    found = fsdpckpt.diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert found.same
    expected = [f"optim:{name}: {UNWRAPPED}" for name in "xy"] if several else [UNWRAPPED]
    assert [note for note in found.notes if note.endswith(UNWRAPPED)] == (expected if wrapped else [])


def test_states_of_other_names_are_no_prefixes(tmp_path: Path) -> None:
    """SGD and AdamW have other states of the same parameters; the names of these do not differ."""
    for side, state in (("a", "momentum_buffer"), ("b", "exp_avg")):
        torch.save(part("a", state), tmp_path / f"{side}.pt")
    found = fsdpckpt.diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert not found.same
    assert not any("prefixes" in note for note in found.notes)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "_checkpoint_wrapped_module.", "other."])
def test_names_that_differ_only_in_wrappers_are_said_to(tmp_path: Path, prefix: str) -> None:
    weights = {"a.w": torch.ones(2, 3), "b": torch.ones(2)}
    torch.save({"model": weights}, tmp_path / "a.pt")
    torch.save({"model": {prefix + name: value for name, value in weights.items()}}, tmp_path / "b.pt")
    found = fsdpckpt.diff(tmp_path / "a.pt", tmp_path / "b.pt")
    said = [note for note in found.notes if "the names of 2 parameters differ only in the prefixes" in note]
    assert not found.same and len(said) == (prefix != "other.") == sum("--clean-names" in note for note in said)
