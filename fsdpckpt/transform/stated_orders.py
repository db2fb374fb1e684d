"""Finds the orders of an optimizer's parameters that a checkpoint and what the user gives state, the best one first.

Several sources may state it: a units file, ``param_names``, ``--parameters``, the units or the groups of a reference of
the same job; a model section has that of ``model.parameters()``. The first is used, and the others must agree with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.listing import divided
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.state_shapes import ShownShapes, fits, has_scalars
from fsdpckpt.ir.units import Groups, Units, first_misplaced
from fsdpckpt.transform.id_order import in_model_order, listed_order
from fsdpckpt.transform.listings import listed_names
from fsdpckpt.transform.order_sources import from_groups, from_list, from_model, from_param_names, from_units
from fsdpckpt.transform.parameter_order import ParameterOrder, split_by_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenNames:
    """What says the names of parameters and their order beside a checkpoint; nothing by default."""

    units: Units | None = None  # those of the source, or of ``--units``; None for those beside the checkpoint
    reference: Checkpoint | None = None  # its model states names, shapes and order, and its optimizer the groups
    parameters: Sequence[str] | None = None  # names, in the order of ``model.parameters()`` or the optimizer's own
    parameter_groups: Groups = ()  # how blank lines divide ``parameters``
    buffers: tuple[str, ...] = ()  # globs of model keys that are not parameters


NO_NAMES_GIVEN = GivenNames()


def parameter_orders(checkpoint: Checkpoint, given: GivenNames = NO_NAMES_GIVEN) -> list[ParameterOrder]:
    """Every source that states an order, the best one first; those that do not preserve the order come last."""
    units = given.units if given.units is not None else checkpoint.units
    reference, parameters, buffers = given.reference, given.parameters, given.buffers
    names = _names_in(checkpoint)
    orders: list[ParameterOrder | None] = []
    if units is not None:
        of_checkpoint = units is checkpoint.units and checkpoint.origin.units_from
        label = f"the units of {checkpoint.origin.units_from}" if of_checkpoint else "the units"
        orders.append(from_units(units, label).named_like(names))
    if checkpoint.optim is not None:
        in_words = from_param_names(checkpoint.optim, names)
        orders.append(in_words.named_like(names) if in_words is not None else None)
    listed = None if parameters is None else from_list(parameters, names).named_like(names)
    told = [order.names for order in (*orders, listed) if order is not None]
    keyed = _keyed_names(checkpoint).union(*told, parameters or ())
    scalars = checkpoint.optim is not None and has_scalars(checkpoint.optim)
    models: list[ParameterOrder | None] = []
    if reference is not None:
        label = f"the reference {reference.source}"
        of_reference = from_model(reference, label, buffers, names, keyed, scalars=scalars)
        models.append(of_reference.named_like(names) if of_reference is not None else None)
    label = "the checkpoint's own model section"
    models.append(from_model(checkpoint, label, buffers, keyed=keyed, scalars=scalars))
    known = [order for order in (*models, *orders) if order is not None]
    of_model = next((order for order in known if order.ordered and order.in_model_order), None)
    if listed is not None:
        by_user = _as_optimizer_lists(listed, given.parameter_groups, checkpoint.optim, of_model)
        # Units without groups, or with those of flat parameters, do not say the optimizer's order, which ids count in.
        recorded = any(order.groups is not None and not order.by_unit for order in orders if order is not None)
        orders.insert(len(orders) if recorded or by_user.groups is None else 0, by_user)
    if reference is not None:
        orders.extend(_of_reference(reference, checkpoint, models[0], of_model))
    orders.extend(models)
    return sorted((order for order in orders if order is not None), key=lambda order: not order.ordered)


def _as_optimizer_lists(
    listed: ParameterOrder, divided: Groups, optim: Optimizer | None, of_model: ParameterOrder | None
) -> ParameterOrder:
    """``listed``, the user's list, with the optimizer's groups if it says them (``groups_by_user``)."""
    position: dict[str, int] | None = None
    if of_model is not None:
        position = {name: index for index, name in enumerate(of_model.names) if name not in of_model.uncertain}
    groups = None if optim is None else groups_by_user(listed.names, divided, optim, position)
    sizes = list(map(len, divided))
    divides_all = sum(sizes) == len(listed.rows)
    if optim is not None and optim.rebuilt and divides_all and len(sizes) > len(optim.groups or ()):
        # Rebuilt groups may have been more, and ``divided_as_recorded`` compares them.
        groups = split_by_sizes(listed.names, sizes)
    if groups is None:
        return listed
    members = split_by_sizes(range(len(listed.rows)), list(map(len, groups)))
    source = f"{listed.source}, in the optimizer's order"
    return replace(listed, members=members, in_model_order=False, source=source)


def groups_by_user(
    names: Sequence[str], divided: Groups, optim: Optimizer, position: Mapping[str, int] | None
) -> Groups | None:
    """The groups of ``optim`` if the user's list ``names`` is in the optimizer's order; None if it is the model's.

    It is the optimizer's if blank lines divide it into as many parts as there are groups (``divided``), or if it has
    exactly the optimizer's parameters in an order that is not the model's. ``position``: of the parameters in the
    model, None if that is not known. A list for ids that is sorted by name is nobody's order; for names it answers a
    warning, and is meant.
    """
    sizes, parts = _group_sizes(optim), tuple(map(len, divided))
    if len(parts) == len(sizes) > 1 and sum(parts) == len(names):
        return split_by_sizes(names, parts)
    sorted_for_ids = optim.key_type != "name" and list(names) == sorted(names)
    if not sizes or sum(sizes) != len(names) or position is None or sorted_for_ids:
        return None
    groups = split_by_sizes(names, sizes)
    if first_misplaced(names, position) is None or (optim.key_type == "name" and not _have_the_keys(groups, optim)):
        return None
    return groups


def _group_sizes(optim: Optimizer) -> tuple[int, ...]:
    return tuple(map(len, optim.in_groups()))


def _of_reference(
    reference: Checkpoint, checkpoint: Checkpoint, names: ParameterOrder | None, of_model: ParameterOrder | None
) -> Iterator[ParameterOrder]:
    """The orders that a reference of the same job states beside that of its model: its units, and its optimizer's
    groups. One that does not fit the optimizer of ``checkpoint`` is of another job, and says nothing of this one.

    ``names``: those of the reference's model. ``of_model``: the order of the model, if that is known.
    """
    optim = checkpoint.optim
    if optim is None:
        return
    own_names = _names_in(checkpoint)
    stated: list[ParameterOrder | None] = []
    if reference.units is not None:
        stated.append(from_units(reference.units, f"the units of {reference.origin.units_from}"))
    if reference.optim is not None:
        source = f"the param groups of {reference.source}"
        stated.append(from_param_names(reference.optim, own_names))
        listed = from_groups(reference.optim, source, own_names)
        stated.append(_as_job_lists(listed.named_like(own_names), of_model) if listed is not None else None)
    for order in stated:
        if order is None:
            continue
        like = order.named_like(own_names)
        with_shapes = like.with_shapes_of([each for each in (names, of_model) if each is not None])
        if _may_be_groups_of(optim, with_shapes):
            yield with_shapes


def _as_job_lists(order: ParameterOrder, of_model: ParameterOrder | None) -> ParameterOrder:
    """``order``, that of groups, in the model's order if their lists prove nothing of the job's (``listed_order``);
    without order if that of the model is not known.
    """
    groups = order.groups or ()
    position = {name: index for index, name in enumerate(of_model.names if of_model is not None else ())}
    known = bool(position) and all(name in position for name in chain(*groups))
    listed = listed_order(groups, position if known else None)
    if listed is not None and listed.own:
        return order
    if listed is None or of_model is None:
        return replace(order, ordered=False, authoritative=False)
    row_of = {row.name: row for row in order.rows}
    resorted = [list(map(row_of.__getitem__, in_model_order(group, position))) for group in groups]
    in_order = ParameterOrder.of_groups(resorted, f"{order.source}, in the order of {of_model.source}")
    return replace(in_order, caution=f"{order.source}: {listed.doubt}")


def _may_be_groups_of(optim: Optimizer, order: ParameterOrder) -> bool:
    """Whether the groups of ``order`` may be those of ``optim``: as large, with states of these shapes."""
    groups = order.groups
    if groups is None or optim.groups is None or tuple(map(len, groups)) != _group_sizes(optim):
        return False
    if optim.key_type != "id":
        return _have_the_keys(groups, optim)
    shown = ShownShapes(optim)
    keys = optim.grouped_keys()
    if order.ordered:
        return all(fits(order.shape(name), shown.of(key)) for key, name in zip(keys, chain(*groups), strict=True))
    for group, of_group in zip(groups, divided(keys, map(len, groups)), strict=True):
        shapes = {order.shape(name) for name in group}
        for key in of_group:
            if not any(fits(shape, shown.of(key)) for shape in shapes):
                return False
    return True


def _have_the_keys(groups: Groups, optim: Optimizer) -> bool:
    """Whether each group of ``optim``, which is keyed by name, has the names of one of ``groups``, in any order."""
    return [*map(set, listed_names(optim))] == [*map(set, groups)]


def _names_in(checkpoint: Checkpoint) -> list[str]:
    """The names that the checkpoint itself uses."""
    if checkpoint.model is not None:
        return list(checkpoint.model.params)
    return [key for key in checkpoint.states if isinstance(key, str)]


def _keyed_names(checkpoint: Checkpoint) -> set[str]:
    """The names that the optimizer has states or groups for."""
    if checkpoint.optim is None:
        return set()
    return {clean(key) for key in checkpoint.optim.all_keys() if isinstance(key, str)}
