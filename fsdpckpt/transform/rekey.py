"""Rekeys an optimizer from ids to names and from names to ids, for every layout, by a proved parameter order.

``torch.optim`` numbers ids group by group, and within a group in the order of ``model.parameters()``, a shared
parameter once (``FSDP.rekey_optim_state_dict``). The proof: there are as many ids as parameters, and every state has a
shape that its parameter allows. An order that contradicts either is refused, and the error lists all contradictions; if
several maps are possible, the error lists the candidates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

from fsdpckpt.errors import NeedsInformationError, SourceCorruptError
from fsdpckpt.ir.checkpoint import Checkpoint, KeyType, Note, OptimState, ParamKey, group_params
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.units import Units
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.layouts.flattened import is_flat_key
from fsdpckpt.text import plural
from fsdpckpt.transform.assignment import Answer, Fits, in_any_order, in_order
from fsdpckpt.transform.parameter_order import (
    ParameterOrder,
    StateShapes,
    contradictions,
    fits,
    parameter_orders,
    shaped_states,
    shapes_of_states,
)

_Key = TypeVar("_Key", int, str)


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
    ids = _Ids.of(optim, checkpoint.source)
    full = order.with_shapes_of(others)
    names = _name_ids(ids, full, checkpoint.source)
    _require_agreement(checkpoint, full, others, [str(name) for name in names.values()])
    _require_param_names(optim, names, order, checkpoint)
    count, shaped = len(ids.numbers), sum(1 for number in ids.numbers if ids.state_shapes[number])
    message = f"{plural(count, 'optimizer id')} became {plural(count, 'name')}, from {order.source}; the "
    message += f"states of {plural(shaped, 'parameter')} have the shapes that this needs"
    return _with_keys(checkpoint, optim, names, message)


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
    message = f"{plural(len(ids), 'optimizer key')} became {plural(len(ids), 'id')}, in the order of {order.source}"
    return _with_keys(checkpoint, optim, ids, message)


def _require_agreement(
    checkpoint: Checkpoint, used: ParameterOrder, others: Sequence[ParameterOrder], keyed: Collection[str]
) -> None:
    """Raises SourceCorruptError with everything in which another source contradicts the one in use."""
    for other in others:
        wrong = contradictions(used, other, keyed)
        if wrong:
            raise _contradicted(f"{used.source} and {other.source} of {checkpoint.source} contradict each other", wrong)


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
        raise _contradicted(f"the param_names of {checkpoint.source} contradict {order.source}", wrong)


def _listed(optim: OptimState, order: ParameterOrder, source: str) -> list[list[str]]:
    """The names that each group lists; without groups, those of an authoritative order."""
    if optim.param_groups is not None:
        return [[str(key) for key in group_params(group) or ()] for group in optim.param_groups]
    if not order.authoritative:
        raise NeedsInformationError(
            f"the optimizer of {source} has no param_groups, so {order.source} does not say which ids its states get",
            why="ids count in the order of the groups, over parameters without state too",
            next_step="add --parameters FILE (the parameters of the optimizer, one name a line) or --units FILE",
        )
    return [list(group) for group in order.groups] if order.groups is not None else [list(order.names)]


def _require_known(optim: OptimState, source: str, listed: Sequence[Sequence[str]], order: ParameterOrder) -> None:
    """Raises SourceCorruptError for names the order does not have, or states of shapes it does not have."""
    names, in_order, shaped = list(chain(*listed)), set(order.names), shaped_states(optim)
    in_groups = set(names)
    wrong = [f"{name} is not in {order.source}" for name in names if clean(name) not in in_order]
    wrong += [f"{name} is listed {names.count(name)} times" for name in _repeated(names)]
    unlisted = [key for key in optim.state if isinstance(key, str) and key not in in_groups and clean(key) in in_order]
    wrong += [f"{key} has states, and no group lists it" for key in unlisted]
    for name in names:
        state_shapes = shapes_of_states(optim.state.get(name, {}), shaped)
        shape = order.shape(clean(name))
        if not fits(shape, state_shapes):
            text = _shapes_text(state_shapes)
            wrong.append(f"{name} has states of shape {text}, and is {list(shape or ())} in {order.source}")
    if wrong:
        raise _does_not_fit(source, order, wrong)


def _sorted_group(names: Sequence[str], index: int, order: ParameterOrder, checkpoint: Checkpoint) -> list[str]:
    """One group's names in the order of their ids."""
    groups = order.groups
    if groups is not None:
        position = {name: at for at, name in enumerate(groups[index])} if index < len(groups) else {}
        wrong = [f"{name} is not in group {index} of {order.source}" for name in names if clean(name) not in position]
        if wrong:
            raise _contradicted(f"the groups of {checkpoint.source} do not fit {order.source}", wrong)
        return sorted(names, key=lambda name: position[clean(name)])
    if not order.ordered and len(names) > 1:
        raise NeedsInformationError(
            f"the optimizer of {checkpoint.source} cannot get ids in the order of {order.source}",
            why=f"{order.source} does not keep the order of the parameters, and ids count in it",
            next_step="add --parameters FILE (model.parameters(), one name a line), --units FILE, or --reference PATH "
            "of a torch or DCP checkpoint of this model",
        )
    position = {name: at for at, name in enumerate(order.names)}
    ordered = sorted(names, key=lambda name: position[clean(name)])
    if ordered != list(names) and any(note.kind == "groups-rebuilt" for note in checkpoint.notes):
        raise NeedsInformationError(
            f"the optimizer of {checkpoint.source} lists its parameters in a different order than {order.source}",
            why="its groups were rebuilt from equal hyper-parameters, so there may have been more of them, and ids "
            "count group by group",
            next_step="add --units FILE, which says the parameters of every group",
        )
    return ordered


