"""What units make of a checkpoint: two that make the same of it need no choice between them."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from fsdpckpt.flat.match import FlatMatch
from fsdpckpt.flat.slice_lengths import is_flat_key
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.units import Strategy, Unit, UnitParam, Units

__all__ = ["reads", "settings_said"]

_Row: TypeAlias = tuple[object, ...]


def reads(checkpoint: Checkpoint, match: FlatMatch) -> object:
    """Equal for two matches of ``checkpoint`` exactly when they read the same bytes as the same parameters."""
    units = match.units
    by_key = {unit.key: unit for unit in units.units}
    flat = {key: _flat(unit, match) for key, unit in by_key.items()}
    params, inside = units.params(), units.unit_of()
    keys = []
    for key, name in match.keys.items():
        if name in by_key:
            keys.append((key, flat[name]))
        elif name in inside:
            keys.append((key, (_slice(params[name], match),)))
        else:
            keys.append((key, ((name, params[name].shape),)))
    model = checkpoint.model.params if checkpoint.model is not None else ()
    split = {clean(key) for key in model if is_flat_key(key)}
    named = frozenset((key, flat[key]) for key in by_key if key in split)
    optim = checkpoint.optim
    whole = units.groups if optim is not None and optim.key_type == "id" and not match.flat_optimizer else None
    return (tuple(keys), whole, named, frozenset(units.shared))


def _flat(unit: Unit, match: FlatMatch) -> tuple[_Row, ...]:
    """Each parameter of a flat one; where it lies in it matters only when it is not alone."""
    layout = match.layouts[unit.key]
    filled = [param for param in unit.params if param.numel]
    if len(filled) == 1:
        return (_slice(filled[0], match),)
    starts = layout.start.tolist()
    return tuple(
        (param.name, param.shape, param.order, start, layout.shard, layout.shards)
        for param, start in zip(unit.params, starts, strict=True)
        if param.numel
    )


def _slice(param: UnitParam, match: FlatMatch) -> _Row:
    counts = np.resize(match.counts[param.name], match.shard_size).astype(np.int64)
    return (param.name, param.shape, param.order, counts.tobytes(), match.shard_size)


def settings_said(units: Units) -> str:
    """The settings in words, for messages: ``use_orig_params=True, full-shard, param_dtype bfloat16``."""
    strategies = dict.fromkeys(unit.strategy for unit in units.units)
    said = [f"use_orig_params={units.use_orig_params}", ", ".join(one.value for one in strategies)]
    if units.shard_size is not None and Strategy.HYBRID_SHARD in strategies:
        said[-1] += f" in groups of {units.shard_size} ranks"
    if units.use_orig_params:
        dtypes = dict.fromkeys((unit.param_dtype or unit.params[0].dtype).name for unit in units.units)
        said.append(f"aligned for {', '.join(dtypes)}")
    return ", ".join(said)
