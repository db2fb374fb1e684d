"""Give every rank's optimizer the same keys, where the optimizers of the ranks list other parameters, or another order.

Each rank counts ids in the order of its own optimizer. What an id is on each rank is known from the units, or from the
``param_names`` of its groups; keys that are names say it themselves. As in ``_map_param_key_to_optim_keys`` of
``torch/distributed/fsdp/_optim_utils.py`` the keys of all ranks count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias, cast

from fsdpckpt.ir.checkpoint import Note, ParamKey, Problem, Section
from fsdpckpt.ir.units import Groups, RankOrder, Units
from fsdpckpt.ir.values import Key
from fsdpckpt.readers.flat_slices import optimizers
from fsdpckpt.text import first_of

_Optimizer: TypeAlias = dict[Key, Any]
_SHOWN = 3


@dataclass(slots=True)
class OneOrder:
    """The ranks' state dicts with one set of optimizer keys. ``orders``: as ``Checkpoint.orders``."""

    roots: list[object]
    orders: tuple[RankOrder, ...]
    notes: list[Note]
    problems: list[Problem]


def one_order(roots: Sequence[object], ranks: Sequence[int], units: Units | None) -> OneOrder:
    """``roots``: the state dict of each of ``ranks``. What nothing explains is left as it is, for others to report."""
    result = OneOrder(list(roots), (), [], [])
    for path, _ in optimizers(cast("Any", roots[0])):
        found = [_at(root, path) for root in roots]
        ours = [optim for optim in found if optim is not None]
        if len(ours) < len(roots):
            continue
        names = _by_units(ours, ranks, units) if units is not None and units.orders else None
        if names is not None and units is not None:
            result.orders = units.orders
            result.problems += _lacking(names, ranks, units)
        names = names or _own_names(ours)
        if names is None or all(one == names[0] for one in names[1:]) or len(set(map(len, names))) > 1:
            continue
        every = _united(names)
        result.notes.append(_note(names, ranks, every))
        if _by_id(ours[0]) and not result.orders:
            differing = [(rank, one) for rank, one in zip(ranks, names, strict=True) if one != every]
            result.orders = tuple(RankOrder((rank,), one) for rank, one in differing)
        keys: Mapping[str, ParamKey] = {name: number for number, name in enumerate(chain(*every))}
        if not _by_id(ours[0]):
            keys = {name: name for name in keys}
        raw = {name: text for optim, one in zip(ours, names, strict=True) for name, text in _raw_names(optim, one)}
        for index, (optim, one) in enumerate(zip(ours, names, strict=True)):
            result.problems += _unlisted(optim, ranks[index])
            changed = _rekeyed(optim, one, every, keys, raw)
            result.roots[index] = _replaced(result.roots[index], path, changed)
    return result


def _at(root: object, path: tuple[Key, ...]) -> _Optimizer | None:
    for key in path:
        try:
            root = root[key]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return None
    return root if isinstance(root, dict) and isinstance(root.get("state"), dict) else None


def _replaced(root: object, path: tuple[Key, ...], value: object) -> object:
    if not path:
        return value
    changed = _replaced(cast("Any", root)[path[0]], path[1:], value)
    if isinstance(root, dict):
        return {**root, path[0]: changed}
    listed = list(cast("Sequence[object]", root))
    listed[cast("int", path[0])] = changed
    return listed


def _groups(optim: _Optimizer) -> list[list[ParamKey]] | None:
    """The keys that each group lists; None without groups, or where a list is not one of keys."""
    groups = optim.get("param_groups")
    if not isinstance(groups, (list, tuple)):
        return None
    listed = [group.get("params") if isinstance(group, dict) else None for group in groups]
    if any(not isinstance(keys, list) or not all(isinstance(key, (int, str)) for key in keys) for keys in listed):
        return None
    return cast("list[list[ParamKey]]", listed)


def _by_id(optim: _Optimizer) -> bool:
    groups = _groups(optim)
    return all(type(key) is int for key in (chain(*groups) if groups is not None else optim["state"]))


def _by_units(ours: Sequence[_Optimizer], ranks: Sequence[int], units: Units) -> list[Groups] | None:
    """The groups of each rank by the units; None where they are not those of these optimizers."""
    by_rank = [groups for rank in ranks if (groups := units.groups_of(rank)) is not None]
    return by_rank if len(by_rank) == len(ours) and all(map(_fits, ours, by_rank)) else None


