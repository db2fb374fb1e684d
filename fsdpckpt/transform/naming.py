"""Finds the name of every id of an optimizer, by a source of the order of parameters, and proves it by shapes.

The proof: there are as many ids as parameters, and every state has a shape that its parameter allows. An order that
contradicts either is refused, and the error lists all contradictions; if several maps are possible, the error lists the
candidates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from fsdpckpt import flags
from fsdpckpt.errors import FsdpckptError, NeedsInformationError, SourceCorruptError
from fsdpckpt.ir import IdRule
from fsdpckpt.ir.listing import divided
from fsdpckpt.ir.optimizer import Optimizer, ParamKey
from fsdpckpt.ir.state_shapes import ShownShapes, StateShapes, fits
from fsdpckpt.text import plural, some_of
from fsdpckpt.transform.assignment import Answer, Fits, in_any_order, in_order, may_fit_in_some_order
from fsdpckpt.transform.model_positions import by_place, counts_over_model
from fsdpckpt.transform.parameter_order import ParameterOrder

NewKeys: TypeAlias = Mapping[ParamKey, ParamKey]
"""The new key of each parameter of an optimizer, by the old one."""

Unnamed: TypeAlias = NeedsInformationError | SourceCorruptError
"""Why ids have no names: several fit, or what is known contradicts the optimizer. The error, for whoever needs them."""

_IDS_LISTED = 48  # ids whose candidates a message lists: each is compared with every name


@dataclass(frozen=True, slots=True)
class OptimizerIds:
    """The ids of the optimizer of ``source``, group by group, and the shapes of each one's states.

    ``group_sizes``: None without groups; then ``numbers`` are the ids in ``state``.
    """

    source: str
    group_sizes: tuple[int, ...] | None
    numbers: tuple[int, ...]
    state_shapes: tuple[StateShapes, ...]

    @classmethod
    def find(cls, optim: Optimizer, source: str) -> OptimizerIds | SourceCorruptError:
        """The ids of ``optim``; an error for a state that no group lists, or an id that two groups list."""
        shown = ShownShapes(optim)
        shapes = {key: shown.of(key) for key in optim.state if isinstance(key, int)}
        if optim.groups is None:
            numbers, group_sizes = sorted(key for key in optim.keys if isinstance(key, int)), None
        else:
            numbers = [key for key in optim.grouped_keys() if isinstance(key, int)]
            group_sizes = tuple(map(len, optim.in_groups()))
            wrong = [f"id {flaw}" for flaw in group_flaws(numbers, shapes)]
            if wrong:
                return contradicted(f"the ids of the optimizer of {source} contradict each other", wrong)
        return cls(source, group_sizes, tuple(numbers), tuple(shapes.get(key, frozenset()) for key in numbers))

    def named(self, names: Iterable[str]) -> NewKeys:
        """Each id with its name, from names in the order of the ids."""
        return dict(zip(self.numbers, names, strict=True))

    def by_group(self) -> list[list[int]]:
        """The ids of each group; without groups, all of them."""
        return divided(self.numbers, self.group_sizes or (len(self.numbers),))

    def over_model(self, rule: IdRule) -> bool:
        """Whether they may count over all parameters of the model: by ``rule``, that of the source, or to be seen."""
        return self.group_sizes is not None and counts_over_model(self.by_group(), rule)

    def may_be(self, names: Sequence[str], order: ParameterOrder) -> Fits:
        """Whether the id at an index of ``numbers`` may be the parameter at an index of ``names``, by their shapes."""
        shapes = [order.shape(name) for name in names]
        return lambda number, name: fits(shapes[name], self.state_shapes[number])


def group_flaws(grouped: Sequence[ParamKey], with_states: Iterable[ParamKey]) -> list[str]:
    """The keys that have states and are in no group, and those that groups list twice."""
    times = Counter(grouped)
    flaws = [f"{key} has states, and no group lists it" for key in with_states if key not in times]
    return flaws + [f"{key} is listed {count} times" for key, count in times.items() if count > 1]


def shapes_text(shapes: StateShapes) -> str:
    return ", ".join(str(list(shape)) for shape in sorted(shapes))


def contradicted(what: str, details: Sequence[str]) -> SourceCorruptError:
    return SourceCorruptError(
        what,
        details=details,
        why="it belongs to a different model, or to another version of this one",
        next_step="give the units, the reference or the parameters of the model that was saved",
    )


def does_not_fit(source: str, order: ParameterOrder, details: Sequence[str]) -> SourceCorruptError:
    return contradicted(f"the optimizer of {source} does not fit {order.source}", details)


def find_names_of_places(
    ids: OptimizerIds, orders: Sequence[ParameterOrder], rule: IdRule = IdRule.GROUPS
) -> tuple[NewKeys, ParameterOrder] | NeedsInformationError | None:
    """The names of ids that count over all parameters of the model, and the order that gives them. None if they do not;
    an error if several names fit, or if only the order of the optimizer is known.

    ``orders``: all that are known. A source that knows the names of each group, in whatever order, makes the names
    certain. ``rule``: that of the source.
    """
    if not ids.over_model(rule):
        return None
    groups = ids.by_group()
    model = next((order for order in orders if order.ordered and order.in_model_order), None)
    if model is None:
        in_optimizer_order = rule is IdRule.MODEL and orders[0].ordered and any(len(group) > 1 for group in groups)
        return _model_unknown(ids, orders[0]) if in_optimizer_order else None
    others_known = False
    for order in orders:
        if order.groups is not None and [*map(len, order.groups)] == [*map(len, groups)]:
            names = _by_place_in_group(ids, groups, order.groups, model)
            if names is not None:
                return names, model
            others_known = True
    if others_known and not counts_over_model(groups):
        return None  # ids of torch.optim, whose groups are these
    found = _by_place(ids, model)
    if found is None or isinstance(found, FsdpckptError):
        return found
    return found, model


def may_count_by_groups(ids: OptimizerIds, names: NewKeys, order: ParameterOrder) -> bool:
    """Whether ``ids``, whose places in the model gave them ``names``, may be ids of ``torch.optim`` that mean others.

    A file of Lightning does not say which of its strategies saved it: those for FSDP count over the model, all others
    group by group.
    """
    if counts_over_model(ids.by_group()):  # not as torch.optim counts
        return False
    by_groups = find_names(ids, order)
    if isinstance(by_groups, FsdpckptError):
        # Several ways are more than the one that was taken; an order that does not fit is none.
        return isinstance(by_groups, NeedsInformationError)
    return dict(by_groups) != dict(names)


def _model_unknown(ids: OptimizerIds, order: ParameterOrder) -> NeedsInformationError:
    return NeedsInformationError(
        f"{order.source} cannot name the {len(ids.numbers)} optimizer ids of {ids.source}",
        why="the ids count over all parameters of the model, and only the order of the optimizer is known",
        next_step=f"add {flags.parameters('FILE')} with the names of model.parameters(), one per line, or "
        f"{flags.reference('PATH')} of a torch or DCP checkpoint of this model",
    )


def _by_place_in_group(
    ids: OptimizerIds, groups: Sequence[Sequence[int]], named: Sequence[Sequence[str]], model: ParameterOrder
) -> NewKeys | None:
    """The names of ids whose groups have these ``named`` parameters: both are sorted by place. None if that is no
    order of the model, or if shapes contradict it.
    """
    place = {name: index for index, name in enumerate(model.names)}
    if any(name not in place for names in named for name in names):
        return None
    ordered = [sorted(names, key=place.__getitem__) for names in named]
    found: dict[ParamKey, ParamKey] = {}
    for group, names in zip(groups, ordered, strict=True):
        found.update(zip(group, names, strict=True))
    by_id = [place[str(found[number])] for number in sorted(ids.numbers)]
    return found if by_id == sorted(by_id) and not _misfits(ids, list(chain(*ordered)), model) else None


def find_names(ids: OptimizerIds, order: ParameterOrder) -> NewKeys | Unnamed:
    """The name of each id; there must be at least one id. An error for an order that does not fit, or that fits in
    several ways.
    """
    if order.groups is not None and order.ordered:
        return _by_groups(ids, order, order.groups)
    if ids.group_sizes is None and order.authoritative:
        return _by_groups(ids, order, (order.names,))  # an id is an index into the names
    without_candidates = _without_candidates(ids, order)
    if without_candidates:
        return does_not_fit(ids.source, order, without_candidates)
    if ids.group_sizes is None or not order.ordered:
        return _by_shapes(ids, order)
    return _distribute(ids, ids.group_sizes, order)


def _by_place(ids: OptimizerIds, order: ParameterOrder) -> NewKeys | NeedsInformationError | None:
    """The names of ids that count over all parameters of the model; None if they cannot, an error if several fit."""
    names = [name for name in order.names if name not in order.plain]
    doubtful = [index for index, name in enumerate(names) if name in order.doubtful]
    answers = by_place(ids.numbers, len(names), doubtful, ids.may_be(names, order))
    if len(answers) > 1:
        why = "the ids count over all parameters of the model, and which of these names are buffers is not recorded"
        return _ambiguous(ids, order, why, _differences(ids, names, answers))
    return ids.named(names[index] for index in answers[0]) if answers else None


def _by_groups(
    ids: OptimizerIds, order: ParameterOrder, groups: Sequence[Sequence[str]]
) -> NewKeys | SourceCorruptError:
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
        return does_not_fit(ids.source, order, wrong)
    return ids.named(names)


def _by_shapes(ids: OptimizerIds, order: ParameterOrder) -> NewKeys | NeedsInformationError:
    """If the names have no order, or the ids no groups, only shapes can decide, and who is in which group if known."""
    by_shape = ids.may_be(order.names, order)
    group_of_name = _group_of_each(order.groups) if order.groups is not None else [0] * len(order.names)
    group_of_id = _group_of_each(ids.by_group()) if order.groups is not None else [0] * len(ids.numbers)

    def may_be(number: int, name: int) -> bool:
        return group_of_id[number] == group_of_name[name] and by_shape(number, name)

    answer = in_any_order(len(ids.numbers), len(order.names), may_be)
    if answer is None:
        lost = "the groups that they are in are" if order.ordered else "the order of the parameters is"
        return _ambiguous(ids, order, f"{lost} not recorded in {order.source}", _candidates(ids, order.names, may_be))
    return ids.named(order.names[index] for index in answer)


def _group_of_each(groups: Sequence[Sequence[object]]) -> list[int]:
    """The index of the group of each member, group by group."""
    return [index for index, group in enumerate(groups) for _ in group]


def _distribute(ids: OptimizerIds, group_sizes: Sequence[int], order: ParameterOrder) -> NewKeys | Unnamed:
    """If some names have no id, or their groups are not known: use the only way to distribute them in order."""
    # Equal values do not prove that two names are one parameter: those that only have them may each have an id.
    certain = tuple(name for name in order.names if name not in order.uncertain or name in order.alike)
    proved = len(certain) == len(ids.numbers)
    choices = [certain, order.names] if proved else [order.names]
    for names in dict.fromkeys(choices):
        answers = in_order(group_sizes, len(names), ids.may_be(names, order))
        if answers is None:
            return _ambiguous(ids, order, "there are more ways to name them than can be tried")
        if len(answers) > 1:
            what = "which of them it has" if len(group_sizes) == 1 else "which group has which of them"
            why = f"{plural(len(names), 'parameter', 'are')} possible, and their shapes do not decide {what}"
            if order.alike:
                alike = some_of([name for name in order.names if name in order.alike])
                why += f"; {alike} may be another name of a parameter with the same values, or both were filled alike"
            return _ambiguous(ids, order, why, _differences(ids, names, answers))
        if answers:
            return ids.named(names[index] for index in answers[0])
    wrong = _count_mismatch(ids, order) + _misfits(ids, choices[0], order)
    if order.authoritative:
        return does_not_fit(ids.source, order, wrong)
    return _out_of_order(ids, choices, order, wrong)


def _out_of_order(
    ids: OptimizerIds, choices: Sequence[Sequence[str]], order: ParameterOrder, wrong: Sequence[str]
) -> NewKeys | Unnamed:
    """If the job gave its optimizer the parameters in another order than the model's, which no file records: shapes.

    ``wrong``: what contradicts the model's order, for the error if no order of the names fits.
    """
    for names in choices:
        answer = in_any_order(len(ids.numbers), len(names), ids.may_be(names, order))
        if answer is not None:
            return ids.named(names[index] for index in answer)
    names = choices[-1]  # all that may be parameters
    may_be = ids.may_be(names, order)
    if not may_fit_in_some_order(len(ids.numbers), len(names), may_be):
        return does_not_fit(ids.source, order, wrong)
    why = f"the optimizer has them in another order than {order.source}, and their shapes do not decide which is which"
    return _ambiguous(ids, order, why, _candidates(ids, names, may_be))


def _misfits(ids: OptimizerIds, names: Sequence[str], order: ParameterOrder) -> list[str]:
    """Every id whose states do not match the shape of its name."""
    return [
        f"id {number} has states of shape {shapes_text(state_shapes)}, {name} is {list(order.shape(name) or ())}"
        for number, state_shapes, name in zip(ids.numbers, ids.state_shapes, names, strict=False)
        if not fits(order.shape(name), state_shapes)
    ]


def _count_mismatch(ids: OptimizerIds, order: ParameterOrder) -> list[str]:
    of_ids, of_names = len(ids.numbers), len(order.names)
    text = f"the optimizer has {plural(of_ids, 'id')}, {order.source} {plural(of_names, 'parameter')}"
    return [text] if of_ids != of_names else []


def _without_candidates(ids: OptimizerIds, order: ParameterOrder) -> list[str]:
    """What is wrong if ids outnumber names, or an id's states fit no name at all."""
    wrong: list[str] = []
    if len(order.names) < len(ids.numbers):
        wrong = _count_mismatch(ids, order) + _misfits(ids, order.names, order)
    shapes = {order.shape(name) for name in order.names}
    for number, state_shapes in zip(ids.numbers, ids.state_shapes, strict=True):
        if state_shapes and not any(fits(shape, state_shapes) for shape in shapes):
            text = shapes_text(state_shapes)
            wrong.append(f"id {number} has states of shape {text}, which no parameter of {order.source} has")
    return wrong


