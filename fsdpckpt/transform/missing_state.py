"""Handles parameters without optimizer state: reports them, leaves them out, or gives them zeros in the form of their
group's other states.

torch creates states at the first step that has a gradient, so a parameter may have none. FSDP1 gives zeros to those
that share a flat parameter with others that have states, and refuses if that needs a ``step``
(``_flatten_optim_state``, ``_flatten_zero_dim_tensor_optim_state``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from fsdpckpt.errors import NeedsInformationError, SourceIncompleteError
from fsdpckpt.ir.checkpoint import ZEROS, Checkpoint, Note, OptimState, ParamKey, SourceFile, group_params
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.units import UnitParam, Units
from fsdpckpt.ir.values import Value
from fsdpckpt.text import plural
from fsdpckpt.transform.parameter_order import Shape, shaped_states

Choice: TypeAlias = Literal["error", "zeros", "skip"]
Made: TypeAlias = dict[ParamKey, dict[str, Tensor | Value]]

_ALIGNED = 64  # bytes between two zero tensors: each has bytes of its own, or they would be written as one


def without_state(checkpoint: Checkpoint, units: Units | None = None) -> list[ParamKey]:
    """The parameters that a group lists and that have no state although others have; without frozen ones if ``units``
    name them.

    Empty for an optimizer that keeps no states at all.
    """
    optim = checkpoint.optim
    if optim is None or not any(optim.state.values()):
        return []
    params = units.params() if units is not None else {}
    listed = optim.grouped_keys()
    stateless = {name for name, param in params.items() if not (param.requires_grad and param.numel)}
    return [key for key in listed if not optim.state.get(key) and key not in stateless]


def fill(checkpoint: Checkpoint, choice: Choice, *, units: Units | None = None, read: Read | None = None) -> Checkpoint:
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
            next_step="--missing-state zeros makes states for them, --missing-state skip leaves them without",
        )
    if choice == "skip":
        note = Note("missing-state", f"{_parameters(len(missing))} no optimizer state", keys=tuple(map(str, missing)))
        return replace(checkpoint, notes=(*checkpoint.notes, note))
    unit_of: dict[ParamKey, str] = {name: unit.key for name, unit in units.unit_of().items()} if units else {}
    params = units.params() if units is not None else {}
    return _fill_missing(
        checkpoint, optim, missing, _StateMaker(checkpoint, read, unit_of, params, shaped_states(optim))
    )


def _parameters(count: int) -> str:
    return f"{plural(count, 'parameter', 'have')}"


@dataclass(slots=True)
class _StateMaker:
    """Makes zero states. ``shaped``: names of states that have dimensions. ``problems``: why some cannot be made.
    ``end``: bytes of zeros in use so far."""

    checkpoint: Checkpoint
    read: Read | None
    unit_of: Mapping[ParamKey, str]
    unit_params: Mapping[str, UnitParam]
    shaped: frozenset[str]
    problems: list[str] = field(default_factory=list)
    end: int = 0

    def param(self, key: ParamKey) -> KnownParam | None:
        """Shape, dtype and sharding of a parameter, from the model section or else from its unit."""
        model = self.checkpoint.model
        leaf = model.params.get(key) if model is not None and isinstance(key, str) else None
        if isinstance(leaf, Tensor):
            return KnownParam(leaf.shape, leaf.dtype, leaf.sharded)
        param = self.unit_params.get(key) if isinstance(key, str) else None
        return None if param is None else KnownParam(param.shape, param.dtype, key in self.unit_of)

    def group(self, keys: list[ParamKey], present: Mapping[ParamKey, States], absent: Collection[ParamKey]) -> Made:
        """The states for the ``absent`` ones among ``keys``, in the form of the group's states.

        The parameters in the same flat parameter decide the form, because they share one ``step``; without any, the
        whole group.
        """
        by_unit: dict[str, dict[ParamKey, States]] = {}
        for key, states in present.items():
            if key in self.unit_of:
                by_unit.setdefault(self.unit_of[key], {})[key] = states
        forms: dict[str, StateForm] = {}
        made: Made = {}
        for key in keys:
            if key in absent:
                unit = self.unit_of.get(key, "")
                siblings = by_unit.get(unit)
                place = unit if siblings is not None else ""
                if place not in forms:
                    others = present if siblings is None else siblings
                    forms[place] = state_form(others, self.param, self.read, self.shaped)
                made[key] = self._states(key, forms[place])
        return made

    def _states(self, key: ParamKey, form: StateForm) -> dict[str, Tensor | Value]:
        self.problems += [f"{key}: {problem}" for problem in form.problems]
        param = self.param(key)
        if param is None and any(isinstance(one, ZeroForm) for one in form.states.values()):
            self.problems.append(f"{key}: its shape is not known")
            return {}
        return {name: self._state(one, param) for name, one in form.states.items()}

    def _state(self, form: ZeroForm | Tensor | Value, param: KnownParam | None) -> Tensor | Value:
        if isinstance(form, Tensor):
            return replace(form)
        if not isinstance(form, ZeroForm) or param is None:
            return None if isinstance(form, ZeroForm) else form
        dtype = form.dtype or param.dtype
        chunks = Chunks.whole(file=len(self.checkpoint.files), offset=self.end, shape=param.shape)
        sharded = form.sharded if param.sharded is None else param.sharded
        tensor = Tensor(dtype, param.shape, chunks, sharded)
        self.end += -(-max(tensor.nbytes, 1) // _ALIGNED) * _ALIGNED
        return tensor


def _fill_missing(checkpoint: Checkpoint, optim: OptimState, missing: list[ParamKey], maker: _StateMaker) -> Checkpoint:
    absent = set(missing)
    made: Made = {}
    for group in optim.param_groups or ():
        keys = group_params(group) or []
        present: dict[ParamKey, States] = {key: states for key in keys if (states := optim.state.get(key))}
        made.update(maker.group(keys, present, absent))
    if maker.problems:
        raise NeedsInformationError(
            f"{checkpoint.source}: zeros cannot be made for {plural(len(missing), 'parameter')} without state",
            details=maker.problems,
            why="they are made like the other states of their group, which have to be unambiguous",
            next_step="--missing-state skip leaves them without state; a model section or --units FILE states shapes",
        )
    what = f"{plural(len(missing), 'parameter')} had no optimizer state, and got zeros"
    note = Note("filled", what, keys=tuple(map(str, missing)))
    zeros = SourceFile(ZEROS, maker.end)
    state = dict(_in_group_order(optim, made))
    return replace(
        checkpoint,
        optim=OptimState(state, optim.param_groups, optim.extra),
        files=(*checkpoint.files, zeros),
        notes=(*checkpoint.notes, note),
    )


def _in_group_order(
    optim: OptimState, made: Mapping[ParamKey, dict[str, Tensor | Value]]
) -> Iterator[tuple[ParamKey, dict[str, Tensor | Value]]]:
    """The existing states in their order, each new one after the parameter that its group lists before it."""
    behind: dict[ParamKey | None, list[ParamKey]] = {}
    last: ParamKey | None = None
    for key in optim.grouped_keys():
        if key in made:
            behind.setdefault(last, []).append(key)
        else:
            last = key if key in optim.state else last
    for key in behind.get(None, ()):
        yield key, made[key]
    for key, states in optim.state.items():
        if key not in made:
            yield key, states
        for new in behind.get(key, ()):
            yield new, made[new]


def note_elementless(checkpoint: Checkpoint, units: Units) -> Checkpoint:
    """Note the parameters without elements, whose states no rank keeps with ``use_orig_params=True``."""
    states = checkpoint.optim.state if checkpoint.optim is not None else {}
    names = [param.name for unit in units.units for param in unit.params if not param.numel and states.get(param.name)]
    if not names:
        return checkpoint
    message = f"{_parameters(len(names))} no element, so that no rank keeps their optimizer states"
    return replace(checkpoint, notes=(*checkpoint.notes, Note("dropped", message, keys=tuple(names))))


def require_complete(checkpoint: Checkpoint, units: Units) -> None:
    """Raises NeedsInformationError if some parameters of one unit have optimizer states and others have none.

    A flat parameter has all states or none, so ``use_orig_params=False`` cannot express a partial absence.
    """
    optim = checkpoint.optim
    if optim is None or units.use_orig_params:
        return
    wrong = []
    for unit in units.units:
        filled = [param.name for param in unit.params if param.numel]
        bare = [name for name in filled if not optim.state.get(name)]
        if bare and len(bare) < len(filled):
            wrong.append(f"{unit}: {', '.join(bare[:4])}{' ...' if len(bare) > 4 else ''}")
    if wrong:
        raise NeedsInformationError(
            # PyTorch's own words for it, which its users know
            "All unflattened parameters comprising a single flat parameter must have scalar state with the same value "
            f"and dtype: in {plural(len(wrong), 'unit')} of {checkpoint.source} only some parameters have states",
            details=wrong,
            why="with use_orig_params=False a unit's parameters share every state",
            next_step="add --missing-state zeros, which makes the absent states, or --use-orig-params, where they may "
            "be absent",
        )


Read: TypeAlias = Callable[[Tensor], bytes]
States: TypeAlias = Mapping[str, Tensor | Value]


@dataclass(frozen=True, slots=True)
class KnownParam:
    """What is known of a parameter. ``sharded`` as in ``Tensor``."""

    shape: Shape
    dtype: DType
    sharded: bool | None


ParamOf: TypeAlias = Callable[[ParamKey], KnownParam | None]


@dataclass(frozen=True, slots=True)
class ZeroForm:
    """A state in the shape of its parameter. ``dtype``: None for the parameter's own."""

    dtype: DType | None
    sharded: bool | None


