"""What the slices of a flattened checkpoint show by their lengths alone, before any unit is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np

from fsdpckpt.flat.slice_lengths import carried_whole, is_flat_key, slice_lengths
from fsdpckpt.ir.checkpoint import Checkpoint, OptimState, ParamKey
from fsdpckpt.ir.tensors import SLICES, Int64Array, Tensor
from fsdpckpt.ir.values import Value

__all__ = ["elements", "key_lengths", "lengths_said", "possible_groups", "uneven"]


def key_lengths(optim: OptimState, world_size: int) -> dict[ParamKey, Int64Array]:
    """Elements that each rank holds of each parameter key: of its first state that is one 1-D chunk a rank.

    Keys without such a state are left out.
    """
    found: dict[ParamKey, Int64Array] = {}
    for key, states in optim.state.items():
        for leaf in states.values():
            lengths = _lengths(leaf, world_size)
            if lengths is not None:
                found[key] = lengths
                break
    return found


def _lengths(leaf: Tensor | Value, world_size: int) -> Int64Array | None:
    if not isinstance(leaf, Tensor) or leaf.ndim != 1 or carried_whole(leaf):
        return None
    if leaf.placement != SLICES and world_size > 1:  # whole vectors; of one rank, slices look the same
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
        yield from key_lengths(checkpoint.optim, checkpoint.world_size).values()


def possible_groups(checkpoint: Checkpoint) -> tuple[int, ...]:
    """The sizes that a sharding group can have, largest first: ranks r and r % size hold equally much of everything."""
    world_size = checkpoint.world_size
    sizes = [size for size in range(world_size, 0, -1) if world_size % size == 0]
    for lengths in _all_lengths(checkpoint):
        sizes = [size for size in sizes if (lengths == np.resize(lengths[:size], world_size)).all()]
    return tuple(sizes)


def elements(checkpoint: Checkpoint) -> tuple[int, ...]:
    """How many elements the parameters may have together, padding included, one number for each sharding group.

    Parameters that show nothing (no state, one element a rank) are not counted.
    """
    world_size = checkpoint.world_size
    model = checkpoint.model.params if checkpoint.model is not None else {}
    flat = [leaf.numel for key, leaf in model.items() if is_flat_key(key) and isinstance(leaf, Tensor)]
    if flat:
        return (sum(flat),)
    optim = checkpoint.optim
    if optim is None:
        return ()
    rows = key_lengths(optim, world_size)
    whole = sum(_whole(states) for key, states in optim.state.items() if key not in rows)
    return tuple(whole + sum(int(row[:size].sum()) for row in rows.values()) for size in possible_groups(checkpoint))


def _whole(states: Mapping[str, Tensor | Value]) -> int:
    return max((leaf.numel for leaf in states.values() if isinstance(leaf, Tensor) and leaf.ndim > 1), default=0)


def uneven(checkpoint: Checkpoint) -> bool:
    """Whether some optimizer slices differ in length between ranks, as only ``use_orig_params=True`` leaves them."""
    optim = checkpoint.optim
    lengths = key_lengths(optim, checkpoint.world_size).values() if optim is not None else ()
    return any((row != row[0]).any() for row in lengths)


def lengths_said(checkpoint: Checkpoint) -> list[str]:
    """The same in words, for messages: how many slices of how many elements there are."""
    said: list[str] = []
    if checkpoint.model is not None:
        flat = {key: leaf for key, leaf in checkpoint.model.params.items() if is_flat_key(key)}
        said.extend(f"{key}: {leaf.numel:,} elements" for key, leaf in flat.items() if isinstance(leaf, Tensor))
    if checkpoint.optim is not None:
        rows = key_lengths(checkpoint.optim, checkpoint.world_size)
        same = Counter(tuple(row.tolist()) for row in rows.values())
        for row, times in same.items():
            text = f"{row[0]:,}" if len(set(row)) == 1 else ", ".join(f"{n:,}" for n in row)
            where = "on every rank" if len(set(row)) == 1 else "by rank"
            said.append(f"{times} optimizer {'key' if times == 1 else 'keys'} with slices of {text} elements {where}")
    return said
