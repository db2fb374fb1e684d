"""LBFGS keeps the states of all parameters with the first one: vectors that join them in the order of its group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fsdpckpt
from fsdpckpt.errors import SourceUnsupportedError
from tests.converters.jobs import RANK_FILES, converted, listed, notes, refused, save, states
from tests.oracle.compare import require_identical

FIRST = "0.weight"
ONE_FOR_ALL = "is one for all parameters"
NAMES = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
FLAT: dict[str, Any] = {"to": "flattened", "world_size": 2, "unit": ["none"]}


def stepped(model: nn.Module, saved: Any = None) -> torch.optim.Optimizer:
    """LBFGS after a step, if it has ``saved``, from there."""
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    if saved is not None:
        optimizer.load_state_dict(saved)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        result = model(torch.ones(2, 3)).pow(2).sum()
        result.backward()
        return result

    optimizer.step(loss)
    return optimizer


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


@pytest.fixture(params=["id", "name"])
def keys(request: pytest.FixtureRequest) -> str:
    """``id.pt`` and ``name.pt``: one job, with its optimizer by id and by name."""
    model = net()
    by_id = stepped(model).state_dict()
    groups = [{**group, "params": NAMES} for group in by_id["param_groups"]]
    for key_type, content in (("id", by_id), ("name", {"state": {FIRST: by_id["state"][0]}, "param_groups": groups})):
        save({"model": model.state_dict(), "optimizer": content}, f"{key_type}.pt")
    return request.param


def test_they_are_those_of_all_parameters_under_every_key(keys: str) -> None:
    other = "name" if keys == "id" else "id"
    assert fsdpckpt.verify(f"{keys}.pt").problems == ()
    for options in ({}, {"missing_state": "zeros"}, {"missing_state": "error"}):
        report = fsdpckpt.convert(f"{keys}.pt", "out.pt", key_type=other, overwrite=True, **options)
        assert not notes(report, "missing-state") and not notes(report, "filled")
        (found,), (expected,) = (states(torch.load(path)).values() for path in ("out.pt", f"{other}.pt"))
        require_identical(found, expected)
        assert fsdpckpt.diff("out.pt", f"{other}.pt").same


def test_no_parameter_is_taken_from_them_and_they_are_not_cut_like_flat_parameters(keys: str) -> None:
    """Dropped with the first parameter they would be lost, and without another they would be those of no optimizer."""
    selected: list[dict[str, Any]] = [{"exclude": ["2.*"]}, {"exclude": [FIRST]}, {"include": ["1.*"]}]
    flat: list[dict[str, Any]] = [{**FLAT, "use_orig_params": orig} for orig in (True, False)]
    for options in (*selected, *flat):
        refused(SourceUnsupportedError, ONE_FOR_ALL, f"{keys}.pt", "out", **options)
    for options in selected:
        fsdpckpt.convert(f"{keys}.pt", "model.pt", only="model", overwrite=True, **options)
    reversed_names = {"key_type": "id", "parameters": listed([NAMES[::-1]])}
    refused(SourceUnsupportedError, ONE_FOR_ALL, "name.pt", "out.pt", **reversed_names)


WAYS: dict[str, dict[str, Any]] = {
    "rename": {"rename": ["0=first"]},
    "prefix": {"add_prefix": "net."},
    "only": {"only": "optim"},
    "ranks": {**RANK_FILES, "world_size": 3, "buffers": ["none"]},
    "dcp": {"to": "sharded", "world_size": 3},
    "safetensors": {"container": "safetensors"},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_next_steps_are_those_of_the_job(keys: str, way: str) -> None:
    made = "made" if way in ("ranks", "dcp", "safetensors") else "made.pt"
    fsdpckpt.convert(f"{keys}.pt", made, **WAYS[way])
    options: dict[str, Any] = {"reference": "name.pt"} if way == "only" and keys == "name" else {}
    found = converted(made, "back.pt", to="full", key_type="id", **options)
    saved, ends = torch.load("id.pt"), []
    for optimizer in (found.get("optimizer", found), saved["optimizer"]):
        model = net()
        model.load_state_dict(saved["model"])
        stepped(model, optimizer)
        ends.append([param.detach() for param in model.parameters()])
    require_identical(*ends)
    if "model" in found:
        require_identical(list(found["model"].values()), list(saved["model"].values()))


def test_a_count_alone_is_that_of_all_parameters(keys: str) -> None:
    """LBFGS has nothing else as long as every gradient is zero."""
    content = torch.load(f"{keys}.pt")
    (key,) = states(content)
    states(content)[key] = {"func_evals": 3, "n_iter": 0}
    found = converted(save(content), "out.pt", key_type="id", missing_state="error")
    assert states(found) == {0: {"func_evals": 3, "n_iter": 0}}
    refused(SourceUnsupportedError, ONE_FOR_ALL, "source.pt", "less.pt", exclude=[FIRST])
