"""The units of a flattened target over its ranks, and the proof that they are those of the checkpoint.

Layouts are worked out once a unit, and the parts of a shard once a shard: ranks, sections and states share them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.ir.checkpoint import Checkpoint, OptimState, group_params
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import Unit, UnitParam, Units
from fsdpckpt.layouts.boxes import Box
from fsdpckpt.layouts.flattened import FlatLayout, FlatPart, layout_of

__all__ = ["PlacedUnit", "place", "require_agreement"]


@dataclass(frozen=True, slots=True, eq=False)
class PlacedUnit:
    """One unit and its layout in a sharding group. ``boxes``: the shards that have elements, in order."""

    unit: Unit
    layout: FlatLayout
    boxes: tuple[Box, ...]
    _parts: dict[int, list[FlatPart]] = field(default_factory=dict)

    @property
    def sharded(self) -> bool:
        """Whether FSDP1 shards it at all: not under NO_SHARD, and not in a group of one rank."""
        return self.layout.shards > 1

    def parts(self, rank: int) -> list[FlatPart]:
        """The shard that ``rank`` holds, front to back."""
        index = rank % self.layout.shards
        known = self._parts.get(index)
        if known is None:
            known = self._parts[index] = self.layout.parts(index)
        return known


def place(units: Units, world_size: int) -> list[PlacedUnit]:
    """Every unit over ``world_size`` ranks."""
    shard_size = units.shard_size or world_size
    found = []
    for unit in units.units:
        layout = layout_of(unit, use_orig_params=units.use_orig_params, world_size=world_size, shard_size=shard_size)
        found.append(PlacedUnit(unit, layout, tuple(_boxes(layout))))
    return found


def _boxes(layout: FlatLayout) -> Iterator[Box]:
    for index in range(layout.shards):
        begin, end = layout.held(index)
        if begin < end:
            yield Box((begin,), (end - begin,))


def require_agreement(checkpoint: Checkpoint, units: Units) -> None:
    """Raises SourceCorruptError that lists every parameter on which the checkpoint and ``units`` differ."""
    params = units.params()
    wrong = list(_model_differences(checkpoint, units, params))
    if checkpoint.optim is not None:
        wrong += _optim_differences(checkpoint.optim, units, params)
    if wrong:
        raise SourceCorruptError(
            f"the units are not those of {checkpoint.source}",
            details=wrong,
            why="they describe another model, or another version of this one",
            next_step="give the units file of the model that will load it: --units FILE",
        )


def _model_differences(checkpoint: Checkpoint, units: Units, params: dict[str, UnitParam]) -> Iterator[str]:
    if checkpoint.model is None:
        return
    shared = dict(units.shared)
    held = checkpoint.model.params
    for name, param in params.items():
        leaf = held.get(name)
        if not isinstance(leaf, Tensor):
            yield f"the model section has no parameter {name}"
        elif leaf.shape != param.shape:
            yield f"{name}: {list(param.shape)} by the units, {list(leaf.shape)} in the model section"
    for name, leaf in held.items():
        first = shared.get(name)
        if first is None:
            if isinstance(leaf, Tensor) and leaf.sharded and name not in params:
                yield f"the units have no parameter {name}, which the model section has"
        elif isinstance(leaf, Tensor) and first in params and leaf.shape != params[first].shape:
            yield f"{name}: {list(params[first].shape)} by the units ({first}), {list(leaf.shape)} in the model section"


def _optim_differences(optim: OptimState, units: Units, params: dict[str, UnitParam]) -> list[str]:
    known = {*params, *dict(units.shared)}
    listed = dict.fromkeys(key for group in optim.param_groups or () for key in group_params(group) or ())
    wrong = [f"the param groups list {key}, which the units do not have" for key in listed if key not in known]
    wrong += [
        f"the optimizer has a state for {key}, which the units do not have"
        for key, states in optim.state.items()
        if key not in known and key not in listed and _looks_sharded(states)
    ]
    wrong += [
        f"the optimizer has states for {first} and for {later}, which are one parameter by the units"
        for later, first in units.shared
        if optim.state.get(first) and optim.state.get(later)
    ]
    return wrong


def _looks_sharded(states: object) -> bool:
    """Whether an entry can only be a parameter's. A user's own entry of ``state`` is carried as it is."""
    return isinstance(states, dict) and any(isinstance(leaf, Tensor) and leaf.sharded for leaf in states.values())
