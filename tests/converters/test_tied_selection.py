"""A shared parameter is one parameter: it stays, with its states, as long as one of its names is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdpckpt
from tests.oracle.compare import identical


class Tied(nn.Module):
    """``head`` has the weight of ``embed``, and all matrices have one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight


def saved(path: Path, form: str) -> dict[str, dict[str, torch.Tensor]]:
    """Saves a trained model; returns the states by name, the shared parameter's under ``head.weight``."""
    model = Tied()
    named = [*model.named_parameters()]
    optimizer = torch.optim.AdamW(named if form == "param_names" else [param for _, param in named], foreach=False)
    for param in model.parameters():
        param.grad = torch.randn(param.shape)
    optimizer.step()
    state: dict[str, Any] = optimizer.state_dict()
    names = [name for name, _ in named]
    if form == "name":
        (group,) = state["param_groups"]
        by_name = dict(zip(names, state["state"].values(), strict=True))
        state = {"state": by_name, "param_groups": [{**group, "params": names}]}
    torch.save({"model": model.state_dict(), "optimizer": state}, path)
    states = {name: optimizer.state[param] for name, param in named}
    return {name.replace("embed", "head"): entry for name, entry in states.items()}


KEPT = ["body.weight", "body.bias", "head.weight"]


@pytest.mark.parametrize("form", ["id", "name", "param_names"])
@pytest.mark.parametrize("options", [{"exclude": ["embed.*"]}, {"include": ["head.*", "body.*"]}])
def test_a_model_without_the_first_name_loads_the_states(tmp_path: Path, form: str, options: dict[str, Any]) -> None:
    states = saved(tmp_path / "a.pt", form)
    fsdpckpt.convert(tmp_path / "a.pt", tmp_path / "b.pt", **options)
    written = torch.load(tmp_path / "b.pt")
    rest = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 4, bias=False)})
    rest.load_state_dict(written["model"])
    named = [*rest.named_parameters()]
    (group,) = written["optimizer"]["param_groups"]
    if form == "name":
        assert group["params"] == KEPT
        held = written["optimizer"]["state"]
    else:
        optimizer = torch.optim.AdamW(named if form == "param_names" else [param for _, param in named])
        optimizer.load_state_dict(written["optimizer"])
        held = {name: optimizer.state[param] for name, param in named}
    assert group.get("param_names") == (KEPT if form == "param_names" else None)
    for name in KEPT:
        assert identical(held[name]["exp_avg"], states[name]["exp_avg"]), name


def test_the_later_name_is_left_out_without_the_states(tmp_path: Path) -> None:
    states = saved(tmp_path / "a.pt", "id")
    fsdpckpt.convert(tmp_path / "a.pt", tmp_path / "b.pt", exclude=["head.*"], key_type="name")
    written = torch.load(tmp_path / "b.pt")
    names = ["embed.weight", "body.weight", "body.bias"]
    assert list(written["model"]) == names and written["optimizer"]["param_groups"][0]["params"] == names
    assert identical(written["optimizer"]["state"]["embed.weight"]["exp_avg"], states["head.weight"]["exp_avg"])


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("only", [None, "optim"])
def test_flat_parameters_keep_it_under_its_next_name(tmp_path: Path, *, orig: bool, only: Any) -> None:
    states = saved(tmp_path / "a.pt", "name")
    flat = {"to": "flattened", "world_size": 2}
    fsdpckpt.convert(tmp_path / "a.pt", tmp_path / "f", unit=["body"], use_orig_params=orig, buffers=["none"], **flat)
    options = {"exclude": ["embed.weight"], "rename": {"head": "out"}, "only": only}
    fsdpckpt.convert(tmp_path / "f", tmp_path / "less", **flat, **options)
    for source, given in (("less", {}), ("f", options)):
        target = tmp_path / f"from-{source}.pt"
        fsdpckpt.convert(tmp_path / source, target, to="full", key_type="name", **given)
        written = torch.load(target)
        optim = written.get("optimizer", written)
        names = [name.replace("head", "out") for name in KEPT]
        assert sorted(optim["state"]) == sorted(names) == sorted(optim["param_groups"][0]["params"])
        for old, new in zip(KEPT, names, strict=True):
            assert identical(optim["state"][new]["exp_avg"], states[old]["exp_avg"]), (source, new)


def test_an_optimizer_spells_it_like_its_other_parameters(tmp_path: Path) -> None:
    states = saved(tmp_path / "a.pt", "name")
    source = torch.load(tmp_path / "a.pt")
    optim, (group,) = source["optimizer"], source["optimizer"]["param_groups"]
    lead = "_orig_mod."
    optim["state"] = {lead + name: entry for name, entry in optim["state"].items() if name != "body.bias"}
    group["params"] = [lead + name for name in group["params"]]
    source["model"] = {f"module.{name}": leaf for name, leaf in source["model"].items()}
    torch.save(source, tmp_path / "a.pt")
    fsdpckpt.convert(tmp_path / "a.pt", tmp_path / "b.pt", exclude=["embed.*"], missing_state="zeros")
    written = torch.load(tmp_path / "b.pt")
    assert list(written["model"]) == [f"module.{name}" for name in KEPT]
    assert written["optimizer"]["param_groups"][0]["params"] == [lead + name for name in KEPT]
    held = written["optimizer"]["state"]
    assert sorted(held) == sorted(lead + name for name in KEPT) and not held[f"{lead}body.bias"]["exp_avg"].any()
    assert identical(held[f"{lead}head.weight"]["exp_avg"], states["head.weight"]["exp_avg"])
