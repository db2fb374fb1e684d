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
