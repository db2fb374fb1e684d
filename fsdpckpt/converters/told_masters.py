"""Ties the master weights of an optimizer to parameters by names that only the user's options tell."""

from __future__ import annotations

from fsdpckpt.converters.steps.knowledge import Knowledge
from fsdpckpt.flat.units.request import UnitsRequest
from fsdpckpt.ir.checkpoint import Checkpoint, Section
from fsdpckpt.options import ConvertOptions
from fsdpckpt.options.declare import Scope, given
from fsdpckpt.readers.masters import has_untied_masters, with_masters
from fsdpckpt.storage.sources import Sources


def with_told_masters(
    checkpoint: Checkpoint, options: ConvertOptions, request: UnitsRequest, sources: Sources
) -> Checkpoint:
    """``checkpoint`` with the float32 weights that only ``options`` tie to parameters: a reader of the target, which
    has the names, would tie them. ``request``: what they say about units.
    """
    if options.only is Section.OPTIM or not given(options, Scope.KNOWLEDGE) or not has_untied_masters(checkpoint):
        return checkpoint
    named = Knowledge(request, sources).named_if_proved(checkpoint)
    return checkpoint if named is None else with_masters(named, sources)