def _fits(optim: _Optimizer, groups: Groups) -> bool:
    """Whether ``groups`` may be those of ``optim``, whose keys are ids."""
    own = _groups(optim)
    if not _by_id(optim):
        return False
    if own is None:
        return all(key < sum(map(len, groups)) for key in optim["state"])
    return [len(keys) for keys in own] == [len(names) for names in groups]


def _own_names(ours: Sequence[_Optimizer]) -> list[Groups] | None:
    """What each optimizer says itself: keys that are names, or ``param_names``; None where one of them does not."""
    named: list[Groups] = []
    for optim in ours:
        groups = _groups(optim)
        if groups is None:
            return None
        texts = groups
        if _by_id(optim):
            recorded = [group.get("param_names") for group in optim["param_groups"]]
            texts = [list(one) if isinstance(one, (list, tuple)) else [] for one in recorded]
        names: Groups = tuple(tuple(str(text) for text in one) for one in texts)
        every = list(chain(*names))
        if [len(one) for one in names] != [len(keys) for keys in groups] or len(set(every)) < len(every):
            return None
        named.append(names)
    return named


def _united(names: Sequence[Groups]) -> Groups:
    """Each group with what any rank has in it, in the order of the first that has it."""
    return tuple(tuple(dict.fromkeys(chain(*(one[number] for one in names)))) for number in range(len(names[0])))


def _note(names: Sequence[Groups], ranks: Sequence[int], every: Groups) -> Note:
    total = sum(map(len, every))
    less = [rank for rank, one in zip(ranks, names, strict=True) if sum(map(len, one)) < total]
    text = "the ranks' optimizers list their parameters in different orders; every id was read as that rank counts it"
    if less:
        text = f"the optimizers of ranks {first_of(less, 8)} do not have all parameters that those of others have"
    return Note("orders", text)


def _lacking(names: Sequence[Groups], ranks: Sequence[int], units: Units) -> list[Problem]:
    """A fatal problem for each rank whose optimizer lacks what FSDP shards, and others have: its part is in no file."""
    managed = {unit.key for unit in units.units} | set(units.unit_of())
    every = dict.fromkeys(name for one in names for name in chain(*one) if name in managed)
    lost = []
    for rank, one in zip(ranks, names, strict=True):
        own = set(chain(*one))
        missing = [name for name in every if name not in own]
        if missing:
            lost.append(
                Problem(
                    "missing-key",
                    f"the optimizer of rank {rank} has no {first_of(missing, _SHOWN)}, which the optimizers of other "
                    "ranks have. In PyTorch's words: FSDP currently requires each rank to have at least the optimizer "
                    "states needed by rank 0's optimizer but some ranks are missing some of those states",
                    key=missing[0],
                    rank=rank,
                    section=Section.OPTIM,
                )
            )
    return lost


def _unlisted(optim: _Optimizer, rank: int) -> list[Problem]:
    """A fatal problem for each id with a state that no group lists: nothing says which parameter it is."""
    listed = set(chain(*(_groups(optim) or (optim["state"],))))
    return [
        Problem(
            "parameter-order",
            f"the optimizer of rank {rank} has a state of id {key}, which no param group lists, and the ranks' "
            "optimizers list their parameters in different orders: nothing says which parameter it is",
            key=f"state.{key}",
            rank=rank,
            section=Section.OPTIM,
        )
        for key in optim["state"]
        if type(key) is int and key not in listed
    ]


def _raw_names(optim: _Optimizer, names: Groups) -> list[tuple[str, str]]:
    """(name, what ``param_names`` calls it)."""
    pairs: list[tuple[str, str]] = []
    for group, own in zip(optim.get("param_groups") or (), names, strict=False):
        recorded = group.get("param_names")
        if isinstance(recorded, (list, tuple)) and len(recorded) == len(own):
            pairs += zip(own, map(str, recorded), strict=True)
    return pairs


def _rekeyed(
    optim: _Optimizer, own: Groups, every: Groups, keys: Mapping[str, ParamKey], raw: Mapping[str, str]
) -> _Optimizer:
    groups = _groups(optim)
    listed = range(sum(map(len, own))) if groups is None else chain(*groups)
    new = {key: keys[name] for key, name in zip(listed, chain(*own), strict=True)}
    changed = {**optim, "state": {new.get(key, key): states for key, states in optim["state"].items()}}
    if groups is not None:
        changed["param_groups"] = [
            {
                **group,
                "params": [keys[name] for name in names],
                **({"param_names": [raw.get(name, name) for name in names]} if "param_names" in group else {}),
            }
            for group, names in zip(optim["param_groups"], every, strict=True)
        ]
    return changed
