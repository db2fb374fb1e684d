"""Matches the keys of two optimizers: names, ids, and ids that count over the model.

Keys of different types are matched by the order of the parameters in their param groups, but only when the groups have
the same lengths and the shapes of all states fit; otherwise the comparison is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TypeAlias

from fsdpckpt import flags
from fsdpckpt.errors import FsdpckptError, NeedsInformationError, to_copy
from fsdpckpt.ir import IdRule
from fsdpckpt.ir.checkpoint import Checkpoint, Layout
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.optimizer import Optimizer, ParamKey
from fsdpckpt.ir.placements import Slices
from fsdpckpt.ir.state_shapes import ShownShapes, StateShapes
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.producers.recognition import id_rule_of
from fsdpckpt.transform.assignment import in_any_order
from fsdpckpt.transform.id_order import listed_order
from fsdpckpt.transform.listings import model_names
from fsdpckpt.transform.model_positions import counts_over_model
from fsdpckpt.transform.rekey import find_named
from fsdpckpt.transform.stated_orders import GivenNames

_Groups: TypeAlias = Sequence[Sequence[ParamKey]]
_Side: TypeAlias = tuple[Checkpoint, _Groups]
"""A checkpoint and what its groups list."""


@dataclass(frozen=True, slots=True)
class Match:
    """How the optimizers' keys match. ``keys``: A's key for each of B's if the key types differ. ``positions``: the
    position of each of A's keys in the model, if the order in which a param group lists names has no meaning.
    """

    keys: Mapping[ParamKey, ParamKey] = field(default_factory=dict)
    positions: Mapping[ParamKey, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def match_optimizers(a: Checkpoint, b: Checkpoint) -> Match:
    """Raises NeedsInformationError if the key types differ and the keys cannot be matched."""
    if a.optim is None or b.optim is None:
        return Match()
    types = a.optim.key_type, b.optim.key_type
    groups_a, groups_b = _listed_keys(a.optim), _listed_keys(b.optim)
    if types == ("name", "name"):
        return _match_order(groups_a or [], groups_b or [], proved=all(map(_lists_in_order, (a, b))))
    if types == ("id", "id") and groups_a is not None and groups_b is not None:
        return _match_ids((a, groups_a), (b, groups_b))
    if types[0] == types[1] or None in types:
        return Match()
    by_place = _match_places(a, b)
    if by_place is not None:
        return by_place
    if groups_a is None or groups_b is None:
        raise _unmatched(a, b, "one of them has no param groups, so ids cannot be matched with names")
    if [len(group) for group in groups_a] != [len(group) for group in groups_b]:
        lengths = f"{_lengths(groups_a)} and {_lengths(groups_b)}"
        raise _unmatched(a, b, f"their param groups have {lengths} parameters")
    return _match_lists((a, groups_a), (b, groups_b))


def _match_lists(a: _Side, b: _Side) -> Match:
    """Match names with ids of ``torch.optim`` by the order in which the groups list the names, if that is the order of
    the job's optimizer (``listed_order``, as ``convert`` asks it), else by that of the model or by shapes alone.

    Raises NeedsInformationError if nothing proves an order.
    """
    (_, groups_a), (_, groups_b) = a, b
    optim_a, optim_b = _optim_of(a), _optim_of(b)
    types = optim_a.key_type, optim_b.key_type
    ids, names = (a, b) if types[0] == "id" else (b, a)
    positions = _model_order(ids[0]) or _model_order(names[0])
    listed = listed_order([list(map(str, each)) for each in names[1]], _positions_by_name(positions))
    by_groups = _pair_keys(groups_a, groups_b)
    mismatch = _find_mismatch(optim_a, optim_b, by_groups)
    matches: list[Match] = []
    if mismatch is None and listed is not None and listed.own:
        matches = [Match(by_groups, notes=(_note("the order of the param groups", types),))]

    def in_model_order(groups: _Groups) -> list[list[ParamKey]]:
        return [sorted(keys, key=lambda key: positions.get(key, 0)) for keys in groups]

    by_model = _pair_keys(in_model_order(groups_a), in_model_order(groups_b))
    if positions and _find_mismatch(optim_a, optim_b, by_model) is None:
        if types[0] == "id":
            positions = {key: key for keys in groups_a for key in keys if isinstance(key, int)}
        matches.append(Match(by_model, positions, (_note("the order of the model's parameters", types),)))
    if matches:
        return min(matches, key=partial(_count_stateless, optim_a, optim_b))
    if listed is None and (by_shapes := _pair_by_shapes(a, b)) is not None:
        return Match(by_shapes, _places(by_shapes), (_note("the shapes of their states", types),))
    if mismatch is None:
        raise _unproved(a[0], b[0], names[0])
    raise _unmatched(a[0], b[0], mismatch)


def _pair_by_shapes(a: _Side, b: _Side) -> dict[ParamKey, ParamKey] | None:
    """A's key for each of B's, where the shapes of the states of each group allow no other; else None."""
    shown_a, shown_b = ShownShapes(_optim_of(a)), ShownShapes(_optim_of(b))
    pairs: dict[ParamKey, ParamKey] = {}
    for group_a, group_b in zip(a[1], b[1], strict=True):
        shapes_a, shapes_b = [shown_a.of(key) for key in group_a], [shown_b.of(key) for key in group_b]

        def fits(
            of_b: int, of_a: int, shapes_a: list[StateShapes] = shapes_a, shapes_b: list[StateShapes] = shapes_b
        ) -> bool:
            return shapes_b[of_b] == shapes_a[of_a]

        answer = in_any_order(len(group_b), len(group_a), fits)
        if answer is None:
            return None
        pairs.update(zip(group_b, (group_a[index] for index in answer), strict=True))
    return pairs


def _unmatched(a: Checkpoint, b: Checkpoint, problem: str) -> NeedsInformationError:
    types = [each.optim.key_type if each.optim is not None else None for each in (a, b)]
    return NeedsInformationError(
        f"the optimizers of {a.source} and {b.source} have different keys ({types[0]} and {types[1]}), "
        f"and cannot be matched: {problem}",
        why="ids count in the order of the param groups, so they match names only if both list the same parameters in "
        "the same order",
        next_step=_next_step(a, b, types[0]),
    )


def _unproved(a: Checkpoint, b: Checkpoint, names: Checkpoint) -> NeedsInformationError:
    """The error for names that are listed in an order which proves nothing, and which shapes do not tell apart."""
    models = f", or compare the models alone: {flags.only('model')}" if a.model is not None is not b.model else ""
    return NeedsInformationError(
        f"the optimizers of {a.source} and {b.source} have different keys, and nothing says which id is which name",
        why=f"the groups of {names.source} list names that were sorted, or flat parameter by flat parameter, and ids "
        "count in the order of the job's optimizer",
        next_step=f"add {flags.parameters('FILE')} (the names in the order in which the job gives them to its "
        f"optimizer, one per line), {flags.units('FILE')}, or {flags.reference('PATH')} of a torch or DCP checkpoint "
        f"of this model{models}",
    )


def _optim_of(side: _Side) -> Optimizer:
    optim = side[0].optim
    if optim is None:
        raise ValueError(f"{side[0].source} has no optimizer")
    return optim


def _places(pairs: Mapping[ParamKey, ParamKey]) -> dict[ParamKey, int]:
    """A place for each of A's keys: lists that have the same keys in another order do not differ."""
    return {key: place for place, key in enumerate(pairs.values())}


