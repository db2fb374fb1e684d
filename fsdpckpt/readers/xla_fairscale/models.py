"""The state dicts in one rank's file that hold recorded shards: proved by their lengths, and given names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias, cast

from fsdpckpt.formats.torch.distributed import BoxInFile, Distributed
from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.ir.assignment import in_order
from fsdpckpt.ir.tensors import SLICES
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.readers.flat_slices import is_optimizer, mappings
from fsdpckpt.readers.xla_fairscale.errors import (
    incomplete,
    misfit,
    one_name,
    own_parameters,
    padded_otherwise,
    strange_shards,
)
from fsdpckpt.readers.xla_fairscale.parse import is_shard
from fsdpckpt.readers.xla_fairscale.shard_metadata import (
    Backing,
    Record,
    fits,
    multiples,
    originals_in,
    ranks_of,
    without_wrappers,
)

__all__ = ["RecordedModels", "Unnamed", "named_optimizer", "names_of_ids", "unnamed_optimizer"]

_Path: TypeAlias = tuple[Key, ...]


class RecordedModels:
    """What ``record`` tells of in ``root``: the model, and others cut alike, an average of it for one.

    ``padded_to``: to multiples of what the lengths of shards are padded. Raises SourceCorruptError or
    SourceIncompleteError for shards whose lengths do not follow from the record, SourceUnsupportedError for parameters
    of which every rank has its own.
    """

    def __init__(self, root: Value, record: Record, rank: int, world_size: int, file: str) -> None:
        self.record = record
        self.rank = rank
        self.world_size = world_size
        self.file = file
        self.padded_to = record.multiples or (128, 1)
        self._by_key = {backing.key: backing for backing in record.backings}
        self._models: dict[_Path, dict[Key, object]] = {}
        for path, value in mappings(root):
            model = cast("dict[Key, object]", value)
            if not is_optimizer(model) and any(isinstance(model.get(key), StoredTensor) for key in self._by_key):
                self._prove(model)
                self._models[path] = model

    # Proofs.

    def _prove(self, model: Mapping[Key, object]) -> None:
        held = self._held(model)
        own = [backing.key for backing, _ in held if backing.own]
        if own and self.world_size > 1:
            raise own_parameters(self.file, own)
        strange = [key for key in model if isinstance(key, str) and key not in self._by_key and is_shard(key)]
        if strange:
            raise strange_shards(self.file, strange)
        self.padded_to = multiples(self.record, [(backing, one.shape) for backing, one in held], self.world_size)
        if not self.padded_to:
            self._refuse(held)
        for backing, stored in held:
            self._prove_padding(backing, stored)

    def _held(self, model: Mapping[Key, object]) -> list[tuple[Backing, StoredTensor]]:
        found = ((backing, model.get(backing.key)) for backing in self.record.backings)
        return [(backing, stored) for backing, stored in found if isinstance(stored, StoredTensor)]

    def _refuse(self, held: list[tuple[Backing, StoredTensor]]) -> None:
        usual = self.record.multiples or (128, 1)
        backing, stored = next(one for one in held if not fits(one[0], one[1].shape, self.world_size, usual))
        length = stored.shape[0] if len(stored.shape) == 1 else 0
        if self.record.world_size is None and 0 < length * self.world_size < backing.numel:
            raise incomplete(
                self.file, backing.key, self.rank, ranks=self.world_size, chunks_of=length, elements=backing.numel
            )
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        raise misfit(
            self.file,
            backing.key,
            self.rank,
            expected=f"a piece of {backing.numel} elements on {ranks}",
            found=f"shape {list(stored.shape)}",
        )

    def _prove_padding(self, backing: Backing, stored: StoredTensor) -> None:
        if backing.padding is None or len(stored.shape) != 1:
            return
        (length,) = stored.shape
        expected = length - max(min(length, backing.numel - self.rank * length), 0)
        if backing.padding != expected:
            raise padded_otherwise(self.file, backing.key, self.rank, expected=expected, found=backing.padding)

    # What was found.

    def order(self) -> list[Backing]:
        """The backing tensors in the order of the wrapped ``model.parameters()``, one under two names once.

        Raises Unnamed where nothing tells it.
        """
        if not self._models:
            if not self.record.listed:
                raise Unnamed("no model lies beside it, and the record is not in the order of its parameters")
            return list(self.record.backings)
        model = next(iter(self._models.values()))
        keys = self._by_key if self.record.listed else [key for key in model if key in self._by_key]
        seen: set[int] = set()
        found: list[Backing] = []
        for key in keys:
            stored = model.get(key)
            place = stored.offset if isinstance(stored, StoredTensor) and 0 not in stored.shape else None
            if place is None or place not in seen:
                found.append(self._by_key[str(key)])
            seen.update([place] if place is not None else [])
        return found

    def by_name(self) -> dict[_Path, dict[Key, object]]:
        """Each state dict with boxes of parameters in the places of shards, and names without wrappers."""
        return {path: self._named(model) for path, model in self._models.items()}

    def _named(self, model: Mapping[Key, object]) -> dict[Key, object]:
        made: OrderedDict[Key, object] = OrderedDict()
        same = self._places(model)
        for key, value in model.items():
            backing = self._by_key.get(str(key)) or same.get(str(key))
            found: dict[Key, object] = {without_wrappers(key) if isinstance(key, str) else key: value}
            if backing is not None and isinstance(value, StoredTensor):
                producer, world_size = self.record.producer, self.world_size
                chunks = originals_in(backing, value, rank=self.rank, world_size=world_size, producer=producer)
                found = cast("dict[Key, object]", chunks)
                if str(key) not in self._by_key:
                    found = {key: next(iter(chunks.values()))}
            self._add(made, found)
        self._add(made, {later: made[first] for later, first in self.record.shared if first in made})
        return made

    def _add(self, made: dict[Key, object], found: Mapping[Key, object]) -> None:
        twice = [str(name) for name in found if name in made]
        if twice:
            raise one_name(self.file, twice)
        made.update(found)

    def _places(self, model: Mapping[Key, object]) -> dict[str, Backing]:
        """Keys that are not recorded and lie on the bytes of a recorded one: parameters that share its storage."""
        places = {_place(stored): backing for backing, stored in self._held(model) if len(backing.params) == 1}
        found = {
            str(key): places.get(_place(value))
            for key, value in model.items()
            if self._unknown(key, value) and isinstance(value, StoredTensor)
        }
        return {key: backing for key, backing in found.items() if backing is not None}

    def _unknown(self, key: Key, value: object) -> bool:
        """Whether ``key`` is a tensor that is neither recorded nor a buffer, so may be cut too."""
        buffers = self.record.buffers
        return (
            isinstance(value, StoredTensor)
            and bool(value.shape)
            and buffers is not None
            and key not in buffers
            and key not in self._by_key
        )

    def unrecorded(self) -> list[str]:
        """Tensors of which nothing says whether they are cut."""
        if self.world_size == 1:
            return []
        return [
            str(key)
            for model in self._models.values()
            for key, value in model.items()
            if self._unknown(key, value) and str(key) not in self._places(model)
        ]

    def absent(self) -> list[str]:
        """Recorded tensors that a state dict with others of them lacks."""
        return [key for model in self._models.values() for key in self._by_key if key not in model]

    def retyped(self) -> list[str]:
        """Buffers whose type is not the one that they had before they were wrapped, with that type."""
        held = {without_wrappers(str(key)): leaf for model in self._models.values() for key, leaf in model.items()}
        return [
            f"{name} ({dtype})"
            for name, dtype in self.record.buffer_types
            if isinstance(leaf := held.get(name), StoredTensor) and leaf.dtype.name != dtype
        ]


def _place(stored: object) -> tuple[object, ...]:
    return (stored.offset, stored.shape, stored.stride, stored.dtype.name) if isinstance(stored, StoredTensor) else ()


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
