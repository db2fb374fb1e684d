"""Ordered parameter names of a model: where to find them in a checkpoint, an optimizer or units, and what their order
proves.

A model lists a module's own parameters before its children, and children in the order of registration. So two lists are
compared where both must agree: within a unit name by name, across units module by module among the children of one
parent. If sizes are equal, only this order distinguishes parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fsdpckpt.ir.checkpoint import Checkpoint, Container
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.names import FSDP_WRAPPER, WRAPPERS, clean, keeps_order, revisits_a_module, sorted_by_a_tool
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.tensors import Slices, Tensor, contiguous_stride
from fsdpckpt.ir.units import FLAT_PARAM, Units, first_misplaced
from fsdpckpt.ir.values import Value
from fsdpckpt.layouts.flattened import is_flat_key


@dataclass(frozen=True, slots=True)
class ParameterNames:
    """Names in the order of ``model.state_dict()`` if ``ordered``, otherwise in any order.

    ``label``: where they come from, in words. ``shared``: (later name, first name) of tensors known to be one; the
    later names are not in ``params``. ``from_reference``: they come from another checkpoint, which may have been cast.
    ``in_model_order``: False if only those within one unit are in the model's order, as in an optimizer's list: with
    ``use_orig_params=False`` FSDP1 lists the parameters flat parameter by flat parameter, the root's first.
    """

    params: tuple[Parameter, ...]
    ordered: bool
    label: str
    shared: tuple[tuple[str, str], ...] = ()
    from_reference: bool = False
    in_model_order: bool = True

    def reordered(self, order: Sequence[str], label: str) -> ParameterNames:
        """The same names, those of ``order`` first and in its order, if it has every possible parameter."""
        position = {name: index for index, name in enumerate(order)}
        if any(param.possible and param.name not in position for param in self.params):
            return self
        params = sorted(self.params, key=lambda param: position.get(param.name, len(position)))
        label = f"{self.label}, ordered by {label}"
        return replace(self, params=tuple(params), ordered=True, in_model_order=True, label=label)

    def renamed(self, names: Mapping[str, str]) -> ParameterNames:
        """The parameters in ``names`` (old to new), under their new names."""
        return replace(
            self,
            params=tuple(replace(param, name=names[param.name]) for param in self.params if param.name in names),
            shared=tuple((names.get(later, later), names[first]) for later, first in self.shared if first in names),
        )


def model_names(checkpoint: Checkpoint, label: str) -> ParameterNames | None:
    """The whole tensors of a model section; None if it has none, or holds flat parameters (only buffers are
    left then).
    """
    named: list[Parameter] = []
    shared: list[tuple[str, str]] = []
    first: dict[tuple[object, ...], str] = {}
    params = checkpoint.model.params if checkpoint.model is not None else {}
    for key, leaf in params.items() if not any(map(is_flat_key, params)) else ():
        if not isinstance(leaf, Tensor) or isinstance(leaf.cut, Slices):
            continue
        name = clean(key)
        same = first.setdefault(leaf.location() or (name,), name)
        if same != name:
            shared.append((name, same))
        else:
            named.append(Parameter(name, leaf.shape, leaf.dtype, stride_of(leaf), sharded=leaf.sharded))
    if not named:
        return None
    possible = [param.name for param in named if param.possible]
    ordered = keeps_order(checkpoint, possible) and not revisits_a_module(possible)
    return ParameterNames(tuple(named), ordered, label, tuple(shared))


def stride_of(tensor: Tensor) -> tuple[int, ...] | None:
    """The strides of the parameter in memory if it is dense and not row-major, else None.

    A chunk keeps the order of dimensions of the parameter that it was cut from.
    """
    chunks = tensor.chunks
    filled = np.flatnonzero((chunks.size > 0).all(axis=1))
    if tensor.ndim < 2 or not len(filled):
        return None
    row = int(filled[0])
    size, stride = chunks.size[row].tolist(), chunks.stride[row].tolist()
    wide = [dim for dim in range(tensor.ndim) if size[dim] > 1]
    order = sorted(wide, key=lambda dim: -stride[dim])
    step = 1
    for dim in reversed(order):
        if stride[dim] != step:
            return None
        step *= size[dim]
    if order == wide:
        return None
    order = [*(dim for dim in range(tensor.ndim) if dim not in wide), *order]  # slowest in memory first
    by_dim = dict(zip(order, contiguous_stride([tensor.shape[dim] for dim in order]), strict=True))
    return tuple(by_dim[dim] for dim in range(tensor.ndim))


def optimizer_names(checkpoint: Checkpoint, label: str) -> ParameterNames | None:
    """The parameters in a name-keyed optimizer with whole states; None for any other optimizer.

    Ordered if one param group lists them all.
    """
    optim = checkpoint.optim
    if optim is None or optim.key_type != "name":
        return None
    named: dict[str, Parameter] = {}
    for key, states in optim.state.items():
        whole = _whole_state(states)
        if whole is not None:
            name = clean(str(key))
            named[name] = Parameter(name, whole.shape, whole.dtype, stride_of(whole), sharded=True)
    order = [clean(str(key)) for key in optim.grouped_keys()]
    ordered = len(optim.groups or ()) == 1 and set(named) <= set(order) and not sorted_by_a_tool(order)
    names = [name for name in order if name in named] if ordered else list(named)
    return ParameterNames(tuple(named[name] for name in names), ordered, label, in_model_order=False) if named else None


def _whole_state(states: Mapping[str, Tensor | Value]) -> Tensor | None:
    """The state shaped like its parameter: the one shape that all states with dimensions have."""
    wide: list[Tensor] = [leaf for leaf in states.values() if isinstance(leaf, Tensor) and leaf.ndim]
    if len({leaf.shape for leaf in wide}) != 1 or any(isinstance(leaf.cut, Slices) for leaf in wide):
        return None
    return wide[0]


def units_names(units: Units, label: str) -> ParameterNames:
    """The parameters of units, in the order of ``model.parameters()``."""
    params = units.params()
    return ParameterNames(
        tuple(params[name] for name in units.parameters),
        ordered=True,
        label=label,
        shared=units.shared,
    )


def unwrapped_names(units: Units, label: str) -> ParameterNames:
    """The parameters that the units file of a model without units lists, which may be in the units of another job."""
    names = units_names(units, label)
    return replace(names, params=tuple(replace(param, sharded=bool(param.shape)) for param in names.params))


@dataclass(frozen=True, slots=True)
class UnitPrefixes:
    """Prefixes of units, "" for the root. ``complete``: the root is a unit only if it is listed.

    ``exact``: every unit of the model is among them. ``label``: where they come from, in words.
    """

    prefixes: tuple[str, ...]
    complete: bool
    label: str
    exact: bool = False


def prefixes_of(checkpoint: Checkpoint) -> UnitPrefixes | None:
    """The unit prefixes that the checkpoint's keys show; None if they show none.

    Flat parameters (``LOCAL_STATE_DICT``) name every unit. Names with FSDP's own path segments, in ``param_names`` or
    as the keys of ``_NamedOptimizer``, show where each wrapped module begins.
    """
    flat = [clean(key) for key in checkpoint.model.params if is_flat_key(key)] if checkpoint.model is not None else []
    if flat:
        prefixes = tuple(key[: -len(FLAT_PARAM)].rstrip(".") for key in flat)
        return UnitPrefixes(prefixes, complete=True, label="the flat parameters' keys", exact=True)
    wrapped = [name for name in raw_names(checkpoint) if FSDP_WRAPPER in name.split(".")]
    if wrapped:
        return UnitPrefixes(tuple(_boundaries(wrapped)), complete=True, label="the optimizer's names (param_names)")
    return None


def raw_names(checkpoint: Checkpoint) -> list[str]:
    """The optimizer's names for its parameters, with wrapper prefixes: ``param_names``, or its keys."""
    optim = checkpoint.optim
    if optim is None:
        return []
    raw = [str(key) for key in optim.state if isinstance(key, str)]
    for group in optim.groups or ():
        raw += group.names()
    return list(dict.fromkeys(raw))


