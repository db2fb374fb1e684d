"""The optimizer's groups under the units of a target: in which order each lists its parameters, and how that is known.

Ids count in this order. Units record it, ``--parameters`` may say it, and a source's groups list it, unless they were
sorted, or list flat parameter by flat parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from fsdpckpt import flags
from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.flat.units.build import keyed_groups, listed_keys, regrouped, returns_to_a_unit
from fsdpckpt.flat.units.request import UnitsRequest
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.units import Groups, Units
from fsdpckpt.text import some_of
from fsdpckpt.transform.id_order import Names, listed_order
from fsdpckpt.transform.listings import listed_names
from fsdpckpt.transform.order_sources import from_param_names
from fsdpckpt.transform.stated_orders import groups_by_user


def given_groups(
    checkpoint: Checkpoint, request: UnitsRequest, in_model: Sequence[str], *, ordered: bool = True
) -> Groups | None:
    """The groups of the optimizer, by name, if ``--parameters`` lists them in its order; None if it lists the
    parameters of the model, or is not given.

    ``in_model``: the names of the target's model, in its order if ``ordered``.
    """
    optim = checkpoint.optim
    if request.parameters is None or optim is None or optim.key_type != "name":
        return None
    given = request.names_in(request.parameters, in_model)
    parts: list[tuple[str, ...]] = []
    for part in request.parameter_groups:
        parts.append(tuple(given[name] for name in part if name in given))
    divided = tuple(filter(None, parts))
    position = {name: place for place, name in enumerate(in_model)} if ordered else None
    return groups_by_user(tuple(given.values()), divided, optim, position)


class OptimizerGroups(NamedTuple):
    """The optimizer's groups, and if they list their parameters in another order than the source, why."""

    groups: Groups | None
    notes: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()  # what is not proved


def optimizer_groups(
    units: Units, checkpoint: Checkpoint, source: Units | None, given: Groups | None, *, by_user: bool
) -> OptimizerGroups:
    """The optimizer's groups under these units: as recorded, else as ``given`` (``given_groups``), else as the
    checkpoint's groups list the parameters.

    Their order is the one in which ``param_names``, or else the groups, list them, unless that list proves nothing
    (``listed_order``): then it is that of ``model.parameters()``. ``source``: the units of the source. ``by_user``:
    whether ``--parameters`` says the order, that of the model if there are no ``given`` groups. Raises
    SourceCorruptError for ``given`` ones that ``param_names`` contradict.
    """
    optim = checkpoint.optim
    if units.groups is not None or optim is None or optim.param_groups is None or optim.key_type == "id":
        return OptimizerGroups(units.groups)
    names = listed_names(optim)
    by_order = keyed_groups(units, names)
    if by_order is None:
        return OptimizerGroups(None)
    named = from_param_names(optim, units.parameters) if units.use_orig_params else None
    if named is not None and named.groups is not None and [*map(set, named.groups)] == [*map(set, by_order)]:
        _require_same_order(named.groups, given, checkpoint)
        return OptimizerGroups(named.groups)
    if given is not None:
        return _as_given(units, given, by_order)
    return _as_source_lists(units, names, by_order, checkpoint, source, by_user=by_user)


def _as_source_lists(
    units: Units,
    names: Sequence[Names],
    by_order: Groups,
    checkpoint: Checkpoint,
    source: Units | None,
    *,
    by_user: bool,
) -> OptimizerGroups:
    """The groups in the order of ``names``, which the source lists, or as ``by_order`` if that proves nothing."""
    keys = listed_keys(units, names)
    pairs = zip(keys, by_order, strict=True)
    moved = [str(number) for number, (listed, ordered) in enumerate(pairs) if tuple(listed) != ordered]
    if not moved:
        return OptimizerGroups(by_order)
    position = {name: place for place, name in enumerate(units.parameters)}
    by_unit = source.listed_by_unit() if source is not None else ()
    listed_by_job = listed_order(names, position, by_unit=by_unit)
    # Lists that come back to a flat parameter say nothing of the order of flat parameters.
    whole = units.use_orig_params or not any(returns_to_a_unit(units, group) for group in names)
    own = listed_by_job is not None and listed_by_job.own
    as_without_fsdp = listed_by_job is not None and listed_by_job.in_model_order
    rebuilt = checkpoint.optim is not None and checkpoint.optim.rebuilt
    if own and whole and not (as_without_fsdp or rebuilt or by_user):
        note = "ids follow the optimizer's own groups, which are not in the order of the model in group "
        return OptimizerGroups(tuple(map(tuple, keys)), (note + some_of(moved),))
    follows = "ids follow model.parameters() within a group"
    notes, doubts = [], []
    if as_without_fsdp:
        how = f"{follows}, an outer module's flat parameter first: the source lists group {some_of(moved)} like a "
        how += "model that FSDP1 does not wrap"
        if whole and (len(names) > 1 or checkpoint.beside):  # what a job gives to each may have an order of its own
            other = f"If the job gives them to its optimizer in that order, add {flags.units('FILE')}, which "
            doubts.append(f"{how}. {other}save_units writes")
        else:
            notes.append(how)
    elif own or rebuilt or by_user:
        notes.append(f"{follows}: the source lists a different order in group {some_of(moved)}")
    else:
        doubts.append(
            f"{follows}, because the source lists the parameters of group {some_of(moved)} sorted by name, or unit by "
            f"unit, which is no optimizer's order. If the job gives them to its optimizer in another order, add "
            f"{flags.units('FILE')}, which save_units writes"
        )
    return OptimizerGroups(by_order, tuple(notes), tuple(doubts))


def _as_given(units: Units, given: Groups, by_order: Groups) -> OptimizerGroups:
    """The groups in the order of a list, which says nothing of flat parameters if it comes back to one of them."""
    if not units.use_orig_params and any(returns_to_a_unit(units, names) for names in given):
        note = f"{flags.parameters} comes back to a flat parameter: ids follow the order of the model within a group"
        return OptimizerGroups(by_order, (note,))
    return OptimizerGroups(
        regrouped(units, given), (f"ids follow {flags.parameters}, which has the optimizer's order",)
    )


def _require_same_order(named: Groups, given: Groups | None, checkpoint: Checkpoint) -> None:
    if given is None or [*chain(*given)] == [*chain(*named)]:
        return
    raise SourceCorruptError(
        f"{flags.parameters} and the param_names of {checkpoint.source} list the optimizer's parameters in different "
        "orders",
        details=[
            f"group {number}: {some_of(names)} in param_names, {some_of(listed)} in {flags.parameters}"
            for number, (names, listed) in enumerate(zip(named, given, strict=False))
            if names != listed
        ],
        why="ids count in the order in which the job gave the parameters to its optimizer, and param_names record it",
        next_step=f"drop {flags.parameters}, or list in it what model.named_parameters() lists",
    )
