"""Names the ids of optimizers as the user's options say, and what depends on these names."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from fsdpckpt import flags
from fsdpckpt.converters.transform import units_request
from fsdpckpt.errors import FsdpckptError, of_option
from fsdpckpt.flat.units.request import UnitsRequest, load_units
from fsdpckpt.ir.checkpoint import Checkpoint, Section
from fsdpckpt.ir.sections import with_each_optimizer
from fsdpckpt.option_fields import Scope, given
from fsdpckpt.options import ConvertOptions
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.readers.masters import has_untied_masters, with_masters
from fsdpckpt.readers.protocol import Locate
from fsdpckpt.storage.sources import Sources
from fsdpckpt.transform.rekey import apply_key_type


def named_as_told(checkpoint: Checkpoint, request: UnitsRequest, sources: Sources) -> Checkpoint:
    """``checkpoint`` with its optimizers keyed by name, as ``request`` says. Raises what ``apply_key_type`` raises."""
    reference = None
    if request.reference is not None:
        with of_option(flags.reference):
            reference = open_checkpoint(request.reference, sources=sources, locate=Locate.NOTHING)
    name = partial(
        apply_key_type,
        key_type="name",
        units=load_units(request.file, sources) if request.file is not None else None,
        reference=reference,
        parameters=request.parameters,
        parameter_groups=request.parameter_groups,
        buffers=request.buffers,
    )
    return with_each_optimizer(checkpoint, name)


def with_told_masters(checkpoint: Checkpoint, options: ConvertOptions, sources: Sources) -> Checkpoint:
    """``checkpoint`` with the float32 weights that only ``options`` tie to parameters: a reader of the target, which
    has the names, would tie them.
    """
    if options.only is Section.OPTIM or not given(options, Scope.KNOWLEDGE) or not has_untied_masters(checkpoint):
        return checkpoint
    with suppress(FsdpckptError):  # raised again if the conversion needs the names
        named = named_as_told(checkpoint, units_request(options), sources)
        return with_masters(named, sources)
    return checkpoint