def parameter_order(checkpoint: Checkpoint) -> list[str]:
    """Parameters in the model's order if the checkpoint shows it: the by-name slices beside flat parameters, or the
    ``param_names`` of a single group; otherwise empty.
    """
    model = checkpoint.model.params if checkpoint.model is not None else {}
    sliced = [key for key, leaf in model.items() if isinstance(leaf, Tensor) and isinstance(leaf.cut, Slices)]
    if sliced and checkpoint.container is Container.TORCH:
        return [clean(key) for key in sliced]
    groups = (checkpoint.optim.groups or ()) if checkpoint.optim is not None else ()
    return [clean(name) for name in groups[0].names() if not is_flat_key(name)] if len(groups) == 1 else []


def _boundaries(names: Iterable[str]) -> list[str]:
    boundaries: dict[str, None] = {}
    for name in names:
        path: list[str] = []
        for word in name.split("."):
            if word == FSDP_WRAPPER:
                boundaries[".".join(path)] = None
            elif word not in WRAPPERS:
                path.append(word)
    return list(boundaries)


def name_contradictions(
    units: Units, names: ParameterNames, *, dtype: DType | None = None, whole_model: bool = True
) -> Iterator[str]:
    """What contradicts the names and shapes of ``units`` in ``names``.

    ``dtype``: what the model is cast to, None if it is not. ``whole_model``: ``names`` are exactly the model's, with
    its dtypes, memory order and shared parameters; a reference may have more names, and may have been cast.
    """
    params, first_names, shared = units.params(), dict(units.shared), dict(names.shared)
    by_name = {param.name: param for param in names.params}
    for name, param in params.items():
        named = by_name.get(shared.get(name, name))
        if named is None:
            yield f"{name} is in the units, not in {names.label}"
        elif named.shape != param.shape:
            yield f"{name}: {list(param.shape)} in the units, {list(named.shape)} in {names.label}"
        elif not whole_model:
            continue
        elif (written := dtype if dtype is not None and named.dtype.floating else named.dtype) != param.dtype:
            yield f"{name}: {param.dtype.name} in the units, {written.name} in {names.label}"
        elif param.order != named.order and named.stride is not None:
            yield f"{name}: strides {param.stride} in the units, {named.stride} in {names.label}"
    if not whole_model:
        return
    for name, named in by_name.items():
        first = first_names.get(name, name)
        if first in params and named.shape != params[first].shape and first != name:
            yield f"{name}: {list(params[first].shape)} in the units, {list(named.shape)} in {names.label}"
        elif named.sharded and name not in params and first == name:
            yield f"{names.label} has a parameter {name}, the units do not"
    for name, same in shared.items():
        if name in first_names and shared.get(first_names[name], first_names[name]) != same:
            yield f"{name} is another name of {first_names[name]} in the units, of {same} in {names.label}"