def _lists_in_order(checkpoint: Checkpoint) -> bool:
    """Whether the order in which the groups of a checkpoint list names is that of the job's optimizer.

    Flat parameters, flattened keys, places in the model and names that FSDP sorted have lost it.
    """
    if id_rule_of(checkpoint) is IdRule.MODEL:
        return False
    if checkpoint.layout is Layout.FLATTENED or checkpoint.units is not None or checkpoint.origin.flattened_keys:
        return False
    groups = _listed_keys(checkpoint.optim) if checkpoint.optim is not None else None
    places = _positions_by_name(_model_order(checkpoint))
    listed = listed_order([list(map(str, keys)) for keys in groups or ()], places)
    return listed is not None and listed.own


def _positions_by_name(positions: Mapping[ParamKey, int]) -> dict[str, int] | None:
    """``positions`` of names without the prefixes of wrappers; None if there are none."""
    return {clean(str(name)): position for name, position in positions.items()} or None


def _match_order(
    groups_a: Sequence[Sequence[ParamKey]], groups_b: Sequence[Sequence[ParamKey]], *, proved: bool
) -> Match:
    """Match groups that list the same names in different orders. ``proved``: both list them as the optimizers did, so
    that the difference counts: it decides which ids the parameters get.
    """
    if proved or len(groups_a) != len(groups_b) or groups_a == groups_b:
        return Match()
    if any(sorted(map(str, a)) != sorted(map(str, b)) for a, b in zip(groups_a, groups_b, strict=True)):
        return Match()
    positions = {key: at for at, key in enumerate(chain(*groups_a))}
    return Match(
        positions=positions,
        notes=("the param groups list the same names in a different order, which does not count as a difference",),
    )


