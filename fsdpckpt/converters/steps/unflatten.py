"""Names the slices of a flattened source: from here on all tensors are whole ones, by name."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from fsdpckpt.converters.steps.draft import Draft
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.converters.target.layout import refuse_flat_options
from fsdpckpt.errors import NeedsInformationError, SourceError
from fsdpckpt.flat.unflatten import name_slices
from fsdpckpt.flat.units.request import ResolvedUnits
from fsdpckpt.flat.units.source import is_flattened, source_units
from fsdpckpt.ir import Layout


def unflatten(draft: Draft, decision: Decision) -> Draft:
    """Replace slices by whole tensors. Units without the order of ``model.parameters()`` map no ids.

    Raises UsageError for options about flat parameters if neither source nor target has any.
    """
    to_flattened = decision.layout is Layout.FLATTENED
    flattened = is_flattened(draft.checkpoint, draft.sources, draft.knowledge.request)
    refuse_flat_options(decision.options, draft.checkpoint, has_flat=to_flattened or flattened)
    if not flattened:
        return replace(draft, id_units=draft.knowledge.units)
    units = _source_units(draft, target_flattened=to_flattened)
    named = name_slices(draft.checkpoint, units, draft.sources)
    if units.order_known:
        return replace(draft, checkpoint=named, source_units=units, id_units=units.units)
    return replace(draft, checkpoint=named.without_order(), source_units=units)


def _source_units(draft: Draft, *, target_flattened: bool) -> ResolvedUnits:
    """The units of the source, proved by all of its sections; by the selected one alone if another one contradicts
    or leaves them open: a section never needs another to be understood.
    """
    opened, selected = draft.opened, draft.checkpoint
    request, sources = draft.knowledge.request, draft.sources
    try:
        return source_units(opened, request, sources, target_flattened=target_flattened)
    except (NeedsInformationError, SourceError):
        if (selected.model is None) == (opened.model is None) and (selected.optim is None) == (opened.optim is None):
            raise
        with suppress(NeedsInformationError, SourceError):  # what all sections together need is the better advice
            return source_units(selected, request, sources, target_flattened=target_flattened)
        raise
