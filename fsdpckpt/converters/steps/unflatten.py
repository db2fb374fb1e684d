"""Names the slices of a flattened source: from here on all tensors are whole ones, by name."""

from __future__ import annotations

from dataclasses import replace

from fsdpckpt.converters.steps.draft import Draft
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.converters.target.layout import refuse_flat_options
from fsdpckpt.flat.units.presence import is_flattened
from fsdpckpt.flat.units.request import ResolvedUnits
from fsdpckpt.ir import Layout
from fsdpckpt.ir.checkpoint import Checkpoint


def unflatten(draft: Draft, decision: Decision) -> Draft:
    """Replace slices by whole tensors. Units without the order of ``model.parameters()`` map no ids.

    Raises UsageError for options about flat parameters if neither source nor target has any.
    """
    to_flattened = decision.layout is Layout.FLATTENED
    flattened = is_flattened(draft.checkpoint, draft.sources, draft.knowledge.request)
    refuse_flat_options(decision.options, draft.checkpoint, has_flat=to_flattened or flattened)
    if not flattened:
        return draft
    from fsdpckpt.flat.unflatten import name_slices  # what finds and proves units is imported where there are slices

    units = _source_units(draft, target_flattened=to_flattened)
    named = name_slices(draft.checkpoint, units, draft.sources)
    return replace(draft, checkpoint=named if units.order_known else named.without_order(), source_units=units)


def _source_units(draft: Draft, *, target_flattened: bool) -> ResolvedUnits:
    """The units of the source, proved by all of its sections; by the selected one alone if another one contradicts
    or leaves them open: a section never needs another to be understood.
    """
    from fsdpckpt.flat.units.source import find_source_units

    all_sections, selected = draft.opened, draft.checkpoint
    request, sources = draft.knowledge.request, draft.sources
    found = find_source_units(all_sections, request, sources, target_flattened=target_flattened)
    if isinstance(found, ResolvedUnits):
        return found
    if _sections_of(selected) != _sections_of(all_sections):
        by_selected = find_source_units(selected, request, sources, target_flattened=target_flattened)
        if isinstance(by_selected, ResolvedUnits):
            return by_selected
    raise found  # what all sections together need is the better advice


def _sections_of(checkpoint: Checkpoint) -> tuple[bool, bool]:
    return checkpoint.model is not None, checkpoint.optim is not None
