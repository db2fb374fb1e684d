"""A new name is in force wherever a name stands: in keys, groups, ``param_names`` and recorded facts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError


class Model(nn.Module):
    """The buffer comes first, and three parameters have one shape."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.register_buffer("rope", torch.ones(3, 3))
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 3, bias=False)
        self.last = nn.Linear(3, 3, bias=False)


def trained(model: nn.Module, groups: list[Any]) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(groups, lr=0.1, foreach=False)
    for param in model.parameters():
        param.grad = torch.randn(param.shape)
    optimizer.step()
    return optimizer


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


RENAMES: dict[str, tuple[dict[str, Any], str, str]] = {
    "no rename": ({}, "rope", "*.weight"),
    "a prefix": ({"add_prefix": "net."}, "net.rope", "net.body"),
    "the buffer": ({"rename": {"rope": "freqs"}}, "freqs", "body"),
    "a prefix less": ({"strip_prefix": "ema.", "add_prefix": "x."}, "x.rope", "x.body"),
}


@pytest.mark.parametrize("how", RENAMES)
def test_a_buffer_that_nothing_tells_apart_is_still_a_question_after_a_rename(tmp_path: Path, how: str) -> None:
    options, buffer, unit = RENAMES[how]
    model = Model()
    optimizer = trained(model, [*model.parameters()])
    lead = options.get("strip_prefix", "")
    named = {f"{lead}{name}": leaf for name, leaf in model.state_dict().items()}
    torch.save({"model": named, "optimizer": optimizer.state_dict()}, tmp_path / "full.pt")
    fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "dcp", to="sharded", world_size=2, container="dcp", **options)
    written = json.loads((tmp_path / "dcp" / "fsdpckpt.json").read_text())
    assert written["undetermined"][0] == buffer
    assert any(note["kind"] == "undetermined" and buffer in note["message"] for note in written["notes"])
    targets: tuple[dict[str, Any], ...] = (
        {"to": "sharded", "container": "torch"},
        {"to": "flattened", "unit": unit, "use_orig_params": True},
    )
    for number, target in enumerate(targets):
        with pytest.raises(NeedsInformationError):
            fsdpckpt.convert(tmp_path / "dcp", tmp_path / f"again{number}", world_size=2, **target)


def test_a_placements_rule_cuts_what_is_undetermined_under_its_new_name(tmp_path: Path) -> None:
    model = Model()
    torch.save(model.state_dict(), tmp_path / "full.pt")
    (tmp_path / "rules.json").write_text(json.dumps({"net.*": {"tp": "Shard(0)"}}))
    cut = {"to": "sharded", "container": "dcp", "mesh": "tp=3", "placements": tmp_path / "rules.json"}
    fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "dcp", add_prefix="net.", **cut)  # type: ignore[arg-type]
    written = json.loads((tmp_path / "dcp" / "fsdpckpt.json").read_text())
    assert written["undetermined"] == [f"net.{name}" for name in model.state_dict()]


@pytest.mark.parametrize("lead", ["", "_orig_mod."])
def test_param_names_beside_ids_have_the_new_names_and_name_the_right_states(tmp_path: Path, lead: str) -> None:
    model = Model()
    named = [(f"{lead}{name}", param) for name, param in model.named_parameters()]
    groups = [{"params": named[2:][::-1]}, {"params": named[:2]}]  # last, head, then the body
    optimizer = trained(model, groups)
    prefixed = {f"{lead}{name}": leaf for name, leaf in model.state_dict().items()}
    torch.save({"model": prefixed, "optimizer": optimizer.state_dict()}, tmp_path / "ids.pt")
    fsdpckpt.convert(tmp_path / "ids.pt", tmp_path / "new.pt", rename={f"{lead}head": f"{lead}out"})
    listed = [group["param_names"] for group in load(tmp_path / "new.pt")["optimizer"]["param_groups"]]
    assert listed[0] == [f"{lead}last.weight", f"{lead}out.weight"]
    fsdpckpt.convert(tmp_path / "new.pt", tmp_path / "names.pt", key_type="name")
    state = load(tmp_path / "names.pt")["optimizer"]["state"]
    for name, param in model.named_parameters():
        new = f"{lead}{name}".replace("head", "out")
        assert torch.equal(state[new]["exp_avg"], optimizer.state[param]["exp_avg"]), name


def test_an_optimizer_alone_is_renamed_by_its_param_names(tmp_path: Path) -> None:
    model = Model()
    optimizer = trained(model, [{"params": [*model.named_parameters()]}])
    torch.save(optimizer.state_dict(), tmp_path / "optim.pt")
    fsdpckpt.convert(tmp_path / "optim.pt", tmp_path / "new.pt", only="optim", add_prefix="net.")
    (group,) = load(tmp_path / "new.pt")["param_groups"]
    assert group["param_names"] == [f"net.{name}" for name, _ in model.named_parameters()]


def test_clean_names_cleans_param_names(tmp_path: Path) -> None:
    model = Model()
    compiled = torch.compile(model)
    optimizer = trained(model, [{"params": [*compiled.named_parameters()]}])
    torch.save({"model": compiled.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "ids.pt")
    fsdpckpt.convert(tmp_path / "ids.pt", tmp_path / "clean.pt", clean_names=True)
    (group,) = load(tmp_path / "clean.pt")["optimizer"]["param_groups"]
    assert group["param_names"] == [name for name, _ in model.named_parameters()]
    model.load_state_dict(load(tmp_path / "clean.pt")["model"])
