"""Takes units to the names of a target: without what is left out (``--exclude``), under new names (``--rename``).

A name stands in one row, and a module's path in the prefix of a unit. What is left out takes its row away, and a
parameter that leaves its module has its row in another unit: then rows get new numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from glob import escape
from itertools import chain

from fsdpckpt.flat.units.build import innermost_unit
from fsdpckpt.globs import matches
from fsdpckpt.ir.parameters import Parameter, RowNumber
from fsdpckpt.ir.units import RankRows, RowGroups, Unit, Units, rows_of_keys

_INSIDE = "\0"  # stands for the name of any parameter in a module


@dataclass(frozen=True, slots=True)
class NameChanges:
    """What a conversion does to names.

    ``keeps``: whether the parameter of a name is converted. ``new_name``: its name in the target. ``old_names``: all
    names of the source.
    """

    keeps: Callable[[str], bool]
    new_name: Callable[[str], str]
    old_names: tuple[str, ...] = ()

    def selection(self) -> NameChanges:
        """The same selection, with names that stay as they are."""
        return replace(self, new_name=_same)

    def new_path(self, path: str) -> str:
        """The path of the module at ``path``; the root stays the root, whatever prefix its parameters get."""
        if not path:
            return ""
        inside = self.new_name(f"{path}.{_INSIDE}")
        return inside.removesuffix(_INSIDE).removesuffix(".") if inside.endswith(_INSIDE) else path

    def follow(self, names: Iterable[str], present: Collection[str]) -> dict[str, str]:
        """Each of ``names`` that is kept with its name among ``present``, the target's.

        An option may have the source's names or the target's: those that more of ``present`` have are meant.
        """
        same = {name: name for name in names}
        changed = {name: self.new_name(name) for name in same if self.keeps(name)}
        meant = len(set(present).intersection(changed.values())) > len(set(present).intersection(same))
        return changed if meant else same

    def follow_globs(self, globs: Iterable[str], present: Collection[str]) -> tuple[str, ...]:
        """Globs of an option that select among ``present``, the target's names, what they select by either name.

        One that selects only what is left out selects nothing here; one that fits no name at all stays, to be refused.
        """
        followed: dict[str, None] = {}
        for glob in globs:
            old = [name for name in self.old_names if matches(name, glob)]
            followed.update(dict.fromkeys(escape(self.new_name(name)) for name in old if self.keeps(name)))
            if not old or any(matches(name, glob) for name in present):
                followed[glob] = None
        return tuple(followed)

    def displaced(self, units: Units) -> dict[str, str]:
        """The name that each shared parameter of ``units`` keeps, by its first name, which is left out. Units record
        the place of the first one alone, and in a model without it the parameter is where the other name is.
        """
        kept: dict[str, str] = {}
        for later, row in units.tied:
            first = units.rows[row].name
            if self.keeps(later) and not self.keeps(first):
                kept.setdefault(first, later)
        return kept

    def applied_to(self, units: Units) -> Units:
        """``units`` of the parameters that are kept, under their new names."""
        names = {row: self.new_name(param.name) for row, param in enumerate(units.rows) if self.keeps(param.name)}
        tied: list[tuple[str, RowNumber]] = []
        for later, row in units.tied:
            if not self.keeps(later):
                continue
            if row in names:
                tied.append((self.new_name(later), row))
            else:  # left out under its first name: it has the next one from now on
                names[row] = self.new_name(later)
        paths = {unit.prefix: self.new_path(unit.prefix) for unit in units.units}
        same = tuple(tied) == units.tied and all(names.get(row) == param.name for row, param in enumerate(units.rows))
        if same and all(old == new for old, new in paths.items()):
            return units
        return _with_names(units, names, paths, tied)


def _same(name: str) -> str:
    return name


def _with_names(
    units: Units, names: Mapping[RowNumber, str], paths: Mapping[str, str], tied: Sequence[tuple[str, RowNumber]]
) -> Units:
    """The rows of ``units`` that are in ``names``, with new names. A unit of which no row is left is none any more.

    ``tied``: the later names of shared ones. ``paths``: the new ones of the units, by their prefixes. A parameter is in
    the innermost unit of its new name. Where two units get one path, they become one, with the settings of the outer
    one.
    """
    outer: dict[str, Unit] = {}
    for unit in sorted(units.units, key=lambda unit: len(unit.prefix)):
        outer.setdefault(paths[unit.prefix], unit)
    inside = _rows_by_path(units, names, paths, outer)
    outside = [row for row in range(len(units.rows) - len(units.unmanaged), len(units.rows)) if row in names]
    became = {row: new for new, row in enumerate((*chain(*inside.values()), *outside))}

    def renamed(rows: Iterable[RowNumber]) -> tuple[Parameter, ...]:
        return tuple(replace(units.rows[row], name=names[row]) for row in rows)

    changed = replace(
        units,
        units=tuple(replace(outer[path], prefix=path, params=renamed(rows)) for path, rows in inside.items()),
        order=tuple(became[row] for row in units.order if row in became),
        unmanaged=renamed(outside),
        tied=tuple((later, became[row]) for later, row in tied),
        trained=None,
        by_rank=(),
        by_optimizer=(),
    )
    by_rank: list[RankRows] = []
    for order in units.by_rank if units.trained is not None else ():
        trained = _followed(order.trained, became, changed)
        by_rank += [] if trained is None else [RankRows(order.ranks, trained)]
    by_optimizer: list[tuple[str, RowGroups]] = []
    for name, groups in units.by_optimizer:
        trained = _followed(groups, became, changed)
        by_optimizer += [] if trained is None else [(name, trained)]
    return replace(
        changed,
        trained=None if units.trained is None else _followed(units.trained, became, changed),
        by_rank=tuple(by_rank),
        by_optimizer=tuple(by_optimizer),
    )


def _rows_by_path(
    units: Units, names: Mapping[RowNumber, str], paths: Mapping[str, str], outer: Mapping[str, Unit]
) -> dict[str, list[RowNumber]]:
    """The rows of each unit under its new path. ``outer``: the unit of ``units`` whose settings each path has."""
    inside: dict[str, list[RowNumber]] = {paths[unit.prefix]: [] for unit in units.units}
    joined: set[str] = set()  # paths of units that have rows of several old ones
    numbers = iter(range(len(units.rows)))
    for unit in units.units:
        own = paths[unit.prefix]
        for _, row in zip(unit.params, numbers, strict=False):  # in this order: the first one ends it
            if row not in names:
                continue
            path = innermost_unit(names[row], outer)
            path = own if path is None else path
            if path != own or outer[path] is not unit:
                joined.add(path)
            inside[path].append(row)
    position = {row: place for place, row in enumerate(units.order)}
    for path in joined:
        inside[path].sort(key=position.__getitem__)
    return {path: rows for path, rows in inside.items() if rows}


def _followed(groups: RowGroups, became: Mapping[RowNumber, RowNumber], units: Units) -> RowGroups | None:
    """What ``groups`` are among the rows of ``units``; None if a flat parameter would be in two of them."""
    left: list[tuple[RowNumber, ...]] = []
    for rows in groups:
        left.append(tuple(became[row] for row in rows if row in became))
    keys = units.keys_of(tuple(left))
    divided = sum(map(len, keys)) != len(set().union(*keys))
    return None if divided else rows_of_keys(keys, units.rows_of)
