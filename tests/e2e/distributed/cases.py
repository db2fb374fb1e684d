"""Conversions that one process and several workers are both asked for, and the disks the sources lie on.

``disk`` holds every source. In ``disks-N`` the same files lie on N disks: each worker sees one of them, as ``disk``.
"""

from __future__ import annotations

import filecmp
import json
import shutil
import tarfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fsdpckpt.api import convert
from fsdpckpt.options import ConvertOptions

__all__ = ["CASES", "case", "disks", "make_sources", "unequal", "write_plan"]

SMALL = {"max_memory": 1 << 20, "threads": 2}
"""Windows of a few KB, so that files have several writers and data comes in many rounds."""

STANDARD = {"world_size": 2, "no_weight_decay": ["standard"]}

GOLDEN = Path(__file__).parents[2] / "golden"
OTHERS = ["deepspeed/zero2-fp32", "deepspeed/zero3-bf16"]
PACKED = ["deepspeed/zero1-bf16-universal", "megatron/flattened-range", "megatron/fsdp-dtensor"]
"""Checkpoints of other trainers: directories, and archives of directories."""

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
    "to universal": ("dcp", "universal", {"flavor": "deepspeed-universal", **SMALL}),
    "from universal": ("zero1-bf16-universal", "of-universal", {"to": "sharded", "world_size": 3}),
    "zero 2 to dcp": ("zero2-fp32", "of-zero2", {"to": "sharded", "world_size": 3, "verify": "full"}),
    "zero 3 to universal": ("zero3-bf16", "of-zero3", {"flavor": "deepspeed-universal"}),
    "megatron to dcp": ("flattened-range/flattened-range", "of-megatron", {"to": "sharded", **STANDARD}),
    "megatron fsdp to full": ("fsdp-dtensor/fsdp-dtensor", "of-megatron-fsdp.pt", {}),
}


def make_sources(disk: Path) -> None:
    """A full checkpoint of random data and odd shapes, and the same in other layouts."""
    disk.mkdir()
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
    for name in OTHERS:
        shutil.copytree(GOLDEN / name, disk / Path(name).name, ignore=shutil.ignore_patterns("truth.pt"))
    for name in PACKED:
        with tarfile.open(GOLDEN / f"{name}.tar.xz") as archive:
            archive.extractall(disk / Path(name).name, filter="data")


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


def disks(base: Path, place: Path, workers: int) -> list[dict[str, str]]:
    """What ``work`` takes: for each worker a disk of its own in ``place``, seen as that of the sources.

    Files are dealt out; every fifth lies on two of them.
    """
    machines = [place / f"disks-{workers}" / str(worker) for worker in range(workers)]
    for machine in machines:
        machine.mkdir(parents=True)
    for number, path in enumerate(sorted(path for path in (base / "disk").rglob("*") if path.is_file())):
        for worker in {(number + 1) % workers, (number + bool(number % 5)) % workers}:
            copy = machines[worker] / path.relative_to(base / "disk")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    return [{str(base / "disk"): str(machine)} for machine in machines]


def case(base: Path, out: Path, name: str, **changed: Any) -> dict[str, Any]:
    """One of ``CASES`` as ``work`` takes it, with other options."""
    source, target, given = CASES[name]
    chosen = asdict(ConvertOptions(**given, **changed))
    return {"source": str(base / "disk" / source), "target": str(out / target), "options": chosen}


def write_plan(path: Path, cases: list[dict[str, Any]], machines: list[dict[str, str]], **more: Any) -> str:
    """The file that ``work`` reads."""
    path.write_text(json.dumps({"disks": machines, "cases": cases, **more}))
    return str(path)


def unequal(one: Path, other: Path) -> list[str]:
    """Every file that is not the same, byte for byte, or not on both sides."""

    def there(top: Path) -> set[Path]:
        return {path.relative_to(top) for path in (top, *top.rglob("*")) if path.is_file()}

    both = there(one) & there(other)
    differ = {path for path in both if not filecmp.cmp(one / path, other / path, shallow=False)}
    return sorted(str(path) for path in (there(one) ^ there(other)) | differ)
