"""Rekeys an optimizer from ids to names and from names to ids, for every layout, by a proved parameter order.

``torch.optim`` numbers ids group by group, and within a group in the order of ``model.parameters()``, a shared
parameter once (``FSDP.rekey_optim_state_dict``). The proof: there are as many ids as parameters, and every state has a
shape that its parameter allows. An order that contradicts either is refused, and the error lists all contradictions; if
several maps are possible, the error lists the candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from fsdpckpt.errors import NeedsInformationError, SourceCorruptError
from fsdpckpt.ir.checkpoint import Checkpoint, KeyType, Note, OptimState, ParamKey, group_params
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.units import Units
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.layouts.flattened import is_flat_key
from fsdpckpt.text import plural
from fsdpckpt.transform.assignment import Answer, in_any_order, in_order
from fsdpckpt.transform.parameter_order import (
    ParameterOrder,
    StateShapes,
    contradictions,
    fits,
    parameter_orders,
    shaped_states,
    shapes_of_states,
)


def apply_key_type(
    checkpoint: Checkpoint,
    key_type: KeyType | None,
    *,
    units: Units | None,
    reference: Checkpoint | None,
    parameters: Sequence[str] | None,
    buffers: Sequence[str] = (),
) -> Checkpoint:
    """Key the optimizer of ``checkpoint`` by ``key_type``; None keeps the keys.

    ``units``: those of the source or of ``--units``; None for those beside the checkpoint. ``reference``: a checkpoint
    whose model section states names, shapes and order. ``parameters``: names in the order of ``model.parameters()``.
    ``buffers``: globs of model keys that are not parameters.

    Raises NeedsInformationError if nothing states the order or several orders are possible, and SourceCorruptError if
    the sources contradict the optimizer or each other.
    """
    optim = checkpoint.optim
    if optim is None or key_type is None or optim.key_type in (None, key_type):
        return checkpoint
    orders = parameter_orders(
        checkpoint, units=units, reference=reference, parameters=parameters, buffers=tuple(buffers)
    )
    if not orders:
        raise NeedsInformationError(
            f"nothing in {checkpoint.source} says which parameter each optimizer "
            + ("id is" if key_type == "name" else "name's id is"),
            why="it has no model section, and its param groups have no param_names",
            next_step="add --reference PATH (a checkpoint of this model), --parameters FILE (the names of "
            "model.parameters(), one per line) or --units FILE",
        )
    first, *others = orders
    return to_names(checkpoint, first, others) if key_type == "name" else to_ids(checkpoint, first, others)


def to_names(checkpoint: Checkpoint, order: ParameterOrder, others: Sequence[ParameterOrder] = ()) -> Checkpoint:
    """Key the optimizer by name. ``others``: further sources of the order, which must agree with it.

    Raises SourceCorruptError for an order that does not fit, NeedsInformationError for one that fits in several ways.
    """
    optim = checkpoint.optim
    if optim is None or optim.key_type != "id":
        return checkpoint
    ids = Ids.of(optim, checkpoint.source)
    full = order.with_shapes_of(others)
    names = name_ids(ids, full, checkpoint.source)
    _require_agreement(checkpoint, full, others, [str(name) for name in names.values()])
    _require_param_names(optim, names, order, checkpoint)
    shaped = sum(1 for number in ids.every if ids.state_shapes[number])
    note = Note(
        "rekeyed",
        f"{plural(len(ids.every), 'optimizer id')} became {plural(len(ids.every), 'name')}, from {order.source}; the "
        f"states of {plural(shaped, 'parameter')} have the shapes that this needs",
    )
    renamed = _rekeyed(optim, names, checkpoint.source)
    return replace(checkpoint, optim=renamed, notes=(*checkpoint.notes, note))


def to_ids(checkpoint: Checkpoint, order: ParameterOrder, others: Sequence[ParameterOrder] = ()) -> Checkpoint:
    """Key the optimizer by id; groups list their parameters in the order of their ids.

    Arguments and errors as for ``to_names``.
    """
    optim = checkpoint.optim
    if optim is None or optim.key_type != "name":
        return checkpoint
    full = order.with_shapes_of(others)
    listed = _listed(optim, full, checkpoint.source)
    _require_known(optim, checkpoint.source, listed, full)
    _require_agreement(checkpoint, full, others, [clean(name) for name in chain(*listed)])
    numbered = [_sorted_group(group, index, full, checkpoint) for index, group in enumerate(listed)]
    ids: dict[ParamKey, ParamKey] = {name: number for number, name in enumerate(chain(*numbered))}
    note = Note(
        "rekeyed",
        f"{plural(len(ids), 'optimizer key')} became {plural(len(ids), 'id')}, in the order of {order.source}",
    )
    renamed = _rekeyed(optim, ids, checkpoint.source)
    return replace(checkpoint, optim=renamed, notes=(*checkpoint.notes, note))


def _require_agreement(
    checkpoint: Checkpoint, used: ParameterOrder, others: Sequence[ParameterOrder], keyed: Collection[str]
) -> None:
    """Raises SourceCorruptError with everything in which another source contradicts the one in use."""
    for other in others:
        wrong = contradictions(used, other, keyed)
        if wrong:
            raise contradicted(f"{used.source} and {other.source} of {checkpoint.source} contradict each other", wrong)


def _require_param_names(
    optim: OptimState, names: Mapping[ParamKey, ParamKey], order: ParameterOrder, checkpoint: Checkpoint
) -> None:
    """Raises SourceCorruptError when a group has ``param_names`` that differ from ``names``."""
    wrong = []
    for group in optim.param_groups or ():
        param_names, params = group.get("param_names"), group_params(group) or []
        if (
            not isinstance(param_names, (list, tuple))
            or len(param_names) != len(params)
            or any(is_flat_key(str(name)) for name in param_names)
        ):
            continue
        for key, name in zip(params, param_names, strict=True):
            expected = str(names.get(key))
            if clean(str(name)) not in (expected, f"module.{expected}"):
                wrong.append(f"id {key} is {clean(str(name))} in param_names, {expected} in {order.source}")
    if wrong:
        raise contradicted(f"the param_names of {checkpoint.source} contradict {order.source}", wrong)


def _listed(optim: OptimState, order: ParameterOrder, source: str) -> list[list[str]]:
    """The names that each group lists; without groups, those of an explicit order."""
    if optim.param_groups is not None:
        return [[str(key) for key in group_params(group) or ()] for group in optim.param_groups]
    if not order.explicit:
        raise NeedsInformationError(
            f"the optimizer of {source} has no param_groups, so {order.source} does not say which ids its states get",
            why="ids count in the order of the groups, over parameters without state too",
            next_step="add --parameters FILE (the parameters of the optimizer, one name a line) or --units FILE",
        )
    return [list(group) for group in order.groups] if order.groups is not None else [list(order.names)]


def _require_known(optim: OptimState, source: str, listed: Sequence[Sequence[str]], order: ParameterOrder) -> None:
    """Raises SourceCorruptError for names the order does not have, or states of shapes it does not have."""
    known, every, shaped = set(order.names), list(chain(*listed)), shaped_states(optim)
    wrong = [f"{name} is not in {order.source}" for name in every if clean(name) not in known]
    wrong += [f"{name} is listed {every.count(name)} times" for name in map(str, repeated(every))]
    listed_names = set(every)
    unlisted = [key for key in optim.state if isinstance(key, str) and key not in listed_names and clean(key) in known]
    wrong += [f"{key} has states, and no group lists it" for key in unlisted]
    for name in every:
        state_shapes = shapes_of_states(optim.state.get(name, {}), shaped)
        shape = order.shape(clean(name))
        if not fits(shape, state_shapes):
            text = ", ".join(str(list(one)) for one in sorted(state_shapes))
            wrong.append(f"{name} has states of shape {text}, and is {list(shape or ())} in {order.source}")
    if wrong:
        raise contradicted(f"the optimizer of {source} does not fit {order.source}", wrong)


def _sorted_group(names: Sequence[str], index: int, order: ParameterOrder, checkpoint: Checkpoint) -> list[str]:
    """One group's names in the order of their ids."""
    groups = order.groups
    if groups is not None:
        place = {name: at for at, name in enumerate(groups[index])} if index < len(groups) else {}
        stray = [name for name in names if clean(name) not in place]
        if stray:
            wrong = [f"{name} is not in group {index} of {order.source}" for name in stray]
            raise contradicted(f"the groups of {checkpoint.source} do not fit {order.source}", wrong)
        return sorted(names, key=lambda name: place[clean(name)])
    if not order.ordered and len(names) > 1:
        raise NeedsInformationError(
            f"the optimizer of {checkpoint.source} cannot get ids in the order of {order.source}",
            why=f"{order.source} does not keep the order of the parameters, and ids count in it",
            next_step="add --parameters FILE (model.parameters(), one name a line), --units FILE, or --reference PATH "
            "of a torch or DCP checkpoint of this model",
        )
    place = {name: at for at, name in enumerate(order.names)}
    ordered = sorted(names, key=lambda name: place[clean(name)])
    if ordered != list(names) and any(note.kind == "groups-rebuilt" for note in checkpoint.notes):
        raise NeedsInformationError(
            f"the optimizer of {checkpoint.source} lists its parameters in a different order than {order.source}",
            why="its groups were rebuilt from equal hyper-parameters, so there may have been more of them, and ids "
            "count group by group",
            next_step="add --units FILE, which says the parameters of every group",
        )
    return ordered


