"""Decides in which order the named parameters of an optimizer get ids.

``torch.optim`` counts ids group by group, and inside a group in the order in which the job gave the parameters to its
optimizer. A source that lists names lists them in that order, with two exceptions, which prove nothing:
``FSDP.rekey_optim_state_dict`` sorts the names of each group, and FSDP1 with ``use_orig_params=False`` lists them flat
parameter by flat parameter, the root's first. Then ids count in the order of ``model.parameters()``, and a note says
so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from typing import TypeAlias

from fsdpckpt import flags
from fsdpckpt.ir.names import clean

Names: TypeAlias = Sequence[str]

OWN_GROUPS = "the optimizer's own groups"

_MAX_DEPTH = 32  # of units within units
_FOLLOWS = "ids follow the order of the model, because the source lists the optimizer's parameters"
_HOW = (
    f"If the job gives them to its optimizer in another order, add {flags.parameters('FILE')} with the names in that "
    "order"
)

_MAY_BE_BY_UNIT = (
    "ids follow the order in which the source's groups list the optimizer's parameters, which is not the model's. "
    f"FSDP1 lists those of flat parameters so, too: if the source is of such a job, add {flags.parameters('FILE')} "
    "with the names of model.parameters()"
)


@dataclass(frozen=True, slots=True)
class ListedOrder:
    """How the groups of a source list their names. ``own``: whether that is the order of the job's own optimizer.

    ``in_model_order``: whether it is that of the model, too. ``doubt``: a warning if the other order is possible.
    """

    own: bool
    in_model_order: bool = False
    doubt: str = ""


def listed_order(
    groups: Sequence[Names], position: Mapping[str, int] | None, *, by_unit: Names = ()
) -> ListedOrder | None:
    """What the order of names in ``groups`` proves. ``position``: of each parameter in the model, None if not known.

    ``by_unit``: the names as FSDP1 lists those of flat parameters, if its units are known. None if nothing is proved:
    the order of the model is not known, and the names may have been sorted, or listed unit by unit.
    """
    cleaned = [list(map(clean, names)) for names in groups]
    if all(len(names) < 2 for names in cleaned):
        return ListedOrder(own=True, in_model_order=True)
    if position is None:
        proves_nothing = sorted_by_name(cleaned) or any(map(_may_be_by_unit, cleaned))
        return None if proves_nothing else ListedOrder(own=True)
    if all(_ascends(names, position) for names in cleaned):
        return ListedOrder(own=True, in_model_order=True)
    if sorted_by_name(cleaned):
        return ListedOrder(own=False, doubt=f"{_FOLLOWS} sorted by name. {_HOW}")
    of_units = {name: place for place, name in enumerate(by_unit)}
    in_units = bool(of_units) and all(_ascends(names, of_units) for names in cleaned)
    if in_units or _are_by_unit(cleaned, position, parents=()):
        return ListedOrder(own=False, doubt=f"{_FOLLOWS} unit by unit, as FSDP1 lists flat parameters. {_HOW}")
    # Jobs rarely wrap other modules than numbered ones, and often give the last module to the optimizer first.
    may_be_by_unit = _are_by_unit(cleaned, position, parents=_parents(position))
    return ListedOrder(own=True, doubt=_MAY_BE_BY_UNIT if may_be_by_unit else "")


def lists_own_order(groups: Sequence[Names], position: Mapping[str, int] | None, *, by_unit: Names = ()) -> bool:
    """Whether ``groups`` certainly list their names as the job gave them to its optimizer, whatever others say.

    Arguments as for ``listed_order``. A list in the order of the model that may have been sorted, or listed unit by
    unit, is not certain.
    """
    of_units = {name: place for place, name in enumerate(by_unit)}
    if of_units and all(_ascends(list(map(clean, names)), of_units) for names in groups):
        return all(len(names) < 2 for names in groups)
    listed = listed_order(groups, None)
    if listed is None and position is not None:
        listed = listed_order(groups, position, by_unit=by_unit)
        return listed is not None and listed.own and not listed.in_model_order and not listed.doubt
    return listed is not None


def in_model_order(names: Names, position: Mapping[str, int]) -> list[str]:
    """``names`` sorted by their place in the model."""
    return sorted(names, key=lambda name: position[clean(name)])


def _ascends(names: Names, position: Mapping[str, int]) -> bool:
    places = [position.get(name, -1) for name in names]
    return all(before < after for before, after in pairwise(places))


# The order of FSDP1's flat parameters.


def _are_by_unit(groups: Sequence[Names], position: Mapping[str, int], *, parents: Collection[str]) -> bool:
    """Whether FSDP1 lists ``groups`` so for some wrapping of numbered modules and of ``parents``."""
    return all(_is_by_unit(names, position, parents) for names in groups)


def _is_by_unit(names: Names, position: Mapping[str, int], parents: Collection[str], depth: int = 0) -> bool:
    """Whether FSDP1 lists ``names`` so for some wrapping: those of a unit itself first, in the order of the model, then
    those of the units inside of it, one unit after the other.
    """
    if depth > _MAX_DEPTH or any(name not in position for name in names):
        return False
    places = [position[name] for name in names]
    end = next((at for at in range(1, len(names)) if places[at] < places[at - 1]), None)
    if end is None:
        return True
    own = {_family(module) for name in names[:end] for module in _modules(name)}
    units: list[str] = []  # of the other names: the outermost that none of the first is in
    for name in names[end:]:
        units.append(next((module for module in _wrappable(name, parents) if _family(module) not in own), ""))
    blocks: list[list[str]] = []  # of one unit each
    for _, block in groupby(zip(units, names[end:], strict=True), key=itemgetter(0)):
        blocks.append([name for _, name in block])
    if "" in units or len(blocks) != len(set(units)):
        return False
    first = [min(map(position.__getitem__, block)) for block in blocks]
    if first != sorted(first):
        return False
    return all(_is_by_unit(block, position, parents, depth + 1) for block in blocks)


def _modules(name: str) -> list[str]:
    """The modules that a parameter is in, the outermost first."""
    words = name.split(".")
    return [".".join(words[:depth]) for depth in range(1, len(words))]


def _parents(names: Iterable[str]) -> set[str]:
    """The modules that have modules inside of them."""
    return {module for name in names for module in _modules(name)[:-1]}


def _family(module: str) -> str:
    """The name of all modules that are wrapped if one is: ``layers.*`` for ``layers.3``."""
    path, _, last = module.rpartition(".")
    return f"{path}.*" if last.isdigit() else module


def _wrappable(name: str, parents: Collection[str]) -> list[str]:
    """The modules of ``name`` that a job may wrap: ``parents``, and numbered ones (``layers.3``)."""
    return [module for module in _modules(name) if module in parents or module.rpartition(".")[2].isdigit()]


def _may_be_by_unit(names: Names) -> bool:
    """Whether FSDP1 may list ``names`` so for some model: some parameters, and then only modules that have none of
    them.
    """
    parents = _parents(names)
    first: dict[str, int] = {}  # of each family of modules: its first parameter
    for at, name in enumerate(names):
        for module in _modules(name):
            first.setdefault(_family(module), at)
    begins = len(names)  # the innermost unit that any later parameter can be in begins here, or later
    for at in range(len(names) - 1, 0, -1):
        inner = (first[_family(module)] for module in _wrappable(names[at], parents))
        begins = min(begins, max(inner, default=-1))
        if begins >= at:
            return True
    return False


def sorted_by_name(groups: Sequence[Sequence[str]]) -> bool:
    """Whether every list of names is in alphabetical order, as ``FSDP.rekey_optim_state_dict`` sorts them."""
    return all(list(names) == sorted(names) for names in groups)
