"""Models without files for the writer of flattened checkpoints: units made by hand, random tensors over one ``Raw``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed._shard import load_with_process_group

from fsdpckpt.flat.flatten import lay_out
from fsdpckpt.flat.flatten.states import require_equal_states
from fsdpckpt.flat.units import keyed_groups
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.targets import Target
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.unit_lists import units_of_lists
from fsdpckpt.ir.units import Strategy, Unit, Units
from fsdpckpt.storage.sources import Sources
from fsdpckpt.transform.listings import listed_names
from fsdpckpt.transform.missing_state import require_complete
from fsdpckpt.writers import DtypeRule, WriteSpec
from tests.materialise import materialise
from tests.oracle.fake_group import as_rank
from tests.writers.source import Raw, checkpoint

SHAPES = {"a.weight": (5, 3), "a.bias": (5,), "b.weight": (7, 2), "b.bias": (1,), "top": (3,)}
ORDER = ("top", "a.weight", "a.bias", "b.weight", "b.bias")  # of model.parameters()


def param(name: str, shape: Sequence[int] | None = None, **more: Any) -> Parameter:
    return Parameter(name, tuple(SHAPES[name] if shape is None else shape), DTYPES["float32"], **more)


def units(*, orig: bool, strategy: Strategy = Strategy.FULL_SHARD, **more: Any) -> Units:
    """A root with ``a`` and ``top``, and a unit ``b``."""
    root = Unit("", tuple(param(name) for name in ("top", "a.weight", "a.bias")), strategy)
    inner = Unit("b", tuple(param(name) for name in ("b.weight", "b.bias")), strategy)
    settings: dict[str, Any] = {"parameters": ORDER, **more}
    return units_of_lists((root, inner), use_orig_params=orig, **settings)


@dataclass
class Model:
    """What was trained (``weights``, ``states``), and the checkpoint of it."""

    seed: int = 0
    raw: Raw = field(default_factory=Raw)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.weights = {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}
        self.states: dict[str, dict[str, Any]] = {
            name: {
                "step": torch.tensor(7.0),
                "exp_avg": torch.randn(shape, generator=generator),
                "exp_avg_sq": torch.randn(shape, generator=generator),
            }
            for name, shape in SHAPES.items()
        }
        self.groups: list[dict[Any, Any]] | None = [{"params": list(ORDER), "lr": 0.5, "betas": (0.9, 0.95)}]

    def checkpoint(self, **more: Any) -> Checkpoint:
        model = OrderedDict((n, self.raw.whole(weight, sharded=True)) for n, weight in self.weights.items())
        state = {
            name: {item: self.raw.whole(v) if isinstance(v, torch.Tensor) else v for item, v in entry.items()}
            for name, entry in self.states.items()
        }
        groups = None if self.groups is None else [dict(group) for group in self.groups]
        return checkpoint(model, Optimizer.of(state, groups), **more)


class _RawSources(Sources):
    """The bytes of one ``Raw`` as the only file."""

    def __init__(self, raw: Raw) -> None:
        super().__init__()
        self.data = raw.data

    def read_elements(self, files: object, tensor: Tensor, *, row: int = 0, first: int = 0, count: int = 1) -> bytes:
        begin = int(tensor.chunks.offset[row]) + first * tensor.dtype.itemsize
        return bytes(self.data[begin : begin + count * tensor.dtype.itemsize])


def written(
    path: Path, model: Model, of: Units, world_size: int, *, key_type: str = "id", ckpt: Checkpoint | None = None,
    dtypes: DtypeRule | None = None,
) -> Target:  # fmt: skip
    source = model.checkpoint() if ckpt is None else ckpt
    if of.groups is None and source.optim is not None and source.optim.param_groups is not None:
        of = of.with_groups(keyed_groups(of, listed_names(source.optim)))
    if not of.use_orig_params:
        require_complete(source, of)
        require_equal_states(source, of, _RawSources(model.raw))
    target = lay_out(
        source,
        WriteSpec(
            units=of,
            world_size=world_size,
            key_type="name" if key_type == "name" else "id",
            dtypes=dtypes or DtypeRule(),
        ),
    )
    materialise(target, model.raw.files, str(path))
    return target


def loaded(path: Path, section: str, rank: int, world_size: int, *, group: int | None = None) -> Any:
    """A rank's file as torch loads it on that rank; ``group``: ranks in one sharding group."""
    size = group or world_size
    first = rank // size * size
    with as_rank(rank, world_size), load_with_process_group(dist.new_group(list(range(first, first + size)))):
        return torch.load(path / f"{section}_world_size_{world_size}_rank_{rank}.pt", weights_only=False)


def flat(tensors: Sequence[torch.Tensor], *, world_size: int, align: int | None = None) -> torch.Tensor:
    """The flat parameter of ``tensors``, padded to equal shards, by concatenation."""
    parts: list[np.ndarray] = []
    numel = 0
    for tensor in tensors:
        if align is not None and numel % align:
            parts.append(np.full(align - numel % align, 42.0))
            numel += align - numel % align
        parts.append(tensor.double().numpy().reshape(-1))
        numel += tensor.numel()
    parts.append(np.full(-numel % world_size, 0.0 if align is None else 42.0))
    return torch.from_numpy(np.concatenate(parts)).to(tensors[0].dtype)
