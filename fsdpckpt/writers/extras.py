"""The extras of one target, out of what is common to the source's ranks and what each rank had of its own."""

from __future__ import annotations

from fsdpckpt.ir.checkpoint import Checkpoint, Note
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Value

__all__ = ["extras_of_one", "extras_of_rank"]


def extras_of_rank(checkpoint: Checkpoint, rank: int) -> dict[Key, Value]:
    """What target rank ``rank`` gets: the common extras, over them source rank ``rank``'s (modulo their number)."""
    if not checkpoint.rank_extra:
        return checkpoint.extra
    return _merged(checkpoint.extra, checkpoint.rank_extra[rank % len(checkpoint.rank_extra)])


def extras_of_one(checkpoint: Checkpoint) -> tuple[dict[Key, Value], list[Note]]:
    """What a target without ranks gets: rank 0's extras, and a note naming what the other ranks had of their own."""
    notes = []
    if len(checkpoint.rank_extra) > 1:
        ranks = len(checkpoint.rank_extra)
        first = checkpoint.rank_extra[0]
        for key in dict.fromkeys(key for extra in checkpoint.rank_extra for key in extra):
            if all(key in extra and _alike(extra[key], first.get(key)) for extra in checkpoint.rank_extra):
                continue
            name = str(key)
            what = f"differs between the {ranks} ranks" if key in first else f"is not on rank 0 of {ranks}"
            notes.append(Note("dropped", f"{name} {what}: only what rank 0 has is kept", name))
    return extras_of_rank(checkpoint, 0), notes


def _merged(common: dict[Key, Value], own: dict[Key, Value]) -> dict[Key, Value]:
    """All of both, ``own`` first: its order is that of the file."""
    merged: dict[Key, Value] = {}
    for key, value in own.items():
        known = common.get(key)
        merged[key] = _merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return {**merged, **{key: value for key, value in common.items() if key not in merged}}


def _alike(one: Value, other: Value) -> bool:
    """Whether two ranks have the same value: what they have in common is one object, its tensors of the same chunks."""
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.chunks is other.chunks
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(_alike(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_alike, one, other))
    return type(one) is type(other) and one == other
