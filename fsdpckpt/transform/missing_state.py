"""Handles parameters without optimizer state: reports them, leaves them out, or gives them zeros in the form of their
group's other states.

torch creates states at the first step that has a gradient, so a parameter may have none. FSDP1 gives zeros to those
that share a flat parameter with others that have states, and refuses if that needs a ``step``
(``_flatten_optim_state``, ``_flatten_zero_dim_tensor_optim_state``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeAlias

from fsdpckpt import flags
from fsdpckpt.errors import NeedsInformationError, SourceIncompleteError
from fsdpckpt.ir.checkpoint import Checkpoint, Note
from fsdpckpt.ir.counters import STEP, is_counter
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.files import Zeros
from fsdpckpt.ir.optimizer import Optimizer, ParamKey
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.state_shapes import Shape, shaped_states, without_states
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.units import Units
from fsdpckpt.ir.values import Value
from fsdpckpt.text import plural, some_of

Choice: TypeAlias = Literal["error", "zeros", "skip"]
Read: TypeAlias = Callable[[Tensor], bytes]
States: TypeAlias = Mapping[str, Tensor | Value]
NewStates: TypeAlias = dict[ParamKey, dict[str, Tensor | Value]]

_ZEROS_ALIGNMENT = 64  # bytes; every tensor of zeros has its own, or several would be written as one tied tensor


def without_state(checkpoint: Checkpoint, units: Units | None = None) -> list[ParamKey]:
    """``without_states`` of the optimizer, without those that are frozen or have no elements, as far as ``units`` say
    so.
    """
    optim = checkpoint.optim
    if optim is None:
        return []
    params = units.params() if units is not None else {}
    stateless = {name for name, param in params.items() if not (param.requires_grad and param.numel)}
    return [key for key in without_states(optim) if key not in stateless]


def fill(checkpoint: Checkpoint, choice: Choice, *, read: Read, units: Units | None = None) -> Checkpoint:
    """Apply ``--missing-state``. ``read`` returns the bytes of a 0-dim tensor: those of a group must be equal.

    ``error`` raises SourceIncompleteError that lists every parameter without state; ``skip`` leaves them without.
    ``zeros`` makes their states: zeros in the parameter's shape, and ``step`` and values that are not tensors as the
    rest of the group has them. Raises NeedsInformationError if the shape of a parameter or the form of a state is not
    known.
    """
    units = units if units is not None else checkpoint.units
    missing = without_state(checkpoint, units)
    optim = checkpoint.optim
    if not missing or optim is None:
        return checkpoint
    if choice == "error":
        raise SourceIncompleteError(
            f"{checkpoint.source}: {_parameters(len(missing))} no optimizer state",
            details=[*map(str, missing)],
            why="they were frozen, or had no gradient yet, or their states were lost",
            next_step=f"{flags.missing_state('zeros')} makes states for them, {flags.missing_state('skip')} leaves "
            "them without",
        )
    if choice == "skip":
        note = Note("missing-state", f"{_parameters(len(missing))} no optimizer state", keys=tuple(map(str, missing)))
        return checkpoint.noted(note)
    maker = _StateMaker(
        checkpoint,
        read,
        unit_of={name: unit.key for name, unit in units.unit_of().items()} if units is not None else {},
        unit_params=units.params() if units is not None else {},
        shaped=shaped_states(optim),
    )
    new: NewStates = {}
    for keys in optim.in_groups():
        new.update(maker.states_of_group(keys, optim.state, set(missing)))
    if maker.problems:
        raise NeedsInformationError(
            f"{checkpoint.source}: zeros cannot be made for {plural(len(missing), 'parameter')} without state",
            details=maker.problems,
            why="they are made like the other states of their group, which have to be unambiguous",
            next_step=f"{flags.missing_state('skip')} leaves them without state; a model section or "
            f"{flags.units('FILE')} states shapes",
        )
    message = f"{plural(len(missing), 'parameter')} had no optimizer state, and got zeros"
    note = Note("filled", message, keys=tuple(map(str, missing)))
    return replace(
        checkpoint,
        optim=optim.with_state(dict(_in_group_order(optim, new))),
        files=(*checkpoint.files, Zeros(maker.zeros_used)),
    ).noted(note)


def _parameters(count: int) -> str:
    return f"{plural(count, 'parameter', 'have')}"


class _Param(NamedTuple):
    """A parameter; ``sharded`` as in ``Tensor``."""

    shape: Shape
    dtype: DType
    sharded: bool | None


@dataclass(frozen=True, slots=True)
class _Zeros:
    """Stands for a state of zeros in the shape of its parameter. ``dtype``: None for the parameter's own."""

    dtype: DType | None
    sharded: bool | None


