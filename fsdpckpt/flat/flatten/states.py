"""A flat parameter's states out of those of its parameters; what ``_flatten_optim_state`` refuses is refused here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fsdpckpt.errors import NeedsInformationError
from fsdpckpt.flat.flatten.units import PlacedUnit
from fsdpckpt.ir.checkpoint import Checkpoint, ParamKey
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import Unit, UnitParam
from fsdpckpt.ir.values import Value

__all__ = ["Cut", "UnitStates", "misshapen", "unit_states"]

_TENSOR = "a tensor"


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """One state of a unit: a tensor in each parameter's shape, all written as ``dtype``."""

    tensors: Sequence[Tensor]
    dtype: DType


_State: TypeAlias = Tensor | Value
UnitStates: TypeAlias = Mapping[str, Cut | Tensor | Value]


def unit_states(
    checkpoint: Checkpoint,
    placed: Sequence[PlacedUnit],
    state: Mapping[ParamKey, Mapping[str, _State]],
    casts: Mapping[Tensor, DType],
) -> tuple[dict[str, UnitStates], list[str]]:
    """Each unit's states, for units that have any, by the unit's key; and everything that no flat parameter can hold.

    Raises NeedsInformationError that lists the units of which only some parameters have states.
    """
    found: dict[str, UnitStates] = {}
    wrong: list[str] = []
    partly: list[str] = []
    for one in placed:
        unit = one.unit
        params = holding(unit)
        held = [states for param in params if (states := state.get(param.name)) is not None]
        if held and len(held) < len(params):
            without = [param.name for param in params if param.name not in state]
            partly.append(f"{_called(unit)}: no state for {', '.join(without)}")
        elif held:
            found[unit.key] = _Merge(unit, casts, wrong).states(held)
    if partly:
        raise NeedsInformationError(
            f"{checkpoint.source}: only some parameters of a unit have optimizer states",
            details=partly,
            why="with use_orig_params=False a unit's states are one tensor over all of its parameters",
            next_step="--missing-state zeros, or --use-orig-params",
        )
    return found, wrong


def holding(unit: Unit) -> Sequence[UnitParam]:
    """The parameters that decide on the states of ``unit``: those with elements, as long as there are some."""
    return [param for param in unit.params if param.numel] or unit.params


def misshapen(param: UnitParam, item: str, leaf: Tensor) -> str:
    return f"{param.name}: state {item} is {list(leaf.shape)}, the parameter {list(param.shape)}"


@dataclass(frozen=True, slots=True)
class _Merge:
    """The states of one unit; what does not fit is added to ``wrong``."""

    unit: Unit
    casts: Mapping[Tensor, DType]
    wrong: list[str]

    def states(self, held: Sequence[Mapping[str, _State]]) -> UnitStates:
        """``held``: the states of each parameter of ``holding``, in the unit's order."""
        params, first = holding(self.unit), held[0]
        for param, states in zip(params, held, strict=True):
            if states.keys() != first.keys():
                told = f"{params[0].name} has the states {', '.join(first)}, {param.name} {', '.join(states)}"
                self.wrong.append(f"{_called(self.unit)}: {told}")
                return {}
        return {item: self._state(item, [states[item] for states in held]) for item in first}

    def _state(self, item: str, leaves: Sequence[_State]) -> Cut | Tensor | Value:
        if not self._agreed(item, [_kind(leaf) for leaf in leaves]):
            return leaves[0]
        if _kind(leaves[0]) != _TENSOR:
            return self._common(item, leaves)
        params = holding(self.unit)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        own = [tensor.shape == param.shape for tensor, param in zip(tensors, params, strict=True)]
        if (item == "step" or not all(own)) and all(tensor.shape == (1,) for tensor in tensors):
            return tensors[0]
        self.wrong.extend(
            misshapen(param, item, tensor) for tensor, param, fits in zip(tensors, params, own, strict=True) if not fits
        )
        dtypes = [self.casts.get(tensor, tensor.dtype) for tensor in tensors]
        self._agreed(f"{item} has several dtypes", [dtype.name for dtype in dtypes])
        by_name = {param.name: tensor for param, tensor in zip(params, tensors, strict=True)}
        # Of a parameter without elements nothing is ever taken.
        return Cut([by_name.get(param.name, tensors[0]) for param in self.unit.params], dtypes[0])

    def _agreed(self, item: str, kinds: Sequence[str]) -> bool:
        """Whether all parameters have the same of ``kinds``."""
        if len(set(kinds)) == 1:
            return True
        named: dict[str, str] = {}
        for kind, param in zip(kinds, holding(self.unit), strict=True):
            named.setdefault(kind, param.name)
        told = ", ".join(f"{kind} for {name}" for kind, name in named.items())
        self.wrong.append(f"{_called(self.unit)}, state {item}: {told}")
        return False

    def _common(self, item: str, leaves: Sequence[_State]) -> _State:
        """A state that a unit has once: equal values, or 0-dim tensors of equal dtype."""
        first, params = leaves[0], holding(self.unit)
        for param, leaf in zip(params, leaves, strict=True):
            if not _same(first, leaf):
                told = f"{_truncate(first)} for {params[0].name}, {_truncate(leaf)} for {param.name}"
                self.wrong.append(f"{_called(self.unit)}, state {item}: {told}")
                break
        return first


def _same(first: _State, leaf: _State) -> bool:
    if isinstance(leaf, Tensor) and isinstance(first, Tensor):
        return leaf.dtype is first.dtype
    return type(leaf) is type(first) and leaf == first


def _called(unit: Unit) -> str:
    return f"unit {unit.prefix or 'root'!r}"


def _kind(leaf: _State) -> str:
    if not isinstance(leaf, Tensor):
        return "None" if leaf is None else "a value"
    return _TENSOR if leaf.shape else "a 0-dim tensor"


def _truncate(leaf: _State) -> str:
    text = leaf.dtype.name if isinstance(leaf, Tensor) else repr(leaf)
    return text if len(text) <= 60 else text[:57] + "..."
