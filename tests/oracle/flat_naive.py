"""Joins the slices in the ranks' files as simply as possible, by what FSDP itself says about its units.

Neither FSDP's gathering nor fsdpckpt takes part, so this tells whether ``tests.oracle.flat_generate`` wrote the truth.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.oracle.toy import clean

__all__ = ["optimizer_states", "parameters"]

State = dict[str, Any]


def _world(directory: Path) -> int:
    return len(list((directory / "raw").iterdir()))


def _read(directory: Path, form: str, section: str, rank: int) -> Any:
    name = f"{section}_world_size_{_world(directory)}_rank_{rank}.pt"
    return torch.load(directory / form / name, weights_only=True)


def _about(directory: Path) -> tuple[dict[str, Any], list[dict[str, list[list[int] | None]]]]:
    about = json.loads((directory / "layout.json").read_text())
    ranks = range(about["group"] or _world(directory))
    return about, [json.loads((directory / f"layout_{rank}.json").read_text()) for rank in ranks]


def _whole(flat: torch.Tensor, shape: list[int], stride: list[int]) -> torch.Tensor:
    """A parameter from its elements in memory order, in row-major memory."""
    return flat.contiguous().as_strided(shape, stride).contiguous()


def _by_key(content: State, ids: list[str]) -> State:
    return {ids[key] if isinstance(key, int) else clean(key): states for key, states in content["state"].items()}


def _is_empty(entry: State) -> bool:
    """Whether a rank holds no element, in which case its step did not advance (eager optimizers such as Adagrad)."""
    tensors = [value for value in entry.values() if isinstance(value, torch.Tensor) and value.ndim]
    return bool(tensors) and not any(map(torch.numel, tensors))


def optimizer_states(directory: Path, *, orig: bool) -> State:
    """``{name: {state: value}}`` from the optimizers' own state dicts."""
    about, slices = _about(directory)
    ranks = [_by_key(_read(directory, "raw", "optim", rank), about["ids"]) for rank in range(len(slices))]
    found: State = {}
    sharded = {name for unit in about["units"] for name in unit["names"]} | {unit["key"] for unit in about["units"]}
    found.update({key: states for key, states in ranks[0].items() if key not in sharded})
    for unit in about["units"]:
        begin = 0
        for index, (name, shape, stride) in enumerate(zip(unit["names"], unit["shapes"], unit["strides"], strict=True)):
            numel = torch.Size(shape).numel()
            entries = [rank.get(name if orig else unit["key"]) for rank in ranks]
            holders = [number for number, entry in enumerate(entries) if entry and not _is_empty(entry)]
            for state in entries[holders[0]] if holders else ():
                parts = [entries[number][state] for number in holders]
                if not isinstance(parts[0], torch.Tensor) or not parts[0].ndim:
                    value = parts[0]
                elif not about["sharded"]:
                    value = parts[0]
                    value = value if orig else _whole(value[begin : begin + numel], shape, stride)
                elif orig:
                    for number, part in zip(holders, parts, strict=True):
                        chunk = slices[number][unit["key"]][index]
                        assert len(part) == (0 if chunk is None else chunk[2] - chunk[1] + 1), (name, state, number)
                    value = _whole(torch.cat(parts), shape, stride)
                else:
                    value = _whole(torch.cat(parts)[begin : begin + numel], shape, stride)
                found.setdefault(name, {})[state] = value
            begin += numel
    return found


def parameters(directory: Path) -> State:
    """``{name: value}`` of what FSDP manages, from the shards of all ranks."""
    about, slices = _about(directory)
    shards = [torch.load(directory / f"shards_{rank}.pt", weights_only=True) for rank in range(len(slices))]
    found: State = {}
    for unit in about["units"]:
        key = unit["key"]
        for index, (name, shape, stride) in enumerate(zip(unit["names"], unit["shapes"], unit["strides"], strict=True)):
            parts = []
            for rank, held in zip(slices, shards, strict=True):
                if rank[key][index] is not None:
                    offset, first, last = rank[key][index]
                    parts.append(held[key][offset : offset + last - first + 1])
            # Without sharding every rank holds all of it.
            found[name] = _whole(torch.cat(parts if about["sharded"] else parts[:1]), shape, stride)
    return found
