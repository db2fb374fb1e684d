"""Rekeys an optimizer from ids to names and from names to ids, for every layout, by a proved parameter order.

``torch.optim`` numbers ids group by group, and within a group in the order of ``model.parameters()``, a shared
parameter once (``FSDP.rekey_optim_state_dict``). The proof: there are as many ids as parameters, and every state has a
shape that its parameter allows. An order that contradicts either is refused, and the error lists all contradictions; if
several maps are possible, the error lists the candidates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeAlias

from fsdpckpt.errors import NeedsInformationError, SourceCorruptError
from fsdpckpt.ir.checkpoint import Checkpoint, KeyType, Note, OptimState, ParamKey, group_params
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.units import Units
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.text import plural, some_of
from fsdpckpt.transform.assignment import Answer, Fits, in_any_order, in_order
from fsdpckpt.transform.parameter_order import (
    ParameterOrder,
    StateShapes,
    contradictions,
    fits,
    listed_param_names,
    parameter_orders,
    shaped_states,
    shapes_of_states,
)

_NewKeys: TypeAlias = Mapping[ParamKey, ParamKey]  # by the old keys
_IDS_LISTED = 48  # ids whose candidates a message lists: each is compared with every name


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
    order = order.with_shapes_of(others)
    names = _name_ids(ids, order)
    _require_agreement(checkpoint.source, order, others, [str(name) for name in names.values()])
    _require_param_names(checkpoint.source, optim, names, order)
    message = f"{plural(len(names), 'optimizer id')} became {plural(len(names), 'name')}, from {order.source}; the "
    with_shapes = sum(map(bool, ids.state_shapes))
    message += f"states of {plural(with_shapes, 'parameter')} have the shapes that this needs"
    return _with_keys(checkpoint, optim, names, message)


def to_ids(checkpoint: Checkpoint, order: ParameterOrder, others: Sequence[ParameterOrder] = ()) -> Checkpoint:
    """Key the optimizer by id; groups list their parameters in the order of their ids.

    Arguments and errors as for ``to_names``.
    """
    optim = checkpoint.optim
    if optim is None or optim.key_type != "name":
        return checkpoint
    order = order.with_shapes_of(others)
    groups = _grouped_names(optim, order, checkpoint.source)
    _require_names_fit(optim, checkpoint.source, groups, order)
    _require_agreement(checkpoint.source, order, others, [clean(name) for name in chain(*groups)])
    names = chain(*(_in_id_order(group, index, order, checkpoint) for index, group in enumerate(groups)))
    ids: _NewKeys = {name: number for number, name in enumerate(names)}
    if optim.param_groups is not None:
        optim = replace(optim, param_groups=[_sorted_group(group, ids) for group in optim.param_groups])
    message = f"{plural(len(ids), 'optimizer key')} became {plural(len(ids), 'id')}, in the order of {order.source}"
    return _with_keys(checkpoint, optim, ids, message)


def _require_agreement(source: str, used: ParameterOrder, others: Sequence[ParameterOrder], names: list[str]) -> None:
    """Raises SourceCorruptError if another order contradicts the one in use. ``names``: the optimizer's parameters."""
    for other in others:
        wrong = contradictions(used, other, names)
        if wrong:
            raise _contradicted(f"{used.source} and {other.source} of {source} contradict each other", wrong)


def _require_param_names(source: str, optim: OptimState, names: _NewKeys, order: ParameterOrder) -> None:
    """Raises SourceCorruptError when a group has ``param_names`` that differ from ``names``."""
    wrong = [
        f"id {key} is {name} in param_names, {names[key]} in {order.source}"
        for group in optim.param_groups or ()
        for key, name in zip(group_params(group) or (), listed_param_names(group) or (), strict=False)
        if name not in (names[key], f"module.{names[key]}")
    ]
    if wrong:
        raise _contradicted(f"the param_names of {source} contradict {order.source}", wrong)


def _grouped_names(optim: OptimState, order: ParameterOrder, source: str) -> list[list[str]]:
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


