"""Answers ``units``: from a checkpoint, a model that is built, or the directory of a Hugging Face model."""

from __future__ import annotations

from fsdpckpt import flags
from fsdpckpt.flat.units import source as of_source
from fsdpckpt.flat.units.architectures import base_model, require_classes
from fsdpckpt.flat.units.request import ResolvedUnits
from fsdpckpt.flat.units.source import prove, units_of_base
from fsdpckpt.ir import Strategy
from fsdpckpt.options.commands import UnitsOptions
from fsdpckpt.queries.opening import open_all, units_request_of
from fsdpckpt.storage.sources import Sources


def find_units(source: str, options: UnitsOptions) -> ResolvedUnits:
    """The units of the checkpoint at ``source``."""
    with Sources() as sources:
        (checkpoint,) = open_all([source], sources, options.units, options.ignore_file)
        return of_source.find_units(checkpoint, units_request_of(options), sources)


def model_units(model: str, options: UnitsOptions) -> ResolvedUnits:
    """The units of the model that ``model`` builds, with how they were made and, with ``options.source``, proved."""
    from fsdpckpt.flat.live.meta import units_from_model  # imports torch

    request = units_request_of(options)
    classes = [] if options.wrap == ("none",) else list(options.wrap)
    units = units_from_model(
        model,
        classes,
        use_orig_params=bool(options.use_orig_params),
        param_dtype=request.param_dtype,
        strategy=options.strategy or Strategy.FULL_SHARD,
        shard_size=request.shard_size,
        ignored=list(options.ignore),
    )
    how = [
        f"built by {model} on the meta device",
        f"wrapped: the root and every {', '.join(classes)}" if classes else "wrapped: the root only",
        *([f"ignored: {', '.join(options.ignore)}"] if options.ignore else []),
    ]
    if options.source is not None:
        with Sources() as sources:
            how += prove(units, options.source, sources)
    if options.use_orig_params is None:
        how.append(f"use_orig_params=False, FSDP's own default: add {flags.use_orig_params} if the training sets it")
    return ResolvedUnits(units, None, tuple(how))


def base_model_units(directory: str, options: UnitsOptions) -> ResolvedUnits:
    """The units of the Hugging Face model in ``directory``."""
    with Sources() as sources:
        base = base_model(directory, sources, options.transformers_version)
        require_classes(base, options.wrap)
        return units_of_base(base, options.wrap, units_request_of(options), options.source, sources)
