"""Builds the state dicts that torch and DCP files hold: of the model, of the optimizer, of all sections, and a rank's
extras."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from fsdpckpt.ir.checkpoint import Checkpoint, ModelState, Note, OptimState, stored_entry
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Value, like
from fsdpckpt.producers.forms import Step
from fsdpckpt.text import plural


def extras_of_rank(checkpoint: Checkpoint, rank: int) -> dict[Key, Value]:
    """The extras of target rank ``rank``: the common ones, and source rank ``rank``'s (modulo their number)."""
    if not checkpoint.rank_extra:
        return checkpoint.extra
    return _merged(checkpoint.extra, checkpoint.rank_extra[rank % len(checkpoint.rank_extra)])


def extras_of_one(checkpoint: Checkpoint) -> tuple[dict[Key, Value], list[Note]]:
    """The extras of a target without ranks: rank 0's, and a note for each one in which other ranks differ."""
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


def _merged(common: dict[Key, Value], of_rank: dict[Key, Value]) -> dict[Key, Value]:
    """Both, ``own`` first: its order is that of the file."""
    merged = like(of_rank, of_rank)
    for key, value in of_rank.items():
        known = common.get(key)
        if isinstance(known, dict) and isinstance(value, dict):
            merged[key] = _merged(known, value)
    merged.update({key: value for key, value in common.items() if key not in merged})
    return merged


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


def nested(sections: Sequence[tuple[tuple[Step, ...], Value]]) -> Value:
    """One dict of ``sections``, each below its path; a position in a path makes a list of the one section."""
    root: dict[Key, Value] = {}
    for path, section in sections:
        if not path:
            root.update(section if isinstance(section, dict) else {})
            continue
        value = section
        for step in reversed(path[1:]):
            value = {step: value} if isinstance(step, str) else [value]
        root[path[0]] = value
    return root


def model_dict(model: ModelState) -> dict[Key, Value]:
    """The state dict ``nn.Module.load_state_dict`` takes, ``_metadata`` attached when the source had it."""
    if model.metadata is None:
        return model.params  # type: ignore[return-value]  # a dict of str is one of Key
    params: OrderedDict[Key, Value] = OrderedDict(model.params)
    vars(params)["_metadata"] = model.metadata
    return params


def optim_dict(optim: OptimState) -> dict[Key, Value]:
    """The dict ``Optimizer.load_state_dict`` takes, and what users added to it."""
    state = {key: stored_entry(states) for key, states in optim.state.items()}
    root: dict[Key, Value] = {"state": state}  # type: ignore[dict-item]
    if optim.param_groups is not None:
        root["param_groups"] = optim.param_groups  # type: ignore[assignment]
    return {**root, **optim.extra}


def extra_notes(checkpoint: Checkpoint, world_size: int) -> list[Note]:
    """A note on what happens to the extras of ranks when the number of ranks changes."""
    ranks = len(checkpoint.rank_extra)
    if ranks in (0, world_size):
        return []
    if ranks > world_size:
        gone = f"rank {world_size} have" if ranks == world_size + 1 else f"ranks {world_size} to {ranks - 1} have"
        return [Note("dropped", f"the extras of {gone} no place in a target of {plural(world_size, 'rank')}")]
    new = f"rank {ranks} gets" if world_size == ranks + 1 else f"ranks {ranks} to {world_size - 1} get"
    return [Note("inferred", f"{new} the extras of rank r modulo {ranks}: the source has no others")]
