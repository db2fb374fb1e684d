"""Counts the ids that names get: group by group, as ``torch.optim`` does, or over all parameters of the model.

Group by group needs the order in which the optimizer lists its parameters (``id_order``); over the model, which keys
are parameters (``model_positions``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from fsdpckpt import flags
from fsdpckpt.errors import NeedsInformationError
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.names import clean
from fsdpckpt.text import first_lines, plural, some_of
from fsdpckpt.transform.id_order import OWN_GROUPS, in_model_order, listed_order, lists_own_order
from fsdpckpt.transform.model_positions import places_in_model
from fsdpckpt.transform.naming import contradicted
from fsdpckpt.transform.order_sources import BY_USER
from fsdpckpt.transform.parameter_order import ParameterOrder

_KEYS_IN_MESSAGE = 12


@dataclass(frozen=True, slots=True)
class CountedIds:
    """The ids of names, and the names of each group in the order in which it lists them. ``how``: for the summary.

    ``doubt``: what is not proved, "" if nothing.
    """

    ids: Mapping[str, int]
    groups: Sequence[Sequence[str]]
    how: str
    doubt: str = ""


def count_by_groups(
    groups: Sequence[Sequence[str]],
    order: ParameterOrder | None,
    others: Sequence[ParameterOrder],
    checkpoint: Checkpoint,
    *,
    lists_places: bool,
) -> CountedIds:
    """Ids as ``torch.optim`` counts them. Raises NeedsInformationError if nothing says in which order."""
    doubt = ""
    has_groups = order is not None and order.groups is not None and order.ordered
    if (
        order is not None
        and has_groups
        and not lists_places
        and _contradicts_own_list(groups, order, others, checkpoint)
    ):
        ordered, how = [list(group) for group in groups], f"in the order of {OWN_GROUPS}"
    elif order is not None and (has_groups or order.source == BY_USER or checkpoint.optim is None):
        ordered = [_as_listed(group, index, order, checkpoint) for index, group in enumerate(groups)]
        how, doubt = f"in the order of {order.source}", order.caution or ""
    else:
        position = positions_in_model(order)
        by_unit = order.by_unit if order is not None else ()
        listed = listed_order(groups, position, by_unit=by_unit)
        if listed is None:
            raise _unknown_order(checkpoint, order)
        if position is not None and not (listed.own and listed.in_model_order):
            _require_groups_of_source(checkpoint, order)
        if listed.own:
            ordered = [list(group) for group in groups]
            how = f"in the order of {OWN_GROUPS}"
            if order is not None and listed.in_model_order:
                how = f"in the order of {order.source}"
            elif order is not None and position is not None:
                how += f", which is not that of {order.source}"
        else:
            ordered = [in_model_order(group, position or {}) for group in groups]
            how = f"in the order of {order.source if order is not None else 'the model'}"
        doubt = listed.doubt
    return CountedIds({name: number for number, name in enumerate(chain(*ordered))}, ordered, how, doubt)


def _contradicts_own_list(
    groups: Sequence[Sequence[str]], order: ParameterOrder, others: Sequence[ParameterOrder], checkpoint: Checkpoint
) -> bool:
    """Whether the groups of ``order``, whose order in the optimizer is assumed, differ from what the source certainly
    lists itself. What the user lists is meant. Raises SourceCorruptError if the groups of ``order`` are certain, too.
    """
    if checkpoint.optim is None or checkpoint.optim.groups is None or order.source.startswith(BY_USER):
        return False
    if checkpoint.optim.rebuilt:
        return False
    position = next((found for each in (order, *others) if (found := positions_in_model(each)) is not None), None)
    by_unit = next((each.by_unit for each in (order, *others) if each.by_unit), ())
    if not lists_own_order(groups, position, by_unit=by_unit):
        return False
    wrong = [
        f"group {index}: {checkpoint.source} lists {some_of(group)}, {order.source} has another order"
        for index, group in enumerate(groups)
        if list(group) != _as_listed(group, index, order, checkpoint)
    ]
    if wrong and order.caution is None:
        raise contradicted(f"the groups of {checkpoint.source} and {order.source} contradict each other", wrong)
    return bool(wrong)


def positions_in_model(order: ParameterOrder | None) -> dict[str, int] | None:
    """The place of each parameter in the model, None if it is not known."""
    if order is None or not order.ordered or not order.in_model_order:
        return None
    return {name: place for place, name in enumerate(order.names)}


def _as_listed(names: Sequence[str], index: int, order: ParameterOrder, checkpoint: Checkpoint) -> list[str]:
    """The names of group ``index`` in the order of an ``order`` that is the optimizer's own."""
    in_order: Sequence[str] = order.names
    if order.groups is not None:
        in_order = order.groups[index] if index < len(order.groups) else ()
    position = {name: at for at, name in enumerate(in_order)}
    wrong = [f"{name} is not in group {index} of {order.source}" for name in names if clean(name) not in position]
    if wrong:
        raise contradicted(f"the groups of {checkpoint.source} do not fit {order.source}", wrong)
    return in_model_order(names, position)


