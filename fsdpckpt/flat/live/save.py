"""Save what FSDP1 knows of a live model and never writes to a checkpoint: the units file."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from fsdpckpt.errors import InternalError, SourceUnsupportedError, UsageError
from fsdpckpt.flat.live.model import (
    FsdpModule,
    aligning_dtype,
    contradictions,
    dtype_of,
    fsdp_modules,
    groups,
    names_of,
    parameter_order,
    params_outside_units,
    shared,
    stride_of,
)
from fsdpckpt.flat.live.rank_orders import SharedOrders, with_orders
from fsdpckpt.flat.units.file import units_path, write_units
from fsdpckpt.ir.units import Strategy, Unit, UnitParam, Units, flaws

_STRATEGIES = {
    "FULL_SHARD": Strategy.FULL_SHARD,
    "SHARD_GRAD_OP": Strategy.SHARD_GRAD_OP,
    "HYBRID_SHARD": Strategy.HYBRID_SHARD,
    "_HYBRID_SHARD_ZERO2": Strategy.HYBRID_SHARD,
    "NO_SHARD": Strategy.NO_SHARD,
}


def save_units(model: nn.Module, optimizer: torch.optim.Optimizer | None, path: str | os.PathLike[str]) -> None:
    """Write the units file of a live FSDP1 model to ``path``: a ``.json`` file, or a directory for its ``units.json``.

    Call it on every rank; no rank waits for another, and rank 0 of the model's process group writes. ``optimizer``
    gives the order of ids in its state; None means one group in ``model.parameters()`` order. Ranks whose optimizers
    list their parameters in another order, or lack some, are recorded with their own. Call it outside of forward and
    backward. Raises UsageError for a model without FSDP1 modules (FSDP2 needs no units file), SourceUnsupportedError
    on a rank whose own order cannot be recorded, because it does not see the file that rank 0 wrote.
    """
    units, target = units_of(model, optimizer), units_path(os.fspath(path))
    rank, process_groups = _place(model)
    orders = SharedOrders.of(units, process_groups, rank, target) if optimizer is not None else None
    if orders is None:
        if not rank:
            write_units(units, target)
        return
    news = orders.say(units)
    if rank and not (news and orders.require_seen()):
        return  # rank 0 writes it
    known = orders.units()
    while True:
        orders.written(write_units(with_orders(known), target))
        before, known = known, orders.units()
        if known == before:
            return


def units_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Units:
    """The units of a live FSDP1 model, the same on every rank.

    What is returned has been proved against the numbers of the model's own flat parameters. Raises UsageError for a
    model without FSDP1 modules or an optimizer of another model, SourceUnsupportedError for FSDP1 on top of tensor
    parallelism.
    """
    modules = fsdp_modules(model)
    if not modules:
        raise UsageError(
            "this model has no FSDP1 module",
            why="save_units is for FullyShardedDataParallel, whose flat parameters say nothing of what they hold; "
            "checkpoints of FSDP2 (fully_shard) carry all names and shapes and need no units file",
            next_step="save_units(model, optimizer, path) after the model is wrapped, with the wrapped model",
        )
    use_orig_params = _agreed(modules)
    units = tuple(_unit(one) for one in modules)
    names = names_of(modules, model)
    outside = tuple(params_outside_units(model, names))
    world_size, shard_size = _ranks(modules)
    result = Units(
        units=units,
        use_orig_params=use_orig_params,
        parameters=tuple(parameter_order(model, modules, names, use_orig_params=use_orig_params)),
        unmanaged=outside,
        shared=tuple(shared(model, modules, names, {param.name for param in outside})),
        groups=None if optimizer is None else groups(optimizer, names.keys),
        world_size=world_size,
        shard_size=shard_size,
    )
    _prove(result, modules)
    return result


def _place(model: nn.Module) -> tuple[int, list[Any]]:
    """This rank among those of the model's checkpoint, and its process groups: stages of a pipeline have their own."""
    groups = fsdp_modules(model)[0].groups
    rank = 0
    for group in reversed(groups):
        rank = rank * group.size() + group.rank()
    return rank, groups


def _agreed(modules: list[FsdpModule]) -> bool:
    found = {one.use_orig_params for one in modules}
    if len(found) > 1:
        raise SourceUnsupportedError(
            "some FSDP modules of this model have use_orig_params=True and some False",
            why="FSDP itself refuses such a model in its first forward",
            next_step="wrap all modules with the same use_orig_params",
        )
    return found.pop()


def _ranks(modules: list[FsdpModule]) -> tuple[int, int | None]:
    """(ranks of the model, ranks of a sharding group when those are fewer)."""
    sizes = {tuple(group.size() for group in one.groups) for one in modules}
    if len(sizes) > 1:
        raise SourceUnsupportedError(
            "the units of this model are sharded over process groups of different sizes",
            expected="one size",
            found=", ".join(str(size[0]) for size in sorted(sizes)),
            next_step="wrap all units with the same process_group",
        )
    shard, *replicas = sizes.pop()
    world = shard * (replicas[0] if replicas else 1)
    return world, shard if shard != world else None


def _unit(one: FsdpModule) -> Unit:
    flat = one.flat_param
    if any(extension is not None for extension in getattr(flat, "_param_extensions", ())):
        raise SourceUnsupportedError(
            f"the parameters of unit {one.prefix!r} are DTensors",
            why="FSDP1 on top of tensor parallelism flattens each rank's part of a parameter",
            next_step="save such a model as SHARDED_STATE_DICT, which fsdpckpt reads without a units file",
        )
    params = tuple(
        UnitParam(
            name=name,
            shape=tuple(flat._shapes[number]),
            dtype=dtype_of(one.orig_dtype),
            stride=_stride(flat, number),
            requires_grad=_requires_grad(one, number),
        )
        for number, name in enumerate(one.names)
    )
    mixed = one.param_dtype
    unit = Unit(one.prefix, params, _strategy(one.state), None if mixed is None else dtype_of(mixed))
    return aligning_dtype(unit, one)


def _stride(flat: Any, number: int) -> tuple[int, ...] | None:
    # torch 2.4 has neither attribute: it flattens every parameter row-major.
    strides, contiguities = getattr(flat, "_strides", None), getattr(flat, "_contiguities", None)
    if strides is None or contiguities is None or contiguities[number]:
        return None
    return stride_of(tuple(flat._shapes[number]), tuple(strides[number]))


def _requires_grad(one: FsdpModule, number: int) -> bool:
    params = one.flat_param._params
    return bool(one.flat_param.requires_grad if params is None else params[number].requires_grad)


def _strategy(state: Any) -> Strategy:
    return _STRATEGIES[state.sharding_strategy.name]


def _prove(units: Units, modules: list[FsdpModule]) -> None:
    """The flat parameters of ``units`` are those of the model, number by number, and ``units`` are consistent."""
    shard_size = units.shard_size or units.world_size or 1
    wrong = flaws(units)
    for unit, one in zip(units.units, modules, strict=True):
        wrong += contradictions(unit, one, shard_size=shard_size, use_orig_params=units.use_orig_params)
    if wrong:
        raise InternalError(
            "this version of fsdpckpt does not understand the units of this model",
            details=wrong,
            why=f"torch {torch.__version__} lays out flat parameters in another way, or the model was changed after "
            "it was wrapped",
        )
