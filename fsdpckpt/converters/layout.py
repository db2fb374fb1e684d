"""Picks the writer for a goal."""

from __future__ import annotations

from fsdpckpt.converters.goal import Goal
from fsdpckpt.converters.options import ConvertOptions
from fsdpckpt.converters.passes import Rewritten
from fsdpckpt.ir.checkpoint import Container, Layout
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.targets import Target
from fsdpckpt.writers import dcp, safetensors, torch_flat, torch_full, torch_ranks
from fsdpckpt.writers.dtype_rule import DtypeRule

__all__ = ["dtype_rule", "lay_out"]


def dtype_rule(options: ConvertOptions) -> DtypeRule:
    """``--dtype`` and ``--optim-dtype`` as the writers take them."""
    return DtypeRule(
        model=DTYPES[options.dtype] if options.dtype is not None else None,
        optim=DTYPES[options.optim_dtype] if options.optim_dtype is not None else None,
    )


def lay_out(rewritten: Rewritten, goal: Goal, options: ConvertOptions) -> Target:
    """The target files of ``rewritten``, laid out by the writer of ``goal.container`` and ``goal.layout``."""
    dtypes = dtype_rule(options)
    checkpoint = rewritten.checkpoint
    if rewritten.units is not None:
        return torch_flat.lay_out(
            checkpoint,
            units=rewritten.units,
            world_size=goal.world_size or 1,
            key_type=rewritten.key_type or "id",
            dtypes=dtypes,
        )
    if goal.container is Container.SAFETENSORS:
        return safetensors.lay_out(
            checkpoint, max_shard_size=options.max_shard_size, single_file=not goal.directory, dtypes=dtypes
        )
    if goal.container is Container.DCP:
        if goal.layout is Layout.FULL:
            return dcp.lay_out(checkpoint, world_size=1, dtypes=dtypes)
        return dcp.lay_out(checkpoint, world_size=goal.world_size, dtypes=dtypes)
    if goal.layout is Layout.FULL:
        return torch_full.lay_out(checkpoint, dtypes=dtypes, bare=options.only is not None)
    return torch_ranks.lay_out(checkpoint, world_size=goal.world_size or 1, tensor=goal.tensor, dtypes=dtypes)