@dataclass(frozen=True, slots=True)
class StateForm:
    """``states``, in order: a form for states in the parameter's shape, the value itself for those that are equal for
    all.

    ``problems``: why there is no common form.
    """

    states: Mapping[str, ZeroForm | Tensor | Value]
    problems: tuple[str, ...]


def _has_dimensions(leaf: Tensor | Value) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0


def state_form(
    siblings: Mapping[ParamKey, States], param_of: ParamOf, read: Read | None, shaped: Collection[str] = ()
) -> StateForm:
    """The common form of the states of ``siblings``. ``read`` returns the bytes of a 0-dim tensor.

    ``shaped``: names of states that are known to have the shape of their parameter. A 0-dim state of a 0-dim parameter
    does not show whether it has the parameter's shape or is a single value, like the step count.
    """
    if not siblings:
        return StateForm({}, ("no other parameter of its group has states to go by",))
    if len({frozenset(states) for states in siblings.values()}) > 1:
        return StateForm({}, ("the others of its group do not have the same states",))
    problems: list[str] = []
    forms: dict[str, ZeroForm | Tensor | Value] = {}
    scalars = not any(_has_more(states, param_of(key)) for key, states in siblings.items())
    for name, first in next(iter(siblings.values())).items():
        values = {key: states[name] for key, states in siblings.items()}
        tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
        if len(tensors) == len(values) and (name in shaped or any(tensor.ndim for tensor in tensors.values())):
            forms[name] = _zero_form(name, tensors, param_of, problems)
            continue
        forms[name] = first
        if tensors and scalars and name != "step":
            problems.append(f"the others of its group have no dimensions, so {name} may be one value or have its shape")
        if len({_identity(value, read) for value in values.values()}) > 1:
            problems.append(f"the others of its group do not agree on {name}")
    return StateForm(forms, tuple(problems))


