"""Finds the units of a flattened target, and checks that what they flatten together is complete and consistent."""

from __future__ import annotations

import shlex
from dataclasses import replace

from fsdpckpt import flags
from fsdpckpt.converters.steps.draft import Draft
from fsdpckpt.converters.steps.shared_places import require_places
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.errors import UsageError, to_copy
from fsdpckpt.flat.units import any_module
from fsdpckpt.flat.units.changes import NameChanges
from fsdpckpt.flat.units.request import ResolvedUnits, UnitsRequest
from fsdpckpt.ir.buffers import NO_BUFFERS
from fsdpckpt.ir.checkpoint import Checkpoint, Note
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.listing import Listing
from fsdpckpt.ir.row_names import rename_shared_states
from fsdpckpt.ir.units import Units
from fsdpckpt.transform.listings import model_names
from fsdpckpt.transform.missing_state import require_complete
from fsdpckpt.transform.selection import parameter_names


def require_something(draft: Draft, _: Decision) -> Draft:
    """Raises UsageError for a checkpoint that has nothing to flatten; one of several sections may have nothing."""
    checkpoint = draft.checkpoint
    if checkpoint.model is None and checkpoint.optim is None and not draft.one_of_several:
        raise UsageError(
            f"{checkpoint.source} has neither a model nor an optimizer to flatten",
            next_step=to_copy("see what it contains", f"fsdpckpt inspect {shlex.quote(checkpoint.source)}"),
        )
    return draft


def wrap(draft: Draft, decision: Decision) -> Draft:
    """Find the units of the target, for the names that it has: ``NameChanges`` takes those of the source to them."""
    changes, checkpoint, options = draft.changes, draft.checkpoint, decision.options
    if changes is None or (checkpoint.model is None and checkpoint.optim is None):
        return draft
    if checkpoint.units is not None:
        checkpoint = replace(checkpoint, units=changes.applied_to(checkpoint.units))
    from fsdpckpt.flat.units.target import target_units  # for a flattened target only, as what writes it

    target = target_units(
        checkpoint,
        _request(draft, changes),
        _source_units(draft, changes),
        decision.world_size or 1,
        draft.sources,
        dtype=DTYPES[options.dtype] if options.dtype is not None else None,
        left_out=_names_left_out(draft, changes),
    )
    named = _under_all_names(rename_shared_states(checkpoint, target.units), target.units)
    notes = [Note("units", line) for line in target.how]
    notes += [Note("unproved-order", doubt, warning=True) for doubt in target.doubts]
    return replace(draft, checkpoint=named.noted(*notes), units=target.units)


def _request(draft: Draft, changes: NameChanges) -> UnitsRequest:
    """The options about units, for the names of the target. They may use its names or those of the source."""
    asked, present = draft.knowledge.request, parameter_names(draft.checkpoint)
    buffers = changes.follow_globs(asked.buffers, present)
    if asked.buffers and not buffers:
        buffers = NO_BUFFERS  # all of those that were named are left out
    source = draft.source_units
    # Globs of modules that only the source has name its units, which the target has too.
    of_source = source is not None and any_module(asked.globs, source.units.parameters)
    globs = () if of_source and not any_module(asked.globs, present) else asked.globs
    return replace(asked, changes=changes, buffers=buffers, globs=globs)


def _source_units(draft: Draft, changes: NameChanges) -> ResolvedUnits | None:
    source = draft.source_units
    return None if source is None else replace(source, units=changes.applied_to(source.units))


def _names_left_out(draft: Draft, changes: NameChanges) -> Listing | None:
    """The names of the model that ``--only optim`` leaves out, as the target has them; None if nothing is."""
    if draft.checkpoint.model is not None:
        return None
    names = model_names(draft.opened, "the model section, which is left out")
    if names is None:
        return None
    kept = [param.name for param in names.params if changes.keeps(param.name)]
    return names.selected({name: changes.new_name(name) for name in kept})


def _under_all_names(checkpoint: Checkpoint, units: Units) -> Checkpoint:
    """``checkpoint`` with the shared parameters of its model under all their names, as FSDP saves them. An export has
    them under one.
    """
    model, params = checkpoint.model, checkpoint.params
    missing = {later: first for later, first in units.shared if first in params and later not in params}
    if model is None or not missing:
        return checkpoint
    notes = (Note("tied", f"{later} is added: it is tied to {first}", later) for later, first in missing.items())
    both = {**params, **{later: params[first] for later, first in missing.items()}}
    return replace(checkpoint, model=replace(model, params=both)).noted(*notes)


def require_whole_units(draft: Draft, decision: Decision) -> Draft:
    """Check that what a unit flattens together is complete and equal, and decide the keys that the optimizer gets.

    With ``use_orig_params=False`` one entry holds many names, so it can only have an id. Raises UsageError for keys by
    name there, SourceIncompleteError, SourceCorruptError.
    """
    asked, units = decision.options.key_type, draft.units
    key_type = asked or draft.source_keys or "id"
    if units is not None:
        # What is laid out in order: the parameters of each flat one. Ids count parameters, or flat ones.
        orders = [unit.names for unit in units.units]
        if units.use_orig_params and key_type == "id" and draft.checkpoint.optim is not None:
            orders.append(list(units.parameters))
        by_name = f"{flags.to('full')} {flags.key_type('name')}"
        order = f"{flags.parameters('FILE')}, the names in the model's order"
        require_places(draft, orders, f"convert with {by_name} first, then what that wrote, with {order}", written=True)
    if units is None or units.use_orig_params:
        return replace(draft, key_type=key_type)
    from fsdpckpt.flat.flatten.states import require_equal_states

    require_complete(draft.checkpoint, units)
    require_equal_states(draft.checkpoint, units, draft.sources)
    if asked == "name":
        raise UsageError(
            f"{flags.key_type('name')} cannot key flat parameters: with use_orig_params=False one entry holds many "
            "names",
            next_step=f"drop {flags.key_type}, or add {flags.use_orig_params}",
        )
    return replace(draft, key_type="id")
