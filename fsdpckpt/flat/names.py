"""Ordered parameter names of a model: where to find them in a checkpoint, an optimizer or units, and what their order
proves.

A model lists a module's own parameters before its children, and children in the order of registration. So two lists are
compared where both must agree: within a unit name by name, across units module by module among the children of one
parent. If sizes are equal, only this order distinguishes parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fsdpckpt.ir.checkpoint import Checkpoint, Container
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.listing import Listing
from fsdpckpt.ir.names import FSDP_WRAPPER, WRAPPERS, clean
from fsdpckpt.ir.placements import Slices
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import FLAT_PARAM, Units, first_misplaced
from fsdpckpt.layouts.flattened import is_flat_key


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
    flat = [clean(key) for key in checkpoint.params if is_flat_key(key)]
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
    model = checkpoint.params
    sliced = [key for key, leaf in model.items() if isinstance(leaf, Tensor) and isinstance(leaf.cut, Slices)]
    if sliced and checkpoint.container is Container.TORCH:
        return [clean(key) for key in sliced]
    groups = checkpoint.groups
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
    units: Units, names: Listing, *, dtype: DType | None = None, whole_model: bool = True
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
            yield f"{name} is in the units, not in {names.source}"
        elif named.shape != param.shape:
            yield f"{name}: {list(param.shape)} in the units, {list(named.shape)} in {names.source}"
        elif not whole_model:
            continue
        elif (written := dtype if dtype is not None and named.dtype.floating else named.dtype) != param.dtype:
            yield f"{name}: {param.dtype.name} in the units, {written.name} in {names.source}"
        elif param.order != named.order and named.stride is not None:
            yield f"{name}: strides {param.stride} in the units, {named.stride} in {names.source}"
    if not whole_model:
        return
    for name, named in by_name.items():
        first = first_names.get(name, name)
        if first in params and named.shape != params[first].shape and first != name:
            yield f"{name}: {list(params[first].shape)} in the units, {list(named.shape)} in {names.source}"
        elif named.sharded and name not in params and first == name:
            yield f"{names.source} has a parameter {name}, the units do not"
    for name, same in shared.items():
        if name in first_names and shared.get(first_names[name], first_names[name]) != same:
            yield f"{name} is another name of {first_names[name]} in the units, of {same} in {names.source}"


def order_contradictions(units: Units, names: Iterable[str], label: str, *, across: bool = True) -> Iterator[str]:
    """What contradicts ``names``, which ``label`` has in the model's order: over all units if ``across``, else within
    each.
    """
    position = {name: index for index, name in enumerate(names)}
    for unit in units.units:
        wrong = first_misplaced(unit.names, position)
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