def _rekeyed(optim: OptimState, keys: Mapping[ParamKey, ParamKey], source: str) -> OptimState:
    """``keys``: old to new, in the order in which groups list the new ones. The user's own entries stay."""
    kept = [key for key in optim.state if key not in keys]
    state = {keys.get(key, key): states for key, states in optim.state.items()}
    if len(state) != len(optim.state):
        new = set(keys.values())
        both = [str(key) for key in kept if key in new]
        raise contradicted(f"the optimizer of {source} has states under both kinds of key", both)
    groups = optim.param_groups
    at = {key: place for place, key in enumerate(keys)}
    return OptimState(state, None if groups is None else [_rekeyed_group(g, keys, at) for g in groups], optim.extra)


def _rekeyed_group(
    group: Mapping[Key, Value], keys: Mapping[ParamKey, ParamKey], at: Mapping[ParamKey, int]
) -> dict[Key, Value]:
    """Rekey one group. ``param_names`` stay in step with ``params``, unless they were in the order of ids and
    ``params`` were not.
    """
    params = group_params(group)
    if params is None:
        return dict(group)
    turn = sorted(range(len(params)), key=lambda place: at[params[place]])
    changed: dict[Key, Value] = {**group, "params": [keys[params[place]] for place in turn]}
    names = group.get("param_names")
    if isinstance(names, list) and len(names) == len(params) and not _sorted_apart(params, names):
        changed["param_names"] = [names[place] for place in turn]
    return changed


