"""Whether units stand in the order in which a checkpoint lists names: where sizes are equal, nothing else tells.

A model lists a module's own parameters before its children, and children as they were registered. So two lists are
compared where both have to agree: within a unit name by name, across units module by module among the children of one
parent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from fsdpckpt.ir.units import Units

__all__ = ["out_of_order", "siblings_astray"]


def out_of_order(units: Units, names: Iterable[str], *, across: bool = True) -> Iterator[str]:
    """What contradicts ``names``, which are in the model's order: over all units when ``across``, else within each."""
    place = {name: index for index, name in enumerate(names)}
    for unit in units.units:
        wrong = _first_astray([param.name for param in unit.params], place)
        if wrong:
            yield f"unit {unit.prefix!r}: {wrong[0]} stands where the model section has {wrong[1]}"
            return
    # Ids count over all units, and only their order tells units of one size apart.
    sharded = units.unit_of()
    wrong = siblings_astray([_module(name) for name in units.parameters if name in sharded], list(map(_module, place)))
    if wrong and across:
        yield f"the units have {wrong[0]} where the model section has {wrong[1]}"


def siblings_astray(modules: Sequence[str], listed: Sequence[str]) -> tuple[str, str] | None:
    """The first of ``modules`` (paths) that is not where ``listed`` has it among the children of its parent.

    A ``LOCAL_STATE_DICT`` lists a unit before or after those in it, and modules side by side in the model's order.
    """
    mine, its = _children(modules), _children(listed)
    for parent, names in mine.items():
        place = {name: index for index, name in enumerate(its.get(parent, ()))}
        wrong = _first_astray(names, place)
        if wrong:
            return wrong
    return None


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _children(paths: Iterable[str]) -> dict[str, list[str]]:
    """The modules on the way to ``paths``, by their parents, in the order in which they first come."""
    found: dict[str, dict[str, None]] = {}
    for path in dict.fromkeys(paths):
        words = path.split(".") if path else []
        for depth in range(len(words)):
            found.setdefault(".".join(words[:depth]), {})[".".join(words[: depth + 1])] = None
    return {parent: list(names) for parent, names in found.items()}


def _first_astray(names: Iterable[str], place: Mapping[str, int]) -> tuple[str, str] | None:
    """The first of ``names`` that is not where ``place`` has it, and what is there; names it lacks do not count."""
    known = [name for name in names if name in place]
    return next(
        (pair for pair in zip(known, sorted(known, key=place.__getitem__), strict=True) if pair[0] != pair[1]), None
    )