def _has_more(states: States, param: KnownParam | None) -> bool:
    """Whether a parameter with these states has dimensions."""
    return bool(param is not None and param.shape) or any(map(_has_dimensions, states.values()))


def _identity(value: Tensor | Value, read: Read | None) -> tuple[str, object]:
    """A key that is equal for equal values. Without ``read``, no two tensors count as equal."""
    if isinstance(value, Tensor):
        return value.dtype.name, read(value) if read is not None and not value.ndim else value
    return type(value).__name__, repr(value)


def _zero_form(name: str, tensors: Mapping[ParamKey, Tensor], param_of: ParamOf, problems: list[str]) -> ZeroForm:
    """The dtype that all have; else the parameter's own, if each state has that of its parameter."""
    params = {key: param_of(key) for key in tensors}
    for key, tensor in tensors.items():
        known = params[key]
        if known is not None and known.shape != tensor.shape:
            problems.append(f"the state {name} of {key} does not have the shape of its parameter")
            break
    dtypes = {tensor.dtype.name: tensor.dtype for tensor in tensors.values()}
    sharded = next(iter(tensors.values())).sharded
    if len(dtypes) == 1:
        return ZeroForm(next(iter(dtypes.values())), sharded)
    if any((known := params[key]) is None or known.dtype is not tensor.dtype for key, tensor in tensors.items()):
        problems.append(f"{name} has several dtypes in its group: {', '.join(dtypes)}")
    return ZeroForm(None, sharded)