def order_contradictions(units: Units, names: Iterable[str], label: str, *, across: bool = True) -> Iterator[str]:
    """What contradicts ``names``, which ``label`` has in the model's order: over all units if ``across``, else within
    each.
    """
    position = {name: index for index, name in enumerate(names)}
    for unit in units.units:
        wrong = first_misplaced([param.name for param in unit.params], position)
        if wrong:
            yield f"the order of parameters differs in {unit}: {wrong[0]} in the units, {wrong[1]} in {label}"
            return
    # Ids count over all units, and only their order distinguishes units of the same size. A parameter that units share
    # is listed where its first name is, which may be in another module.
    placed = units.unit_of().keys() - {first for _, first in units.shared}
    wrong = first_misplaced_module(
        [module_of(name) for name in units.parameters if name in placed], list(map(module_of, position))
    )
    if wrong and across:
        yield f"the order of modules differs: {wrong[0]} in the units, {wrong[1]} in {label}"


def first_misplaced_module(modules: Sequence[str], listed: Sequence[str]) -> tuple[str, str] | None:
    """The first of ``modules`` (paths) that is not where ``listed`` has it among the children of its parent.

    A ``LOCAL_STATE_DICT`` lists a unit before or after those in it, and modules side by side in the model's order.
    """
    expected = _children(listed)
    for parent, names in _children(modules).items():
        position = {name: index for index, name in enumerate(expected.get(parent, ()))}
        wrong = first_misplaced(names, position)
        if wrong:
            return wrong
    return None


def module_of(name: str) -> str:
    """The path of the module that a parameter or buffer belongs to; "" for the root."""
    return name.rpartition(".")[0]


def _children(paths: Iterable[str]) -> dict[str, list[str]]:
    """The modules on the way to ``paths``, by their parents, in the order in which they first appear."""
    children: dict[str, dict[str, None]] = {}
    for path in dict.fromkeys(paths):
        words = path.split(".") if path else []
        for depth in range(len(words)):
            children.setdefault(".".join(words[:depth]), {})[".".join(words[: depth + 1])] = None
    return {parent: list(names) for parent, names in children.items()}