def _sorted_apart(params: Sequence[ParamKey], names: Sequence[Value]) -> bool:
    """Whether both list the same names in different orders, as after ``FSDP.rekey_optim_state_dict``."""
    keys, param_names = [clean(str(key)) for key in params], [clean(str(name)) for name in names]
    return keys != param_names and sorted(keys) == sorted(param_names)


_CANDIDATES = 48  # ids whose candidates are listed: each is compared with every name


@dataclass(frozen=True, slots=True)
class Ids:
    """The ids of an optimizer. ``groups``: None when it has none. ``state_shapes``: the shapes of each id's states."""

    groups: tuple[tuple[int, ...], ...] | None
    every: tuple[int, ...]
    state_shapes: Mapping[int, StateShapes]

    @classmethod
    def of(cls, optim: OptimState, source: str) -> Ids:
        """Collect the ids of ``optim``. Raises SourceCorruptError for a state that no group lists, or an id that two
        groups list.
        """
        shaped = shaped_states(optim)
        state_shapes = {
            key: shapes_of_states(states, shaped) for key, states in optim.state.items() if isinstance(key, int)
        }
        if optim.param_groups is None:
            every = tuple(sorted(state_shapes))
            return cls(None, every, state_shapes)
        groups = tuple(
            tuple(key for key in group_params(group) or () if isinstance(key, int)) for group in optim.param_groups
        )
        every = tuple(chain(*groups))
        known = set(every)
        wrong = [f"id {key} has states, and no group lists it" for key in state_shapes if key not in known]
        wrong += [f"id {key} is listed {every.count(key)} times" for key in repeated(every)]
        if wrong:
            raise contradicted(f"the ids of the optimizer of {source} contradict each other", wrong)
        return cls(groups, every, {key: state_shapes.get(key, frozenset()) for key in every})


