"""Builds ``Units`` from names, the paths of the wrapped modules (``--unit GLOB``) and FSDP1's settings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby

from fsdpckpt import flags
from fsdpckpt.errors import UsageError
from fsdpckpt.flags import Flag, Wording
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.units import Strategy, Unit, Units
from fsdpckpt.text import fold


@dataclass(frozen=True, slots=True)
class Settings:
    """How FSDP1 was configured; None for what is not known or not given.

    ``param_dtype``: ``MixedPrecision.param_dtype``. ``shard_size``: ranks in one sharding group, None for all.
    """

    use_orig_params: bool | None = None
    strategy: Strategy | None = None
    param_dtype: DType | None = None
    shard_size: int | None = None

    def fits(self, units: Units) -> bool:
        """Whether ``units`` have all the settings that are not None here."""
        wanted = {name: getattr(self, name) for name in SETTINGS}
        return all(value is None or {*SETTINGS[name](units)} <= {value} for name, value in wanted.items())

    def applied_to(self, units: Units) -> Units:
        """``units`` with the settings that are not None here, and their groups adapted."""
        names = units.named_groups()
        changed = replace(
            units,
            units=tuple(
                replace(unit, strategy=self.strategy or unit.strategy, param_dtype=self.param_dtype or unit.param_dtype)
                for unit in units.units
            ),
            use_orig_params=units.use_orig_params if self.use_orig_params is None else self.use_orig_params,
            shard_size=(self.shard_size or units.shard_size)
            if self.strategy in (None, Strategy.HYBRID_SHARD)
            else None,
        )
        if changed.use_orig_params == units.use_orig_params:
            return changed
        changed = replace(changed, by_optimizer=())  # their order is that of the other setting
        return changed if names is None else changed.with_groups(keyed_groups(changed, names))

    def options(self) -> list[Wording]:
        """The options for the known settings."""
        given: list[Wording] = []
        if self.use_orig_params is not None:
            given.append(flags.use_orig_params if self.use_orig_params else flags.use_orig_params.off)
        if self.strategy is not None:
            given.append(flags.strategy(self.strategy.value))
        if self.param_dtype is not None:
            given.append(flags.param_dtype(self.param_dtype.name))
        if self.shard_size is not None:
            given.append(flags.shard_size(self.shard_size))
        return given


SETTINGS: Mapping[str, Callable[[Units], tuple[Hashable, ...]]] = {
    "use_orig_params": lambda units: (units.use_orig_params,),
    "strategy": lambda units: tuple(unit.strategy for unit in units.units),
    "shard_size": lambda units: (units.shard_size,),
    "param_dtype": lambda units: tuple(unit.param_dtype for unit in units.units),
}
"""The values of each of ``Settings`` in units."""


def differing_settings(several: Sequence[Units]) -> tuple[str, ...]:
    """The names of the settings in which these units differ."""
    return tuple(name for name, values in SETTINGS.items() if len(set(map(values, several))) > 1)


def build_units(
    params: Sequence[Parameter],
    prefixes: Collection[str],
    settings: Settings,
    *,
    unmanaged: Collection[str] = (),
    shared: Sequence[tuple[str, str]] = (),
) -> Units:
    """The units of ``params`` (in the order of ``model.parameters()``), each in the innermost unit that contains it.

    A parameter under none of ``prefixes`` ("" is the root), or among the names ``unmanaged``, belongs to no unit.
    """
    inside: dict[str, list[int]] = {}  # places in ``params``
    outside: list[int] = []
    for place, param in enumerate(params):
        prefix = None if param.name in unmanaged else innermost_unit(param.name, prefixes)
        if prefix is None:
            outside.append(place)
        else:
            inside.setdefault(prefix, []).append(place)
    begins = _begins(params, inside)
    # Pre-order of the modules: a module begins where its first parameter does, an outer one before an inner one.
    ordered = sorted(inside, key=lambda prefix: (begins[prefix], len(prefix)))
    row_of = {place: row for row, place in enumerate((*chain(*map(inside.__getitem__, ordered)), *outside))}
    row_named = {param.name: row_of[place] for place, param in enumerate(params)}
    strategy = settings.strategy or Strategy.FULL_SHARD
    units: list[Unit] = []
    for prefix in ordered:
        members = tuple(params[place] for place in inside[prefix])
        units.append(Unit(prefix, members, strategy, settings.param_dtype))
    return Units(
        units=tuple(units),
        use_orig_params=bool(settings.use_orig_params),
        order=tuple(row_of[place] for place in range(len(params))),
        unmanaged=tuple(params[place] for place in outside),
        tied=tuple((later, row_named[first]) for later, first in shared if first in row_named),
        shard_size=settings.shard_size,
    )


def _begins(params: Sequence[Parameter], prefixes: Collection[str]) -> dict[str, int]:
    """The index of the first parameter under each prefix; the root comes before all."""
    begins = {"": -1}
    for index, param in enumerate(params):
        for prefix in module_paths([param.name]):
            if prefix in prefixes:
                begins.setdefault(prefix, index)
    return begins


def keyed_groups(units: Units, names: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...] | None:
    """The keys of groups of original names under ``units``, each group in the order of ``optimizer_keys``.

    None if a flat parameter would be in two groups.
    """
    order, keys = units.optimizer_keys(), listed_keys(units, names)
    if sum(map(len, keys)) != len(set().union(*keys)):
        return None
    groups: list[tuple[str, ...]] = []
    for group in map(frozenset, keys):
        groups.append(tuple(key for key in order if key in group))
    return tuple(groups)


def listed_keys(units: Units, names: Sequence[Sequence[str]]) -> list[list[str]]:
    """The keys of groups of original names under ``units``, each group in the order of its names."""
    key_of = {name: name if units.use_orig_params else unit.key for name, unit in units.unit_of().items()}
    key_of.update({param.name: param.name for param in units.unmanaged})
    listed: list[list[str]] = []
    for group in names:
        keys = dict.fromkeys(key_of[name] for name in group if name in key_of)
        listed.append(list(keys))
    return listed


def regrouped(units: Units, names: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...] | None:
    """The keys of groups of original names under ``units``, each group in the order of its names.

    None if a flat parameter would be in two groups.
    """
    keys = listed_keys(units, names)
    if sum(map(len, keys)) != len(set().union(*keys)):
        return None
    return tuple(map(tuple, keys))


def returns_to_a_unit(units: Units, names: Sequence[str]) -> bool:
    """Whether ``names`` come back to a flat parameter after those of another one."""
    unit_of = units.unit_of()
    keys = [unit_of[name].key if name in unit_of else name for name in names]
    runs = [key for key, _ in groupby(keys)]
    return len(runs) != len(set(runs))


ROOT_ONLY = "none"
"""What ``--unit`` says when no module but the root is wrapped."""


def module_paths(names: Iterable[str]) -> list[str]:
    """Every module on the way to a parameter, the root left out, in the order of the names."""
    paths: dict[str, None] = {}
    for name in names:
        words = name.split(".")
        paths.update({".".join(words[:depth]): None for depth in range(1, len(words))})
    return list(paths)


def expand_globs(globs: Sequence[str], names: Iterable[str]) -> tuple[str, ...]:
    """The module paths that the globs match, without the root. ``*`` stays within a segment, ``**`` crosses dots.

    Raises UsageError for a glob that matches no module, with the module paths that exist.
    """
    if tuple(globs) == (ROOT_ONLY,):
        return ()
    paths = module_paths(names)
    matched_paths: dict[str, None] = {}
    for glob in globs:
        if glob == ROOT_ONLY and ROOT_ONLY not in paths:
            raise UsageError(
                f"{flags.unit('none')} says that only the root is wrapped, and another {flags.unit} wraps more",
                found=" ".join(f"{flags.unit(given)}" for given in globs),
                next_step=f"drop {flags.unit('none')}: the root is a unit beside the others",
            )
        pattern = module_pattern(glob, flags.unit)
        matched = [path for path in paths if pattern.fullmatch(path)]
        if not matched:
            raise _nothing(glob, paths)
        matched_paths.update(dict.fromkeys(matched))
    return tuple(path for path in paths if path in matched_paths)


def any_module(globs: Sequence[str], names: Iterable[str]) -> bool:
    """Whether the globs of ``--unit`` match a module of these parameters, or say that none is wrapped."""
    paths = module_paths(names)
    return tuple(globs) == (ROOT_ONLY,) or any(
        module_pattern(glob, flags.unit).fullmatch(path) for glob in globs for path in paths
    )


def module_pattern(glob: str, option: Flag) -> re.Pattern[str]:
    """The pattern of the whole module paths that ``glob``, the value of ``option``, matches. Raises UsageError."""
    text = ""
    for part in re.split(r"(\*\*|\*|\?|\[[^\]]+\])", glob):
        if part == "**":
            text += ".*"
        elif part == "*":
            text += r"[^.]*"
        elif part == "?":
            text += r"[^.]"
        elif part.startswith("[") and part.endswith("]"):
            inside = part[1:-1].replace("\\", "\\\\").replace("[", "\\[").replace("^", "\\^")
            text += f"[^{inside[1:]}]" if inside.startswith("!") else f"[{inside}]"
        else:
            text += re.escape(part)
    try:
        return re.compile(text)
    except re.error:
        raise UsageError(f"{option(glob)}: {glob!r} is not a glob", next_step=f"{option('layers.*')}") from None


def _nothing(glob: str, paths: Sequence[str]) -> UsageError:
    return UsageError(
        f"{flags.unit(glob)} matches no module of this model",
        details=[folded.key for folded in fold((path, None) for path in paths)],
        why="a glob is matched against whole module paths, and * does not cross dots; these are the modules",
        next_step=f"{flags.unit(layers_glob(paths))} for every layer, {flags.unit('**.block')} for a name anywhere, "
        f"{flags.unit('none')} for the root",
    )


def layers_glob(names: Iterable[str]) -> str:
    """The glob of the numbered modules that contain most of ``names``, as an example: ``model.layers.*``. Of a model
    without such modules, the path of its first one.
    """
    globs: Counter[str] = Counter()
    names = list(names)
    for name in names:
        words = name.split(".")
        globs.update(".".join((*words[:at], "*")) for at, word in enumerate(words) if word.isdigit())
    if globs:
        return max(globs, key=lambda glob: (globs[glob], -len(glob)))
    return next(iter(module_paths(names)), "model.layers.*")


def innermost_unit(name: str, prefixes: Collection[str]) -> str | None:
    """The innermost of the prefixes that contains a parameter; None if none does."""
    return next((path for path in (*reversed(module_paths([name])), "") if path in prefixes), None)