def _match_ids(a: _Side, b: _Side) -> Match:
    """Match ids of one kind by number; those that count over the model with those of ``torch.optim`` by their names, or
    by shapes, or by place, if nothing names them.
    """
    counted = [_over_model(*side) for side in (a, b)]
    groups_a, groups_b = a[1], b[1]
    if counted[0] == counted[1]:
        return Match()
    names = [_names_of_ids(each) for each, _ in (a, b)]
    if names[0] is not None and names[1] is not None and set(names[0]) == set(names[1]):
        pairs = {names[1][name]: key for name, key in names[0].items()}
        by_name = "optimizer keys matched by name: only one side counts all parameters of the model"
        return Match(pairs, _places(pairs), (by_name,))
    if groups_a == groups_b or list(map(len, groups_a)) != list(map(len, groups_b)):
        return Match()
    by_shapes = _pair_by_shapes(a, b)
    if by_shapes is not None:
        shapes = (
            "optimizer keys matched by the shapes of their states: only one side counts all parameters of the model"
        )
        return Match(by_shapes, _places(by_shapes), (shapes,))
    note = (
        "optimizer keys matched by their places in the param groups: only one side counts all parameters of the model. "
        f"If the job lists them in another order, add {flags.parameters('FILE')} with the names in that order"
    )
    return Match(_pair_keys(groups_a, groups_b), notes=(note,))


def _names_of_ids(checkpoint: Checkpoint) -> dict[str, ParamKey] | None:
    """The id of each name, None if the checkpoint itself does not say it."""
    if checkpoint.optim is None:
        return None
    named = find_named(checkpoint)
    if isinstance(named, FsdpckptError) or named.optim is None:
        return None
    pairs = zip(named.optim.grouped_keys(), checkpoint.optim.grouped_keys(), strict=True)
    return {clean(str(name)): number for name, number in pairs}


def _over_model(checkpoint: Checkpoint, groups: _Groups) -> bool:
    """Whether ids that ``groups`` list are places in the model, by the rule of the framework or to be seen."""
    numbers: list[list[int]] = []
    for group in groups:
        numbers.append([key for key in group if isinstance(key, int)])
    return counts_over_model(numbers, id_rule_of(checkpoint))


def _match_places(a: Checkpoint, b: Checkpoint) -> Match | None:
    """Match names with ids that count over all parameters of the model, which are not in the order of the lists; None
    if the ids are none of these, or if nothing names them. Raises NeedsInformationError if they certainly are, and
    several names fit: the order of the lists is then no other way.
    """
    ids, names = (a, b) if a.optim is not None and a.optim.key_type == "id" else (b, a)
    if ids.optim is None or not _over_model(ids, _listed_keys(ids.optim) or []):
        return None
    named = find_named(ids, GivenNames(reference=names))
    if isinstance(named, NeedsInformationError) and id_rule_of(ids) is IdRule.MODEL:
        raise named
    if isinstance(named, FsdpckptError) or named.optim is None:
        return None
    keys = dict(zip(ids.optim.grouped_keys(), named.optim.grouped_keys(), strict=True))
    pairs = keys if ids is b else {name: number for number, name in keys.items()}
    doubts = [note.message for note in named.notes[len(ids.notes) :] if note.warning]
    return Match(pairs, _places(pairs), ("optimizer keys matched by the places of ids in the model", *doubts))


