"""Keys, names and param groups of a wrapped model and its optimizer.

Ids count group by group, and within a group in the order of the wrapped model's ``parameters()``. ``params`` lists have
the same order, in which ``_rekey_sharded_optim_state_dict`` sorts ids.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from fsdpckpt.ir.checkpoint import Checkpoint, KeyType, Note
from fsdpckpt.ir.names import FSDP_WRAPPER
from fsdpckpt.ir.optimizer import PARAM_NAMES, PARAMS, Optimizer, ParamGroup, ParamKey
from fsdpckpt.ir.units import Groups, Units
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.text import plural


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
    """The keys of ``checkpoint``'s optimizer (keyed by name) in a flattened target of ``units``, which match it."""
    optim = checkpoint.optim
    groups = optim.groups if optim is not None else None
    order: Groups = units.groups if units.groups is not None else (units.optimizer_keys(),)
    absent = _absent_unmanaged(optim, units)
    prefixes = frozenset(unit.prefix for unit in units.units)

    def rank_keys(order: Groups) -> RankKeys:
        keys = _numbered(order, key_type, prefixes)
        if groups is None:
            return RankKeys(keys, None)
        written = []
        for group, names in zip(groups, order, strict=True):
            present = [name for name in names if name not in absent]
            written.append(_group(group, present, keys, prefixes))
        return RankKeys(keys, written)

    by_rank: dict[int, RankKeys] = {}
    for rank_order in units.orders:
        by_rank.update(dict.fromkeys(rank_order.ranks, rank_keys(rank_order.groups)))
    notes: tuple[Note, ...] = ()
    if absent:
        parameters = plural(len(absent), "optimizer parameter")
        text = f"no state for {parameters} outside every unit: add an entry before load_state_dict"
        notes = (Note("missing-state", text, keys=tuple(sorted(absent))),)
    return FlatKeys(rank_keys(order), by_rank, notes)


def _absent_unmanaged(optim: Optimizer | None, units: Units) -> frozenset[str]:
    """The unmanaged parameters in the optimizer that the checkpoint does not contain.

    FSDP leaves them out (``_flatten_optim_state_dict``), as another part of the job may load them; without their entry
    ``Optimizer.load_state_dict`` refuses the group.
    """
    if optim is None or optim.groups is None:
        return frozenset()
    listed = set(optim.grouped_keys())
    unlisted = {param.name for param in units.unmanaged} - listed
    return frozenset(unlisted.intersection(chain(*(units.groups or ()))))


def _numbered(order: Iterable[Sequence[str]], key_type: KeyType, prefixes: Collection[str]) -> dict[str, ParamKey]:
    """The ids, or for keys by name the wrapped model's names, as ``_NamedOptimizer`` has and loads them."""
    names = [name for group in order for name in group]
    if key_type == "name":
        return {name: wrapped_name(name, prefixes) for name in names}
    return {name: number for number, name in enumerate(names)}


def _group(
    group: ParamGroup, names: Sequence[str], keys: Mapping[str, ParamKey], prefixes: frozenset[str]
) -> dict[Key, Value]:
    written = dict(group.settings)
    if PARAMS in written:
        # In the order of the ids even if names are listed: ``Optimizer.load_state_dict`` matches by position.
        written[PARAMS] = [keys[name] for name in names]
        if PARAM_NAMES in written:
            # As in the wrapped model's named_parameters(): ``Optimizer.load_state_dict`` copies them unchecked.
            written[PARAM_NAMES] = [wrapped_name(name, prefixes) for name in names]
    return written


def wrapped_name(name: str, prefixes: Collection[str]) -> str:
    """The name of a parameter or unit in ``named_parameters()`` of a model that is wrapped at ``prefixes``."""
    words = name.split(".")
    path: list[str] = []
    for index, word in enumerate(words):
        if ".".join(words[:index]) in prefixes:
            path.append(FSDP_WRAPPER)
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
        bare[".".join(word for word in str(key).split(".") if word != FSDP_WRAPPER)] = value
    wrapped: OrderedDict[Key, Value] = OrderedDict()
    for path, value in bare.items():
        name = wrapped_name(path, prefixes) if path else path
        wrapped[name] = {"version": 1} if path in prefixes else value
        if path in prefixes:
            wrapped[f"{name}.{FSDP_WRAPPER}" if name else FSDP_WRAPPER] = value
    return wrapped
