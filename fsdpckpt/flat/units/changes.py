"""Takes units to the names of a target: without what is left out (``--exclude``), under new names (``--rename``).

A name stands in the units' parameters, in the order of ``model.parameters()``, in the optimizer's groups and among
shared parameters; a module's path is the prefix of a unit. Here all of them change in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from glob import escape
from typing import TypeAlias

from fsdpckpt.flat.units.build import innermost_unit, regrouped
from fsdpckpt.globs import matches
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.units import Groups, RankOrder, Unit, Units

_INSIDE = "\0"  # stands for the name of any parameter in a module
_NewNames: TypeAlias = Mapping[str, str]  # by the old ones; what has none is left out


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

    def applied_to(self, units: Units) -> Units:
        """``units`` of the parameters that are kept, under their new names."""
        names = {name: self.new_name(name) for name in units.params() if self.keeps(name)}
        shared: list[tuple[str, str]] = []
        for later, first in units.shared:
            if not self.keeps(later):
                continue
            if first in names:
                shared.append((self.new_name(later), names[first]))
            else:  # left out under its first name: it has the next one from now on
                names[first] = self.new_name(later)
        paths = {unit.prefix: self.new_path(unit.prefix) for unit in units.units}
        same_names = len(names) == len(units.params()) and tuple(shared) == units.shared
        if same_names and all(old == new for old, new in (*names.items(), *paths.items())):
            return units
        return replace(_with_names(units, names, paths), shared=tuple(shared))


def _same(name: str) -> str:
    return name


def _with_names(units: Units, names: _NewNames, paths: _NewNames) -> Units:
    """``units`` of the parameters in ``names``. A unit of which no parameter is left is none any more.

    A parameter is in the innermost unit of its new name. Where two units get one path, they become one, with the
    settings of the outer one.
    """
    by_path: dict[str, Unit] = {}
    for unit in sorted(units.units, key=lambda unit: len(unit.prefix)):
        by_path.setdefault(paths[unit.prefix], unit)
    members: dict[str, list[Parameter]] = {path: [] for path in by_path}
    joined: set[str] = set()  # paths of units that have parameters of several old ones
    for unit in units.units:
        for param in unit.params:
            if param.name in names:
                name = names[param.name]
                path = innermost_unit(name, by_path)
                path = paths[unit.prefix] if path is None else path
                if path != paths[unit.prefix] or by_path[path] is not unit:
                    joined.add(path)
                members[path].append(replace(param, name=name))
    parameters = tuple(names[name] for name in units.parameters if name in names)
    position = {name: index for index, name in enumerate(parameters)}
    for path in joined:
        members[path].sort(key=lambda param: position[param.name])
    order = dict.fromkeys(paths[unit.prefix] for unit in units.units)
    renamed = replace(
        units,
        units=tuple(
            replace(by_path[path], prefix=path, params=tuple(members[path])) for path in order if members[path]
        ),
        parameters=parameters,
        unmanaged=tuple(replace(param, name=names[param.name]) for param in units.unmanaged if param.name in names),
        shared=(),
        groups=None,
        orders=(),
        optimizers=(),
    )
    by_name = [(name, _groups(units, groups, renamed, names)) for name, groups in units.optimizers]
    known = tuple((name, groups) for name, groups in by_name if groups is not None)
    if units.groups is None:
        return replace(renamed, optimizers=known)
    orders = [(order.ranks, _groups(units, order.groups, renamed, names)) for order in units.orders]
    return replace(
        renamed,
        optimizers=known,
        groups=_groups(units, units.groups, renamed, names),
        orders=tuple(RankOrder(ranks, groups) for ranks, groups in orders if groups is not None),
    )


def _groups(units: Units, groups: Groups, renamed: Units, names: _NewNames) -> Groups | None:
    """``groups`` of ``units`` as those of ``renamed``; None if a flat parameter would be in two of them."""
    listed: list[list[str]] = []
    for group in groups:
        originals = group if units.use_orig_params else units.names_of(group)
        listed.append([names[name] for name in originals if name in names])
    return regrouped(renamed, listed)
