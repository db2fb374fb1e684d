"""LBFGS keeps the states of all parameters with the first one: vectors that join them in the order of its group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdpckpt
from fsdpckpt.errors import SourceUnsupportedError
from tests.oracle.compare import identical

KEYS = pytest.mark.parametrize("key_type", ["id", "name"])
FIRST = "0.weight"


@pytest.fixture
def trained(tmp_path: Path) -> dict[str, Path]:
    """One job, with its optimizer by id and by name."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        result = model(torch.ones(2, 3)).pow(2).sum()
        result.backward()  # type: ignore[no-untyped-call]
        return result

    optimizer.step(loss)  # type: ignore[arg-type]
    names = [name for name, _ in model.named_parameters()]
    by_id = optimizer.state_dict()
    groups = [{**group, "params": names} for group in by_id["param_groups"]]
    by_name = {"state": {FIRST: by_id["state"][0]}, "param_groups": groups}
    for key_type, content in (("id", by_id), ("name", by_name)):
        torch.save({"model": model.state_dict(), "optimizer": content}, tmp_path / f"{key_type}.pt")
    return {key_type: tmp_path / f"{key_type}.pt" for key_type in ("id", "name")}


def states(path: Path) -> Any:
    (key, found), *others = torch.load(path, weights_only=False)["optimizer"]["state"].items()
    assert key in (0, FIRST) and not others
    return found


@KEYS
@pytest.mark.parametrize("missing_state", [None, "zeros", "error"])
def test_they_are_those_of_all_parameters_under_every_key(
    trained: dict[str, Path], key_type: str, missing_state: Any, tmp_path: Path
) -> None:
    source = trained[key_type]
    assert fsdpckpt.verify(source).problems == ()
    other: Any = "name" if key_type == "id" else "id"
    options = {"missing_state": missing_state} if missing_state else {}
    report = fsdpckpt.convert(source, tmp_path / "out.pt", key_type=other, **options)
    assert not any(note.kind in ("missing-state", "filled") for note in report.notes)
    found, expected = states(tmp_path / "out.pt"), states(source)
    assert found.keys() == expected.keys()
    for name in ("d", "prev_flat_grad"):
        assert identical(found[name], expected[name])
    assert all(map(identical, found["old_dirs"], expected["old_dirs"]))
    assert fsdpckpt.diff(tmp_path / "out.pt", trained[other]).same


@KEYS
@pytest.mark.parametrize("options", [{"exclude": ["2.*"]}, {"exclude": [FIRST]}, {"include": ["1.*"]}])
def test_no_parameter_is_taken_from_them(trained: dict[str, Path], key_type: str, options: Any, tmp_path: Path) -> None:
    """Dropped with the first parameter they would be lost, and without another they would be those of no optimizer."""
    with pytest.raises(SourceUnsupportedError, match="is one for all parameters"):
        fsdpckpt.convert(trained[key_type], tmp_path / "out.pt", **options)
    fsdpckpt.convert(trained[key_type], tmp_path / "model.pt", only="model", **options)


@KEYS
@pytest.mark.parametrize("orig", [True, False])
def test_they_are_not_cut_like_flat_parameters(
    trained: dict[str, Path], key_type: str, orig: bool, tmp_path: Path
) -> None:
    with pytest.raises(SourceUnsupportedError, match="is one for all parameters"):
        fsdpckpt.convert(
            trained[key_type], tmp_path / "out", to="flattened", world_size=2, unit=["none"], use_orig_params=orig
        )


def test_their_order_is_that_of_the_optimizer(trained: dict[str, Path], tmp_path: Path) -> None:
    names = torch.load(trained["name"], weights_only=False)["optimizer"]["param_groups"][0]["params"]
    (tmp_path / "names").write_text("\n".join(reversed(names)))
    with pytest.raises(SourceUnsupportedError, match="is one for all parameters"):
        fsdpckpt.convert(trained["name"], tmp_path / "out.pt", key_type="id", parameters=tmp_path / "names")


def closure_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        result = model(torch.ones(2, 3)).pow(2).sum()
        result.backward()
        return result

    return loss


WAYS: dict[str, Any] = {
    "rename": {"rename": ["0=first"]},
    "prefix": {"add_prefix": "net."},
    "only": {"only": "optim"},
    "ranks": {"to": "sharded", "container": "torch", "world_size": 3, "buffers": ["none"]},
    "dcp": {"to": "sharded", "world_size": 3},
    "safetensors": {"container": "safetensors"},
}


@KEYS
@pytest.mark.parametrize("way", WAYS)
def test_the_next_steps_are_those_of_the_job(trained: dict[str, Path], key_type: str, way: str, tmp_path: Path) -> None:
    made = tmp_path / ("made" if way in ("ranks", "dcp", "safetensors") else "made.pt")
    fsdpckpt.convert(trained[key_type], made, **WAYS[way])
    fsdpckpt.convert(made, tmp_path / "back.pt", to="full", key_type=None if way == "only" else "id")
    if way == "only" and key_type == "name":
        fsdpckpt.convert(made, tmp_path / "ids.pt", key_type="id", reference=trained["name"])
        (tmp_path / "ids.pt").rename(tmp_path / "back.pt")
    found, saved = (torch.load(path, weights_only=True) for path in (tmp_path / "back.pt", trained["id"]))
    stepped: list[list[torch.Tensor]] = []
    for states in (found.get("optimizer", found), saved["optimizer"]):
        model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        model.load_state_dict(saved["model"])
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
        optimizer.load_state_dict(states)
        optimizer.step(closure_of(model, optimizer))
        stepped.append([param.detach() for param in model.parameters()])
    assert all(map(identical, *stepped))
    model.load_state_dict(dict(zip(saved["model"], list(found.get("model", saved["model"]).values()), strict=True)))


@KEYS
def test_a_count_alone_is_that_of_all_parameters(trained: dict[str, Path], key_type: str, tmp_path: Path) -> None:
    """LBFGS has nothing else as long as every gradient is zero."""
    content = torch.load(trained[key_type], weights_only=True)
    (key,) = content["optimizer"]["state"]
    content["optimizer"]["state"][key] = {"func_evals": 3, "n_iter": 0}
    torch.save(content, tmp_path / "counts.pt")
    fsdpckpt.convert(tmp_path / "counts.pt", tmp_path / "out.pt", key_type="id", missing_state="error")
    assert torch.load(tmp_path / "out.pt")["optimizer"]["state"] == {0: {"func_evals": 3, "n_iter": 0}}
    with pytest.raises(SourceUnsupportedError, match="is one for all parameters"):
        fsdpckpt.convert(tmp_path / "counts.pt", tmp_path / "less.pt", exclude=[FIRST])
