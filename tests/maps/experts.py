"""A small mixture of experts in two forms: a tensor for each expert, and all experts of a layer in one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, silu

State = dict[str, Any]

MAP = """
format = 1
rest = "keep"

[[rule]]
from = ["blocks.{block}.experts.{expert}.gate.weight", "blocks.{block}.experts.{expert}.up.weight"]
to = "blocks.{block}.gate_up"
steps = [{ cat = 0 }, { stack = "expert" }]

[[rule]]
from = "blocks.{block}.experts.{expert}.down.weight"
to = "blocks.{block}.down"
steps = [{ stack = "expert" }]

[[rule]]
from = "embed.weight"
to = "tokens.weight"
"""

DIM, WIDTH, EXPERTS, TOKENS = 6, 5, 3, 11


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, WIDTH, bias=False)
        self.up = nn.Linear(DIM, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, DIM, bias=False)


class Apart(nn.Module):
    """A block with a module for each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def weights(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        expert = self.experts[number]
        return expert.gate.weight, expert.up.weight, expert.down.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.router(x).softmax(-1)
        for number in range(EXPERTS):
            gate, up, down = self.weights(number)
            x = x + weight[:, number : number + 1] * linear(silu(linear(x, gate)) * linear(x, up), down)
        return x


class Fused(Apart):
    """The same block with one tensor for all experts."""

    def __init__(self) -> None:
        super().__init__()
        del self.experts
        self.gate_up = nn.Parameter(torch.empty(EXPERTS, 2 * WIDTH, DIM))
        self.down = nn.Parameter(torch.empty(EXPERTS, DIM, WIDTH))

    def weights(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gate, up = self.gate_up[number].split(WIDTH)
        return gate, up, self.down[number]


class Model(nn.Module):
    def __init__(self, block: type[Apart], embedding: str) -> None:
        super().__init__()
        setattr(self, embedding, nn.Embedding(TOKENS, DIM))
        self.blocks = nn.ModuleList([block(), block()])
        self.head = nn.Linear(DIM, TOKENS)
        self._embedding = embedding

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = getattr(self, self._embedding)(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def apart() -> Model:
    return Model(Apart, "embed")


def fused() -> Model:
    return Model(Fused, "tokens")


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """AdamW with two groups, whose state dict has names."""
    named = list(model.named_parameters())
    routers = [(name, parameter) for name, parameter in named if "router" in name]
    others = [(name, parameter) for name, parameter in named if "router" not in name]
    return torch.optim.AdamW([{"params": others}, {"params": routers, "lr": 0.005}], lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: range) -> list[float]:
    """The losses of some steps, each on data of its own."""
    losses = []
    for step in steps:
        tokens = torch.randint(TOKENS, (16,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(path: Path) -> State:
    """Train the model with experts apart for two steps and save it, its optimizer keyed by name."""
    torch.manual_seed(0)
    model = apart()
    optimizer = optimizer_of(model)
    train(model, optimizer, steps=range(2))
    state = by_name(model, optimizer)
    torch.save(state, path)
    return state


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """The state of a job, with the optimizer keyed by name as ``get_optimizer_state_dict`` gives it."""
    saved = optimizer.state_dict()
    names = {
        key: name
        for group in saved["param_groups"]
        for key, name in zip(group["params"], group["param_names"], strict=True)
    }
    groups = [{**group, "params": [names[key] for key in group["params"]]} for group in saved["param_groups"]]
    for group in groups:
        del group["param_names"]
    state = {names[key]: entry for key, entry in saved["state"].items()}
    return {"model": model.state_dict(), "optimizer": {"state": state, "param_groups": groups}}


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load a torch file whose optimizer is keyed by name."""
    state = torch.load(path)
    model.load_state_dict(state["model"])
    ids = {
        name: number
        for number, name in enumerate(
            name for group in optimizer.state_dict()["param_groups"] for name in group["param_names"]
        )
    }
    saved = state["optimizer"]
    groups = [{**group, "params": sorted(ids[name] for name in group["params"])} for group in saved["param_groups"]]
    optimizer.load_state_dict(
        {"state": {ids[name]: entry for name, entry in saved["state"].items()}, "param_groups": groups}
    )


def written_out(state: Mapping[str, Any]) -> State:
    """What ``MAP`` makes of the parameters ``state`` of the model with experts apart, in torch's own words."""
    result = {name: value for name, value in state.items() if "experts" not in name and name != "embed.weight"}
    result["tokens.weight"] = state["embed.weight"]
    for block in range(2):
        parts = [
            [state[f"blocks.{block}.experts.{expert}.{part}.weight"] for expert in range(EXPERTS)]
            for part in ("gate", "up", "down")
        ]
        result[f"blocks.{block}.gate_up"] = torch.cat([torch.stack(parts[0]), torch.stack(parts[1])], dim=1)
        result[f"blocks.{block}.down"] = torch.stack(parts[2])
    return result
