"""Names the ids of an optimizer by an order of parameters, and proves that nothing else fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from fsdpckpt.errors import NeedsInformationError, SourceCorruptError
from fsdpckpt.ir.assignment import Answer, in_any_order, in_order
from fsdpckpt.ir.checkpoint import OptimState, ParamKey, group_params
from fsdpckpt.transform.parameter_order import ParameterOrder, StatedShapes, fits, stated_shapes

__all__ = ["Ids", "contradicted", "name_ids", "repeated"]

_CANDIDATES = 48  # ids whose candidates are listed: each is compared with every name


@dataclass(frozen=True, slots=True)
class Ids:
    """The ids of an optimizer. ``groups``: None when it has none. ``stated``: what each one's states say."""

    groups: tuple[tuple[int, ...], ...] | None
    every: tuple[int, ...]
    stated: Mapping[int, StatedShapes]

    @classmethod
    def of(cls, optim: OptimState, source: str) -> Ids:
        """Raises SourceCorruptError for a state that no group lists, or an id that two do."""
        stated = {key: stated_shapes(states) for key, states in optim.state.items() if isinstance(key, int)}
        if optim.param_groups is None:
            every = tuple(sorted(stated))
            return cls(None, every, stated)
        groups = tuple(
            tuple(key for key in group_params(group) or () if isinstance(key, int)) for group in optim.param_groups
        )
        every = tuple(chain(*groups))
        known = set(every)
        wrong = [f"id {key} has states, and no group lists it" for key in stated if key not in known]
        wrong += [f"id {key} is listed {every.count(key)} times" for key in repeated(every)]
        if wrong:
            raise contradicted(f"the ids of the optimizer of {source} contradict each other", wrong)
        return cls(groups, every, {key: stated.get(key, frozenset()) for key in every})


def repeated(keys: Sequence[ParamKey]) -> list[ParamKey]:
    seen: set[ParamKey] = set()
    return list(dict.fromkeys(key for key in keys if key in seen or seen.add(key)))  # type: ignore[func-returns-value]


def contradicted(what: str, details: Sequence[str]) -> SourceCorruptError:
    return SourceCorruptError(
        what,
        details=details,
        why="it belongs to another model, or to another version of this one",
        next_step="give the units, the reference or the parameters of the model that was saved",
    )


def name_ids(ids: Ids, order: ParameterOrder, source: str) -> dict[ParamKey, ParamKey]:
    """The name of each id, of which there is one at least. ``source`` names the checkpoint in errors.

    Raises SourceCorruptError for an order that does not fit, NeedsInformationError for one that fits in several ways.
    """
    if order.groups is not None:
        return _by_groups(ids, order, order.groups, source)
    if ids.groups is None:
        return _ungrouped(ids, order, source)
    if not order.certain:
        return _by_shapes(ids, order.names, order, source)
    return _dealt(ids, ids.groups, order, source)


def _required(order: ParameterOrder) -> tuple[str, ...]:
    return tuple(name for name in order.names if name not in order.optional)


def _misfits(ids: Ids, names: Sequence[str], order: ParameterOrder) -> list[str]:
    """Every id whose states do not have the shape of its name."""
    found = []
    for number, name in zip(ids.every, names, strict=False):
        stated = ids.stated[number]
        if not fits(order.shape(name), stated):
            shapes = ", ".join(str(list(shape)) for shape in sorted(stated))
            found.append(f"id {number} has states of shape {shapes}, {name} is {list(order.shape(name) or ())}")
    return found


def _by_groups(
    ids: Ids, order: ParameterOrder, groups: tuple[tuple[str, ...], ...], source: str
) -> dict[ParamKey, ParamKey]:
    """The source knows the groups: nothing is left to find, all to be proved."""
    held = ids.groups
    if held is not None and [len(group) for group in held] != [len(group) for group in groups]:
        wrong = [
            f"groups of {', '.join(str(len(group)) for group in held)} ids in the optimizer",
            f"groups of {', '.join(str(len(group)) for group in groups)} parameters in {order.source}",
        ]
        raise contradicted(f"the optimizer of {source} does not fit {order.source}", wrong)
    names = tuple(chain(*groups))
    if held is None and ids.every[-1] >= len(names):
        raise contradicted(
            f"the optimizer of {source} does not fit {order.source}",
            [f"id {ids.every[-1]} is beyond the {len(names)} parameters of the groups"],
        )
    taken = names if held is not None else tuple(names[number] for number in ids.every)
    _require_fit(ids, taken, order, source)
    return dict(zip(ids.every, taken, strict=True))


def _require_fit(ids: Ids, names: Sequence[str], order: ParameterOrder, source: str) -> None:
    wrong = _misfits(ids, names, order)
    if wrong:
        raise contradicted(f"the optimizer of {source} does not fit {order.source}", wrong)


def _ungrouped(ids: Ids, order: ParameterOrder, source: str) -> dict[ParamKey, ParamKey]:
    """Without groups an id says its place in a list that only an explicit order can be."""
    if not order.explicit:
        return _by_shapes(ids, order.names, order, source)
    if ids.every[-1] >= len(order.names):
        wrong = [f"id {ids.every[-1]} is beyond the {len(order.names)} parameters listed"]
        raise contradicted(f"the optimizer of {source} does not fit {order.source}", wrong)
    names = [order.names[number] for number in ids.every]
    _require_fit(ids, names, order, source)
    return dict(zip(ids.every, names, strict=True))