def _note(how: str, types: tuple[str | None, str | None]) -> str:
    return f"optimizer keys matched by {how}: {types[1]}s of B to {types[0]}s of A"


def _pair_keys(
    groups_a: Sequence[Sequence[ParamKey]], groups_b: Sequence[Sequence[ParamKey]]
) -> dict[ParamKey, ParamKey]:
    """A's key for each of B's, group by group."""
    return {
        key_b: key_a
        for group_a, group_b in zip(groups_a, groups_b, strict=True)
        for key_a, key_b in zip(group_a, group_b, strict=True)
    }


def _model_order(checkpoint: Checkpoint) -> dict[ParamKey, int]:
    """The position of each name in the model of the checkpoint that uses ids; empty if it keeps no order."""
    listed = model_names(checkpoint, "the model section")
    if checkpoint.model is None or listed is None or not listed.ordered:
        return {}
    return {name: at for at, name in enumerate(checkpoint.model.params)}


def _next_step(a: Checkpoint, b: Checkpoint, key_type: str | None) -> str:
    unnamed = [checkpoint.source for checkpoint in (a, b) if _has_slices(checkpoint)]
    if unnamed:
        return f"add {flags.units('FILE')}: it says which parameters are in the slices of {unnamed[0]}"
    if a.model is not None and b.model is not None:
        return f"compare the models alone: add {flags.only('model')}"
    convert = flags.command("convert", b.source, "DST", flags.key_type(key_type))
    return to_copy("convert B first, then compare A with the result", convert)


def _has_slices(checkpoint: Checkpoint) -> bool:
    """Whether its optimizer is still in slices of flat parameters, which nothing names."""
    states = checkpoint.states.values()
    leaves = (leaf for entry in states for leaf in entry.values())
    return any(isinstance(leaf, Tensor) and isinstance(leaf.cut, Slices) for leaf in leaves)


def _lengths(groups: Sequence[Sequence[ParamKey]]) -> str:
    return "+".join(str(len(group)) for group in groups) or "no"


def _listed_keys(optim: Optimizer) -> list[list[ParamKey]] | None:
    """The keys that each param group lists; None without groups, or if a list is missing."""
    if optim.groups is None or any(group.members is None for group in optim.groups):
        return None
    return optim.in_groups()


def _find_mismatch(a: Optimizer, b: Optimizer, pairs: Mapping[ParamKey, ParamKey]) -> str | None:
    """Why keys cannot be matched by the order of the groups, None if every state matches."""
    for key_b, key_a in pairs.items():
        states_a = a.state.get(key_a, {})
        for name, state_b in b.state.get(key_b, {}).items():
            state_a = states_a.get(name)
            if isinstance(state_a, Tensor) and isinstance(state_b, Tensor) and state_a.shape != state_b.shape:
                return (
                    f"by that order {key_b} is {key_a}, but their states {name} have the shapes "
                    f"{list(state_b.shape)} and {list(state_a.shape)}"
                )
    added = a.state.keys() - pairs.values()  # by a user: such entries keep their keys
    stray = next((key for key in b.state if key not in pairs and key not in added), None)
    return None if stray is None else f"the state of {stray} is in no param group"


def _count_stateless(a: Optimizer, b: Optimizer, match: Match) -> int:
    """The number of keys whose parameter has states on one side only. An order that is right has few."""
    return sum(bool(a.state.get(key_a)) != bool(b.state.get(key_b)) for key_b, key_a in match.keys.items())
