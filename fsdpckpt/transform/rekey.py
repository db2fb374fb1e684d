"""Rekeys an optimizer from ids to names and from names to ids, for every layout, by a proved parameter order.

A key is a way of writing a member of the optimizer (``ir.optimizer``): by the name of its row, or by its position.
``IdRule`` says what position. The proof of names: there are as many ids as parameters, and every state has a shape that
its parameter allows (``naming``). The proof of ids: the order in which the source's groups list names (``id_order``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from fsdpckpt import flags
from fsdpckpt.errors import FsdpckptError, NeedsInformationError, SourceCorruptError, required
from fsdpckpt.ir import IdRule
from fsdpckpt.ir.checkpoint import Checkpoint, KeyType, Note
from fsdpckpt.ir.names import DISTRIBUTED, clean
from fsdpckpt.ir.optimizer import MemberNumber, Optimizer, ParamKey
from fsdpckpt.ir.state_shapes import ShownShapes, fits
from fsdpckpt.ir.table import Table
from fsdpckpt.producers.recognition import id_rule_of
from fsdpckpt.text import plural
from fsdpckpt.transform.counted_ids import count_by_groups, count_over_model, positions_in_model
from fsdpckpt.transform.naming import (
    NewKeys,
    OptimizerIds,
    Unnamed,
    contradicted,
    does_not_fit,
    find_names,
    find_names_of_places,
    group_flaws,
    may_count_by_groups,
    shapes_text,
)
from fsdpckpt.transform.order_sources import listed_param_names
from fsdpckpt.transform.parameter_order import ParameterOrder, contradictions
from fsdpckpt.transform.rebuilt_groups import divided_as_recorded
from fsdpckpt.transform.spanning import require_same_members
from fsdpckpt.transform.stated_orders import NO_NAMES_GIVEN, GivenNames, parameter_orders
from fsdpckpt.transform.units_beside import units_beside_unreadable


def apply_key_type(
    checkpoint: Checkpoint,
    key_type: KeyType | None,
    given: GivenNames = NO_NAMES_GIVEN,
    *,
    rule: IdRule = IdRule.GROUPS,
) -> Checkpoint:
    """Key the optimizer of ``checkpoint`` by ``key_type``; None keeps the keys.

    ``rule``: how new ids count; those of the source count as its framework's do.

    Raises NeedsInformationError if nothing states the order or several orders are possible, and SourceCorruptError if
    the sources contradict the optimizer or each other.
    """
    if key_type == "name":
        return required(find_named(checkpoint, given))
    optim = checkpoint.optim
    if optim is None or key_type is None or optim.key_type in (None, key_type):
        return checkpoint
    required(_units_unreadable(checkpoint, given))
    orders = parameter_orders(checkpoint, given)
    return to_ids(checkpoint, orders[0] if orders else None, orders[1:], rule=rule)


def find_named(checkpoint: Checkpoint, given: GivenNames = NO_NAMES_GIVEN) -> Checkpoint | Unnamed:
    """``checkpoint`` with its optimizer keyed by name; the error that says why not, if nothing proves the names."""
    optim = checkpoint.optim
    if optim is None or optim.key_type != "id":
        return checkpoint
    unreadable = _units_unreadable(checkpoint, given)
    if unreadable is not None:
        return unreadable
    orders = parameter_orders(checkpoint, given)
    if not orders:
        return NeedsInformationError(
            f"nothing in {checkpoint.source} maps optimizer ids to parameters",
            why="no model in it is certainly that of the optimizer, and the param groups have no param_names",
            next_step=f"add {flags.reference('PATH')} (a checkpoint of this model), {flags.parameters('FILE')} (the "
            f"names of model.parameters(), one per line) or {flags.units('FILE')}",
        )
    caution = orders[0].caution
    cautioned = _with_doubt(checkpoint, caution) if caution is not None else checkpoint
    return _find_named_by(cautioned, orders[0], orders[1:])


def _units_unreadable(checkpoint: Checkpoint, given: GivenNames) -> SourceCorruptError | None:
    """The error for a units file beside ``checkpoint`` that cannot be read, unless something else says the names."""
    said_otherwise = given.units is not None or given.parameters is not None
    return None if said_otherwise else units_beside_unreadable(checkpoint)


def to_names(checkpoint: Checkpoint, order: ParameterOrder, others: Sequence[ParameterOrder] = ()) -> Checkpoint:
    """Key the optimizer by name. ``others``: further sources of the order, which must agree with it.

    Raises SourceCorruptError for an order that does not fit, NeedsInformationError for one that fits in several ways.
    """
    return required(_find_named_by(checkpoint, order, others))


def _find_named_by(
    checkpoint: Checkpoint, order: ParameterOrder, others: Sequence[ParameterOrder]
) -> Checkpoint | Unnamed:
    """``to_names``, with the error as an answer."""
    optim = checkpoint.optim
    if optim is None or optim.key_type != "id":
        return checkpoint
    ids = OptimizerIds.find(optim, checkpoint.source)
    if isinstance(ids, FsdpckptError):
        return ids
    order = order.with_shapes_of(others)
    known = [each.with_shapes_of(others) for each in (order, *others)]
    placed = find_names_of_places(ids, known, id_rule_of(checkpoint))
    if isinstance(placed, FsdpckptError):
        return placed
    if placed is not None:
        # The ids count over all parameters of the model.
        names, order = placed
        if not any(each.groups for each in known) and may_count_by_groups(ids, names, order):
            checkpoint = checkpoint.noted(_doubtful_places(checkpoint, names))
    else:
        by_group = find_names(ids, order)
        if isinstance(by_group, FsdpckptError):
            return by_group
        names = by_group
        disagreement = _disagreement(checkpoint.source, order, others, [str(name) for name in names.values()])
        contradiction = disagreement or _contradicting_param_names(checkpoint.source, optim, names, order)
        if contradiction is not None:
            return contradiction
    message = f"{plural(len(names), 'optimizer id')} became {plural(len(names), 'name')}, from {order.source}; the "
    with_shapes = sum(map(bool, ids.state_shapes))
    message += f"states of {plural(with_shapes, 'parameter')} have the shapes that this needs"
    if not _keeps_order(optim, names, order):
        message += ", and the optimizer has its parameters in another order"
    table = Table.of(checkpoint)
    keys = {member: names.get(key, key) for member, key in enumerate(optim.keys)}
    return _find_with_keys(checkpoint, table, keys, message)


def _keeps_order(optim: Optimizer, names: NewKeys, order: ParameterOrder) -> bool:
    """Whether each group has the parameters in their ``order`` in the model, if that is what it says."""
    place = positions_in_model(order)
    if place is None or order.groups is not None:
        return True
    for keys in optim.in_groups():
        places = [place.get(str(names.get(key, key)), -1) for key in keys]
        if places != sorted(places):
            return False
    return True


def _doubtful_places(checkpoint: Checkpoint, names: NewKeys) -> Note:
    number, name = next(iter(names.items()))
    message = (
        f"optimizer ids were read as the FSDP strategies of {checkpoint.flavor} count them, over model.parameters(): "
        f"id {number} is {name}; DDP saves files that look the same and count group by group: if it saved this one, "
        f"add {flags.parameters('FILE')} with the names in the order of the optimizer, and a blank line between groups"
    )
    return Note("unproved-order", message, warning=True)


def to_ids(
    checkpoint: Checkpoint,
    order: ParameterOrder | None,
    others: Sequence[ParameterOrder] = (),
    *,
    rule: IdRule = IdRule.GROUPS,
) -> Checkpoint:
    """Key the optimizer by id; groups list their parameters in the order of their ids.

    ``order``: None if only the groups list names. ``rule``: how the ids count. Arguments and errors otherwise as for
    ``to_names``.
    """
    optim = checkpoint.optim
    if optim is None or optim.key_type != "name":
        return checkpoint
    if order is not None:
        order = order.with_shapes_of(others)
        if optim.rebuilt:
            checkpoint, optim = divided_as_recorded(checkpoint, optim, order)
    groups = _grouped_names(optim, order, checkpoint.source)
    _require_names_fit(optim, checkpoint.source, groups, order)
    if order is not None:
        required(_disagreement(checkpoint.source, order, others, [clean(name) for name in chain(*groups)]))
    if rule is IdRule.MODEL:
        known = [each for each in (order, *others) if each is not None]
        counted = count_over_model(groups, known, checkpoint)
    else:
        # Groups that list places in the model do not list the optimizer's order.
        lists_places = id_rule_of(checkpoint) is IdRule.MODEL
        counted = count_by_groups(groups, order, others, checkpoint, lists_places=lists_places)
    if optim.groups is not None:
        require_same_members(checkpoint, list(chain(*counted.groups)), f"the ids would be {counted.how}")
    table = Table.of(checkpoint)
    names = table.member_names()
    member_of = {name: member for member, name in names.items()}
    if optim.groups is not None:
        members = [list(map(member_of.__getitem__, group)) for group in counted.groups]
        table = table.reordered(members)
    keys: dict[MemberNumber, ParamKey] = {}
    for member, name in names.items():
        keys[member] = counted.ids.get(str(name), counted.ids.get(clean(str(name)), name))
    message = f"{plural(len(counted.ids), 'optimizer key')} became {plural(len(counted.ids), 'id')}, {counted.how}"
    found = required(_find_with_keys(checkpoint, table, keys, message))
    return _with_doubt(found, counted.doubt) if counted.doubt else found


def _with_doubt(checkpoint: Checkpoint, doubt: str) -> Checkpoint:
    """``checkpoint`` whose optimizer says why its new keys are not proved."""
    if checkpoint.optim is None:
        return checkpoint
    doubtful = replace(checkpoint, optim=replace(checkpoint.optim, doubt=doubt))
    return doubtful.noted(Note("unproved-order", doubt, warning=True))


def recounted(checkpoint: Checkpoint) -> Checkpoint:
    """``checkpoint`` with the ids that ``torch.optim`` gives its parameters, from any others in the same groups."""
    optim = checkpoint.optim
    if optim is None or optim.key_type != "id":
        return checkpoint
    keys = optim.counted()
    if all(keys.get(member) == key for member, key in enumerate(optim.keys)):
        return checkpoint
    if len(keys) < len(optim.keys):
        return checkpoint  # states that no group lists
    message = f"{plural(len(keys), 'optimizer id')} counted all parameters of the model; now they count group by group"
    return required(_find_with_keys(checkpoint, Table.of(checkpoint), keys, message))


def _disagreement(
    source: str, used: ParameterOrder, others: Sequence[ParameterOrder], names: list[str]
) -> SourceCorruptError | None:
    """The error if another order contradicts the one in use. ``names``: the optimizer's parameters."""
    for other in others:
        wrong = contradictions(used, other, names)
        if wrong:
            return contradicted(f"{used.source} and {other.source} of {source} contradict each other", wrong)
    return None


