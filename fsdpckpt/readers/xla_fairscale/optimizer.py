"""Names the ids of an optimizer over recorded shards, and cuts its states as the parameters are cut.

The optimizer is the one of ``torch.optim`` over the wrapped ``model.parameters()``: an id is a backing tensor. Which
one is proved by ``param_names`` in the groups, or by order and by the lengths of the states; nothing else fits, or the
optimizer keeps its ids and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias, cast

from fsdpckpt.formats.torch.distributed import BoxInFile, Distributed
from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.ir.assignment import in_order
from fsdpckpt.ir.tensors import SLICES
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.readers.xla_fairscale.records import Backing, Record, fits, originals_in, ranks_of, without_wrappers

__all__ = ["Unnamed", "named_optimizer", "names_of_ids", "unnamed_optimizer"]

_Ids: TypeAlias = dict[Key, Backing]


class Unnamed(Exception):
    """Why the ids cannot be named, in words."""


def names_of_ids(
    optimizer: Mapping[Key, object], backings: Sequence[Backing], world_size: int, padded_to: Sequence[int]
) -> _Ids:
    """The backing tensor of each id. ``backings``: in the order of the wrapped ``model.parameters()``.

    Raises Unnamed.
    """
    groups = [_listed(group) for group in cast("list[dict[Key, object]]", optimizer.get("param_groups") or [])]
    states = cast("dict[Key, object]", optimizer["state"])
    ids = [key for group in groups for key in group]
    if not ids or any(key not in ids for key in states) or len(set(ids)) < len(ids):
        raise Unnamed("its param groups do not list every id once")
    told = _told(optimizer, backings)
    shapes = [list(_shapes(states.get(key))) for key in ids]

    def fitting(number: int, at: int) -> bool:
        if backings[at].frozen and states.get(ids[number]):  # what has no gradient gets no states
            return False
        return all(fits(backings[at], shape, world_size, padded_to) for shape in shapes[number])

    if told is not None:
        answers = [tuple(told)] if all(map(fitting, range(len(ids)), told)) else []
    else:
        answers = in_order([len(group) for group in groups], len(backings), fitting) or []
    if not answers:
        raise Unnamed(f"the lengths of its states are not those of the {len(backings)} tensors recorded")
    if len(answers) > 1:
        one = next(at for at, pair in enumerate(zip(*answers, strict=True)) if len(set(pair)) > 1)
        raise Unnamed(f"id {ids[one]!r} may be " + " or ".join(backings[answer[one]].title for answer in answers))
    return {key: backings[at] for key, at in zip(ids, answers[0], strict=True)}


def _listed(group: Mapping[Key, object]) -> list[Key]:
    listed = group.get("params")
    return list(listed) if isinstance(listed, (list, tuple)) else []


def _told(optimizer: Mapping[Key, object], backings: Sequence[Backing]) -> list[int] | None:
    """What ``param_names`` say, None where they do not say it of every id."""
    places = {without_wrappers(backing.key): at for at, backing in enumerate(backings)}
    found: list[int] = []
    for group in cast("list[dict[Key, object]]", optimizer["param_groups"]):
        names = group.get("param_names")
        if not isinstance(names, (list, tuple)) or len(names) != len(_listed(group)):
            return None
        at = [places.get(without_wrappers(str(name))) for name in names]
        if any(one is None for one in at):
            raise Unnamed("its param_names are not those of the tensors recorded")
        found.extend(one for one in at if one is not None)
    return found if len(set(found)) == len(found) else None


def _shapes(states: object) -> Iterator[tuple[int, ...]]:
    """The shapes of those states of one id that are cut."""
    for name, leaf in states.items() if isinstance(states, dict) else ():
        if _is_cut(name, leaf):
            yield leaf.shape


def _is_cut(name: object, leaf: object) -> bool:
    """A number is no chunk of anything; as a tensor it may be of shape (1,), which only ``step`` proves."""
    return isinstance(leaf, StoredTensor) and bool(leaf.shape) and (name, leaf.shape) != ("step", (1,))


def named_optimizer(
    optimizer: dict[Key, object], ids: _Ids, record: Record, *, rank: int, world_size: int
) -> dict[Key, object]:
    """``optimizer`` by name, with every state cut as its parameter is, on ``rank``."""
    states = cast("dict[Key, object]", optimizer["state"])
    made: dict[Key, object] = {}
    for key, backing in ids.items():
        if key in states:
            made.update(_entries(states[key], backing, record, rank, world_size))
    groups = cast("list[dict[Key, object]]", optimizer["param_groups"])
    return {**optimizer, "state": made, "param_groups": [_group(group, ids) for group in groups]}


def _entries(
    states: object, backing: Backing, record: Record, rank: int, world_size: int
) -> dict[Key, dict[Key, object]]:
    """The states of each parameter in ``backing``; what is not cut belongs to all of them."""
    found: dict[Key, dict[Key, object]] = {param.name: {} for param in backing.params}
    for name, leaf in cast("dict[Key, object]", states).items():
        chunks: Mapping[str, object] = dict.fromkeys((param.name for param in backing.params), leaf)
        if _is_cut(name, leaf):
            stored = cast(StoredTensor, leaf)
            chunks = originals_in(backing, stored, rank=rank, world_size=world_size, producer=record.producer)
        for param, chunk in chunks.items():
            found[param][name] = chunk
    return found


def _group(group: Mapping[Key, object], ids: _Ids) -> dict[Key, object]:
    names: list[Value] = [param.name for key in _listed(group) for param in ids[key].params]
    changed: dict[Key, object] = {**group, "params": names}
    if "param_names" in group:
        changed["param_names"] = list(names)
    return changed


def unnamed_optimizer(optimizer: dict[Key, object], *, rank: int, world_size: int, producer: str) -> dict[Key, object]:
    """``optimizer`` by its ids, with every state as the rank's slice of nobody knows what."""
    states = cast("dict[Key, dict[Key, object]]", optimizer["state"])
    made = {
        key: {name: _slice(name, leaf, rank, world_size, producer) for name, leaf in entry.items()}
        if isinstance(entry, dict)
        else entry
        for key, entry in states.items()
    }
    return {**optimizer, "state": made}


def _slice(name: object, leaf: object, rank: int, world_size: int, producer: str) -> object:
    if not _is_cut(name, leaf) or not isinstance(leaf, StoredTensor):
        return leaf
    rows, *rest = leaf.shape
    start = (rank * rows, *(0,) * len(rest))
    boxes = (BoxInFile(start, leaf.shape, leaf.offset, leaf.stride),)
    world = ranks_of(world_size)
    shape = (world_size * rows, *rest)
    return Distributed(f"{producer} shard", leaf.dtype, shape, SLICES, rank, world, world, boxes)
