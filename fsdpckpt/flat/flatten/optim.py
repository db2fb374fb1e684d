"""The optimizer's state dict on each rank: one shard a unit, or one slice a parameter.

The rules are those of ``_flatten_optim_state`` (``use_orig_params=False``) and ``_shard_orig_param_state`` (True) in
``torch/distributed/fsdp/_optim_utils.py``: tensors in the parameter's shape are cut; 0-dim ones and values that are no
tensors are on every rank that holds elements. A tensor of shape (1,) is carried like a 0-dim one. That 0-dim states of
a unit are equal has to be seen before: nothing here reads data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsdpckpt.errors import SourceCorruptError, SourceUnsupportedError
from fsdpckpt.flat.flatten.keys import FlatKeys
from fsdpckpt.flat.flatten.pickle import FlatShard, ParamSlice, WholeParam
from fsdpckpt.flat.flatten.states import Cut, UnitStates, misshapen, unit_states
from fsdpckpt.flat.flatten.units import PlacedUnit
from fsdpckpt.ir.checkpoint import Checkpoint, OptimState, stored_entry
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.tensors import SLICES, Tensor
from fsdpckpt.ir.units import Units
from fsdpckpt.ir.values import Value

__all__ = ["FlatOptimizer"]

# What a state is called in a flattened source that is no slice of its parameter: ranks' parts of something else.
_IN_SLICES = frozenset({SLICES, "flattened"})


class FlatOptimizer:
    """Everything about the optimizer that is the same on all ranks; ``value`` is what one rank gets."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        optim: OptimState,
        *,
        units: Units,
        placed: Sequence[PlacedUnit],
        keys: FlatKeys,
        casts: Mapping[Tensor, DType],
    ) -> None:
        """Raises SourceUnsupportedError for states that no flat parameter can hold, NeedsInformationError for units
        of which only some parameters have states."""
        first = dict(units.shared)
        self._params = units.params()
        named = {first.get(key, key) if isinstance(key, str) else key: states for key, states in optim.state.items()}
        self._state = {key: states for key, states in named.items() if states or key not in self._params}
        self._extra = optim.extra
        self._units = units
        self._keys = keys
        self._casts = casts
        self._placed = {unit.unit.key: unit for unit in placed}
        self._holder = {param.name: unit for unit in placed for param in unit.unit.params}
        if units.use_orig_params:
            self._of_units: Mapping[str, UnitStates] = {}
            wrong = [text for name in self._holder for text in self._misshapen(name)]
        else:
            self._of_units, wrong = unit_states(checkpoint, placed, self._state, casts)
        if wrong:
            raise SourceUnsupportedError(
                f"{checkpoint.source}: optimizer states that a flattened checkpoint cannot hold",
                details=wrong,
                why="a rank's slice of a parameter says nothing about a state of another shape",
                next_step="convert to another layout (--to full, --to sharded), or only the model (--only model)",
            )
        self._order = [key for key in units.optimizer_keys() if key in self._of_units or key in self._state]
        self._require_groups(checkpoint)

    def value(self, rank: int) -> dict[Any, Any]:
        """The state dict of ``rank``."""
        state: dict[Any, Any] = {}
        slices = self._slices(rank) if self._units.use_orig_params else {}
        for name in self._order:
            unit = self._of_units.get(name)
            if unit is not None:
                state[self._keys.keys[name]] = self._unit_entry(self._placed[name], unit, rank)
                continue
            holder = self._holder.get(name)
            states = self._state[name]
            if holder is None or not holder.sharded:
                state[self._keys.keys[name]] = {item: self._whole(name, leaf) for item, leaf in states.items()}
            elif name in slices:
                state[self._keys.keys[name]] = self._slice_entry(name, states, *slices[name])
        for key, entry in self._state.items():
            if key not in self._params:
                state[key] = stored_entry(entry)
        root: dict[Any, Any] = {"state": state}
        if self._keys.groups is not None:
            root["param_groups"] = self._keys.groups
        return {**root, **self._extra}

    def _require_groups(self, checkpoint: Checkpoint) -> None:
        homeless = [key for key in self._order if key not in self._keys.keys]
        if homeless:
            raise SourceCorruptError(
                f"{checkpoint.source}: the optimizer has states of parameters that none of its groups lists",
                details=homeless,
                next_step="leave them out with --exclude",
            )

    # use_orig_params=True.

    def _slices(self, rank: int) -> dict[str, tuple[int, int]]:
        """Of which parameters ``rank`` holds elements: [begin, begin + count) each."""
        found = {}
        for placed in self._placed.values():
            if placed.sharded:
                params = placed.unit.params
                for part in placed.parts(rank):
                    if part.param is not None:
                        found[params[part.param].name] = part.begin, part.count
        return found

    def _slice_entry(self, name: str, states: Mapping[str, Tensor | Value], begin: int, count: int) -> dict[str, Any]:
        param = self._params[name]
        return {
            item: ParamSlice(param, leaf, begin, count, self._dtype(leaf))
            if isinstance(leaf, Tensor) and leaf.shape and leaf.shape == param.shape
            else leaf
            for item, leaf in states.items()
        }

    def _whole(self, name: str, leaf: Tensor | Value) -> Any:
        param = self._params[name]
        if isinstance(leaf, Tensor) and param.stride is not None and leaf.shape == param.shape:
            return WholeParam(param, leaf, self._dtype(leaf))
        return leaf

    def _misshapen(self, name: str) -> list[str]:
        """What is wrong with the states of a parameter: one that is not sharded may have states of any shape."""
        param, sharded = self._params[name], self._holder[name].sharded
        return [
            misshapen(param, item, leaf)
            for item, leaf in self._state.get(name, {}).items()
            if isinstance(leaf, Tensor)
            and leaf.shape not in ((), (1,), param.shape)
            and (sharded or leaf.placement in _IN_SLICES)
        ]

    # use_orig_params=False.

    def _unit_entry(self, placed: PlacedUnit, states: UnitStates, rank: int) -> dict[str, Any]:
        return {
            item: FlatShard(placed.unit.params, leaf.tensors, placed.parts(rank), leaf.dtype, placed.layout.shard)
            if isinstance(leaf, Cut)
            else leaf
            for item, leaf in states.items()
        }

    def _dtype(self, tensor: Tensor) -> DType:
        return self._casts.get(tensor, tensor.dtype)
