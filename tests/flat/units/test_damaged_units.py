"""A units file that lies beside a checkpoint and cannot be used is a problem, and nothing is inferred in its place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import FsdpckptError, SourceCorruptError
from tests.oracle.compare import require_identical

SHAPES = {"a.weight": (6, 4), "b.weight": (6, 4), "b.bias": (6,), "head.weight": (5, 6)}
Units = dict[str, Any]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``full.pt``, keyed by name; ``flat``, its flat shards without ``fsdpckpt.json``; ``ids.pt``; ``units.json``."""
    place = tmp_path_factory.mktemp("saved")
    model = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    states = {name: {"step": torch.tensor(3.0), "exp_avg": torch.randn(shape)} for name, shape in SHAPES.items()}
    group: dict[str, Any] = {"lr": 0.1, "params": list(SHAPES)}
    torch.save({"model": model, "optimizer": {"state": states, "param_groups": [group]}}, place / "full.pt")
    fsdpckpt.convert(
        place / "full.pt", place / "flat", to="flattened", world_size=2, unit=["none"], use_orig_params=True
    )
    units = json.loads((place / "flat" / "fsdpckpt.json").read_text())["units"]
    (place / "flat" / "fsdpckpt.json").unlink()
    (place / "units.json").write_text(json.dumps(units))
    by_id = {"state": dict(enumerate(states.values())), "param_groups": [{"lr": 0.1, "params": [0, 1, 2, 3]}]}
    (place / "ids").mkdir()
    torch.save({"model": model, "optimizer": by_id}, place / "ids" / "full.pt")
    return place


def newer(units: Units) -> None:
    units["version"] = 99


def no_list(units: Units) -> None:
    units["units"] = [{"params": 5}]


def other_order(units: Units) -> None:
    """The order of a unit's parameters stands in ``parameters``, too."""
    params = units["units"][0]["params"]
    params[0], params[1] = params[1], params[0]


@pytest.mark.parametrize("damage", [newer, no_list, other_order], ids=lambda each: each.__name__)
@pytest.mark.parametrize("form", ["flat", "ids"])
def test_units_that_cannot_be_read_are_a_problem_and_are_not_inferred(
    form: str, damage: Callable[[Units], None], saved: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(saved / form, tmp_path / form)
    units = json.loads((saved / "units.json").read_text())
    damage(units)
    (source / "units.json").write_text(json.dumps(units))
    help_: dict[str, Any] = {"reference": saved / "full.pt", "unit": ["none"]} if form == "flat" else {}
    expected = torch.load(saved / "full.pt", weights_only=True)
    problems = fsdpckpt.verify(source).problems
    assert [f"{source / 'units.json'}" in problem.message for problem in problems] == [True]
    for options in ({}, help_):
        with pytest.raises(SourceCorruptError, match="cannot be used") as refused:
            fsdpckpt.convert(source, tmp_path / "refused.pt", to="full", key_type="name", **options)
        assert "--units" in str(refused.value.next_step) and "--ignore-file" in str(refused.value.next_step)
    for number, options in enumerate(({"units": saved / "units.json"}, {**help_, "ignore_file": ["units.json"]})):
        fsdpckpt.convert(source, tmp_path / f"{number}.pt", to="full", key_type="name", **options)
        found = torch.load(tmp_path / f"{number}.pt", weights_only=True)
        require_identical(found["model"], expected["model"])
        require_identical(found["optimizer"]["state"], expected["optimizer"]["state"])


def test_what_needs_no_units_is_converted_beside_a_damaged_file(saved: Path, tmp_path: Path) -> None:
    source = shutil.copytree(saved / "ids", tmp_path / "ids")
    (source / "units.json").write_text('{"format": "fsdpckpt-units"')
    fsdpckpt.convert(source, tmp_path / "out.pt", to="full")
    assert fsdpckpt.diff(source, tmp_path / "out.pt").same
    assert fsdpckpt.inspect(source).checkpoint.optim is not None


def test_inspect_shows_flat_shards_beside_damaged_units_as_they_are(saved: Path, tmp_path: Path) -> None:
    source = shutil.copytree(saved / "flat", tmp_path / "flat")
    (source / "units.json").write_text('{"format": "fsdpckpt-units"')
    assert fsdpckpt.inspect(source).checkpoint.model is not None
    with pytest.raises(FsdpckptError):
        fsdpckpt.diff(source, saved / "full.pt")
