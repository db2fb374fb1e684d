"""Picks the writer for a goal."""

from __future__ import annotations

from collections.abc import Mapping

from fsdpckpt.converters.flavored import lay_out_flavor
from fsdpckpt.converters.goal import Goal
from fsdpckpt.converters.passes import Rewritten
from fsdpckpt.converters.rank_files import lay_out_ranks
from fsdpckpt.flat.flatten import write as torch_flat
from fsdpckpt.ir.checkpoint import Container, Layout
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.targets import Target
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.options import ConvertOptions
from fsdpckpt.producers.forms import PLAIN_MESH
from fsdpckpt.writers import dcp, safetensors, torch_full
from fsdpckpt.writers.dtype_rule import DtypeRule

__all__ = ["dtype_rule", "lay_out"]


def dtype_rule(options: ConvertOptions) -> DtypeRule:
    """``--dtype`` and ``--optim-dtype`` as the writers take them."""
    return DtypeRule(
        model=DTYPES[options.dtype] if options.dtype is not None else None,
        optim=DTYPES[options.optim_dtype] if options.optim_dtype is not None else None,
    )


def lay_out(
    rewritten: Rewritten, goal: Goal, options: ConvertOptions, beside: Mapping[str, Tensor] | None = None
) -> Target:
    """The target files of ``rewritten``, laid out by the writer of ``goal.container`` and ``goal.layout``.

    ``beside``: the files beside it that go along, by target name, where the goal is a producer's form.
    """
    dtypes = dtype_rule(options)
    checkpoint = rewritten.checkpoint
    if goal.form is not None:
        return lay_out_flavor(
            rewritten, goal.form, beside or {}, world_size=goal.world_size, options=options, dtypes=dtypes
        )
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
        ranks = 1 if goal.layout is Layout.FULL else goal.world_size
        return dcp.lay_out(checkpoint, world_size=ranks, dtypes=dtypes)
    if goal.layout is Layout.FULL:
        return torch_full.lay_out(checkpoint, dtypes=dtypes, bare=options.only is not None)
    return lay_out_ranks(checkpoint, world_size=goal.world_size or 1, options=options, dtypes=dtypes, mesh=PLAIN_MESH)