def _by_shapes(ids: Ids, names: Sequence[str], order: ParameterOrder, source: str) -> dict[ParamKey, ParamKey]:
    """The names are in no order that says anything: only shapes can."""
    shapes = [order.shape(name) for name in names]
    stated = [ids.stated[number] for number in ids.every]

    def possible(number: int, name: int) -> bool:
        return fits(shapes[name], stated[number])

    _require_enough(ids, names, order, source)
    answer = in_any_order(len(ids.every), len(names), possible)
    if answer is None:
        why = "does not say in which groups they are" if order.certain else "does not keep the order of the parameters"
        raise _ambiguous(ids, source, order, f"{order.source} {why}", _possible_names(ids, names, possible))
    return {number: names[name] for number, name in zip(ids.every, answer, strict=True)}


def _require_enough(ids: Ids, names: Sequence[str], order: ParameterOrder, source: str) -> None:
    """Raises SourceCorruptError when ids outnumber names, or an id's states fit no name at all."""
    wrong = []
    if len(names) < len(ids.every):
        wrong.append(f"the optimizer has {len(ids.every)} ids, {order.source} {len(names)} parameters")
        wrong += _misfits(ids, names, order)
    shapes = {order.shape(name) for name in names}
    for number in ids.every:
        stated = ids.stated[number]
        if stated and not any(fits(shape, stated) for shape in shapes):
            text = ", ".join(str(list(shape)) for shape in sorted(stated))
            wrong.append(f"id {number} has states of shape {text}, which no parameter of {order.source} has")
    if wrong:
        raise contradicted(f"the optimizer of {source} does not fit {order.source}", list(dict.fromkeys(wrong)))


def _possible_names(ids: Ids, names: Sequence[str], possible: Callable[[int, int], bool]) -> list[str]:
    """What each of the first ids may be, in words."""
    lines = []
    for at, number in enumerate(ids.every[:_CANDIDATES]):
        found = [names[name] for name in range(len(names)) if possible(at, name)]
        if len(found) > 1:
            lines.append(f"id {number} may be {', '.join(found[:4])}{' ...' if len(found) > 4 else ''}")
    return lines


def _dealt(ids: Ids, groups: Sequence[Sequence[int]], order: ParameterOrder, source: str) -> dict[ParamKey, ParamKey]:
    """Some names have no id, or which group each is in is not known: the one way to deal them out in order."""
    _require_enough(ids, order.names, order, source)
    required = _required(order)
    for pool in dict.fromkeys([required, order.names] if len(required) == len(ids.every) else [order.names]):
        answers = _deal(ids, groups, pool, order)
        if answers is None:
            raise _ambiguous(ids, source, order, "there are more ways to name them than can be tried", [])
        if len(answers) > 1:
            what = "which of them it has" if len(groups) == 1 else "which group has which of them"
            why = f"{len(pool)} parameters come in question, and their shapes do not settle {what}"
            raise _ambiguous(ids, source, order, why, _differences(ids, pool, answers))
        if answers:
            return {number: pool[name] for number, name in zip(ids.every, answers[0], strict=True)}
    wrong = _misfits(ids, required if len(required) == len(ids.every) else order.names, order)
    if len(order.names) != len(ids.every):
        wrong.insert(0, f"the optimizer has {len(ids.every)} ids, {order.source} {len(order.names)} parameters")
    raise contradicted(f"the optimizer of {source} does not fit {order.source}", wrong)


def _deal(
    ids: Ids, groups: Sequence[Sequence[int]], names: Sequence[str], order: ParameterOrder
) -> list[Answer] | None:
    shapes = [order.shape(name) for name in names]
    stated = [ids.stated[number] for number in ids.every]
    return in_order(
        [len(group) for group in groups], len(names), lambda number, name: fits(shapes[name], stated[number])
    )


def _differences(ids: Ids, names: Sequence[str], answers: Sequence[Answer]) -> list[str]:
    return [
        f"id {number} may be {names[one]} or {names[other]}"
        for number, one, other in zip(ids.every, *answers[:2], strict=True)
        if one != other
    ]


def _ambiguous(
    ids: Ids, source: str, order: ParameterOrder, why: str, candidates: Sequence[str]
) -> NeedsInformationError:
    options = []
    if len(order.names) > len(ids.every):
        options.append("--parameters FILE (the names of the optimizer's parameters in the order of model.parameters())")
        options += [] if order.explicit else ["--buffers GLOB for the model keys that are no parameters"]
    elif not order.certain:
        options.append("--parameters FILE (the names in the order of model.parameters())")
        options.append("--reference PATH of a torch or DCP checkpoint of this model")
    options.append("--units FILE, which also says the parameters of every group")
    return NeedsInformationError(
        f"{order.source} cannot name the {len(ids.every)} optimizer ids of {source} for certain",
        details=candidates,
        why=why,
        next_step=f"add {', or '.join(options)}",
    )
