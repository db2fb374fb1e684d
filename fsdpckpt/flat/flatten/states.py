"""The optimizer's state dict on each rank: one shard for each unit, or one slice for each parameter.

The rules are those of ``_flatten_optim_state`` (``use_orig_params=False``) and ``_shard_orig_param_state`` (True) in
``torch/distributed/fsdp/_optim_utils.py``: tensors in the parameter's shape are cut; 0-dim ones and values that are not
tensors are on every rank that holds elements, and with ``use_orig_params=False`` all parameters of a unit must agree on
them (``_flatten_zero_dim_tensor_optim_state``, ``_flatten_non_tensor_optim_state``). A tensor of shape (1,) is treated
like a 0-dim one. Only ``require_equal_scalars`` reads data. What FSDP1 refuses is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from fsdpckpt.errors import NeedsInformationError, SourceCorruptError, SourceUnsupportedError
from fsdpckpt.flat.blocks import Quantized, require_whole_blocks
from fsdpckpt.flat.flatten.keys import FlatKeys
from fsdpckpt.flat.flatten.pickle import FlatScales, FlatShard, in_memory_order
from fsdpckpt.ir.checkpoint import Checkpoint, OptimState, ParamKey, stored_entry
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.quantized import maps_in, scales_in
from fsdpckpt.ir.tensors import SLICES, Tensor
from fsdpckpt.ir.units import Unit, UnitParam, Units
from fsdpckpt.ir.values import Value
from fsdpckpt.layouts.flattened import FlatPart, PlacedUnit
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import some_of

_TENSOR = "a tensor"


@dataclass(frozen=True, slots=True, eq=False)
class FlatState:
    """One state of a unit: a tensor in each parameter's shape, all written as ``dtype``."""

    tensors: Sequence[Tensor]
    dtype: DType


_State: TypeAlias = Tensor | Value
UnitStates: TypeAlias = Mapping[str, FlatState | FlatScales | Tensor | Value]


def unit_states(
    checkpoint: Checkpoint,
    placed: Sequence[PlacedUnit],
    state: Mapping[ParamKey, Mapping[str, _State]],
    casts: Mapping[Tensor, DType],
) -> tuple[dict[str, UnitStates], list[str]]:
    """The states of each unit that has any, by the unit's key; and everything that no flat parameter can hold.

    Raises NeedsInformationError that lists the units of which only some parameters have states.
    """
    states_of_units: dict[str, UnitStates] = {}
    wrong: list[str] = []
    partly: list[str] = []
    for one in placed:
        unit = one.unit
        params = deciding_params(unit)
        param_states = [states for param in params if (states := state.get(param.name)) is not None]
        if param_states and len(param_states) < len(params):
            without = [param.name for param in params if param.name not in state]
            partly.append(f"{_unit_text(unit)}: no state for {', '.join(without)}")
        elif param_states:
            states_of_units[unit.key] = _Merge(unit, casts, wrong, Quantized.of(unit, state).block).states(param_states)
    if partly:
        raise NeedsInformationError(
            f"{checkpoint.source}: only some parameters of a unit have optimizer states",
            details=partly,
            why="with use_orig_params=False a unit's states are one tensor over all of its parameters",
            next_step="--missing-state zeros, or --use-orig-params",
        )
    return states_of_units, wrong


def deciding_params(unit: Unit) -> Sequence[UnitParam]:
    """The parameters that decide the states of ``unit``: those with elements, if there are any."""
    return [param for param in unit.params if param.numel] or unit.params


def shape_mismatch(param: UnitParam, item: str, leaf: Tensor) -> str:
    return f"{param.name}: state {item} is {list(leaf.shape)}, the parameter {list(param.shape)}"


