"""Names the parameters in one rank's shards: those of models, and those of the optimizer's states.

The shapes of the shards must follow from the shard metadata, or they are refused. The optimizer is the one of
``torch.optim`` over the wrapped ``model.parameters()``: an id is a sharded tensor. ``param_names`` in the groups, or
the order and the lengths of the states, prove which one; if they leave it open, the optimizer keeps its ids and is
refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias, cast

from fsdpckpt.errors import SourceCorruptError, SourceError, SourceIncompleteError, SourceUnsupportedError
from fsdpckpt.formats.torch.distributed import BoxInFile, Distributed, all_ranks
from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.ir.tensors import Slices
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.readers.optimizer_forms import containers, is_optimizer
from fsdpckpt.readers.protocol import KeyPath
from fsdpckpt.readers.xla_fairscale.shard_metadata import (
    ShardedTensor,
    ShardMetadata,
    fits,
    is_shard,
    padding_multiples,
    params_in,
    without_wrappers,
)
from fsdpckpt.text import plural
from fsdpckpt.transform.assignment import in_order

MAX_NAMES = 5  # keys in a message

_Ids: TypeAlias = dict[Key, ShardedTensor]


class UnnamedError(Exception):
    """Why the ids of an optimizer cannot be named, in words."""


class RankShards:
    """The tensors of ``metadata`` in ``root``, one rank's file: the model, and others cut the same way (an average of
    it).

    Raises SourceCorruptError or SourceIncompleteError for shards whose lengths do not follow from the metadata,
    SourceUnsupportedError for parameters that differ on every rank.
    """

    def __init__(self, root: Value, metadata: ShardMetadata, rank: int, world_size: int, file: str) -> None:
        self.metadata = metadata
        self.rank = rank
        self.world_size = world_size
        self.file = file
        self._multiples = metadata.multiples or (128, 1)
        self._by_key = {tensor.key: tensor for tensor in metadata.tensors}
        self._models: dict[KeyPath, dict[Key, object]] = {}
        for path, value in containers(root):
            model = cast("dict[Key, object]", value)
            if not is_optimizer(model) and any(isinstance(model.get(key), StoredTensor) for key in self._by_key):
                self._prove(model)
                self._models[path] = model

    # Proofs

    def _prove(self, model: Mapping[Key, object]) -> None:
        stored_tensors = self._stored_tensors(model)
        per_rank = [tensor.key for tensor, _ in stored_tensors if tensor.per_rank]
        if per_rank and self.world_size > 1:
            more = f", and {len(per_rank) - 1} more" if len(per_rank) > 1 else ""
            raise SourceUnsupportedError(
                f"{self.file}: every rank has its own {per_rank[0]}{more}",
                details=per_rank[:MAX_NAMES],
                file=self.file,
                key=per_rank[0],
                why="its module was wrapped with no_broadcast_optim_state, as the experts of a mixture are",
                next_step="save the experts of each rank under different names in the job that trained them",
            )
        unlisted = [key for key in model if isinstance(key, str) and key not in self._by_key and is_shard(key)]
        if unlisted:
            raise SourceCorruptError(
                f"{self.file} has {plural(len(unlisted), 'shard')} that its shard metadata does not list",
                details=unlisted[:MAX_NAMES],
                file=self.file,
                key=unlisted[0],
                why="the metadata describes a different model",
                next_step="save the metadata and the shards of one model in one file",
            )
        shapes = [(tensor, stored.shape) for tensor, stored in stored_tensors]
        usual = self.metadata.multiples or (128, 1)
        self._multiples = padding_multiples(self.metadata, shapes, self.world_size)
        if not self._multiples:
            misfits = (pair for pair in stored_tensors if not fits(pair[0], pair[1].shape, self.world_size, usual))
            raise self._length_error(*next(misfits))
        for tensor, stored in stored_tensors:
            self._prove_padding(tensor, stored)

    def _stored_tensors(self, model: Mapping[Key, object]) -> list[tuple[ShardedTensor, StoredTensor]]:
        pairs = ((tensor, model.get(tensor.key)) for tensor in self.metadata.tensors)
        return [(tensor, stored) for tensor, stored in pairs if isinstance(stored, StoredTensor)]

    def _length_error(self, tensor: ShardedTensor, stored: StoredTensor) -> SourceError:
        length = stored.shape[0] if len(stored.shape) == 1 else 0
        if self.metadata.world_size is None and 0 < length * self.world_size < tensor.numel:
            needed = -(-tensor.numel // length)
            return SourceIncompleteError(
                f"ranks are missing: {tensor.key} has {needed} chunks or more, and {self.world_size} can be here",
                file=self.file,
                key=tensor.key,
                rank=self.rank,
                expected=f"{tensor.numel} elements",
                found=f"{self.world_size} chunks of {length}",
                why="each rank writes its own part, and every part is needed",
                next_step="copy the files of all ranks into one directory and give that directory",
            )
        return SourceCorruptError(
            f"{self.file}: the shard {tensor.key} does not match the record beside it",
            file=self.file,
            key=tensor.key,
            rank=self.rank,
            expected=f"a chunk of {plural(tensor.numel, 'element')} on {plural(self.world_size, 'rank')}",
            found=f"shape {list(stored.shape)}",
            why="the shard metadata and the shards are of different models, or files of another run are among them",
            next_step="give a directory with the files of one save",
        )

    def _prove_padding(self, tensor: ShardedTensor, stored: StoredTensor) -> None:
        if tensor.padding is None or len(stored.shape) != 1:
            return
        (length,) = stored.shape
        expected = length - max(min(length, tensor.numel - self.rank * length), 0)
        if tensor.padding != expected:
            raise SourceCorruptError(
                f"{self.file} does not hold what rank {self.rank} has of {tensor.key}",
                file=self.file,
                key=tensor.key,
                rank=self.rank,
                expected=f"{expected} elements of padding",
                found=f"{tensor.padding}",
                why="files were renamed, or copied from another rank or run, or the files of some ranks are missing",
                next_step="rename every file to the name it was saved under, and give all files of one save",
            )

    # Models

    def models(self) -> dict[KeyPath, dict[Key, object]]:
        """Each state dict with boxes of parameters in place of shards, and names without wrappers."""
        return {path: self._named(model) for path, model in self._models.items()}

    def _params_in(self, tensor: ShardedTensor, stored: StoredTensor) -> dict[str, Distributed]:
        producer = self.metadata.producer
        return params_in(tensor, stored, rank=self.rank, world_size=self.world_size, producer=producer)

    def _named(self, model: Mapping[Key, object]) -> dict[Key, object]:
        named: OrderedDict[Key, object] = OrderedDict()
        aliases = self._aliases(model)
        for key, value in model.items():
            tensor = self._by_key.get(str(key)) or aliases.get(str(key))
            entries: Mapping[Key, object] = {without_wrappers(key) if isinstance(key, str) else key: value}
            if tensor is not None and isinstance(value, StoredTensor):
                params = self._params_in(tensor, value)
                entries = {key: next(iter(params.values()))} if str(key) not in self._by_key else dict(params.items())
            self._add(named, entries)
        self._add(named, {later: named[first] for later, first in self.metadata.shared if first in named})
        return named

    def _add(self, named: dict[Key, object], entries: Mapping[Key, object]) -> None:
        twice = [str(name) for name in entries if name in named]
        if twice:
            raise SourceCorruptError(
                f"{self.file} has two tensors of one name",
                details=twice[:MAX_NAMES],
                file=self.file,
                key=twice[0],
                why="the shard metadata and the state dict are of different models",
                next_step="give a directory with the files of one save",
            )
        named.update(entries)

    def _aliases(self, model: Mapping[Key, object]) -> dict[str, ShardedTensor]:
        """Keys that are not in the metadata, with the tensor of it whose storage they share."""
        places = {_place(stored): tensor for tensor, stored in self._stored_tensors(model) if len(tensor.params) == 1}
        unlisted = ((key, _place(stored)) for key, stored in self._unlisted(model).items())
        return {key: places[place] for key, place in unlisted if place in places}

    def _unlisted(self, model: Mapping[Key, object]) -> dict[str, StoredTensor]:
        """Tensors that are neither in the metadata nor buffers, so may be cut too."""
        if self.metadata.buffers is None:
            return {}
        recorded = self.metadata.buffers | self._by_key.keys()
        others = ((str(key), leaf) for key, leaf in model.items() if key not in recorded)
        return {key: leaf for key, leaf in others if isinstance(leaf, StoredTensor) and leaf.shape}

    def unlisted(self) -> list[str]:
        """Tensors of which it is not known whether they are cut."""
        models = self._models.values() if self.world_size > 1 else ()
        return [key for model in models for key in self._unlisted(model) if key not in self._aliases(model)]

    def absent(self) -> list[str]:
        """Tensors of the metadata that are missing from a state dict with others of them."""
        return [key for model in self._models.values() for key in self._by_key if key not in model]

    def retyped(self) -> list[str]:
        """Buffers whose dtype is not the one they had before they were wrapped, with that dtype."""
        leaves = {without_wrappers(str(key)): leaf for model in self._models.values() for key, leaf in model.items()}
        return [
            f"{name} ({dtype})"
            for name, dtype in self.metadata.buffer_types
            if isinstance(leaf := leaves.get(name), StoredTensor) and leaf.dtype.name != dtype
        ]

    # Optimizers

    def named_optimizer(self, optimizer: dict[Key, object]) -> tuple[dict[Key, object], int, int]:
        """``optimizer`` by name, with every state cut like its parameter; also the number of its ids, and of their
        parameters. Raises UnnamedError.
        """
        ids = self._tensors_of_ids(optimizer, self._model_order())
        states = cast("dict[Key, object]", optimizer["state"])
        named: dict[Key, object] = {}
        for key, tensor in ids.items():
            if key in states:
                named.update(self._states(states[key], tensor))
        groups = [_group(group, ids) for group in cast("list[dict[Key, object]]", optimizer["param_groups"])]
        count = sum(len(tensor.params) for tensor in ids.values())
        return {**optimizer, "state": named, "param_groups": groups}, len(ids), count

    def _model_order(self) -> list[ShardedTensor]:
        """The tensors in the order of the wrapped ``model.parameters()``, one under two names once."""
        ordered_by_metadata = self.metadata.in_parameter_order
        if not self._models:
            if not ordered_by_metadata:
                raise UnnamedError("there is no model beside it, and the record is not in the order of its parameters")
            return list(self.metadata.tensors)
        model = next(iter(self._models.values()))
        ordered: list[ShardedTensor] = []
        seen: set[int] = set()
        for key in self._by_key if ordered_by_metadata else [key for key in model if key in self._by_key]:
            stored = model.get(key)
            place = stored.offset if isinstance(stored, StoredTensor) and 0 not in stored.shape else None
            if place is None or place not in seen:
                ordered.append(self._by_key[str(key)])
            seen.update([place] if place is not None else [])
        return ordered

    def _tensors_of_ids(self, optimizer: Mapping[Key, object], tensors: Sequence[ShardedTensor]) -> _Ids:
        """The tensor of each id; ``tensors`` are in the order of the wrapped ``model.parameters()``."""
        groups = [_ids(group) for group in cast("list[dict[Key, object]]", optimizer.get("param_groups") or [])]
        states = cast("dict[Key, object]", optimizer["state"])
        ids = [key for group in groups for key in group]
        if not ids or any(key not in ids for key in states) or len(set(ids)) < len(ids):
            raise UnnamedError("its param groups do not list every id once")
        shapes = [list(_cut_shapes(states.get(key))) for key in ids]

        def fitting(number: int, at: int) -> bool:
            if tensors[at].frozen and states.get(ids[number]):  # what has no gradient gets no states
                return False
            return all(fits(tensors[at], shape, self.world_size, self._multiples) for shape in shapes[number])

        listed = _by_param_names(optimizer, tensors)
        if listed is not None:
            answers = [tuple(listed)] if all(map(fitting, range(len(ids)), listed)) else []
        else:
            answers = in_order([len(group) for group in groups], len(tensors), fitting) or []
        if not answers:
            raise UnnamedError(f"the lengths of its states are not those of the {len(tensors)} tensors recorded")
        if len(answers) > 1:
            open_id = next(at for at, pair in enumerate(zip(*answers, strict=True)) if len(set(pair)) > 1)
            titles = " or ".join(tensors[answer[open_id]].title for answer in answers)
            raise UnnamedError(f"id {ids[open_id]!r} may be {titles}")
        return {key: tensors[at] for key, at in zip(ids, answers[0], strict=True)}

    def _states(self, states: object, tensor: ShardedTensor) -> dict[Key, dict[Key, object]]:
        """The states of each parameter in ``tensor``; a state that is not cut belongs to all of them."""
        by_param: dict[Key, dict[Key, object]] = {param.name: {} for param in tensor.params}
        for name, leaf in cast("dict[Key, object]", states).items():
            params: Mapping[str, object] = dict.fromkeys((param.name for param in tensor.params), leaf)
            if _is_cut(name, leaf):
                params = self._params_in(tensor, cast(StoredTensor, leaf))
            for param, chunk in params.items():
                by_param[param][name] = chunk
        return by_param

    def unnamed_optimizer(self, optimizer: dict[Key, object]) -> dict[Key, object]:
        """``optimizer`` by its ids, with every state as the rank's slice of something unknown."""
        states = cast("dict[Key, object]", optimizer["state"])
        return {**optimizer, "state": {key: self._slices(entry) for key, entry in states.items()}}

    def _slices(self, entry: object) -> object:
        if not isinstance(entry, dict):
            return entry
        return {name: self._slice(leaf) if _is_cut(name, leaf) else leaf for name, leaf in entry.items()}

    def _slice(self, stored: StoredTensor) -> Distributed:
        rows, *rest = stored.shape
        boxes = (BoxInFile((self.rank * rows, *(0,) * len(rest)), stored.shape, stored.offset, stored.stride),)
        form, world = f"{self.metadata.producer} shard", all_ranks(self.world_size)
        shape = (self.world_size * rows, *rest)
        return Distributed(form, stored.dtype, shape, Slices(), self.rank, world, world, boxes)


