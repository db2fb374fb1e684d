"""Flattened checkpoints without files: what a reader gives for units on some number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np

from fsdpckpt.ir.checkpoint import Checkpoint, Container, Layout, ModelState, Origin
from fsdpckpt.ir.dtypes import DTYPES, DType
from fsdpckpt.ir.listing import Listing
from fsdpckpt.ir.optimizer import Optimizer, ParamKey
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.placements import Shard, Sharded, Slices
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.units import Units
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.layouts.flattened import layout_of

FLOAT = DTYPES["float32"]


def named(name: str, *shape: int, dtype: str = "float32", sharded: bool | None = True) -> Parameter:
    return Parameter(name, shape, DTYPES[dtype], sharded=sharded)


def name_list(*params: Parameter, ordered: bool = True, from_reference: bool = False) -> Listing:
    return Listing(params, "a list", ordered, from_reference=from_reference)


def whole(*shape: int, dtype: DType = FLOAT, sharded: bool | None = True, file: int = 0, offset: int = 0) -> Tensor:
    return Tensor(dtype, shape, Chunks.whole(file=file, offset=offset, shape=shape), sharded)


def slices(lengths: Sequence[int | None], dtype: DType = FLOAT) -> Tensor:
    """One row a rank with elements to show; None for a rank that lacks the state. Of one rank it looks whole."""
    if len(lengths) == 1:
        return whole(lengths[0] or 0, dtype=dtype, sharded=None)
    ranks = [rank for rank, length in enumerate(lengths) if length is not None]
    sizes = [lengths[rank] or 0 for rank in ranks]
    starts = np.cumsum([0, *sizes])[:-1].tolist()
    rows = Chunks.rows(
        ndim=1,
        rank=ranks,
        file=ranks,
        offset=[64 * rank for rank in ranks],
        start=[[one] for one in starts],
        size=[[one] for one in sizes],
    )
    return Tensor(dtype, (sum(sizes),), rows, sharded=True, cut=Slices())


def replicas(world_size: int, *shape: int, dtype: DType = FLOAT) -> Tensor:
    """A plain tensor that every rank holds whole."""
    if len(shape) == 1:
        return slices([shape[0]] * world_size, dtype)
    ranks = list(range(world_size))
    zeros = [[0] * len(shape)] * world_size
    rows = Chunks.rows(
        ndim=len(shape), rank=ranks, file=ranks, offset=[64] * world_size, start=zeros, size=[shape] * world_size
    )
    return Tensor(dtype, shape, rows, sharded=False)


def optimizer(
    units: Units,
    world_size: int,
    *,
    by: str = "id",
    groups: Sequence[Sequence[str]] | None = None,
    without: Sequence[str] = (),
    param_names: Sequence[Sequence[str]] | None = None,
) -> Optimizer:
    """The optimizer's own state on every rank. ``groups``: keys of the units; ``without``: keys that have no state."""
    listed = [list(group) for group in groups] if groups is not None else [list(units.optimizer_keys())]
    order = [key for group in listed for key in group]
    keys: dict[str, ParamKey] = {name: number if by == "id" else name for number, name in enumerate(order)}
    state: dict[ParamKey, dict[str, Tensor | Value]] = {}
    for name in order:
        if name not in without:
            tensor = _state(units, world_size, name)
            state[keys[name]] = {"step": whole(), "exp_avg": tensor, "exp_avg_sq": tensor}
    param_groups: list[dict[Key, Value]] = []
    for number, group in enumerate(listed):
        entry: dict[Key, Value] = {"lr": 0.1 + number, "params": [keys[name] for name in group]}
        if param_names is not None:
            entry["param_names"] = list(param_names[number])
        param_groups.append(entry)
    return Optimizer.of(state, param_groups)


def _state(units: Units, world_size: int, key: str) -> Tensor:
    for unit in units.units:
        layout = layout_of(
            unit,
            use_orig_params=units.use_orig_params,
            world_size=world_size,
            shard_size=units.shard_size or world_size,
        )
        if unit.key == key:
            return slices([layout.shard_numel] * world_size)
        for index, param in enumerate(unit.params):
            if param.name != key:
                continue
            if layout.shard_count == 1:
                return replicas(world_size, *param.shape)
            counts = [0] * layout.shard_count
            found = layout.slices()
            for rank, number, count in zip(
                found.rank.tolist(), found.param.tolist(), found.count.tolist(), strict=True
            ):
                if number == index:
                    counts[rank] = count
            return slices([counts[rank % layout.shard_count] or None for rank in range(world_size)])
    param = next(param for param in units.unmanaged if param.name == key)
    return replicas(world_size, *param.shape)


def local_model(units: Units, world_size: int, *, by_name: bool = False) -> ModelState:
    """What ``LOCAL_STATE_DICT`` gives: flat parameters, and by-name slices when asked for."""
    params: dict[str, Tensor | Value] = {}
    for unit in units.units:
        layout = layout_of(
            unit,
            use_orig_params=units.use_orig_params,
            world_size=world_size,
            shard_size=units.shard_size or world_size,
        )
        held = [layout.shard_range(rank % layout.shard_count) for rank in range(world_size)]
        ranks = [rank for rank, (begin, end) in enumerate(held) if end > begin]
        rows = Chunks.rows(
            ndim=1,
            rank=ranks,
            file=ranks,
            offset=[0] * len(ranks),
            start=[[held[rank][0]] for rank in ranks],
            size=[[held[rank][1] - held[rank][0]] for rank in ranks],
        )
        dtype = unit.params[0].dtype
        params[unit.key] = Tensor(dtype, (layout.total,), rows, sharded=True, cut=Sharded((Shard(0),)))
        for param in unit.params if by_name else ():
            tensor = _state(replace(units, use_orig_params=True), world_size, param.name)
            lengths = {
                int(rank): int(size) for rank, size in zip(tensor.chunks.rank, tensor.chunks.size[:, 0], strict=True)
            }
            params[param.name] = slices([lengths.get(rank, 0) for rank in range(world_size)], dtype)
    return ModelState(params)


def sharded_model(params: Sequence[Parameter]) -> ModelState:
    """A model section of whole tensors, each at a place of its own."""
    found: dict[str, Tensor | Value] = {}
    offset = 0
    for param in params:
        found[param.name] = whole(*param.shape, dtype=param.dtype, sharded=param.sharded, offset=offset)
        offset += prod(param.shape) * param.dtype.itemsize
    return ModelState(found)


def checkpoint(
    world_size: int,
    *,
    model: ModelState | None = None,
    optim: Optimizer | None = None,
    layout: Layout = Layout.FLATTENED,
    container: Container = Container.TORCH,
    units: Units | None = None,
) -> Checkpoint:
    return Checkpoint(
        Origin(
            "run/step-7",
            layout,
            container,
            "plain",
            world_size,
            units_from="run/step-7/units.json" if units is not None else "",
        ),
        files=(),
        model=model,
        optim=optim,
        extra={},
        units=units,
    )
