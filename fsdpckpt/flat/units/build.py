"""Makes ``Units`` of names, of unit prefixes, and of how FSDP1 was configured."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from fsdpckpt.flat.units.globs import owner
from fsdpckpt.flat.units.names import NamedParam
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.units import Strategy, Unit, Units

__all__ = ["Settings", "build_units", "grouped", "name_groups", "with_settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides the layout beside the parameters. ``shard_size``: ranks in one sharding group, None for all."""

    use_orig_params: bool
    strategy: Strategy = Strategy.FULL_SHARD
    param_dtype: DType | None = None
    shard_size: int | None = None


def build_units(
    params: Sequence[NamedParam],
    prefixes: Collection[str],
    settings: Settings,
    *,
    unmanaged: Collection[str] = (),
    shared: Sequence[tuple[str, str]] = (),
) -> Units:
    """Units of ``params`` (in the order of ``model.parameters()``), each in the innermost unit that contains it.

    A parameter under none of ``prefixes`` ("" is the root), or among the names ``unmanaged``, belongs to no unit.
    """
    inside: dict[str, list[NamedParam]] = {}
    outside: list[NamedParam] = []
    for param in params:
        prefix = None if param.name in unmanaged else owner(param.name, prefixes)
        if prefix is None:
            outside.append(param)
        else:
            inside.setdefault(prefix, []).append(param)
    begins = _begins(params, inside)
    # Pre-order of the modules: a module begins where its first parameter does, an outer one before an inner one.
    order = sorted(inside, key=lambda prefix: (begins[prefix], len(prefix)))
    return Units(
        units=tuple(
            Unit(prefix, tuple(param.unit_param() for param in inside[prefix]), settings.strategy, settings.param_dtype)
            for prefix in order
        ),
        use_orig_params=settings.use_orig_params,
        parameters=tuple(param.name for param in params),
        unmanaged=tuple(param.unit_param() for param in outside),
        shared=tuple(shared),
        shard_size=settings.shard_size,
    )


def _begins(params: Sequence[NamedParam], prefixes: Collection[str]) -> dict[str, int]:
    """Where the first parameter under each prefix stands; the root begins before all."""
    found = {"": -1}
    for index, param in enumerate(params):
        words = param.name.split(".")
        for depth in range(1, len(words)):
            prefix = ".".join(words[:depth])
            if prefix in prefixes:
                found.setdefault(prefix, index)
    return found


def with_settings(
    units: Units,
    *,
    use_orig_params: bool | None = None,
    strategy: Strategy | None = None,
    param_dtype: DType | None = None,
    shard_size: int | None = None,
) -> Units:
    """The same wrapping of the same model under other settings, None to keep one; the groups follow."""
    names = name_groups(units)
    hybrid = strategy in (None, Strategy.HYBRID_SHARD)
    changed = replace(
        units,
        units=tuple(
            replace(unit, strategy=strategy or unit.strategy, param_dtype=param_dtype or unit.param_dtype)
            for unit in units.units
        ),
        use_orig_params=units.use_orig_params if use_orig_params is None else use_orig_params,
        shard_size=(shard_size or units.shard_size) if hybrid else None,
    )
    if changed.use_orig_params == units.use_orig_params or names is None:
        return changed
    return replace(changed, groups=grouped(replace(changed, groups=None), names))


def name_groups(units: Units) -> list[list[str]] | None:
    """The optimizer's groups as original names; None when the units do not say."""
    if units.groups is None:
        return None
    inside = {unit.key: [param.name for param in unit.params] for unit in units.units}
    return [[name for key in group for name in inside.get(key, [key])] for group in units.groups]


def grouped(units: Units, names: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...] | None:
    """The keys that groups of original names have under ``units``, each group in the order of ``optimizer_keys``.

    None when a flat parameter would lie in two groups.
    """
    key_of = {name: name if units.use_orig_params else unit.key for name, unit in units.unit_of().items()}
    key_of.update({param.name: param.name for param in units.unmanaged})
    order = units.optimizer_keys()
    held = [{key_of[name] for name in group if name in key_of} for group in names]
    if sum(map(len, held)) != len(set().union(*held)):
        return None
    return tuple(tuple(key for key in order if key in keys) for keys in held)
