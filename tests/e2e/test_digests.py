"""``verify --digests`` prints the same SHA-256 for the same tensors, whatever they were converted into."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

import fsdpckpt

NONE = {"buffers": ("none",)}
CHAIN: list[tuple[str, dict[str, Any]]] = [
    ("dcp-3", {"to": "sharded", "container": "dcp", "world_size": 3, **NONE}),
    ("ranks-2", {"to": "sharded", "container": "torch", "world_size": 2, **NONE}),
    ("flat-4", {"to": "flattened", "world_size": 4, "unit": ("*",), "use_orig_params": True}),
    ("flat-3", {"to": "flattened", "world_size": 3}),
    ("full.pt", {"to": "full"}),
    ("safetensors", {"to": "full", "container": "safetensors", "max_shard_size": 3000}),
    ("sharded-tensors-5", {"to": "sharded", "container": "torch", "world_size": 5, "tensor": "sharded-tensor", **NONE}),
    ("dcp-7", {"to": "sharded", "container": "dcp", "world_size": 7, **NONE}),
    ("one.safetensors", {"to": "full", "only": "model"}),
]


def digests(path: Path) -> dict[tuple[str, str], str | None]:
    found = fsdpckpt.verify(path, digests=True)
    assert found.problems == (), path
    return {(one.section, one.key): one.sha256 for one in found.digests}


def expected(state: dict[str, Any]) -> dict[tuple[str, str], str]:
    tensors = {("model", name): value for name, value in state["model"].items()}
    for param, states in state["optimizer"]["state"].items():
        tensors |= {("optim", f"{param}.{name}"): value for name, value in states.items()}
    return {
        key: hashlib.sha256(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for key, value in tensors.items()
    }


def test_digests_are_the_same_along_a_chain_of_layouts_containers_and_world_sizes(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(7)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    model = {"a.weight": tensor(13, 5), "a.bias": tensor(13), "b.weight": tensor(2, 3, 4), "b.bias": tensor(1)}
    states = {
        name: {"step": torch.tensor(3.0), "exp_avg": tensor(*value.shape), "exp_avg_sq": tensor(*value.shape)}
        for name, value in model.items()
    }
    state = {"model": model, "optimizer": {"state": states, "param_groups": [{"lr": 0.1, "params": list(model)}]}}
    at = tmp_path / "source.pt"
    torch.save(state, at)
    truth: dict[tuple[str, str], str | None] = dict(expected(state))
    assert digests(at) == truth
    for name, options in CHAIN:
        target = tmp_path / name
        fsdpckpt.convert(at, target, **options)
        assert digests(target) == {
            key: sum_ for key, sum_ in truth.items() if "only" not in options or key[0] == "model"
        }
        at = target
