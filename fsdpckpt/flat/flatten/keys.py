"""Keys, names and param groups of a wrapped model and its optimizer.

Ids count group by group, and within a group in the order of the wrapped model's ``parameters()``. ``params`` lists have
the same order, in which ``_rekey_sharded_optim_state_dict`` sorts ids.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fsdpckpt.errors import SourceCorruptError, SourceUnsupportedError, UsageError
from fsdpckpt.ir.checkpoint import Checkpoint, KeyType, Note, ParamKey, group_params
from fsdpckpt.ir.units import Unit, Units
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.text import plural, some_of


@dataclass(frozen=True, slots=True)
class RankKeys:
    """``keys``: the key in the target for each parameter name, or unit key, that the optimizer holds.

    ``groups``: the param groups as they are written, None if the source has none.
    """

    keys: Mapping[str, ParamKey]
    groups: list[dict[Key, Value]] | None


@dataclass(frozen=True, slots=True)
class FlatKeys:
    """``every``: the keys that any rank has. ``by_rank``: the ranks whose optimizers have other keys, or fewer."""

    every: RankKeys
    by_rank: Mapping[int, RankKeys] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()

    def of(self, rank: int) -> RankKeys:
        return self.by_rank.get(rank, self.every)


def flat_keys(checkpoint: Checkpoint, units: Units, key_type: KeyType) -> FlatKeys:
    """The keys of ``checkpoint``'s optimizer (keyed by name) in a flattened target of ``units``.

    Raises SourceUnsupportedError for units that are in several groups, or only partly in the optimizer, because a flat
    parameter is in one group; SourceCorruptError if the groups are not those of the units; UsageError for keys by name,
    because flat parameters have no names.
    """
    if key_type == "name" and not units.use_orig_params:
        raise UsageError(
            "a flat parameter has no name: with use_orig_params=False its optimizer is keyed by id",
            next_step="--key-type id, or --use-orig-params",
        )
    groups = checkpoint.optim.param_groups if checkpoint.optim is not None else None
    order: Sequence[Sequence[str]] = units.groups if units.groups is not None else (units.optimizer_keys(),)
    notes: tuple[Note, ...] = ()
    absent: frozenset[str] = frozenset()
    if groups is not None:
        listed = [_names(group, units) for group in groups]
        members = listed if units.use_orig_params else _of_units(listed, units)
        absent = _absent_unmanaged(members, units)
        order, notes = _ordered(checkpoint, members, units, absent)
    prefixes = frozenset(unit.prefix for unit in units.units)

    def of(order: Sequence[Sequence[str]]) -> RankKeys:
        keys = _numbered(order, key_type, prefixes)
        if groups is None:
            return RankKeys(keys, None)
        there = [[name for name in names if name not in absent] for names in order]
        return RankKeys(keys, [_group(one, names, keys, prefixes) for one, names in zip(groups, there, strict=True)])

    by_rank: dict[int, RankKeys] = {}
    for one in units.orders:
        by_rank.update(dict.fromkeys(one.ranks, of(one.groups)))
    return FlatKeys(of(order), by_rank, notes)


def _absent_unmanaged(members: Sequence[Sequence[str]], units: Units) -> frozenset[str]:
    """The unmanaged parameters in the optimizer that the checkpoint does not contain.

    FSDP leaves them out (``_flatten_optim_state_dict``), as another part of the job may load them; without their entry
    ``Optimizer.load_state_dict`` refuses the group.
    """
    have = {name for names in members for name in names}
    unmanaged = {param.name for param in units.unmanaged}
    return frozenset(key for group in units.groups or () for key in group if key in unmanaged and key not in have)


def _numbered(order: Iterable[Sequence[str]], key_type: KeyType, prefixes: Collection[str]) -> dict[str, ParamKey]:
    """The ids, or for keys by name the wrapped model's names, as ``_NamedOptimizer`` has and loads them."""
    names = [name for group in order for name in group]
    if key_type == "name":
        return {name: wrapped_name(name, prefixes) for name in names}
    return {name: number for number, name in enumerate(names)}


def _names(group: Mapping[Key, Value], units: Units) -> list[str]:
    """The names that a group lists, a shared parameter once and by its first name."""
    shared = dict(units.shared)
    return list(dict.fromkeys(shared.get(str(key), str(key)) for key in group_params(group) or ()))


def _of_units(listed: Sequence[Sequence[str]], units: Units) -> list[list[str]]:
    """The unit keys and unmanaged names of each group. Raises SourceUnsupportedError as ``flat_keys``."""
    places: dict[str, int] = {name: number for number, names in enumerate(listed) for name in names}
    wrong = [text for unit in units.units if (text := _group_division(unit, places))]
    if wrong:
        raise SourceUnsupportedError(
            "a flat parameter has to be in one param group, and these are divided among several",
            details=wrong,
            why="use_orig_params=False gives the optimizer one parameter per unit",
            next_step="add --use-orig-params, or wrap so that the parameters of a unit are in one group",
        )
    holders = units.unit_of()
    return [list(dict.fromkeys(holders[n].key if n in holders else n for n in names)) for names in listed]