def _contradicting_param_names(
    source: str, optim: Optimizer, names: NewKeys, order: ParameterOrder
) -> SourceCorruptError | None:
    """The error if a group has ``param_names`` that differ from ``names``."""
    wrong: list[str] = []
    for group, keys in zip(optim.groups or (), optim.in_groups(), strict=False):
        for key, name in zip(keys, listed_param_names(group) or (), strict=False):
            new = str(names[key])
            if name not in (new, f"{DISTRIBUTED}{new}", new.removeprefix(DISTRIBUTED)):
                wrong.append(f"id {key} is {name} in param_names, {new} in {order.source}")
    return contradicted(f"the param_names of {source} contradict {order.source}", wrong) if wrong else None


def _grouped_names(optim: Optimizer, order: ParameterOrder | None, source: str) -> list[list[str]]:
    """The names that each group lists; without groups, those of an authoritative order."""
    if optim.groups is not None:
        return optim.names_in_groups()
    if order is None or not order.authoritative:
        place = order.source if order is not None else source
        raise NeedsInformationError(
            f"the optimizer of {source} has no param_groups, and {place} does not give its states ids",
            why="ids count in the order of the groups, over parameters without state too",
            next_step=f"add {flags.parameters('FILE')} (the parameters of the optimizer, one per line) or "
            f"{flags.units('FILE')}",
        )
    return [list(group) for group in order.groups] if order.groups is not None else [list(order.names)]


