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
from fsdpckpt.ir.placements import Slices
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.units import Units
from fsdpckpt.ir.values import Key, Value
from tests.flat.flat_checkpoints import Played

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
    held = _states(units, world_size)
    state: dict[ParamKey, dict[str, Tensor | Value]] = {
        keys[name]: {"step": whole(), "exp_avg": held[name], "exp_avg_sq": held[name]}
        for name in order
        if name not in without
    }
    param_groups: list[dict[Key, Value]] = []
    for number, group in enumerate(listed):
        entry: dict[Key, Value] = {"lr": 0.1 + number, "params": [keys[name] for name in group]}
        if param_names is not None:
            entry["param_names"] = list(param_names[number])
        param_groups.append(entry)
    return Optimizer.of(state, param_groups)


def _states(units: Units, world_size: int) -> dict[str, Tensor]:
    """One state of everything that an optimizer can hold, by its key."""
    played = Played(units, world_size)
    held = played.moment({name: played.values(param) for name, param in units.params().items()})
    if world_size == 1:
        held = {key: slices([int(tensor.chunks.size.sum())]) for key, tensor in held.items()}
    not_cut = [one for one in units.units if not played.is_cut(one)] if units.use_orig_params else []
    for param in (*units.unmanaged, *(param for one in not_cut for param in one.params)):
        held[param.name] = replicas(world_size, *param.shape)
    return held


def local_model(units: Units, world_size: int, *, by_name: bool = False) -> ModelState:
    """What ``LOCAL_STATE_DICT`` gives: flat parameters, and by-name slices when asked for."""
    played, params = Played(units, world_size), dict[str, Tensor | Value]()
    flat = played.flat_parameters({name: played.values(param) for name, param in units.params().items()})
    by_key = _states(replace(units, use_orig_params=True), world_size) if by_name else {}
    for unit in units.units:
        params[unit.key] = replace(flat[unit.key], dtype=unit.params[0].dtype)
        for param in unit.params if by_name else ():
            chunks = by_key[param.name].chunks
            lengths = dict(zip(chunks.rank.tolist(), chunks.size[:, 0].tolist(), strict=True))
            params[param.name] = slices([lengths.get(rank, 0) for rank in range(world_size)], param.dtype)
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