def _unknown_order(checkpoint: Checkpoint, order: ParameterOrder | None) -> NeedsInformationError:
    if order is None:
        what = f"nothing in {checkpoint.source} says in which order its optimizer has its parameters"
        why = "its groups list names that were sorted, or flat parameter by flat parameter, and ids count in that order"
    else:
        what = f"the optimizer of {checkpoint.source} cannot get ids in the order of {order.source}"
        why = f"ids count in the order of the parameters, which is not recorded in {order.source}"
    return NeedsInformationError(
        what,
        why=why,
        next_step=f"add {flags.parameters('FILE')} (the names in the order in which the job gives them to its "
        f"optimizer, one per line), {flags.units('FILE')}, or {flags.reference('PATH')} of a torch or DCP checkpoint "
        "of this model",
    )


def _require_groups_of_source(checkpoint: Checkpoint, order: ParameterOrder | None) -> None:
    """Raises NeedsInformationError if the groups, which list another order than the model, are not the source's own."""
    if checkpoint.optim is not None and checkpoint.optim.rebuilt:
        raise NeedsInformationError(
            f"the optimizer of {checkpoint.source} lists its parameters in a different order than "
            f"{order.source if order is not None else 'the model'}",
            why="its groups were rebuilt from equal hyper-parameters, so there may have been more of them, and ids "
            "count group by group",
            next_step=f"add {flags.units('FILE')}, which says the parameters of every group",
        )


def count_over_model(
    groups: Sequence[Sequence[str]], orders: Sequence[ParameterOrder], checkpoint: Checkpoint
) -> CountedIds:
    """Ids that count over all of ``model.parameters()``. Raises NeedsInformationError if a key before them may be a
    frozen parameter or a buffer.
    """
    of_model = [order for order in orders if order.ordered and order.in_model_order]
    by_user = next((order for order in of_model if order.source == BY_USER), None)
    order = next((order for order in of_model if order.source != BY_USER), by_user)
    if order is None:
        raise _unknown_order(checkpoint, orders[0] if orders else None)
    trained = {clean(name) for name in chain(*groups)}
    plain_or_doubtful = order.plain | order.doubtful
    if by_user is not None:  # which says what is a parameter
        parameters = {*by_user.names, *trained}
        names = [name for name in order.names if name in parameters or name not in plain_or_doubtful]
    else:
        names = [name for name in order.names if name not in order.plain]
    places, undecided = places_in_model(names, trained, order.doubtful if by_user is None else ())
    if undecided:
        raise NeedsInformationError(
            f"{plural(len(undecided), 'model key')} of {checkpoint.source} may be frozen parameters or buffers",
            details=first_lines(undecided, _KEYS_IN_MESSAGE),
            why="the target's ids count over all parameters of the model, frozen ones included, and no buffers",
            next_step=f"add {flags.buffers('GLOB')} for the buffers ({flags.buffers('none')} when there are none), or "
            f"{flags.parameters('FILE')} (the names of model.parameters(), one per line)",
        )
    ids = {name: places[clean(name)] for group in groups for name in group}
    ordered = [sorted(group, key=lambda name: ids[name]) for group in groups]
    how = f"their places among all parameters, in the order of {order.source}"
    last = max((index for index, name in enumerate(order.names) if name in trained), default=-1)
    plain = [name for name in order.names[:last] if name in order.plain] if by_user is None else []
    if plain:
        taken = "is taken for a buffer" if len(plain) == 1 else "are taken for buffers"
        how += (
            f"; {some_of(plain)} {taken}: whole beside distributed tensors ({flags.parameters('FILE')} with all "
            "parameters of the model says otherwise, if FSDP ignored a frozen one)"
        )
    return CountedIds(ids, ordered, how)
