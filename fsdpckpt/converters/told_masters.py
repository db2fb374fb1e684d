"""Ties the master weights of an optimizer to parameters by names that only the user's options tell."""

from __future__ import annotations

from fsdpckpt.converters.steps.knowledge import Knowledge
from fsdpckpt.flat.units.from_options import units_request
from fsdpckpt.ir.checkpoint import Checkpoint, Section
from fsdpckpt.options import ConvertOptions
from fsdpckpt.options.declare import Scope, given
from fsdpckpt.readers.masters import has_untied_masters, with_masters
from fsdpckpt.storage.sources import Sources


def with_told_masters(checkpoint: Checkpoint, options: ConvertOptions, sources: Sources) -> Checkpoint:
    """``checkpoint`` with the float32 weights that only ``options`` tie to parameters: a reader of the target, which
    has the names, would tie them.
    """
    if options.only is Section.OPTIM or not given(options, Scope.KNOWLEDGE) or not has_untied_masters(checkpoint):
        return checkpoint
    named = Knowledge(units_request(options), sources).named_if_proved(checkpoint)
    return checkpoint if named is None else with_masters(named, sources)