@dataclass(frozen=True, slots=True)
class _Merge:
    """Merges the states of one unit; adds what does not fit to ``wrong``."""

    unit: Unit
    casts: Mapping[Tensor, DType]
    wrong: list[str]
    block: int | None

    def states(self, param_states: Sequence[Mapping[str, _State]]) -> UnitStates:
        """Merge ``param_states``: the states of each of ``deciding_params``, in the unit's order."""
        params, first = deciding_params(self.unit), param_states[0]
        for param, states in zip(params, param_states, strict=True):
            if states.keys() != first.keys():
                difference = f"{params[0].name} has the states {', '.join(first)}, {param.name} {', '.join(states)}"
                self.wrong.append(f"{_unit_text(self.unit)}: {difference}")
                return {}
        scales, maps = scales_in(first), maps_in(first)
        made: dict[str, FlatState | FlatScales | Tensor | Value] = {}
        for item in first:
            leaves = [states[item] for states in param_states]
            if item in scales:
                made[item] = FlatScales(self._of_all(leaves), self.block or 1)
            else:
                made[item] = leaves[0] if item in maps else self._state(item, leaves)
        return made

    def _of_all(self, leaves: Sequence[_State]) -> list[Tensor]:
        """Extend ``leaves`` of ``deciding_params`` to all parameters; nothing is ever taken from one without
        elements.
        """
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        by_name = {param.name: one for param, one in zip(deciding_params(self.unit), tensors, strict=True)}
        return [by_name.get(param.name, tensors[0]) for param in self.unit.params]

    def _state(self, item: str, leaves: Sequence[_State]) -> FlatState | Tensor | Value:
        if not self._agreed(item, [_kind(leaf) for leaf in leaves]):
            return leaves[0]
        if _kind(leaves[0]) != _TENSOR:
            return self._common(item, leaves)
        params = deciding_params(self.unit)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        fitting = [tensor.shape == param.shape for tensor, param in zip(tensors, params, strict=True)]
        if (item == "step" or not all(fitting)) and all(tensor.shape == (1,) for tensor in tensors):
            return tensors[0]
        self.wrong.extend(
            shape_mismatch(param, item, tensor)
            for tensor, param, fits in zip(tensors, params, fitting, strict=True)
            if not fits
        )
        dtypes = [self.casts.get(tensor, tensor.dtype) for tensor in tensors]
        self._agreed(f"{item} has several dtypes", [dtype.name for dtype in dtypes])
        return FlatState(self._of_all(tensors), dtypes[0])

    def _agreed(self, item: str, kinds: Sequence[str]) -> bool:
        """Whether all parameters have the same of ``kinds``."""
        if len(set(kinds)) == 1:
            return True
        named: dict[str, str] = {}
        for kind, param in zip(kinds, deciding_params(self.unit), strict=True):
            named.setdefault(kind, param.name)
        kinds_text = ", ".join(f"{kind} for {name}" for kind, name in named.items())
        self.wrong.append(f"{_unit_text(self.unit)}, state {item}: {kinds_text}")
        return False

    def _common(self, item: str, leaves: Sequence[_State]) -> _State:
        """A state that a unit has once: equal values, or 0-dim tensors of equal dtype."""
        first, params = leaves[0], deciding_params(self.unit)
        for param, leaf in zip(params, leaves, strict=True):
            if not _same_state(first, leaf):
                difference = f"{_truncate(first)} for {params[0].name}, {_truncate(leaf)} for {param.name}"
                self.wrong.append(f"{_unit_text(self.unit)}, state {item}: {difference}")
                break
        return first


def _same_state(first: _State, leaf: _State) -> bool:
    if isinstance(leaf, Tensor) and isinstance(first, Tensor):
        return leaf.dtype is first.dtype
    return type(leaf) is type(first) and leaf == first


def _unit_text(unit: Unit) -> str:
    return f"unit {unit.prefix or 'root'!r}"


def _kind(leaf: _State) -> str:
    if not isinstance(leaf, Tensor):
        return "None" if leaf is None else "a value"
    return _TENSOR if leaf.shape else "a 0-dim tensor"


def _truncate(leaf: _State) -> str:
    text = leaf.dtype.name if isinstance(leaf, Tensor) else repr(leaf)
    return text if len(text) <= 60 else text[:57] + "..."


# The name of a state in a flattened source that is not a slice of its parameter but ranks' parts of something else.
_IN_SLICES = frozenset({SLICES, "flattened"})


