"""Recognises a source in slices of flat parameters, and gives the slices their names once units are proved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdpckpt.flat.match import FlatMatch, match
from fsdpckpt.flat.padding import require_padding
from fsdpckpt.flat.replicas import compare_replicas
from fsdpckpt.flat.slice_lengths import is_flat_key, is_sliced
from fsdpckpt.flat.unflatten import unflatten
from fsdpckpt.flat.units.request import FoundUnits, UnitsRequest, load_units
from fsdpckpt.ir.checkpoint import Checkpoint, Layout, Note
from fsdpckpt.ir.invariants import fatal
from fsdpckpt.ir.tensors import SLICES, Tensor
from fsdpckpt.storage.sources import Sources

__all__ = ["is_flattened", "name_slices"]


def is_flattened(checkpoint: Checkpoint, sources: Sources, request: UnitsRequest | None = None) -> bool:
    """Whether the sections that ``checkpoint`` has hold slices of flat parameters."""
    if checkpoint.model is not None and any(is_flat_key(key) for key in checkpoint.model.params):
        return True
    optim = checkpoint.optim
    if optim is None:
        return False
    leaves = [leaf for states in optim.state.values() for leaf in states.values() if isinstance(leaf, Tensor)]
    if any(leaf.placement == SLICES for leaf in leaves):
        return True
    return optim.key_type == "id" and _looks_whole(checkpoint, leaves, sources, request)


def _looks_whole(
    checkpoint: Checkpoint, leaves: Sequence[Tensor], sources: Sources, request: UnitsRequest | None
) -> bool:
    """Whether an optimizer is sliced although nothing in it shows: one rank's, or one without states.

    The units beside it, or those given, tell.
    """
    units = checkpoint.units
    if units is None and request is not None and request.file is not None:
        units = load_units(request.file, sources)
    if units is not None:
        if checkpoint.layout is Layout.FLATTENED:
            return True
        return is_sliced(checkpoint, units) and isinstance(match(checkpoint, units), FlatMatch)
    if request is None or not request.globs or checkpoint.world_size > 1:
        return False
    model = checkpoint.model.params.values() if checkpoint.model is not None else ()
    vectors = bool(model) and all(leaf.ndim == 1 for leaf in model if isinstance(leaf, Tensor))
    return {leaf.ndim for leaf in leaves if leaf.ndim} == {1} and not vectors


def name_slices(checkpoint: Checkpoint, found: FoundUnits, sources: Sources, *, replicas: bool = True) -> Checkpoint:
    """``checkpoint`` with the slices turned into whole tensors by units that were proved.

    ``replicas``: whether those of slices are compared here. Raises SourceCorruptError when they differ, or when what
    the units call padding is none.
    """
    if found.match is None:
        return checkpoint
    padding = require_padding(checkpoint, found.match, sources)
    proved = [f"{padding} elements of padding hold what FSDP1 writes there"] if padding else []
    problems, notes = compare_replicas(checkpoint, found.match) if replicas else ([], [])
    if problems:
        raise fatal(problems, source=checkpoint.source)
    told = [*notes, *(Note("units", line) for line in (*found.how, *found.match.proved, *proved))]
    return unflatten(replace(checkpoint, notes=(*checkpoint.notes, *told)), found.match)
