"""Random checkpoints through random chains of conversions: layouts, key types, new names, selections, casts.

The truth goes through the same steps in plain PyTorch: dicts of whole tensors by name, and the lists of the optimizer's
groups. At the end ``torch.optim`` itself loads what was written, by its ids, into an optimizer whose groups list their
parameters in an order of their own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdpckpt
from tests.oracle.compare import identical, require_parts

SEEDS = range(12)
STEPS = 4
SHAPES = ((7, 3), (3,), (5, 4), (1, 6), (9,), (4, 4), (2, 3, 5))


@dataclass
class Truth:
    """``model``: every key; ``buffers``: those of buffers; ``states`` and ``groups``: of the optimizer, by name."""

    model: dict[str, Tensor]
    buffers: set[str]
    states: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]

    def renamed(self, rename: dict[str, str]) -> Truth:
        return Truth(
            {rename[name]: value for name, value in self.model.items()},
            {rename[name] for name in self.buffers},
            {rename[name]: states for name, states in self.states.items()},
            [{**group, "params": [rename[name] for name in group["params"]]} for group in self.groups],
        )

    def without(self, glob: str) -> Truth:
        kept = {name for name in self.model if not fnmatchcase(name, glob)}
        return Truth(
            {name: value for name, value in self.model.items() if name in kept},
            self.buffers & kept,
            {name: states for name, states in self.states.items() if name in kept},
            [{**group, "params": [name for name in group["params"] if name in kept]} for group in self.groups],
        )

    def cast(self, dtype: torch.dtype) -> Truth:
        model = {name: value.to(dtype) if value.is_floating_point() else value for name, value in self.model.items()}
        return Truth(model, self.buffers, self.states, self.groups)


def random_training(rng: random.Random) -> tuple[Truth, dict[str, Any]]:
    """A model after three steps of AdamW in groups whose order is not the model's, and what ``torch.save`` gets."""
    torch.manual_seed(rng.randrange(1 << 30))
    model = nn.Module()
    for number in range(rng.randint(2, 4)):
        block = nn.Module()
        for name in ("weight", "bias", "gain")[: rng.randint(1, 3)]:
            shape = rng.choice(SHAPES) if rng.random() < 0.6 else (4, 4)  # equal shapes prove nothing
            block.register_parameter(name, nn.Parameter(torch.randn(shape)))
        if rng.random() < 0.4:
            block.register_buffer("table", torch.randn(rng.choice(SHAPES)))
        model.add_module(f"block{number}", block)
    model.register_buffer("count", torch.tensor(rng.randrange(100)))
    named = list(model.named_parameters())
    rng.shuffle(named)
    cut = rng.randint(1, len(named))
    with_names = rng.random() < 0.5
    groups = [
        {
            "params": part if with_names else [param for _, param in part],
            "lr": rng.random(),
            "weight_decay": 0.1 * number,
        }
        for number, part in enumerate((named[:cut], named[cut:]))
        if part
    ]
    optimizer = torch.optim.AdamW(groups)
    for _ in range(3):
        for _, param in named:
            param.grad = torch.randn_like(param)
        optimizer.step()
    name_of = {param: name for name, param in named}
    by_id = optimizer.state_dict()
    truth_groups = []
    for group, live in zip(by_id["param_groups"], optimizer.param_groups, strict=True):
        truth_groups.append({**group, "params": [name_of[param] for param in live["params"]]})
    truth = Truth(
        {name: value.clone() for name, value in model.state_dict().items()},
        {name for name, _ in model.named_buffers()},
        {name: dict(optimizer.state[param]) for param, name in name_of.items()},
        truth_groups,
    )
    by_name = {"state": truth.states, "param_groups": truth.groups}
    return truth, {"model": model.state_dict(), "optimizer": by_id if with_names else by_name}


