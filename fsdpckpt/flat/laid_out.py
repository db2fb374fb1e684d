"""The units of a job, laid out over its ranks: how many elements each rank holds of what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.tensors import Int64Array
from fsdpckpt.ir.units import Unit, Units
from fsdpckpt.layouts.flattened import FlatLayout, place_units


@dataclass(frozen=True, slots=True, eq=False)
class LaidOutUnits:
    """``units`` on ``world_size`` ranks, which their sharding groups divide."""

    units: Units
    world_size: int
    params: Mapping[str, Parameter]  # all of the model, by name
    unit_of: Mapping[str, Unit]  # by parameter; not of those that no unit manages
    by_key: Mapping[str, Unit]  # by the unit's key, which is that of its flat parameter
    layouts: Mapping[str, FlatLayout]  # by the unit's key
    counts: Mapping[str, Int64Array]  # of each sharded parameter, its number of elements in each shard

    @classmethod
    def of(cls, units: Units, world_size: int) -> LaidOutUnits:
        layouts: dict[str, FlatLayout] = {}
        counts: dict[str, Int64Array] = {}
        for placed in place_units(units, world_size):
            layouts[placed.unit.key] = placed.layout
            counts.update(zip(placed.unit.names, placed.layout.counts(), strict=True))
        by_key = {unit.key: unit for unit in units.units}
        return cls(units, world_size, units.params(), units.unit_of(), by_key, layouts, counts)

    def lengths(self, key: str) -> Int64Array:
        """The number of elements each rank holds of a parameter or a flat parameter."""
        if key in self.by_key:
            return np.full(self.world_size, self.layouts[key].shard_numel, np.int64)
        if key in self.unit_of:
            return np.resize(self.counts[key], self.world_size)
        return np.full(self.world_size, self.params[key].numel, np.int64)

    def requires_grad(self, key: str) -> bool:
        """Of a parameter or a flat parameter."""
        return self.by_key[key].requires_grad if key in self.by_key else self.params[key].requires_grad