def _place(stored: StoredTensor) -> tuple[object, ...]:
    return (stored.offset, stored.shape, stored.stride, stored.dtype.name)


def _ids(group: Mapping[Key, object]) -> list[Key]:
    params = group.get("params")
    return list(params) if isinstance(params, (list, tuple)) else []


def _by_param_names(optimizer: Mapping[Key, object], tensors: Sequence[ShardedTensor]) -> list[int] | None:
    """The index in ``tensors`` of each id, from ``param_names``; None unless they name every id once."""
    places = {without_wrappers(tensor.key): at for at, tensor in enumerate(tensors)}
    places_of_ids: list[int] = []
    for group in cast("list[dict[Key, object]]", optimizer["param_groups"]):
        names = group.get("param_names")
        if not isinstance(names, (list, tuple)) or len(names) != len(_ids(group)):
            return None
        numbers = [places.get(without_wrappers(str(name))) for name in names]
        if None in numbers:
            raise UnnamedError("its param_names are not those of the tensors recorded")
        places_of_ids.extend(number for number in numbers if number is not None)
    return places_of_ids if len(set(places_of_ids)) == len(places_of_ids) else None


def _cut_shapes(states: object) -> Iterator[tuple[int, ...]]:
    """The shapes of those states of one id that are cut."""
    for name, leaf in states.items() if isinstance(states, dict) else ():
        if _is_cut(name, leaf):
            yield leaf.shape


def _is_cut(name: object, leaf: object) -> bool:
    """Whether a state is cut. A number is not; as a tensor it may have shape (1,), which only ``step`` proves."""
    return isinstance(leaf, StoredTensor) and bool(leaf.shape) and (name, leaf.shape) != ("step", (1,))


def _group(group: Mapping[Key, object], ids: _Ids) -> dict[Key, object]:
    names: list[Value] = [param.name for key in _ids(group) for param in ids[key].params]
    changed: dict[Key, object] = {**group, "params": names}
    if "param_names" in group:
        changed["param_names"] = list(names)
    return changed