def _with_keys(
    checkpoint: Checkpoint, optim: OptimState, keys: Mapping[ParamKey, ParamKey], message: str
) -> Checkpoint:
    """``checkpoint`` with new keys in its optimizer, and a note. Entries that a user added stay.

    ``keys``: old to new, in the order in which groups list the new ones.
    """
    state = {keys.get(key, key): states for key, states in optim.state.items()}
    if len(state) != len(optim.state):
        new = set(keys.values())
        both = [str(key) for key in optim.state if key not in keys and key in new]
        raise _contradicted(f"the optimizer of {checkpoint.source} has states under both kinds of key", both)
    position = {key: number for number, key in enumerate(keys)}
    groups = optim.param_groups and [_rekeyed_group(group, keys, position) for group in optim.param_groups]
    notes = (*checkpoint.notes, Note("rekeyed", message))
    return replace(checkpoint, optim=OptimState(state, groups, optim.extra), notes=notes)


def _rekeyed_group(
    group: Mapping[Key, Value], keys: Mapping[ParamKey, ParamKey], position: Mapping[ParamKey, int]
) -> dict[Key, Value]:
    """Rekey one group. ``param_names`` stay in step with ``params``, unless they were in the order of ids and
    ``params`` were not.
    """
    params = group_params(group)
    if params is None:
        return dict(group)
    order = sorted(range(len(params)), key=lambda index: position[params[index]])
    changed: dict[Key, Value] = {**group, "params": [keys[params[index]] for index in order]}
    names = group.get("param_names")
    if isinstance(names, (list, tuple)) and len(names) == len(params) and not _in_different_order(params, names):
        changed["param_names"] = type(names)(names[index] for index in order)
    return changed


def _in_different_order(params: Sequence[ParamKey], names: Sequence[Value]) -> bool:
    """Whether both list the same names in different orders, as after ``FSDP.rekey_optim_state_dict``."""
    keys, param_names = [clean(str(key)) for key in params], [clean(str(name)) for name in names]
    return keys != param_names and sorted(keys) == sorted(param_names)


_CANDIDATES = 48  # ids whose candidates are listed: each is compared with every name