def _require_names_fit(optim: OptimState, source: str, groups: Sequence[Sequence[str]], order: ParameterOrder) -> None:
    """Raises SourceCorruptError for a name that the order lacks, is grouped twice or never, or has other shapes."""
    names, in_order, shaped = list(chain(*groups)), set(order.names), shaped_states(optim)
    keys = dict.fromkeys((*names, *map(str, optim.param_keys())))
    wrong = [f"{name} is not in {order.source}" for name in keys if clean(name) not in in_order]
    wrong += _group_flaws(names, [key for key in optim.state if clean(str(key)) in in_order])
    for name in names:
        state_shapes = shapes_of_states(optim.state.get(name, {}), shaped)
        shape = order.shape(clean(name))
        if not fits(shape, state_shapes):
            text = _shapes_text(state_shapes)
            wrong.append(f"{name} has states of shape {text}, and is {list(shape or ())} in {order.source}")
    if wrong:
        raise _does_not_fit(source, order, wrong)


def _in_id_order(names: Sequence[str], index: int, order: ParameterOrder, checkpoint: Checkpoint) -> list[str]:
    """The names of group ``index`` in the order of their ids."""
    groups = order.groups
    in_order = order.names if groups is None else groups[index] if index < len(groups) else ()
    position = {name: at for at, name in enumerate(in_order)}
    wrong = [f"{name} is not in group {index} of {order.source}" for name in names if clean(name) not in position]
    if wrong:
        raise _contradicted(f"the groups of {checkpoint.source} do not fit {order.source}", wrong)
    if groups is None and not order.ordered and len(names) > 1:
        raise NeedsInformationError(
            f"the optimizer of {checkpoint.source} cannot get ids in the order of {order.source}",
            why=f"{order.source} does not keep the order of the parameters, and ids count in it",
            next_step="add --parameters FILE (model.parameters(), one name a line), --units FILE, or --reference PATH "
            "of a torch or DCP checkpoint of this model",
        )
    result = sorted(names, key=lambda name: position[clean(name)])
    rebuilt = any(note.kind == "groups-rebuilt" for note in checkpoint.notes)
    if groups is None and rebuilt and result != list(names):
        raise NeedsInformationError(
            f"the optimizer of {checkpoint.source} lists its parameters in a different order than {order.source}",
            why="its groups were rebuilt from equal hyper-parameters, so there may have been more of them, and ids "
            "count group by group",
            next_step="add --units FILE, which says the parameters of every group",
        )
    return result


def _with_keys(checkpoint: Checkpoint, optim: OptimState, keys: _NewKeys, message: str) -> Checkpoint:
    """``checkpoint`` with new ``keys`` in its optimizer, and a note. Entries that a user added keep theirs.

    Raises SourceCorruptError if such an entry has the new key of a parameter.
    """
    new = set(keys.values())
    both = [str(key) for key in optim.state if key not in keys and key in new]
    if both:
        raise _contradicted(f"the optimizer of {checkpoint.source} has states under both kinds of key", both)
    optim = optim.renamed({key: keys.get(key, key) for key in optim.all_keys()})
    return replace(checkpoint, optim=optim, notes=(*checkpoint.notes, Note("rekeyed", message)))


def _sorted_group(group: dict[Key, Value], ids: _NewKeys) -> dict[Key, Value]:
    """``group`` with its parameters in the order of their ids.

    ``param_names`` are sorted with ``params``, unless both list the same names in different orders: then ``params``
    alone had been sorted by name, by ``FSDP.rekey_optim_state_dict``.
    """
    params, names = group_params(group), group.get("param_names")
    if params is None:
        return group
    indices = sorted(range(len(params)), key=lambda index: ids[params[index]])
    result: dict[Key, Value] = {**group, "params": [params[index] for index in indices]}
    if isinstance(names, (list, tuple)) and len(names) == len(params):
        keys, param_names = [clean(str(key)) for key in params], [clean(str(name)) for name in names]
        if keys == param_names or sorted(keys) != sorted(param_names):
            result["param_names"] = type(names)(names[index] for index in indices)
    return result


