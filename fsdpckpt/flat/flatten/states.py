"""The optimizer's state dict on each rank: one shard for each unit, or one slice for each parameter.

The rules are those of ``_flatten_optim_state`` (``use_orig_params=False``) and ``_shard_orig_param_state`` (True) in
``torch/distributed/fsdp/_optim_utils.py``: tensors in the parameter's shape are cut; 0-dim ones and values that are not
tensors are on every rank that holds elements, and with ``use_orig_params=False`` all parameters of a unit must agree on
them (``_flatten_zero_dim_tensor_optim_state``, ``_flatten_non_tensor_optim_state``). A tensor of shape (1,) is treated
like a 0-dim one. Only ``require_equal_states`` reads data. What FSDP1 refuses is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from fsdpckpt import flags
from fsdpckpt.errors import SourceCorruptError, SourceUnsupportedError
from fsdpckpt.flat.blocks import QuantizedUnit, require_aligned_slices
from fsdpckpt.flat.flatten.keys import FlatKeys
from fsdpckpt.flat.flatten.pickle import UnitState, in_memory_order
from fsdpckpt.ir.checkpoint import Checkpoint, Note
from fsdpckpt.ir.counters import STEP, is_counter
from fsdpckpt.ir.dtypes import DType, numpy_dtype
from fsdpckpt.ir.optimizer import Optimizer, ParamKey
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.placements import Flattened, Slices
from fsdpckpt.ir.state_parts import state_parts
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import Unit, Units
from fsdpckpt.ir.values import Value
from fsdpckpt.layouts.flattened import FlatPart, PlacedUnit
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import plural, some_of

UnitStates: TypeAlias = Mapping[str, UnitState | Tensor | Value]


def unit_states(
    unit: Unit, state: Mapping[ParamKey, Mapping[str, Tensor | Value]], casts: Mapping[Tensor, DType], wrong: list[str]
) -> UnitStates | None:
    """The states of ``unit``, None if its parameters have none; adds to ``wrong`` what no flat parameter can hold.

    ``require_complete`` and ``require_equal_states`` have shown that its parameters agree on what a unit has once.
    """
    params = deciding_params(unit)
    entries = [state[param.name] for param in params if param.name in state]
    if not entries:
        return None
    parts = state_parts(entries[0])
    block = QuantizedUnit.of(unit, state).block or 1
    states: dict[str, UnitState | Tensor | Value] = {}
    for name, first in entries[0].items():
        by_param = {param.name: entry[name] for param, entry in zip(params, entries, strict=True)}
        tensors = {param: leaf for param, leaf in by_param.items() if isinstance(leaf, Tensor) and leaf.ndim}
        if name in parts.maps or not tensors or _is_per_unit(name, list(tensors.values()), params):
            states[name] = first
            continue
        dtypes = {casts.get(tensor, tensor.dtype).name: param for param, tensor in tensors.items()}
        if len(dtypes) > 1:
            text = ", ".join(f"{dtype} for {param}" for dtype, param in dtypes.items())
            wrong.append(f"{unit}, state {name} has several dtypes: {text}")
        # Stands in for the state of a parameter without elements: no element of it is written.
        of_params = [tensors.get(param.name, next(iter(tensors.values()))) for param in unit.params]
        dtype = casts.get(of_params[0], of_params[0].dtype)
        if name in parts.scales:
            states[name] = UnitState.of_scales(of_params, dtype, block)
        else:
            wrong += [shape_mismatch(p, name, tensors[p.name]) for p in params if tensors[p.name].shape != p.shape]
            states[name] = UnitState(unit.params, of_params, dtype)
    return states


def deciding_params(unit: Unit) -> Sequence[Parameter]:
    """The parameters that decide the states of ``unit``: those with elements, if there are any."""
    return [param for param in unit.params if param.numel] or unit.params


def shape_mismatch(param: Parameter, state: str, leaf: Tensor) -> str:
    return f"{param.name}: state {state} is {list(leaf.shape)}, the parameter {list(param.shape)}"


def _is_per_unit(state: str, tensors: Sequence[Tensor], params: Sequence[Parameter]) -> bool:
    """Whether these ``tensors`` of ``params`` are one number each, of which a unit has one for all its parameters."""
    if any(tensor.shape not in ((), (1,)) for tensor in tensors):
        return False
    own_shapes = all(tensor.shape == param.shape for tensor, param in zip(tensors, params, strict=True))
    return state == STEP or not own_shapes


# Placements of states that were read from ranks' slices and are not in the shape of their parameter.
_IN_SLICES = (Slices, Flattened)


class FlatOptimizer:
    """The parts of the optimizer's state dict that are the same on all ranks; ``value`` returns one rank's
    state dict.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        optim: Optimizer,
        units: Units,
        placed: Sequence[PlacedUnit],
        *,
        keys: FlatKeys,
        casts: Mapping[Tensor, DType],
    ) -> None:
        """Raises SourceUnsupportedError for states that no flat parameter can hold."""
        self._params = units.params()
        self._state = {key: states for key, states in optim.state.items() if states or key not in self._params}
        self._of_users = {key: entry for key, entry in optim.stored_state().items() if key not in self._params}
        self._extra = optim.extra
        self._units = units
        self._keys = keys
        self._casts = casts
        self._placed = {unit.unit.key: unit for unit in placed}
        self._holder = {param.name: unit for unit in placed for param in unit.unit.params}
        self._of_units: dict[str, UnitStates] = {}
        wrong: list[str] = []
        if units.use_orig_params:
            wrong += [text for name in self._holder for text in self._misshapen(name)]
        else:
            for unit in placed:
                states = unit_states(unit.unit, self._state, casts, wrong)
                if states is not None:
                    self._of_units[unit.unit.key] = states
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
                next_step=f"convert to another layout ({flags.to('full')}, {flags.to('sharded')}), or only the model "
                f"({flags.only('model')})"
                + ("" if units.use_orig_params else f"; where dtypes differ, add {flags.use_orig_params}"),
            )
        cut = [QuantizedUnit.of(unit.unit, self._state) for unit in placed if unit.sharded or not units.use_orig_params]
        layouts = {unit.unit.key: unit.layout for unit in placed}
        require_aligned_slices(cut, layouts, orig=units.use_orig_params, source=checkpoint.source)
        self._blocks = {name: of_unit.block or 1 for of_unit in cut for name in of_unit.params}
        self._order = [key for key in units.optimizer_keys() if key in self._of_units or key in self._state]
        self._require_groups(checkpoint)

    def notes(self) -> Iterator[Note]:
        """Notes on parameters that have no states, and on those without elements, whose own states have no place where
        units are cut or joined.
        """
        yield from self._keys.notes
        joined = not self._units.use_orig_params
        placed = ((name, unit) for name, unit in self._holder.items() if joined or unit.sharded)
        names = tuple(name for name, _ in placed if not self._params[name].numel and self._state.get(name))
        if names:
            lost = "they have those of their flat parameter" if joined else "no rank keeps them"
            message = f"optimizer states of {plural(len(names), 'parameter')} without elements are left out: {lost}"
            yield Note("dropped", message, keys=names)

    def value(self, rank: int) -> dict[Any, Any]:
        """The state dict of ``rank``."""
        state: dict[Any, Any] = {}
        slices = self._slices(rank) if self._units.use_orig_params else {}
        rank_keys = self._keys.of(rank)
        for name in self._order:
            if name not in rank_keys.keys:  # the optimizer of this rank does not have it
                continue
            if name in self._of_units:
                parts = self._placed[name].parts(rank)
                state[rank_keys.keys[name]] = {
                    item: leaf.shard(parts) if isinstance(leaf, UnitState) else leaf
                    for item, leaf in self._of_units[name].items()
                }
                continue
            holder = self._holder.get(name)
            states = self._state[name]
            if holder is None or not holder.sharded:
                state[rank_keys.keys[name]] = {
                    item: in_memory_order(self._params[name], leaf, self._casts) for item, leaf in states.items()
                }
            elif name in slices:
                state[rank_keys.keys[name]] = self._slice_entry(name, states, *slices[name])
        state |= {key: entry for key, entry in self._of_users.items() if key not in state}
        root: dict[Any, Any] = {"state": state}
        if rank_keys.groups is not None:
            root["param_groups"] = rank_keys.groups
        return {**root, **self._extra}

    def _require_groups(self, checkpoint: Checkpoint) -> None:
        ungrouped = [key for key in self._order if key not in self._keys.every.keys]
        if ungrouped:
            raise SourceCorruptError(
                f"{checkpoint.source}: the optimizer has states of parameters that none of its groups lists",
                details=ungrouped,
                next_step=f"leave them out with {flags.exclude}",
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
        param, parts = self._params[name], (FlatPart(0, begin, count),)
        scales = state_parts(states).scales
        entry: dict[str, Any] = dict(states)
        for item, leaf in states.items():
            if not isinstance(leaf, Tensor) or not leaf.ndim or is_counter(item, leaf):
                continue
            dtype = self._casts.get(leaf, leaf.dtype)
            if item in scales:
                entry[item] = UnitState.of_scales((leaf,), dtype, self._blocks[name]).shard(parts)
            elif leaf.shape == param.shape:
                entry[item] = UnitState((param,), (leaf,), dtype).shard(parts)
        return entry

    def _misshapen(self, name: str) -> list[str]:
        """What is wrong with the states of a parameter. One that is not sharded may have states of any shape."""
        param, sharded, states = self._params[name], self._holder[name].sharded, self._state.get(name, {})
        parts = state_parts(states).names
        return [
            shape_mismatch(param, item, leaf)
            for item, leaf in states.items()
            if isinstance(leaf, Tensor)
            and item not in parts
            and leaf.shape not in ((), (1,), param.shape)
            and (sharded or isinstance(leaf.cut, _IN_SLICES))
        ]


def require_equal_states(checkpoint: Checkpoint, units: Units, sources: Sources) -> None:
    """Raises SourceUnsupportedError that lists every state in which the parameters of one unit differ.

    They must have the same states, and one value of each state that is not a tensor in its parameter's shape.
    """
    optim = checkpoint.optim
    if optim is None:
        return
    wrong = [text for unit in units.units for text in _disagreements(unit, optim, checkpoint, sources)]
    if wrong:
        raise SourceUnsupportedError(
            f"{checkpoint.source}: parameters of one unit have different states where a flat parameter has one",
            details=wrong,
            why="with use_orig_params=False the parameters of a unit share one optimizer entry: its states, its step, "
            "and each value that is not a tensor",
            next_step=f"add {flags.use_orig_params}, which gives each parameter its own entry, or check the source: "
            "fsdpckpt verify",
        )


def _disagreements(unit: Unit, optim: Optimizer, checkpoint: Checkpoint, sources: Sources) -> Iterator[str]:
    params = [param for param in deciding_params(unit) if optim.state.get(param.name)]
    entries = [optim.state[param.name] for param in params]
    parts = {name for entry in entries for name in state_parts(entry).names}
    for state in dict.fromkeys(name for entry in entries for name in entry):
        tensors = [leaf for entry in entries if isinstance(leaf := entry.get(state), Tensor)]
        per_unit = state not in parts and len(tensors) == len(params) and _is_per_unit(state, tensors, params)
        names: dict[tuple[str, object], list[str]] = {}
        for param, entry in zip(params, entries, strict=True):
            if state not in entry:
                value: tuple[str, object] = ("no such state", None)
            elif isinstance(leaf := entry[state], Tensor):
                value = _number(leaf, checkpoint, sources) if per_unit or not leaf.ndim else ("a tensor", None)
            else:
                text = repr(leaf)
                value = (
                    text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 3]}...",
                    (type(leaf).__name__, text),
                )
            names.setdefault(value, []).append(param.name)
        if len(names) > 1:
            values_text = "; ".join(f"{text} for {some_of(of)}" for (text, _), of in names.items())
            yield f"{unit}, state {state}: {values_text}"


_MAX_CHARACTERS = 60  # characters of a value in a message


def _number(leaf: Tensor, checkpoint: Checkpoint, sources: Sources) -> tuple[str, object]:
    """A tensor of one element as text, and what is equal for equal tensors."""
    content = sources.read_elements(checkpoint.files, leaf)
    number = f"0x{content.hex()}"
    if leaf.dtype.numpy is not None:
        number = str(np.frombuffer(content, numpy_dtype(leaf.dtype))[0])
    shape = f", shape {list(leaf.shape)}" if leaf.ndim else ""
    return f"{number} ({leaf.dtype.name}{shape})", content