class FlatOptimizer:
    """The parts of the optimizer's state dict that are the same on all ranks; ``value`` returns one rank's
    state dict.
    """

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
                why="a state is cut as its parameter is, and has the same shape"
                + (
                    ""
                    if units.use_orig_params
                    else "; with use_orig_params=False those of a unit become one, of one dtype"
                ),
                next_step="convert to another layout (--to full, --to sharded), or only the model (--only model)"
                + ("" if units.use_orig_params else "; where dtypes differ, add --use-orig-params"),
            )
        cut = [Quantized.of(one.unit, self._state) for one in placed if one.sharded or not units.use_orig_params]
        layouts = {one.unit.key: one.layout for one in placed}
        require_whole_blocks(cut, layouts, orig=units.use_orig_params, source=checkpoint.source)
        self._blocks = {name: one.block or 1 for one in cut for name in one.params}
        self._order = [key for key in units.optimizer_keys() if key in self._of_units or key in self._state]
        self._require_groups(checkpoint)

    def value(self, rank: int) -> dict[Any, Any]:
        """The state dict of ``rank``."""
        state: dict[Any, Any] = {}
        slices = self._slices(rank) if self._units.use_orig_params else {}
        rank_keys = self._keys.of(rank)
        for name in self._order:
            if name not in rank_keys.keys:  # the optimizer of this rank does not have it
                continue
            unit = self._of_units.get(name)
            if unit is not None:
                state[rank_keys.keys[name]] = self._unit_entry(self._placed[name], unit, rank)
                continue
            holder = self._holder.get(name)
            states = self._state[name]
            if holder is None or not holder.sharded:
                state[rank_keys.keys[name]] = {
                    item: in_memory_order(self._params[name], leaf, self._casts) for item, leaf in states.items()
                }
            elif name in slices:
                state[rank_keys.keys[name]] = self._slice_entry(name, states, *slices[name])
        for key, entry in self._state.items():
            if key not in self._params:
                state[key] = stored_entry(entry)
        root: dict[Any, Any] = {"state": state}
        if rank_keys.groups is not None:
            root["param_groups"] = rank_keys.groups
        return {**root, **self._extra}

    def _require_groups(self, checkpoint: Checkpoint) -> None:
        homeless = [key for key in self._order if key not in self._keys.every.keys]
        if homeless:
            raise SourceCorruptError(
                f"{checkpoint.source}: the optimizer has states of parameters that none of its groups lists",
                details=homeless,
                next_step="leave them out with --exclude",
            )

    # use_orig_params=True.

    def _slices(self, rank: int) -> dict[str, tuple[int, int]]:
        """The parameters of which ``rank`` holds elements: [begin, begin + count) each."""
        ranges = {}
        for placed in self._placed.values():
            if placed.sharded:
                params = placed.unit.params
                for part in placed.parts(rank):
                    if part.param is not None:
                        ranges[params[part.param].name] = part.begin, part.count
        return ranges

    def _slice_entry(self, name: str, states: Mapping[str, Tensor | Value], begin: int, count: int) -> dict[str, Any]:
        param, part = self._params[name], FlatPart(0, begin, count)
        entry: dict[str, Any] = {
            item: FlatShard((param,), (leaf,), (part,), self._casts.get(leaf, leaf.dtype), count)
            if isinstance(leaf, Tensor) and leaf.shape and leaf.shape == param.shape
            else leaf
            for item, leaf in states.items()
        }
        for scale in scales_in(states):
            if isinstance(leaf := states[scale], Tensor):
                entry[scale] = FlatScales((leaf,), self._blocks[name]).shard((part,))
        return entry

    def _misshapen(self, name: str) -> list[str]:
        """What is wrong with the states of a parameter. One that is not sharded may have states of any shape."""
        param, sharded, states = self._params[name], self._holder[name].sharded, self._state.get(name, {})
        other = {*scales_in(states), *maps_in(states)}
        return [
            shape_mismatch(param, item, leaf)
            for item, leaf in states.items()
            if isinstance(leaf, Tensor)
            and item not in other
            and leaf.shape not in ((), (1,), param.shape)
            and (sharded or leaf.placement in _IN_SLICES)
        ]

    # use_orig_params=False.

    def _unit_entry(self, placed: PlacedUnit, states: UnitStates, rank: int) -> dict[str, Any]:
        return {
            item: FlatShard(placed.unit.params, leaf.tensors, placed.parts(rank), leaf.dtype, placed.layout.shard)
            if isinstance(leaf, FlatState)
            else leaf.shard(placed.parts(rank))
            if isinstance(leaf, FlatScales)
            else leaf
            for item, leaf in states.items()
        }


def require_equal_scalars(checkpoint: Checkpoint, units: Units, sources: Sources) -> None:
    """Raises SourceUnsupportedError that lists every state on which the parameters of one unit disagree."""
    optim = checkpoint.optim
    if optim is None:
        return
    wrong = [text for unit in units.units for text in _disagreements(unit, optim, checkpoint, sources)]
    if wrong:
        raise SourceUnsupportedError(
            f"{checkpoint.source}: parameters of one unit have different states where a flat parameter has one",
            details=wrong,
            why="with use_orig_params=False all parameters of a unit share one step and one value of each such state",
            next_step="add --use-orig-params, under which each parameter keeps its own, or check the source: "
            "fsdpckpt verify",
        )


def _disagreements(unit: Unit, optim: OptimState, checkpoint: Checkpoint, sources: Sources) -> Iterator[str]:
    values: dict[str, dict[tuple[str, object], list[str]]] = {}
    for param in unit.params:
        for state, leaf in optim.state.get(param.name, {}).items():
            # A parameter without elements never took a step.
            if param.numel and (not isinstance(leaf, Tensor) or _is_scalar(state, leaf, param)):
                seen = values.setdefault(state, {})
                seen.setdefault(_identity(leaf, checkpoint, sources), []).append(param.name)
    for state, seen in values.items():
        if len(seen) > 1:
            values_text = "; ".join(f"{_shown_text(value)} for {some_of(names)}" for value, names in seen.items())
            yield f"unit {unit.prefix or 'root'!r}, state {state}: {values_text}"


def _is_scalar(state: str, leaf: Tensor, param: UnitParam) -> bool:
    return leaf.numel == 1 and (state == "step" or leaf.shape != param.shape)


def _identity(leaf: Tensor | Value, checkpoint: Checkpoint, sources: Sources) -> tuple[str, object]:
    """Type and content, hashable: equal for equal values of equal type."""
    if not isinstance(leaf, Tensor):
        return type(leaf).__name__, repr(leaf)
    return leaf.dtype.name, sources.read_elements(checkpoint.files, leaf)


def _shown_text(value: tuple[str, object]) -> str:
    kind, content = value
    return f"{kind} 0x{content.hex()}" if isinstance(content, bytes) else str(content)