@dataclass(frozen=True, slots=True)
class _Ids:
    """The ids of the optimizer of ``source``, group by group, and the shapes of each one's states.

    ``group_sizes``: None without groups; then ``numbers`` are the ids that have states.
    """

    source: str
    group_sizes: tuple[int, ...] | None
    numbers: tuple[int, ...]
    state_shapes: tuple[StateShapes, ...]

    @classmethod
    def of(cls, optim: OptimState, source: str) -> _Ids:
        """Collect the ids of ``optim``. Raises SourceCorruptError for a state that no group lists, or an id that two
        groups list.
        """
        shaped = shaped_states(optim)
        shapes = {key: shapes_of_states(states, shaped) for key, states in optim.state.items() if isinstance(key, int)}
        if optim.param_groups is None:
            numbers, group_sizes = sorted(shapes), None
        else:
            numbers = [key for key in optim.grouped_keys() if isinstance(key, int)]
            group_sizes = tuple(len(group_params(group) or ()) for group in optim.param_groups)
            wrong = [f"id {flaw}" for flaw in _group_flaws(numbers, shapes)]
            if wrong:
                raise _contradicted(f"the ids of the optimizer of {source} contradict each other", wrong)
        return cls(source, group_sizes, tuple(numbers), tuple(shapes.get(key, frozenset()) for key in numbers))

    def named(self, names: Iterable[str]) -> _NewKeys:
        """Each id with its name, from names in the order of the ids."""
        return dict(zip(self.numbers, names, strict=True))

    def may_be(self, names: Sequence[str], order: ParameterOrder) -> Fits:
        """Whether the id at an index of ``numbers`` may be the parameter at an index of ``names``, by their shapes."""
        shapes = [order.shape(name) for name in names]
        return lambda number, name: fits(shapes[name], self.state_shapes[number])


def _group_flaws(grouped: Sequence[ParamKey], with_states: Iterable[ParamKey]) -> list[str]:
    """The keys that have states and are in no group, and those that groups list twice."""
    times = Counter(grouped)
    flaws = [f"{key} has states, and no group lists it" for key in with_states if key not in times]
    return flaws + [f"{key} is listed {count} times" for key, count in times.items() if count > 1]


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


def _name_ids(ids: _Ids, order: ParameterOrder) -> _NewKeys:
    """The name of each id; there must be at least one id.

    Raises SourceCorruptError for an order that does not fit, NeedsInformationError for one that fits in several ways.
    """
    if order.groups is not None:
        return _by_groups(ids, order, order.groups)
    if ids.group_sizes is None and order.authoritative:
        return _by_groups(ids, order, (order.names,))  # an id is an index into the names
    _require_candidates(ids, order)
    if ids.group_sizes is None or not order.ordered:
        return _by_shapes(ids, order)
    return _distribute(ids, ids.group_sizes, order)


def _by_groups(ids: _Ids, order: ParameterOrder, groups: Sequence[Sequence[str]]) -> _NewKeys:
    """If the groups are known, each id's name follows from its position; lengths and shapes must prove it."""
    names = list(chain(*groups))
    wrong = []
    if ids.group_sizes is None:
        if ids.numbers[-1] >= len(names):
            wrong = [f"id {ids.numbers[-1]} is beyond the {plural(len(names), 'parameter')} of {order.source}"]
        else:
            names = [names[number] for number in ids.numbers]
    elif ids.group_sizes != (sizes := tuple(map(len, groups))):
        wrong = [
            f"groups of {', '.join(map(str, ids.group_sizes))} ids in the optimizer",
            f"groups of {', '.join(map(str, sizes))} parameters in {order.source}",
        ]
    wrong = wrong or _misfits(ids, names, order)
    if wrong:
        raise _does_not_fit(ids.source, order, wrong)
    return ids.named(names)


def _by_shapes(ids: _Ids, order: ParameterOrder) -> _NewKeys:
    """If the names have no order, or the ids no groups, only shapes can decide."""
    may_be = ids.may_be(order.names, order)
    answer = in_any_order(len(ids.numbers), len(order.names), may_be)
    if answer is None:
        why = "does not say in which groups they are" if order.ordered else "does not keep the order of the parameters"
        raise _ambiguous(ids, order, f"{order.source} {why}", _candidates(ids, order.names, may_be))
    return ids.named(order.names[index] for index in answer)


