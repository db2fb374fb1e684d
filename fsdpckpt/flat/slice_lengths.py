"""What is a slice of a flat parameter, and how much of it each rank holds."""

from __future__ import annotations

import numpy as np

from fsdpckpt.flat.keys import order_of_ids
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.tensors import SLICES, Int64Array, Tensor
from fsdpckpt.ir.units import FLAT_PARAM, Units

__all__ = ["carried_whole", "is_flat_key", "is_sliced", "is_step", "lengths_found", "lengths_shown", "slice_lengths"]


def is_flat_key(key: str) -> bool:
    """Whether a model key names a flat parameter."""
    return key == FLAT_PARAM or key.endswith(f".{FLAT_PARAM}")


def slice_lengths(tensor: Tensor, world_size: int) -> Int64Array | None:
    """Elements each rank holds of a 1-D tensor, 0 where it has none; None when it is not one plain chunk a rank."""
    chunks = tensor.chunks
    if tensor.ndim != 1 or len(np.unique(chunks.rank)) != len(chunks):
        return None
    if ((chunks.stride[:, 0] != 1) & (chunks.size[:, 0] > 1)).any():  # no slice of FSDP1's, which are dense
        return None
    lengths = np.zeros(world_size, np.int64)
    lengths[chunks.rank] = chunks.size[:, 0]
    return lengths


def carried_whole(tensor: Tensor) -> bool:
    """Whether it is one number a rank, in a tensor of shape (1,): no slice then, but like a 0-dim state."""
    return tensor.ndim == 1 and len(tensor.chunks) > 0 and bool((tensor.chunks.size[:, 0] == 1).all())


def is_step(state: str, tensor: Tensor) -> bool:
    """Whether it is a step of shape (1,): never a slice, even where slices have one element too."""
    return state == "step" and carried_whole(tensor)


def is_sliced(checkpoint: Checkpoint, units: Units) -> bool:
    """Whether the optimizer holds slices. Of one rank they are whole 1-D tensors, and only the units tell."""
    optim = checkpoint.optim
    if optim is None:
        return False
    leaves = [
        leaf for states in optim.state.values() for leaf in states.values() if isinstance(leaf, Tensor) and leaf.ndim
    ]
    if any(leaf.placement == SLICES for leaf in leaves):
        return True
    if not leaves:  # SGD without momentum: only the ids are there, and they are ids of what the units say
        return optim.key_type == "id"
    if optim.key_type != "id" or units.use_orig_params:
        return False
    keys = {unit.key for unit in units.units}
    states = [
        leaf
        for number, key in enumerate(order_of_ids(units))
        if key in keys
        for leaf in optim.state.get(number, {}).values()
    ]
    return all(leaf.ndim < 2 and leaf.sharded is not True for leaf in states if isinstance(leaf, Tensor))


def lengths_shown(lengths: Int64Array) -> str:
    """The elements by rank, for a message."""
    values: list[int] = lengths.tolist()
    if len(set(values)) == 1 and len(values) > 1:
        return f"{values[0]} (each of {len(values)})"
    return ", ".join(map(str, values[:12])) + (", ..." if len(values) > 12 else "")


def lengths_found(tensor: Tensor, world_size: int) -> str:
    """The elements of a tensor by rank, for a message; its shape where it is no slice."""
    lengths = slice_lengths(tensor, world_size)
    return f"shape {list(tensor.shape)}" if lengths is None else lengths_shown(lengths)