def _require_names_fit(
    optim: Optimizer, source: str, groups: Sequence[Sequence[str]], order: ParameterOrder | None
) -> None:
    """Raises SourceCorruptError for a name that the order lacks, is grouped twice or never, or has other shapes."""
    names = list(chain(*groups))
    if order is None:
        wrong = group_flaws(names, [key for key, states in optim.state.items() if states and isinstance(key, str)])
        if wrong:
            raise contradicted(f"the names of the optimizer of {source} contradict each other", wrong)
        return
    in_order, shown = set(order.names), ShownShapes(optim)
    keys = dict.fromkeys((*names, *map(str, optim.keys)))
    wrong = [f"{name} is not in {order.source}" for name in keys if clean(name) not in in_order]
    wrong += group_flaws(names, [key for key in optim.state if clean(str(key)) in in_order])
    for name in names:
        state_shapes = shown.of(name)
        shape = order.shape(clean(name))
        if not fits(shape, state_shapes):
            text = shapes_text(state_shapes)
            wrong.append(f"{name} has states of shape {text}, and is {list(shape or ())} in {order.source}")
    if wrong:
        raise does_not_fit(source, order, wrong)


def _find_with_keys(
    checkpoint: Checkpoint, table: Table, keys: Mapping[MemberNumber, ParamKey], message: str
) -> Checkpoint | SourceCorruptError:
    """``checkpoint`` with these ``keys`` of its members, and a note. Entries that a user added keep theirs.

    An error if such an entry has the new key of a parameter, or is a number beside new ids: whoever reads it takes it
    for the states of a parameter that no group lists.
    """
    new = set(keys.values())
    become_ids = any(isinstance(key, int) for key in new)
    added = [entry.key for entry in table.optimizer.entries if entry.member is None] if table.optimizer else []
    both = [str(key) for key in added if key in new or (become_ids and isinstance(key, int))]
    if both:
        return contradicted(f"the optimizer of {checkpoint.source} has states under both kinds of key", both)
    found = table.written(checkpoint, keys)
    return found.noted(Note("rekeyed", message))