def _distribute(ids: _Ids, group_sizes: Sequence[int], order: ParameterOrder) -> _NewKeys:
    """If some names have no id, or their groups are not known: use the only way to distribute them in order."""
    certain = tuple(name for name in order.names if name not in order.uncertain)
    choices = [certain, order.names] if len(certain) == len(ids.numbers) else [order.names]
    for names in dict.fromkeys(choices):
        answers = in_order(group_sizes, len(names), ids.may_be(names, order))
        if answers is None:
            raise _ambiguous(ids, order, "there are more ways to name them than can be tried")
        if len(answers) > 1:
            what = "which of them it has" if len(group_sizes) == 1 else "which group has which of them"
            why = f"{plural(len(names), 'parameter', 'are')} possible, and their shapes do not decide {what}"
            raise _ambiguous(ids, order, why, _differences(ids, names, answers))
        if answers:
            return ids.named(names[index] for index in answers[0])
    raise _does_not_fit(ids.source, order, _count_mismatch(ids, order) + _misfits(ids, choices[0], order))


def _misfits(ids: _Ids, names: Sequence[str], order: ParameterOrder) -> list[str]:
    """Every id whose states do not match the shape of its name."""
    return [
        f"id {number} has states of shape {_shapes_text(state_shapes)}, {name} is {list(order.shape(name) or ())}"
        for number, state_shapes, name in zip(ids.numbers, ids.state_shapes, names, strict=False)
        if not fits(order.shape(name), state_shapes)
    ]


def _count_mismatch(ids: _Ids, order: ParameterOrder) -> list[str]:
    of_ids, of_names = len(ids.numbers), len(order.names)
    text = f"the optimizer has {plural(of_ids, 'id')}, {order.source} {plural(of_names, 'parameter')}"
    return [text] if of_ids != of_names else []


def _require_candidates(ids: _Ids, order: ParameterOrder) -> None:
    """Raises SourceCorruptError if ids outnumber names, or an id's states fit no name at all."""
    wrong = []
    if len(order.names) < len(ids.numbers):
        wrong = _count_mismatch(ids, order) + _misfits(ids, order.names, order)
    shapes = {order.shape(name) for name in order.names}
    for number, state_shapes in zip(ids.numbers, ids.state_shapes, strict=True):
        if state_shapes and not any(fits(shape, state_shapes) for shape in shapes):
            text = _shapes_text(state_shapes)
            wrong.append(f"id {number} has states of shape {text}, which no parameter of {order.source} has")
    if wrong:
        raise _does_not_fit(ids.source, order, wrong)


def _candidates(ids: _Ids, names: Sequence[str], may_be: Fits) -> list[str]:
    """The possible names of each of the first ids, one line each, for messages."""
    lines = []
    for at, number in enumerate(ids.numbers[:_IDS_LISTED]):
        candidates = [name for index, name in enumerate(names) if may_be(at, index)]
        if len(candidates) > 1:
            lines.append(f"id {number} may be {some_of(candidates, 4)}")
    return lines


def _differences(ids: _Ids, names: Sequence[str], answers: Sequence[Answer]) -> list[str]:
    return [
        f"id {number} may be {names[first]} or {names[second]}"
        for number, first, second in zip(ids.numbers, *answers[:2], strict=True)
        if first != second
    ]


def _ambiguous(ids: _Ids, order: ParameterOrder, why: str, candidates: Sequence[str] = ()) -> NeedsInformationError:
    options = []
    if len(order.names) > len(ids.numbers):
        options.append("--parameters FILE (the names of the optimizer's parameters in the order of model.parameters())")
        options += [] if order.authoritative else ["--buffers GLOB for the model keys that are not parameters"]
    elif not order.ordered:
        options.append("--parameters FILE (the names in the order of model.parameters())")
        options.append("--reference PATH of a torch or DCP checkpoint of this model")
    options.append("--units FILE, which also says the parameters of every group")
    return NeedsInformationError(
        f"{order.source} cannot name the {len(ids.numbers)} optimizer ids of {ids.source} for certain",
        details=candidates,
        why=why,
        next_step=f"add {', or '.join(options)}",
    )
