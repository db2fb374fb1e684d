"""Tensors inside of lists and dicts in an optimizer's states, as SOAP, Shampoo and bitsandbytes keep them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.ir.units_json import encode, render
from tests.flat.flat_checkpoints import unit, units_of


def state(value: float) -> dict[str, Any]:
    nested = {"GG": [torch.full((3, 3), value), None], "scale": {"row": torch.full((3,), value)}}
    return {"state": {0: {"step": torch.tensor(2.0), **nested}}, "param_groups": [{"lr": 0.1, "params": [0]}]}


def test_they_are_listed_digested_compared_and_searched_for_nan(tmp_path: Path) -> None:
    for name, value in (("one", 1.0), ("nan", torch.nan)):
        torch.save({"model": {"w": torch.ones(3, 3)}, "optimizer": state(value)}, tmp_path / f"{name}.pt")
    inside = ["0.GG.0", "0.scale.row"]
    assert [row.key for row in fsdpckpt.inspect(tmp_path / "one.pt").tensors] == ["w", "0.step", *inside]
    digests = fsdpckpt.verify(tmp_path / "one.pt", digests=True).digests
    assert [one.key for one in digests] == ["w", "0.step", *inside]
    problems = fsdpckpt.verify(tmp_path / "nan.pt", finite=True).problems
    assert [problem.key for problem in problems] == inside
    with fsdpckpt.open(tmp_path / "one.pt") as checkpoint:
        assert checkpoint["0.GG.0"].numpy().tolist() == [[1.0] * 3] * 3


@pytest.mark.parametrize("container", ["list", "dict"])
def test_ranks_whose_states_differ_inside_of_a_container_are_refused(container: str, tmp_path: Path) -> None:
    """Of equal lengths they would look like replicas, and one rank's would be written for all."""
    source = tmp_path / "ranks"
    source.mkdir()
    for rank in range(2):
        moment = torch.full((6,), float(rank))
        entry = {"exp_avg": moment, "held": [moment] if container == "list" else {"moment": moment}}
        optim = {"state": {0: entry}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        torch.save(optim, source / f"optim_world_size_2_rank_{rank}.pt")
    (source / "units.json").write_text(render(encode(units_of(unit("", {"w": (3, 4)}), use_orig_params=False))))
    with pytest.raises(SourceCorruptError, match=r"held\.(0|moment): the copies of rank 0 and of rank 1 differ"):
        fsdpckpt.convert(source, tmp_path / "three", to="flattened", world_size=3)


def model(value: float) -> dict[str, Any]:
    """What ``get_extra_state`` of a module may return is no tensor, but may hold some."""
    return {"a.weight": torch.ones(3, 3), "a._extra_state": {"scale": torch.full((3,), value), "n": 1}}


def test_tensors_inside_of_a_models_extra_state_are_listed_digested_and_compared(tmp_path: Path) -> None:
    for name, value in (("one", 1.0), ("same", 1.0), ("two", 2.0), ("nan", torch.nan)):
        torch.save({"model": model(value), "optimizer": state(1.0)}, tmp_path / f"{name}.pt")
    (row,) = [row for row in fsdpckpt.inspect(tmp_path / "one.pt").tensors if row.param == "a._extra_state"]
    assert (row.key, row.state) == ("a._extra_state.scale", "scale")
    digests = fsdpckpt.verify(tmp_path / "one.pt", digests=True).digests
    assert "a._extra_state.scale" in [one.key for one in digests]
    assert fsdpckpt.diff(tmp_path / "one.pt", tmp_path / "same.pt").same
    result = fsdpckpt.diff(tmp_path / "one.pt", tmp_path / "two.pt")
    assert [entry.key for entry in result.entries if entry.sigil == "*"] == ["a._extra_state.scale"]
    assert fsdpckpt.verify(tmp_path / "nan.pt", finite=True).whole  # it is neither a parameter nor a state


@pytest.mark.parametrize(
    "options",
    [
        {"to": "full", "container": "safetensors"},
        {"to": "sharded", "world_size": 2},
        {"to": "sharded", "container": "torch", "world_size": 2, "buffers": "none"},
    ],
)
def test_a_models_extra_state_is_the_same_after_a_conversion(options: dict[str, Any], tmp_path: Path) -> None:
    torch.save({"model": model(1.0)}, tmp_path / "one.pt")
    fsdpckpt.convert(tmp_path / "one.pt", tmp_path / "out", **options)
    assert fsdpckpt.diff(tmp_path / "one.pt", tmp_path / "out").same


def test_a_cast_of_the_model_leaves_tensors_inside_of_values(tmp_path: Path) -> None:
    torch.save({"model": model(1.0)}, tmp_path / "one.pt")
    fsdpckpt.convert(tmp_path / "one.pt", tmp_path / "cast.pt", dtype="bfloat16")
    dtypes = {row.key: row.tensor.dtype.name for row in fsdpckpt.inspect(tmp_path / "cast.pt").tensors}
    assert dtypes == {"a.weight": "bfloat16", "a._extra_state.scale": "float32"}