@dataclass(frozen=True, slots=True)
class _Ids:
    """The ids of an optimizer. ``groups``: None when it has none. ``state_shapes``: the shapes of each id's states."""

    groups: tuple[tuple[int, ...], ...] | None
    numbers: tuple[int, ...]
    state_shapes: Mapping[int, StateShapes]

    @classmethod
    def of(cls, optim: OptimState, source: str) -> _Ids:
        """Collect the ids of ``optim``. Raises SourceCorruptError for a state that no group lists, or an id that two
        groups list.
        """
        shaped = shaped_states(optim)
        state_shapes = {
            key: shapes_of_states(states, shaped) for key, states in optim.state.items() if isinstance(key, int)
        }
        if optim.param_groups is None:
            return cls(None, tuple(sorted(state_shapes)), state_shapes)
        groups = tuple(
            tuple(key for key in group_params(group) or () if isinstance(key, int)) for group in optim.param_groups
        )
        numbers = tuple(chain(*groups))
        listed = set(numbers)
        wrong = [f"id {key} has states, and no group lists it" for key in state_shapes if key not in listed]
        wrong += [f"id {key} is listed {numbers.count(key)} times" for key in _repeated(numbers)]
        if wrong:
            raise _contradicted(f"the ids of the optimizer of {source} contradict each other", wrong)
        return cls(groups, numbers, {key: state_shapes.get(key, frozenset()) for key in numbers})

    def may_be(self, names: Sequence[str], order: ParameterOrder) -> Fits:
        """Whether the id at an index of ``numbers`` may be the parameter at an index of ``names``, by their shapes."""
        shapes = [order.shape(name) for name in names]
        state_shapes = [self.state_shapes[number] for number in self.numbers]
        return lambda number, name: fits(shapes[name], state_shapes[number])


def _repeated(keys: Sequence[_Key]) -> list[_Key]:
    return [key for key, times in Counter(keys).items() if times > 1]


def _shapes_text(shapes: StateShapes) -> str:
    return ", ".join(str(list(shape)) for shape in sorted(shapes))


def _contradicted(what: str, details: Sequence[str]) -> SourceCorruptError:
    return SourceCorruptError(
        what,
        details=details,
        why="it belongs to a different model, or to another version of this one",
        next_step="give the units, the reference or the parameters of the model that was saved",
    )


def _does_not_fit(source: str, order: ParameterOrder, details: Sequence[str]) -> SourceCorruptError:
    return _contradicted(f"the optimizer of {source} does not fit {order.source}", details)


def _name_ids(ids: _Ids, order: ParameterOrder, source: str) -> dict[ParamKey, ParamKey]:
    """The name of each id; there must be at least one id. ``source`` names the checkpoint in errors.

    Raises SourceCorruptError for an order that does not fit, NeedsInformationError for one that fits in several ways.
    """
    groups = order.groups
    if groups is None and ids.groups is None and order.authoritative:
        groups = (order.names,)  # an id is an index into the names
    if groups is not None:
        return _by_groups(ids, order, groups, source)
    if ids.groups is None or not order.ordered:
        return _by_shapes(ids, order, source)
    return _distribute(ids, ids.groups, order, source)


def _misfits(ids: _Ids, names: Sequence[str], order: ParameterOrder) -> list[str]:
    """Every id whose states do not match the shape of its name."""
    return [
        f"id {number} has states of shape {_shapes_text(ids.state_shapes[number])}, "
        f"{name} is {list(order.shape(name) or ())}"
        for number, name in zip(ids.numbers, names, strict=False)
        if not fits(order.shape(name), ids.state_shapes[number])
    ]


def _by_groups(
    ids: _Ids, order: ParameterOrder, groups: tuple[tuple[str, ...], ...], source: str
) -> dict[ParamKey, ParamKey]:
    """If the groups are known, each id's name follows from its position; lengths and shapes must prove it."""
    names: Sequence[str] = tuple(chain(*groups))
    if ids.groups is None:
        if ids.numbers[-1] >= len(names):
            beyond = f"id {ids.numbers[-1]} is beyond the {plural(len(names), 'parameter')} of {order.source}"
            raise _does_not_fit(source, order, [beyond])
        names = [names[number] for number in ids.numbers]
    elif [len(group) for group in ids.groups] != [len(group) for group in groups]:
        wrong = [
            f"groups of {', '.join(str(len(group)) for group in ids.groups)} ids in the optimizer",
            f"groups of {', '.join(str(len(group)) for group in groups)} parameters in {order.source}",
        ]
        raise _does_not_fit(source, order, wrong)
    wrong = _misfits(ids, names, order)
    if wrong:
        raise _does_not_fit(source, order, wrong)
    return dict(zip(ids.numbers, names, strict=True))