def _group_division(unit: Unit, places: Mapping[str, int]) -> str | None:
    """How the parameters of ``unit`` are divided among several groups, or among a group and none."""
    by_group: dict[int | None, list[str]] = {}
    for param in unit.params:
        by_group.setdefault(places.get(param.name), []).append(param.name)
    if len(by_group) < 2:
        return None
    parts = [
        f"{some_of(names)} {'in no group' if number is None else f'in group {number}'}"
        for number, names in by_group.items()
    ]
    return f"unit {unit.prefix or 'root'!r}: {'; '.join(parts)}"


def _ordered(
    checkpoint: Checkpoint, members: Sequence[Sequence[str]], units: Units, absent: Collection[str]
) -> tuple[Sequence[Sequence[str]], tuple[Note, ...]]:
    """The members of each group in the order of their ids, including ``absent`` ones."""
    if units.groups is not None:
        wrong = _other_groups(members, [[key for key in group if key not in absent] for group in units.groups])
        if wrong:
            raise SourceCorruptError(
                f"the param groups of {checkpoint.source} are not those of the units",
                details=wrong,
                why="the units record a different optimizer, whose ids mean other parameters",
                next_step="give the units file of the optimizer that will load it: --units FILE",
            )
        if not absent:
            return units.groups, ()
        text = (
            f"no entry, outside of every unit and not in the checkpoint: {plural(len(absent), 'parameter')} of the "
            "optimizer, which load_state_dict wants added"
        )
        return units.groups, (Note("missing-state", text, keys=tuple(sorted(absent))),)
    place = {key: number for number, key in enumerate(units.optimizer_keys())}
    order = [sorted(names, key=place.__getitem__) for names in members]
    moved = [number for number, names in enumerate(members) if list(names) != order[number]]
    if not moved:
        return order, ()
    message = "ids follow model.parameters() inside a group; the source lists another order in group "
    return order, (Note("inferred", message + ", ".join(map(str, moved))),)


def _other_groups(listed: Sequence[Sequence[str]], expected: Sequence[Sequence[str]]) -> list[str]:
    if len(listed) != len(expected):
        return [f"the checkpoint has {len(listed)} param groups, the units have {len(expected)}"]
    wrong = []
    for number, (members, in_units) in enumerate(zip(listed, expected, strict=True)):
        only = [key for key in members if key not in set(in_units)]
        missing = [key for key in in_units if key not in set(members)]
        wrong += [f"group {number}: {key} is not in it according to the units" for key in only]
        wrong += [
            f"group {number}: {key} is in it according to the units, but not in the checkpoint" for key in missing
        ]
    return wrong


def _group(
    group: Mapping[Key, Value], names: Sequence[str], keys: Mapping[str, ParamKey], prefixes: frozenset[str]
) -> dict[Key, Value]:
    written = dict(group)
    if "params" in group:
        # In the order of the ids even if names are listed: ``Optimizer.load_state_dict`` matches by position.
        written["params"] = [keys[name] for name in names]
        if "param_names" in group:
            # As in the wrapped model's named_parameters(): ``Optimizer.load_state_dict`` copies them unchecked.
            written["param_names"] = [wrapped_name(name, prefixes) for name in names]
    return written


_WRAPPED = "_fsdp_wrapped_module"


def wrapped_name(name: str, prefixes: Collection[str]) -> str:
    """The name of a parameter or unit in ``named_parameters()`` of a model that is wrapped at ``prefixes``."""
    words = name.split(".")
    path: list[str] = []
    for index, word in enumerate(words):
        if ".".join(words[:index]) in prefixes:
            path.append(_WRAPPED)
        path.append(word)
    return ".".join(path)


def wrapped_metadata(metadata: Value, units: Units) -> Value:
    """``_metadata`` (module path to version) of a model, wrapped or not, for the model wrapped in ``units``."""
    if not isinstance(metadata, dict):
        return metadata
    prefixes = {unit.prefix for unit in units.units}
    bare: dict[str, Value] = {}
    for key, value in metadata.items():
        # Of a wrapper and the module in it, the module comes later and stays.
        bare[".".join(word for word in str(key).split(".") if word != _WRAPPED)] = value
    wrapped: OrderedDict[Key, Value] = OrderedDict()
    for path, value in bare.items():
        name = wrapped_name(path, prefixes) if path else path
        wrapped[name] = {"version": 1} if path in prefixes else value
        if path in prefixes:
            wrapped[f"{name}.{_WRAPPED}" if name else _WRAPPED] = value
    return wrapped