_Form: TypeAlias = Mapping[str, _Zeros | Tensor | Value]
"""The states of a parameter by name, in order: zeros in its shape, or the value that all parameters have."""


@dataclass(slots=True)
class _StateMaker:
    """Makes states in the form that other parameters have. ``read`` returns the bytes of a 0-dim tensor.

    ``unit_of``: the key of each parameter's unit. ``shaped``: names of states that have dimensions for some parameter.
    ``problems``: why some states cannot be made. ``zeros_used``: bytes of the source of zeros.
    """

    checkpoint: Checkpoint
    read: Read
    unit_of: Mapping[ParamKey, str]
    unit_params: Mapping[str, Parameter]
    shaped: frozenset[str]
    problems: list[str] = field(default_factory=list)
    zeros_used: int = 0

    def states_of_group(
        self, keys: Sequence[ParamKey], state: Mapping[ParamKey, States], missing: Collection[ParamKey]
    ) -> NewStates:
        """New states for those ``keys`` of a group that are ``missing``, in the form of the group's other states.

        A parameter takes the form of those in the same flat parameter, because they share one ``step``; if none of
        those has states, the form of the whole group.
        """
        present = {key: states for key in keys if (states := state.get(key))}
        in_unit: dict[str, dict[ParamKey, States]] = {}
        for key, states in present.items():
            if key in self.unit_of:
                in_unit.setdefault(self.unit_of[key], {})[key] = states
        forms: dict[str, tuple[_Form, Sequence[str]]] = {}
        new: NewStates = {}
        for key in keys:
            if key in missing:
                unit = self.unit_of.get(key, "")
                siblings = in_unit.get(unit)
                form_of = unit if siblings is not None else "the group"
                if form_of not in forms:
                    forms[form_of] = self._form(present if siblings is None else siblings)
                new[key] = self._states(key, *forms[form_of])
        return new

    def _states(self, key: ParamKey, form: _Form, problems: Sequence[str]) -> dict[str, Tensor | Value]:
        self.problems += [f"{key}: {problem}" for problem in problems]
        param = self._param(key)
        states: dict[str, Tensor | Value] = {}
        for name, state in form.items():
            if not isinstance(state, _Zeros):
                states[name] = replace(state) if isinstance(state, Tensor) else state
            elif param is not None:
                states[name] = self._zeros(state, param)
            else:
                self.problems.append(f"{key}: its shape is not known")
                break
        return states

    def _zeros(self, state: _Zeros, param: _Param) -> Tensor:
        chunks = Chunks.whole(file=len(self.checkpoint.files), offset=self.zeros_used, shape=param.shape)
        sharded = state.sharded if param.sharded is None else param.sharded
        tensor = Tensor(state.dtype or param.dtype, param.shape, chunks, sharded)
        self.zeros_used += -(-max(tensor.nbytes, 1) // _ZEROS_ALIGNMENT) * _ZEROS_ALIGNMENT
        return tensor

    def _param(self, key: ParamKey) -> _Param | None:
        """A parameter from the model section, or else from its unit."""
        model = self.checkpoint.model
        leaf = model.params.get(key) if model is not None and isinstance(key, str) else None
        if isinstance(leaf, Tensor):
            return _Param(leaf.shape, leaf.dtype, leaf.sharded)
        param = self.unit_params.get(key) if isinstance(key, str) else None
        return None if param is None else _Param(param.shape, param.dtype, key in self.unit_of)

    def _form(self, siblings: Mapping[ParamKey, States]) -> tuple[_Form, Sequence[str]]:
        """The common form of the states of ``siblings``, and the problems if there is none.

        A 0-dim state of a 0-dim parameter does not show whether it has the parameter's shape or is a single value, like
        the step count: ``shaped`` does.
        """
        if not siblings:
            return {}, ["no other parameter of its group has states to go by"]
        if len({frozenset(states) for states in siblings.values()}) > 1:
            return {}, ["the others of its group do not have the same states"]
        problems: list[str] = []
        form: dict[str, _Zeros | Tensor | Value] = {}
        scalars = not any(self._has_dimensions(key, states) for key, states in siblings.items())
        for name, first in next(iter(siblings.values())).items():
            values = [states[name] for states in siblings.values()]
            tensors = {key: leaf for key, states in siblings.items() if isinstance(leaf := states[name], Tensor)}
            shaped = any(leaf.ndim and not is_counter(name, leaf) for leaf in tensors.values())
            if len(tensors) == len(values) and (name in self.shaped or shaped):
                form[name] = self._zeros_like(name, tensors, problems)
                continue
            form[name] = first
            if tensors and scalars and name != STEP:
                problems.append(
                    f"the others of its group have no dimensions, so {name} may be one value or have its shape"
                )
            if len(set(map(self._identity, values))) > 1:
                problems.append(f"the others of its group do not agree on {name}")
        return form, problems

    def _has_dimensions(self, key: ParamKey, states: States) -> bool:
        param = self._param(key)
        return bool(param is not None and param.shape) or any(
            isinstance(leaf, Tensor) and leaf.ndim for leaf in states.values()
        )

    def _identity(self, value: Tensor | Value) -> tuple[str, object]:
        """Equal for equal values."""
        if isinstance(value, Tensor):
            return value.dtype.name, value if value.numel != 1 else self.read(value)
        return type(value).__name__, repr(value)

    def _zeros_like(self, name: str, tensors: Mapping[ParamKey, Tensor], problems: list[str]) -> _Zeros:
        """Zeros in the dtype that all have; else in the parameter's own, if each state has that of its parameter."""
        params = {key: self._param(key) for key in tensors}
        for key, tensor in tensors.items():
            param = params[key]
            if param is not None and param.shape != tensor.shape:
                problems.append(f"the state {name} of {key} does not have the shape of its parameter")
                break
        sharded = next(iter(tensors.values())).sharded
        dtypes = {tensor.dtype.name: tensor.dtype for tensor in tensors.values()}
        if len(dtypes) == 1:
            return _Zeros(next(iter(dtypes.values())), sharded)
        if any((param := params[key]) is None or param.dtype is not tensor.dtype for key, tensor in tensors.items()):
            problems.append(f"{name} has several dtypes in its group: {', '.join(dtypes)}")
        return _Zeros(None, sharded)


def _in_group_order(optim: Optimizer, new: NewStates) -> Iterator[tuple[ParamKey, dict[str, Tensor | Value]]]:
    """The existing states in their order, each new one after the parameter that its group lists before it."""
    inserted_after: dict[ParamKey | None, list[ParamKey]] = {}
    last: ParamKey | None = None
    for key in optim.grouped_keys():
        if key in new:
            inserted_after.setdefault(last, []).append(key)
        else:
            last = key if key in optim.state else last
    for key in inserted_after.get(None, ()):
        yield key, new[key]
    for key, states in optim.state.items():
        if key not in new:
            yield key, states
        for inserted in inserted_after.get(key, ()):
            yield inserted, new[inserted]


def require_complete(checkpoint: Checkpoint, units: Units) -> None:
    """Raises NeedsInformationError if some parameters of one unit have optimizer states and others have none.

    A flat parameter has all states or none, so ``use_orig_params=False`` cannot express a partial absence.
    """
    optim = checkpoint.optim
    if optim is None or units.use_orig_params:
        return
    wrong = []
    for unit in units.units:
        names = [param.name for param in unit.params if param.numel]
        missing = [name for name in names if not optim.state.get(name)]
        if missing and len(missing) < len(names):
            wrong.append(f"{unit}: {some_of(missing, 4)}")
    if wrong:
        raise NeedsInformationError(
            # PyTorch's own message, which its users know
            "All unflattened parameters comprising a single flat parameter must have scalar state with the same value "
            f"and dtype: in {plural(len(wrong), 'unit')} of {checkpoint.source} only some parameters have states",
            details=wrong,
            why="with use_orig_params=False a unit's parameters share every state",
            next_step=f"add {flags.missing_state('zeros')}, which makes the absent states, or {flags.use_orig_params}, "
            "where they may be absent",
        )