def _by_shapes(ids: _Ids, order: ParameterOrder, source: str) -> dict[ParamKey, ParamKey]:
    """If the names have no order, or the ids no groups, only shapes can decide."""
    names = order.names
    _require_enough(ids, order, source)
    may_be = ids.may_be(names, order)
    answer = in_any_order(len(ids.numbers), len(names), may_be)
    if answer is None:
        why = "does not say in which groups they are" if order.ordered else "does not keep the order of the parameters"
        raise _ambiguous(ids, source, order, f"{order.source} {why}", _possible_names(ids, names, may_be))
    return {number: names[index] for number, index in zip(ids.numbers, answer, strict=True)}


def _require_enough(ids: _Ids, order: ParameterOrder, source: str) -> None:
    """Raises SourceCorruptError if ids outnumber names, or an id's states fit no name at all."""
    wrong = []
    if len(order.names) < len(ids.numbers):
        wrong = [_counts(ids, order), *_misfits(ids, order.names, order)]
    shapes = {order.shape(name) for name in order.names}
    for number in ids.numbers:
        state_shapes = ids.state_shapes[number]
        if state_shapes and not any(fits(shape, state_shapes) for shape in shapes):
            text = _shapes_text(state_shapes)
            wrong.append(f"id {number} has states of shape {text}, which no parameter of {order.source} has")
    if wrong:
        raise _does_not_fit(source, order, list(dict.fromkeys(wrong)))


def _counts(ids: _Ids, order: ParameterOrder) -> str:
    return f"the optimizer has {plural(len(ids.numbers), 'id')}, {order.source} {plural(len(order.names), 'parameter')}"


def _possible_names(ids: _Ids, names: Sequence[str], may_be: Fits) -> list[str]:
    """The possible names of each of the first ids, one line each, for messages."""
    lines = []
    for at, number in enumerate(ids.numbers[:_CANDIDATES]):
        possible_names = [name for index, name in enumerate(names) if may_be(at, index)]
        if len(possible_names) > 1:
            lines.append(
                f"id {number} may be {', '.join(possible_names[:4])}{' ...' if len(possible_names) > 4 else ''}"
            )
    return lines


def _distribute(
    ids: _Ids, groups: Sequence[Sequence[int]], order: ParameterOrder, source: str
) -> dict[ParamKey, ParamKey]:
    """If some names have no id, or their groups are not known: use the only way to distribute them in order."""
    _require_enough(ids, order, source)
    certain = tuple(name for name in order.names if name not in order.uncertain)
    choices = [certain, order.names] if len(certain) == len(ids.numbers) else [order.names]
    for names in dict.fromkeys(choices):
        answers = in_order([len(group) for group in groups], len(names), ids.may_be(names, order))
        if answers is None:
            raise _ambiguous(ids, source, order, "there are more ways to name them than can be tried", [])
        if len(answers) > 1:
            what = "which of them it has" if len(groups) == 1 else "which group has which of them"
            why = f"{plural(len(names), 'parameter', 'are')} possible, and their shapes do not decide {what}"
            raise _ambiguous(ids, source, order, why, _differences(ids, names, answers))
        if answers:
            return {number: names[index] for number, index in zip(ids.numbers, answers[0], strict=True)}
    wrong = _misfits(ids, choices[0], order)
    if len(order.names) != len(ids.numbers):
        wrong.insert(0, _counts(ids, order))
    raise _does_not_fit(source, order, wrong)


def _differences(ids: _Ids, names: Sequence[str], answers: Sequence[Answer]) -> list[str]:
    return [
        f"id {number} may be {names[first]} or {names[second]}"
        for number, first, second in zip(ids.numbers, *answers[:2], strict=True)
        if first != second
    ]


def _ambiguous(
    ids: _Ids, source: str, order: ParameterOrder, why: str, candidates: Sequence[str]
) -> NeedsInformationError:
    options = []
    if len(order.names) > len(ids.numbers):
        options.append("--parameters FILE (the names of the optimizer's parameters in the order of model.parameters())")
        options += [] if order.authoritative else ["--buffers GLOB for the model keys that are not parameters"]
    elif not order.ordered:
        options.append("--parameters FILE (the names in the order of model.parameters())")
        options.append("--reference PATH of a torch or DCP checkpoint of this model")
    options.append("--units FILE, which also says the parameters of every group")
    return NeedsInformationError(
        f"{order.source} cannot name the {len(ids.numbers)} optimizer ids of {source} for certain",
        details=candidates,
        why=why,
        next_step=f"add {', or '.join(options)}",
    )
