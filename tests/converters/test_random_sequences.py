"""Random models and optimizers through random sequences of rename, select and rekey; the truth stays in plain PyTorch.

Every parameter has one of two shapes, so that nothing but names and order can tell them apart. In the end the optimizer
is loaded by ``torch.optim`` into a job that lists its parameters as the first one did.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fsdpckpt
from tests.oracle.compare import identical, require_identical

WORDS = ("z", "a", "m.b", "m.a", "layers.10", "layers.2")
STEPS = ("rename", "prefix", "strip", "drop", "name", "id")


class Truth:
    """Names, values and groups, changed in plain Python."""

    def __init__(self, weights: Mapping[str, torch.Tensor], groups: list[list[str]]) -> None:
        self.weights, self.groups = dict(weights), groups
        self.moments = {name: weights[name] * 3 for group in groups for name in group}

    def renamed(self, change: Mapping[str, str]) -> None:
        self.weights = {change[name]: value for name, value in self.weights.items()}
        self.moments = {change[name]: value for name, value in self.moments.items()}
        self.groups = [[change[name] for name in group] for group in self.groups]

    def saved(self, *, words: bool) -> dict[str, Any]:
        """As an optimizer by name; ``words``: one that was built from named parameters."""
        groups: list[dict[str, Any]] = [{"lr": 0.1 * at, "params": list(group)} for at, group in enumerate(self.groups)]
        if words:
            groups = [{**group, "param_names": list(group["params"])} for group in groups]
        state = {name: {"step": torch.tensor(1.0), "exp_avg": value} for name, value in self.moments.items()}
        return {"model": self.weights, "optimizer": {"state": state, "param_groups": groups}}

    def require(self, content: Any) -> None:
        """The file says of every parameter what the truth says, and a live optimizer gets it by its own order."""
        assert list(content["model"]) == list(self.weights)
        require_identical(content["model"], self.weights)
        live = {name: nn.Parameter(torch.zeros_like(value)) for name, value in self.weights.items()}
        optimizer = torch.optim.Adam(
            [{"params": [live[name] for name in group]} for group in self.groups], foreach=False
        )
        states = content["optimizer"]
        for group, names in zip(states["param_groups"], self.groups, strict=True):
            if any(isinstance(key, str) for key in group["params"]):
                assert group["params"] == names
            if "param_names" in group:
                assert group["param_names"] == names
        optimizer.load_state_dict(states)
        for name, value in self.moments.items():
            assert identical(optimizer.state[live[name]]["exp_avg"], value), name


@st.composite
def truths(draw: st.DrawFn) -> Truth:
    modules = draw(st.lists(st.sampled_from(WORDS), min_size=2, max_size=5, unique=True))
    names = [f"{module}.{leaf}" for module in modules for leaf in draw(st.sampled_from([("w",), ("w", "b")]))]
    weights = {name: torch.full((2, 3) if name.endswith("w") else (2,), float(at)) for at, name in enumerate(names)}
    order = draw(st.permutations(names))
    cut = draw(st.integers(1, len(order)))
    groups = [list(order[:cut]), *([list(order[cut:])] if cut < len(order) else [])]
    return Truth(weights, groups)


def changed(step: str, truth: Truth, draw: st.DrawFn) -> dict[str, Any]:
    """The options of one step, after it was done to the truth."""
    names = list(truth.weights)
    if step == "prefix":
        truth.renamed({name: f"net.{name}" for name in names})
        return {"add_prefix": "net."}
    if step == "strip" and all(name.startswith("net.") for name in names):
        truth.renamed({name: name.removeprefix("net.") for name in names})
        return {"strip_prefix": "net."}
    if step == "rename":
        old = draw(st.sampled_from(names))
        truth.renamed({name: f"new.{name}" if name == old else name for name in names})
        return {"rename": [(old, f"new.{old}")]}
    droppable = [name for group in truth.groups if len(group) > 1 for name in group]
    if step == "drop" and droppable:
        old = draw(st.sampled_from(droppable))
        del truth.weights[old], truth.moments[old]
        truth.groups = [[name for name in group if name != old] for group in truth.groups]
        return {"exclude": old}
    return {"key_type": step} if step in ("name", "id") else {}


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_what_is_renamed_selected_and_rekeyed_stays_the_parameters_own(data: st.DataObject) -> None:
    truth = data.draw(truths())
    # Without ``param_names`` the user says the order: a list that FSDP could have made itself proves nothing.
    words = len(truth.groups) == 1 or data.draw(st.booleans())
    with TemporaryDirectory() as folder:
        path = Path(folder) / "0.pt"
        torch.save(truth.saved(words=words), path)
        for number in range(data.draw(st.integers(1, 4))):
            order = "\n\n".join("\n".join(group) for group in truth.groups)
            options = changed(data.draw(st.sampled_from(STEPS)), truth, data.draw)
            if not words and ("key_type" in options or "exclude" in options):
                (Path(folder) / "order.txt").write_text(order)
                options = {**options, "parameters": Path(folder) / "order.txt"}
            target = Path(folder) / f"{number + 1}.pt"
            fsdpckpt.convert(path, target, **options)
            path = target
            truth.require(torch.load(path, weights_only=True))