def repeated(keys: Sequence[ParamKey]) -> list[ParamKey]:
    seen: set[ParamKey] = set()
    return list(dict.fromkeys(key for key in keys if key in seen or seen.add(key)))  # type: ignore[func-returns-value]


def contradicted(what: str, details: Sequence[str]) -> SourceCorruptError:
    return SourceCorruptError(
        what,
        details=details,
        why="it belongs to a different model, or to another version of this one",
        next_step="give the units, the reference or the parameters of the model that was saved",
    )


def name_ids(ids: Ids, order: ParameterOrder, source: str) -> dict[ParamKey, ParamKey]:
    """The name of each id; there must be at least one id. ``source`` names the checkpoint in errors.

    Raises SourceCorruptError for an order that does not fit, NeedsInformationError for one that fits in several ways.
    """
    if order.groups is not None:
        return _by_groups(ids, order, order.groups, source)
    if ids.groups is None:
        return _ungrouped(ids, order, source)
    if not order.ordered:
        return _by_shapes(ids, order.names, order, source)
    return _distribute(ids, ids.groups, order, source)


def _required_names(order: ParameterOrder) -> tuple[str, ...]:
    return tuple(name for name in order.names if name not in order.optional)


def _misfits(ids: Ids, names: Sequence[str], order: ParameterOrder) -> list[str]:
    """Every id whose states do not match the shape of its name."""
    misfits = []
    for number, name in zip(ids.every, names, strict=False):
        state_shapes = ids.state_shapes[number]
        if not fits(order.shape(name), state_shapes):
            shapes = ", ".join(str(list(shape)) for shape in sorted(state_shapes))
            misfits.append(f"id {number} has states of shape {shapes}, {name} is {list(order.shape(name) or ())}")
    return misfits


def _by_groups(
    ids: Ids, order: ParameterOrder, groups: tuple[tuple[str, ...], ...], source: str
) -> dict[ParamKey, ParamKey]:
    """If the order has the groups, each id's name follows from its place; lengths and shapes must prove it."""
    id_groups = ids.groups
    if id_groups is not None and [len(group) for group in id_groups] != [len(group) for group in groups]:
        wrong = [
            f"groups of {', '.join(str(len(group)) for group in id_groups)} ids in the optimizer",
            f"groups of {', '.join(str(len(group)) for group in groups)} parameters in {order.source}",
        ]
        raise contradicted(f"the optimizer of {source} does not fit {order.source}", wrong)
    names = tuple(chain(*groups))
    if id_groups is None and ids.every[-1] >= len(names):
        raise contradicted(
            f"the optimizer of {source} does not fit {order.source}",
            [f"id {ids.every[-1]} is beyond the {plural(len(names), 'parameter')} of the groups"],
        )
    taken = names if id_groups is not None else tuple(names[number] for number in ids.every)
    _require_fit(ids, taken, order, source)
    return dict(zip(ids.every, taken, strict=True))


def _require_fit(ids: Ids, names: Sequence[str], order: ParameterOrder, source: str) -> None:
    wrong = _misfits(ids, names, order)
    if wrong:
        raise contradicted(f"the optimizer of {source} does not fit {order.source}", wrong)


def _ungrouped(ids: Ids, order: ParameterOrder, source: str) -> dict[ParamKey, ParamKey]:
    """Without groups, an id is an index into the names of an explicit order; other orders leave only the shapes."""
    if not order.explicit:
        return _by_shapes(ids, order.names, order, source)
    if ids.every[-1] >= len(order.names):
        wrong = [f"id {ids.every[-1]} is beyond the {plural(len(order.names), 'parameter')} listed"]
        raise contradicted(f"the optimizer of {source} does not fit {order.source}", wrong)
    names = [order.names[number] for number in ids.every]
    _require_fit(ids, names, order, source)
    return dict(zip(ids.every, names, strict=True))


