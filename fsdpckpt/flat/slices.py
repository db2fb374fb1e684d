"""FSDP1's flat parameters. This module has their slices by length, as each rank holds them before any unit is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np

from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.counters import STEP
from fsdpckpt.ir.optimizer import Optimizer, ParamKey
from fsdpckpt.ir.placements import Slices
from fsdpckpt.ir.tensors import Int64Array, Tensor, distinct
from fsdpckpt.ir.units import Units
from fsdpckpt.ir.values import Value
from fsdpckpt.layouts.flattened import is_flat_key
from fsdpckpt.text import some_of


def slice_lengths(tensor: Tensor, world_size: int) -> Int64Array | None:
    """The number of elements each rank holds of a 1-D tensor, 0 if it has none; None if it is not one plain chunk for
    each rank.
    """
    chunks = tensor.chunks
    if tensor.ndim != 1 or len(distinct(chunks.rank)) != len(chunks):
        return None
    if ((chunks.stride[:, 0] != 1) & (chunks.size[:, 0] > 1)).any():  # not a slice of FSDP1's, which are dense
        return None
    lengths = np.zeros(world_size, np.int64)
    lengths[chunks.rank] = chunks.size[:, 0]
    return lengths


def is_number_per_rank(tensor: Tensor) -> bool:
    """Whether it is one number for each rank, in a tensor of shape (1,): then it is not a slice but like a
    0-dim state.
    """
    return tensor.ndim == 1 and len(tensor.chunks) > 0 and bool((tensor.chunks.size[:, 0] == 1).all())


def is_step(state: str, tensor: Tensor) -> bool:
    """Whether it is a step of shape (1,): never a slice, even if slices have one element too."""
    return state == STEP and is_number_per_rank(tensor)


def is_sliced(checkpoint: Checkpoint, units: Units) -> bool:
    """Whether the optimizer holds slices. With one rank they are whole 1-D tensors, and only the units show it."""
    optim = checkpoint.optim
    if optim is None:
        return False
    leaves = [
        leaf for states in optim.state.values() for leaf in states.values() if isinstance(leaf, Tensor) and leaf.ndim
    ]
    if any(isinstance(leaf.cut, Slices) for leaf in leaves):
        return True
    if not leaves:  # SGD without momentum: only the ids exist, and the units name them
        return optim.key_type == "id"
    if optim.key_type != "id" or units.use_orig_params:
        return False
    keys = {unit.key for unit in units.units}
    states = [
        leaf
        for number, key in enumerate(units.id_order())
        if key in keys
        for leaf in optim.state.get(number, {}).values()
    ]
    return all(leaf.ndim < 2 and leaf.sharded is not True for leaf in states if isinstance(leaf, Tensor))


def lengths_text(lengths: Int64Array) -> str:
    """The number of elements by rank, for a message."""
    values: list[int] = lengths.tolist()
    if len(set(values)) == 1 and len(values) > 1:
        return f"{values[0]} (each of {len(values)})"
    return some_of(values, 12)


def tensor_text(tensor: Tensor, world_size: int) -> str:
    """The number of elements of a tensor by rank, for a message; its shape if it is not a slice."""
    lengths = slice_lengths(tensor, world_size)
    return f"shape {list(tensor.shape)}" if lengths is None else lengths_text(lengths)


def lengths_by_key(optim: Optimizer, world_size: int) -> dict[ParamKey, Int64Array]:
    """The number of elements each rank holds of each parameter key, from its first state that is one 1-D chunk for each
    rank.

    Leaves out keys without such a state.
    """
    by_key: dict[ParamKey, Int64Array] = {}
    for key, states in optim.state.items():
        for leaf in states.values():
            lengths = _state_lengths(leaf, world_size)
            if lengths is not None:
                by_key[key] = lengths
                break
    return by_key


def _state_lengths(leaf: Tensor | Value, world_size: int) -> Int64Array | None:
    if not isinstance(leaf, Tensor) or leaf.ndim != 1 or is_number_per_rank(leaf):
        return None
    if not isinstance(leaf.cut, Slices) and world_size > 1:  # whole vectors; with one rank, slices look the same
        return None
    return slice_lengths(leaf, world_size)


def _all_lengths(checkpoint: Checkpoint) -> Iterator[Int64Array]:
    if checkpoint.model is not None:
        for key, leaf in checkpoint.model.params.items():
            if is_flat_key(key) and isinstance(leaf, Tensor):
                lengths = slice_lengths(leaf, checkpoint.world_size)
                if lengths is not None:
                    yield lengths
    if checkpoint.optim is not None:
        yield from lengths_by_key(checkpoint.optim, checkpoint.world_size).values()


def possible_shard_sizes(checkpoint: Checkpoint) -> tuple[int, ...]:
    """The possible sizes of a sharding group, largest first: ranks r and r % size hold the same number of elements of
    everything.
    """
    world_size = checkpoint.world_size
    sizes = [size for size in range(world_size, 0, -1) if world_size % size == 0]
    for lengths in _all_lengths(checkpoint):
        sizes = [size for size in sizes if (lengths == np.resize(lengths[:size], world_size)).all()]
    return tuple(sizes)


def possible_numels(checkpoint: Checkpoint) -> tuple[int, ...]:
    """The possible total numbers of elements of the parameters, padding included, one for each size of sharding group.

    Does not count parameters that show nothing (no state, one element for each rank).
    """
    world_size = checkpoint.world_size
    model = checkpoint.params
    flat = [leaf.numel for key, leaf in model.items() if is_flat_key(key) and isinstance(leaf, Tensor)]
    if flat:
        return (sum(flat),)
    optim = checkpoint.optim
    if optim is None:
        return ()
    rows = lengths_by_key(optim, world_size)
    whole = sum(_count_whole(states) for key, states in optim.state.items() if key not in rows)
    numels: list[int] = []
    for size in possible_shard_sizes(checkpoint):
        sliced = sum(int(row[:size].sum()) for row in rows.values())
        numels.append(whole + sliced)
    return tuple(numels)


def _count_whole(states: Mapping[str, Tensor | Value]) -> int:
    return max((leaf.numel for leaf in states.values() if isinstance(leaf, Tensor) and leaf.ndim > 1), default=0)


def has_uneven_slices(checkpoint: Checkpoint) -> bool:
    """Whether some optimizer slices differ in length between ranks, which only ``use_orig_params=True`` causes."""
    optim = checkpoint.optim
    lengths = lengths_by_key(optim, checkpoint.world_size).values() if optim is not None else ()
    return any((row != row[0]).any() for row in lengths)


def describe_lengths(checkpoint: Checkpoint) -> list[str]:
    """How many slices of how many elements there are, for messages."""
    lines: list[str] = []
    if checkpoint.model is not None:
        flat = {key: leaf for key, leaf in checkpoint.model.params.items() if is_flat_key(key)}
        lines.extend(f"{key}: {leaf.numel:,} elements" for key, leaf in flat.items() if isinstance(leaf, Tensor))
    if checkpoint.optim is not None:
        rows = lengths_by_key(checkpoint.optim, checkpoint.world_size)
        same = Counter(tuple(row.tolist()) for row in rows.values())
        for row, times in same.items():
            text = f"{row[0]:,}" if len(set(row)) == 1 else ", ".join(f"{n:,}" for n in row)
            where = "on every rank" if len(set(row)) == 1 else "by rank"
            lines.append(f"{times} optimizer {'key' if times == 1 else 'keys'} with slices of {text} elements {where}")
    return lines
