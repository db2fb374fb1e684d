"""Optimizer keys: ids to names and names to ids, for every layout, by an order that is stated and proved.

Ids are what ``torch.optim`` gives: group by group, inside a group in the order of ``model.parameters()``, a shared
parameter once (``FSDP.rekey_optim_state_dict``). The proof: as many ids as parameters, and every state in a shape that
its parameter can have. A map that contradicts either is refused with all contradictions, one that is not the only
possible one with the candidates.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from fsdpckpt.errors import NeedsInformationError
from fsdpckpt.ir.checkpoint import Checkpoint, Note, OptimState, ParamKey, group_params
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.transform.id_names import Ids, contradicted, name_ids, repeated
from fsdpckpt.transform.parameter_order import ParameterOrder, contradictions, fits, is_flat, stated_shapes

__all__ = ["is_keyed_by_id", "to_ids", "to_names"]


def is_keyed_by_id(optim: OptimState) -> bool:
    """Whether the parameters are ids. What the groups list decides: users put entries of their own into ``state``."""
    listed = [key for group in optim.param_groups or () for key in group_params(group) or ()]
    keys = listed or list(optim.state)
    return bool(keys) and all(type(key) is int for key in keys)


def to_names(checkpoint: Checkpoint, order: ParameterOrder, others: Sequence[ParameterOrder] = ()) -> Checkpoint:
    """The same with the optimizer keyed by name. ``others`` are further sources, which must agree with ``order``.

    Raises SourceCorruptError for an order that does not fit, NeedsInformationError for one that fits in several ways.
    """
    optim = checkpoint.optim
    if optim is None or not is_keyed_by_id(optim):
        return checkpoint
    ids = Ids.of(optim, checkpoint.source)
    full = order.with_shapes_of(others)
    names = name_ids(ids, full, checkpoint.source)
    _require_agreement(checkpoint, full, others, [str(name) for name in names.values()])
    _require_param_names(optim, names, order, checkpoint)
    stated = sum(1 for number in ids.every if ids.stated[number])
    note = Note(
        "rekeyed",
        f"{len(ids.every)} optimizer ids became names, from {order.source}; the states of {stated} parameters have the "
        "shapes that this needs",
    )
    renamed = _rekeyed(optim, names, checkpoint.source)
    return replace(checkpoint, optim=renamed, notes=(*checkpoint.notes, note))


def to_ids(checkpoint: Checkpoint, order: ParameterOrder, others: Sequence[ParameterOrder] = ()) -> Checkpoint:
    """The same with the optimizer keyed by id; groups list their parameters in the order of their ids. See above."""
    optim = checkpoint.optim
    if optim is None or is_keyed_by_id(optim):
        return checkpoint
    full = order.with_shapes_of(others)
    listed = _listed(optim, full, checkpoint.source)
    _require_known(checkpoint, listed, full)
    _require_agreement(checkpoint, full, others, [clean(name) for name in chain(*listed)])
    numbered = [_sorted_group(group, index, full, checkpoint) for index, group in enumerate(listed)]
    ids: dict[ParamKey, ParamKey] = {name: number for number, name in enumerate(chain(*numbered))}
    note = Note("rekeyed", f"{len(ids)} optimizer keys became ids, in the order of {order.source}")
    renamed = _rekeyed(optim, ids, checkpoint.source)
    return replace(checkpoint, optim=renamed, notes=(*checkpoint.notes, note))


def _require_agreement(
    checkpoint: Checkpoint, used: ParameterOrder, others: Sequence[ParameterOrder], keyed: Collection[str]
) -> None:
    """Raises SourceCorruptError with everything in which another source contradicts the one that is used."""
    for other in others:
        wrong = contradictions(used, other, keyed)
        if wrong:
            raise contradicted(f"{used.source} and {other.source} of {checkpoint.source} contradict each other", wrong)


def _require_param_names(
    optim: OptimState, names: Mapping[ParamKey, ParamKey], order: ParameterOrder, checkpoint: Checkpoint
) -> None:
    """Groups that name their parameters, even if not all do, must name them alike."""
    wrong = []
    for group in optim.param_groups or ():
        told, params = group.get("param_names"), group_params(group) or []
        if not isinstance(told, (list, tuple)) or len(told) != len(params) or any(is_flat(str(name)) for name in told):
            continue
        for key, name in zip(params, told, strict=True):
            mine = str(names.get(key))
            if clean(str(name)) not in (mine, f"module.{mine}"):
                wrong.append(f"id {key} is {clean(str(name))} in param_names, {mine} in {order.source}")
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


def _require_known(checkpoint: Checkpoint, listed: Sequence[Sequence[str]], order: ParameterOrder) -> None:
    """Raises SourceCorruptError for names the order does not have, or states of shapes it does not have."""
    optim = checkpoint.optim
    if optim is None:
        return
    known, every = set(order.names), list(chain(*listed))
    wrong = [f"{name} is not in {order.source}" for name in every if clean(name) not in known]
    wrong += [f"{name} is listed {every.count(name)} times" for name in map(str, repeated(every))]
    here = set(every)
    unlisted = [key for key in optim.state if isinstance(key, str) and key not in here and clean(key) in known]
    wrong += [f"{key} has states, and no group lists it" for key in unlisted]
    for name in every:
        stated = stated_shapes(optim.state.get(name, {}))
        shape = order.shape(clean(name))
        if not fits(shape, stated):
            text = ", ".join(str(list(one)) for one in sorted(stated))
            wrong.append(f"{name} has states of shape {text}, and is {list(shape or ())} in {order.source}")
    if wrong:
        raise contradicted(f"the optimizer of {checkpoint.source} does not fit {order.source}", wrong)


def _sorted_group(names: Sequence[str], index: int, order: ParameterOrder, checkpoint: Checkpoint) -> list[str]:
    """One group's names in the order of their ids."""
    told = order.groups
    if told is not None:
        place = {name: at for at, name in enumerate(told[index])} if index < len(told) else {}
        stray = [name for name in names if clean(name) not in place]
        if stray:
            wrong = [f"{name} is not in group {index} of {order.source}" for name in stray]
            raise contradicted(f"the groups of {checkpoint.source} do not fit {order.source}", wrong)
        return sorted(names, key=lambda name: place[clean(name)])
    if not order.certain and len(names) > 1:
        raise NeedsInformationError(
            f"the optimizer of {checkpoint.source} cannot get ids in the order of {order.source}",
            why=f"{order.source} does not keep the order of the parameters, and ids count in it",
            next_step="add --parameters FILE (model.parameters(), one name a line), --units FILE, or --reference PATH "
            "of a torch or DCP checkpoint of this model",
        )
    place = {name: at for at, name in enumerate(order.names)}
    found = sorted(names, key=lambda name: place[clean(name)])
    if found != list(names) and any(note.kind == "groups-rebuilt" for note in checkpoint.notes):
        raise NeedsInformationError(
            f"the optimizer of {checkpoint.source} lists its parameters in another order than {order.source}",
            why="its groups were rebuilt from equal hyper-parameters, so there may have been more of them, and ids "
            "count group by group",
            next_step="add --units FILE, which says the parameters of every group",
        )
    return found


def _rekeyed(optim: OptimState, keys: Mapping[ParamKey, ParamKey], source: str) -> OptimState:
    """``keys``: old to new, in the order in which groups list the new ones. What it does not have, a user put there."""
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
    """``param_names`` stay in step with ``params``, unless they were in the order of ids when ``params`` were not."""
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
    keys, told = [clean(str(key)) for key in params], [clean(str(name)) for name in names]
    return keys != told and sorted(keys) == sorted(told)
