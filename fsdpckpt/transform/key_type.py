"""Keys an optimizer by the type that was asked for, in the order of parameters that is known best."""

from __future__ import annotations

from collections.abc import Sequence

from fsdpckpt.errors import NeedsInformationError
from fsdpckpt.ir.checkpoint import Checkpoint, KeyType, OptimState
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.units import Units
from fsdpckpt.transform.parameter_order import (
    ParameterOrder,
    from_list,
    from_model,
    from_param_names,
    from_units,
    has_scalars,
)
from fsdpckpt.transform.rekey import is_keyed_by_id, to_ids, to_names


def apply_key_type(
    checkpoint: Checkpoint,
    key_type: KeyType | None,
    *,
    units: Units | None,
    reference: Checkpoint | None,
    parameters: Sequence[str] | None,
    buffers: Sequence[str] = (),
) -> Checkpoint:
    """``checkpoint`` with its optimizer keyed as ``key_type`` says; None leaves the keys as they are.

    ``units``: those of the source or of ``--units``; when None, those beside the checkpoint. ``reference``: a
    checkpoint whose model section states names, shapes and order. ``parameters``: names in the order of
    ``model.parameters()``. ``buffers``: globs of model keys that are not parameters.

    Raises NeedsInformationError when nothing states the order, or what does leaves several answers, and
    SourceCorruptError when the sources contradict the optimizer or each other.
    """
    optim = checkpoint.optim
    if optim is None or key_type is None or optim.key_type is None or key_type == key_type_of(optim):
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


def key_type_of(optim: OptimState) -> KeyType:
    """How ``optim`` is keyed."""
    return "id" if is_keyed_by_id(optim) else "name"


def parameter_orders(
    checkpoint: Checkpoint,
    *,
    units: Units | None,
    reference: Checkpoint | None,
    parameters: Sequence[str] | None,
    buffers: tuple[str, ...] = (),
) -> list[ParameterOrder]:
    """Every source that states an order, the one to use first: those that do not keep the order come last."""
    held = units if units is not None else checkpoint.units
    like = _known_names(checkpoint)
    orders: list[ParameterOrder | None] = []
    if held is not None:
        beside = held is checkpoint.units and checkpoint.units_from
        orders.append(from_units(held, f"the units of {checkpoint.units_from}" if beside else "the units"))
    if checkpoint.optim is not None:
        orders.append(from_param_names(checkpoint.optim, like))
    if parameters is not None:
        orders.append(from_list(parameters, like=like))
    keyed = _keyed_names(checkpoint).union(*(order.names for order in orders if order is not None))
    scalars = checkpoint.optim is not None and has_scalars(checkpoint.optim)
    if reference is not None:
        about = f"the reference {reference.source}"
        orders.append(from_model(reference, about, buffers, like, keyed, scalars=scalars))
    about = "the checkpoint's own model section"
    orders.append(from_model(checkpoint, about, buffers, keyed=keyed, scalars=scalars))
    known = [order for order in orders if order is not None]
    return sorted(known, key=lambda order: not order.ordered)


def _known_names(checkpoint: Checkpoint) -> list[str]:
    """The names that the checkpoint itself uses."""
    if checkpoint.model is not None:
        return list(checkpoint.model.params)
    return [key for key in checkpoint.optim.state if isinstance(key, str)] if checkpoint.optim is not None else []


def _keyed_names(checkpoint: Checkpoint) -> set[str]:
    """The names that the optimizer has states or groups for."""
    if checkpoint.optim is None:
        return set()
    listed = checkpoint.optim.grouped_keys()
    return {clean(key) for key in (*checkpoint.optim.state, *listed) if isinstance(key, str)}
