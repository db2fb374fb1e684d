"""Whether a checkpoint holds slices of flat parameters: every command asks, and few need what finds their units."""

from __future__ import annotations

from collections.abc import Sequence

from fsdpckpt.flat.match import FlatMatch, match
from fsdpckpt.flat.slices import is_sliced
from fsdpckpt.flat.units.request import UnitsRequest, load_units
from fsdpckpt.ir.checkpoint import Checkpoint, Layout
from fsdpckpt.ir.placements import Slices
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.layouts.flattened import is_flat_key
from fsdpckpt.storage.sources import Sources


def is_flattened(checkpoint: Checkpoint, sources: Sources, request: UnitsRequest | None = None) -> bool:
    """Whether the sections of ``checkpoint`` hold slices of flat parameters."""
    if checkpoint.model is not None and any(is_flat_key(key) for key in checkpoint.model.params):
        return True
    optim = checkpoint.optim
    if optim is None:
        return False
    leaves = [leaf for states in optim.state.values() for leaf in states.values() if isinstance(leaf, Tensor)]
    if any(isinstance(leaf.cut, Slices) for leaf in leaves):
        return True
    return optim.key_type == "id" and _is_sliced_by_units(checkpoint, leaves, sources, request)


def _is_sliced_by_units(
    checkpoint: Checkpoint, leaves: Sequence[Tensor], sources: Sources, request: UnitsRequest | None
) -> bool:
    """Whether an optimizer holds slices although nothing in it shows that: it is one rank's, or has no states.

    The units beside it, or those given, decide.
    """
    units = checkpoint.units
    if units is None and request is not None and request.file is not None:
        units = load_units(request.file, sources, request.sections)
    if units is not None and not units.flat:
        return checkpoint.layout is Layout.FLATTENED
    if units is not None:
        if checkpoint.layout is Layout.FLATTENED:
            return True
        return is_sliced(checkpoint, units) and isinstance(match(checkpoint, units), FlatMatch)
    if request is None or not request.globs or checkpoint.world_size > 1:
        return False
    model = checkpoint.params.values()
    vectors = bool(model) and all(leaf.ndim == 1 for leaf in model if isinstance(leaf, Tensor))
    return {leaf.ndim for leaf in leaves if leaf.ndim} == {1} and not vectors