def _by_shapes(ids: Ids, names: Sequence[str], order: ParameterOrder, source: str) -> dict[ParamKey, ParamKey]:
    """The names have no order, so only shapes can decide."""
    shapes = [order.shape(name) for name in names]
    state_shapes = [ids.state_shapes[number] for number in ids.every]

    def possible(number: int, name: int) -> bool:
        return fits(shapes[name], state_shapes[number])

    _require_enough(ids, names, order, source)
    answer = in_any_order(len(ids.every), len(names), possible)
    if answer is None:
        why = "does not say in which groups they are" if order.ordered else "does not keep the order of the parameters"
        raise _ambiguous(ids, source, order, f"{order.source} {why}", _possible_names(ids, names, possible))
    return {number: names[name] for number, name in zip(ids.every, answer, strict=True)}


def _require_enough(ids: Ids, names: Sequence[str], order: ParameterOrder, source: str) -> None:
    """Raises SourceCorruptError if ids outnumber names, or an id's states fit no name at all."""
    wrong = []
    if len(names) < len(ids.every):
        wrong.append(
            f"the optimizer has {plural(len(ids.every), 'id')}, {order.source} {plural(len(names), 'parameter')}"
        )
        wrong += _misfits(ids, names, order)
    shapes = {order.shape(name) for name in names}
    for number in ids.every:
        state_shapes = ids.state_shapes[number]
        if state_shapes and not any(fits(shape, state_shapes) for shape in shapes):
            text = ", ".join(str(list(shape)) for shape in sorted(state_shapes))
            wrong.append(f"id {number} has states of shape {text}, which no parameter of {order.source} has")
    if wrong:
        raise contradicted(f"the optimizer of {source} does not fit {order.source}", list(dict.fromkeys(wrong)))


def _possible_names(ids: Ids, names: Sequence[str], possible: Callable[[int, int], bool]) -> list[str]:
    """The possible names of each of the first ids, one line each, for messages."""
    lines = []
    for at, number in enumerate(ids.every[:_CANDIDATES]):
        possible_names = [names[name] for name in range(len(names)) if possible(at, name)]
        if len(possible_names) > 1:
            lines.append(
                f"id {number} may be {', '.join(possible_names[:4])}{' ...' if len(possible_names) > 4 else ''}"
            )
    return lines


def _distribute(
    ids: Ids, groups: Sequence[Sequence[int]], order: ParameterOrder, source: str
) -> dict[ParamKey, ParamKey]:
    """If some names have no id, or their groups are not known: use the only way to distribute them in order."""
    _require_enough(ids, order.names, order, source)
    required = _required_names(order)
    for pool in dict.fromkeys([required, order.names] if len(required) == len(ids.every) else [order.names]):
        answers = _names_in_order(ids, groups, pool, order)
        if answers is None:
            raise _ambiguous(ids, source, order, "there are more ways to name them than can be tried", [])
        if len(answers) > 1:
            what = "which of them it has" if len(groups) == 1 else "which group has which of them"
            why = f"{plural(len(pool), 'parameter', 'are')} possible, and their shapes do not decide {what}"
            raise _ambiguous(ids, source, order, why, _differences(ids, pool, answers))
        if answers:
            return {number: pool[name] for number, name in zip(ids.every, answers[0], strict=True)}
    wrong = _misfits(ids, required if len(required) == len(ids.every) else order.names, order)
    if len(order.names) != len(ids.every):
        wrong.insert(
            0,
            f"the optimizer has {plural(len(ids.every), 'id')}, {order.source} {plural(len(order.names), 'parameter')}",
        )
    raise contradicted(f"the optimizer of {source} does not fit {order.source}", wrong)


def _names_in_order(
    ids: Ids, groups: Sequence[Sequence[int]], names: Sequence[str], order: ParameterOrder
) -> list[Answer] | None:
    shapes = [order.shape(name) for name in names]
    state_shapes = [ids.state_shapes[number] for number in ids.every]
    return in_order(
        [len(group) for group in groups], len(names), lambda number, name: fits(shapes[name], state_shapes[number])
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
        options += [] if order.explicit else ["--buffers GLOB for the model keys that are not parameters"]
    elif not order.ordered:
        options.append("--parameters FILE (the names in the order of model.parameters())")
        options.append("--reference PATH of a torch or DCP checkpoint of this model")
    options.append("--units FILE, which also says the parameters of every group")
    return NeedsInformationError(
        f"{order.source} cannot name the {len(ids.every)} optimizer ids of {source} for certain",
        details=candidates,
        why=why,
        next_step=f"add {', or '.join(options)}",
    )
