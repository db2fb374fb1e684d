"""Conversions that one process and several workers are both asked for, and the disks the sources lie on.

``disk`` holds every source. In ``disks-N`` the same files lie on N disks: each worker sees one of them, as ``disk``.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from fsdpckpt.api import convert
from fsdpckpt.option_fields import from_json, to_json
from fsdpckpt.options import ConvertOptions

__all__ = ["CASES", "disks", "make_sources", "options", "unequal"]

SMALL = {"max_memory": 1 << 20, "threads": 2}
"""Windows of a few KB, so that files have several writers and data comes in many rounds."""

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gather": ("ranks", "gathered.pt", SMALL),
    "scatter": ("full.pt", "scattered", {"to": "sharded", "world_size": 5, "buffers": ["none"], **SMALL}),
    "all to all": ("ranks", "resharded", {"to": "sharded", "container": "torch", "world_size": 4, **SMALL}),
    "to a full dcp": ("dcp", "full-dcp", {"to": "full", "container": "dcp", **SMALL}),
    "cast": ("ranks", "cast.safetensors", {"only": "model", "dtype": "bfloat16", **SMALL}),
    "cast to wider": ("dcp", "wide", {"to": "sharded", "world_size": 2, "dtype": "float64", **SMALL}),
    "shards of safetensors": (
        "full.pt",
        "shards",
        {"container": "safetensors", "max_shard_size": 1_500_000, "verify": "full", **SMALL},
    ),
    "from flattened": ("flat", "unflattened.pt", {"key_type": "name", **SMALL}),
    "between flattened": ("flat", "reflattened", {"to": "flattened", "world_size": 3, **SMALL}),
    "rekey": ("full.pt", "named.pt", {"key_type": "name", "verify": "full"}),
    "states of zeros": ("gaps.pt", "filled.pt", {"missing_state": "zeros", **SMALL}),
    "links": ("dcp", "linked", {"to": "sharded", "add_prefix": "x.", "link": "hardlink", "verify": "full", **SMALL}),
    "selection": ("dcp", "selected", {"to": "sharded", "world_size": 3, "include": ["layers.1.*"], "only": "model"}),
}


def options(given: dict[str, Any]) -> ConvertOptions:
    return from_json(ConvertOptions, {**to_json(ConvertOptions()), **given})


def make_sources(disk: Path) -> None:
    """A full checkpoint of random data and odd shapes, and the same in other layouts."""
    generator = torch.Generator().manual_seed(4)
    model = {"embed.weight": torch.randn(101, 257, generator=generator)}
    for layer in range(3):
        model[f"layers.{layer}.weight"] = torch.randn(257 + layer, 259, generator=generator)
        model[f"layers.{layer}.bias"] = torch.randn(257 + layer, generator=generator)
    torch.save(_checkpoint(model, generator, first=1), disk / "gaps.pt")
    torch.save(_checkpoint(model, generator), disk / "full.pt")
    named = {"key_type": "name", "buffers": "none"}
    convert(disk / "full.pt", disk / "ranks", to="sharded", container="torch", world_size=3, **named)
    convert(disk / "full.pt", disk / "dcp", to="sharded", world_size=4, **named)
    convert(disk / "full.pt", disk / "flat", to="flattened", world_size=4, unit="layers.*", use_orig_params=True)


def _checkpoint(model: dict[str, torch.Tensor], generator: torch.Generator, *, first: int = 0) -> dict[str, Any]:
    """``model`` with an Adam whose states begin with parameter number ``first``."""
    states = {
        number: {
            "exp_avg": torch.randn(value.shape, generator=generator),
            "exp_avg_sq": torch.rand(value.shape, generator=generator).to(torch.bfloat16),
            "step": torch.tensor(3.0),
        }
        for number, value in enumerate(model.values())
        if number >= first
    }
    groups = [{"lr": 1e-3, "betas": (0.9, 0.95), "params": list(range(len(model)))}]
    return {"model": model, "optimizer": {"state": states, "param_groups": groups}, "epoch": 7}


def disks(base: Path, workers: int) -> list[dict[str, str]]:
    """What ``work`` takes: for each worker its own disk. Files are dealt out; every fifth lies on two of them."""
    found = []
    for worker in range(workers):
        folder = base / f"disks-{workers}" / str(worker)
        folder.mkdir(parents=True)
        found.append({str(base / "disk"): str(folder)})
    files = sorted(path for path in (base / "disk").rglob("*") if path.is_file())
    for number, path in enumerate(files):
        for worker in {(number + 1) % workers, (number + (number % 5 == 0)) % workers if number % 5 == 0 else -1}:
            if worker >= 0:
                copy = base / f"disks-{workers}" / str(worker) / path.relative_to(base / "disk")
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
    return found


def write_plan(path: Path, base: Path, out: Path, machines: list[dict[str, str]], names: list[str]) -> None:
    """The file that ``work`` reads."""
    cases = [
        {
            "source": str(base / "disk" / CASES[name][0]),
            "target": str(out / CASES[name][1]),
            "options": to_json(options(CASES[name][2])),
        }
        for name in names
    ]
    path.write_text(json.dumps({"disks": machines, "cases": cases}))


def unequal(one: Path, other: Path) -> list[str]:
    """Every file that is not the same, byte for byte, or not on both sides."""
    if one.is_file():
        return [] if other.is_file() and filecmp.cmp(one, other, shallow=False) else [one.name]
    names = sorted({*os.listdir(one), *(os.listdir(other) if other.is_dir() else ())})
    return [name for name in names if _differs(one / name, other / name)]


def _differs(one: Path, other: Path) -> bool:
    return not (one.is_file() and other.is_file() and filecmp.cmp(one, other, shallow=False))