def _candidates(ids: OptimizerIds, names: Sequence[str], may_be: Fits) -> list[str]:
    """The possible names of each of the first ids, one line each, for messages."""
    lines = []
    for at, number in enumerate(ids.numbers[:_IDS_LISTED]):
        candidates = [name for index, name in enumerate(names) if may_be(at, index)]
        if len(candidates) > 1:
            lines.append(f"id {number} may be {some_of(candidates, 4)}")
    return lines


def _differences(ids: OptimizerIds, names: Sequence[str], answers: Sequence[Answer]) -> list[str]:
    return [
        f"id {number} may be {names[first]} or {names[second]}"
        for number, first, second in zip(ids.numbers, *answers[:2], strict=True)
        if first != second
    ]


def _ambiguous(
    ids: OptimizerIds, order: ParameterOrder, why: str, candidates: Sequence[str] = ()
) -> NeedsInformationError:
    """The error for ids that have several possible names. It names what settles this very situation."""
    several_groups = ids.group_sizes is not None and len(ids.group_sizes) > 1
    too_many = len(order.names) > len(ids.numbers)
    ways: list[str] = []
    if too_many and not several_groups and not order.authoritative and not order.excludes_buffers:
        ways.append(
            f"{flags.buffers('GLOB')} for the model keys that are not parameters ({flags.buffers('none')} if all are)"
        )
    listed = f"{flags.parameters('FILE')} with the names of the optimizer's parameters in its order"
    ways.append(listed + (", and a blank line between groups" if several_groups else ""))
    if not order.ordered:
        ways.append(f"{flags.reference('PATH')} of a torch or DCP checkpoint of this model")
    elif several_groups:
        ways.append(f"{flags.reference('PATH')} of a checkpoint of the same job whose optimizer is keyed by name")
    ways.append(f"{flags.units('FILE')}, which save_parameter_order(model, optimizer, FILE) writes in the job")
    return NeedsInformationError(
        f"{order.source} cannot name the {len(ids.numbers)} optimizer ids of {ids.source} for certain",
        details=candidates,
        most_shown=3,
        why=why,
        next_step=f"add {', or '.join(ways)}",
    )