def random_step(rng: random.Random, truth: Truth) -> tuple[Truth, dict[str, Any], str]:
    """The truth after one conversion, the options of that conversion, and the suffix of its target."""
    options: dict[str, Any] = {}
    after = truth
    if rng.random() < 0.25 and len(after.model) > 4:
        glob = f"*{rng.choice(sorted(after.model)).rpartition('.')[2]}"
        if any(states for states in after.without(glob).states.values()):
            options["exclude"], after = glob, after.without(glob)
    change = rng.choice(("add_prefix", "rename", "rename block", "none"))
    names = {name: name for name in after.model}
    if change == "add_prefix":
        options["add_prefix"] = "net."
        names = {name: f"net.{name}" for name in names}
    elif change == "rename":
        old = rng.choice(sorted(names))
        options["rename"] = {old: f"{old}_new"}
        names[old] = f"{old}_new"
    elif change == "rename block":
        block = rng.choice(sorted(name.rpartition(".")[0] for name in names if "." in name))
        options["rename"] = {block: f"{block}b"}
        names = {name: name.replace(f"{block}.", f"{block}b.", 1) for name in names}
    after = after.renamed(names)
    if rng.random() < 0.2:
        options["dtype"], after = "bfloat16", after.cast(torch.bfloat16)
    layout = rng.choice(("full", "dcp", "ranks", "flattened"))
    if layout == "flattened" and len({after.model[name].dtype for name in after.states}) > 1:
        layout = "dcp"
    if layout == "full":
        return after, {**options, "to": "full"}, ".pt"
    options |= {"to": "flattened" if layout == "flattened" else "sharded", "world_size": rng.randint(1, 4)}
    if layout == "dcp":
        return after, {**options, "container": "dcp"}, ""
    options |= {"container": "torch", "buffers": _floating_buffers(truth) or ["none"]}
    if layout == "flattened":
        options |= {"unit": ["none"], "use_orig_params": True}
    return after, options, ""


def proves_an_order(truth: Truth) -> bool:
    """Whether the groups' lists cannot have been made by sorting names: such lists prove no order of ids."""
    return any(group["params"] != sorted(group["params"]) for group in truth.groups)


def _floating_buffers(truth: Truth) -> list[str]:
    """The buffers that could be parameters: an integer never is one."""
    return sorted(name for name in truth.buffers if truth.model[name].is_floating_point())


def loaded_by_torch(truth: Truth, written: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The states by name, after ``torch.optim`` has loaded the ids of ``written``."""
    params = {name: nn.Parameter(torch.zeros_like(truth.model[name])) for name in truth.states}
    groups = [{"params": [params[name] for name in group["params"]]} for group in truth.groups]
    optimizer = torch.optim.AdamW(groups)
    optimizer.load_state_dict(written["optimizer"])
    return {name: dict(optimizer.state[param]) for name, param in params.items() if param in optimizer.state}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.filterwarnings("ignore::fsdpckpt.FsdpckptWarning")
def test_a_chain_of_conversions_is_what_plain_pytorch_makes_of_it(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    truth, content = random_training(rng)
    while not proves_an_order(truth):
        truth, content = random_training(rng)
    source = tmp_path / "source.pt"
    torch.save(content, source)
    for number in range(STEPS):
        truth_after, options, suffix = random_step(rng, truth)
        while not proves_an_order(truth_after):
            truth_after, options, suffix = random_step(rng, truth)
        target = tmp_path / f"step{number}{suffix}"
        print(source.name, target.name, options)
        fsdpckpt.convert(source, target, **options)
        assert fsdpckpt.verify(target).whole
        source, truth = target, truth_after
    fsdpckpt.convert(source, tmp_path / "named.pt", to="full", key_type="name")
    named = torch.load(tmp_path / "named.pt", weights_only=True)
    assert named["model"].keys() == truth.model.keys()
    require_parts(named["model"], truth.model)
    assert named["optimizer"]["state"].keys() == truth.states.keys()
    for name, states in truth.states.items():
        require_parts(named["optimizer"]["state"][name], states)
    assert [group["params"] for group in named["optimizer"]["param_groups"]] == [g["params"] for g in truth.groups]
    fsdpckpt.convert(source, tmp_path / "ids.pt", to="full", key_type="id")
    states = loaded_by_torch(truth, torch.load(tmp_path / "ids.pt", weights_only=True))
    for name, expected in truth.states.items():
        # ``load_state_dict`` casts floating states to the dtype of their parameter, except for the step.
        dtype = truth.model[name].dtype
        assert identical(states[name]["exp_avg"], expected["exp_avg"].to(dtype)), name
        assert identical(states[name]["step"], expected["step"]), name
