"""Reads what the module states of a DeepSpeed step hold: shapes, buffers, and parameters that are not trained."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from fsdpckpt.formats.torch.tensors import StoredTensor, size_of
from fsdpckpt.ir.checkpoint import Note, Problem
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.readers.deepspeed.partitions import FlatGroup, PartitionError, Slice, partitions_of_params
from fsdpckpt.readers.deepspeed.pieces import MAP_INFO, Partitions
from fsdpckpt.readers.deepspeed.step import (
    AUTOEP_LAYERS,
    StateDict,
    StepFile,
    as_mapping,
    contradiction,
    merge_files,
    plain_scaler,
    section_of,
)
from fsdpckpt.readers.model_shards import ModelShard, RankGrid, Shards, whole_shard
from fsdpckpt.readers.optimizer_forms import notes_on_copies
from fsdpckpt.readers.protocol import PartContents

_DESCRIBED = frozenset({
    "module", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params", "buffer_names",
})  # fmt: skip  # what they say is in the sections


@dataclass(frozen=True, slots=True)
class ModuleStates:
    """``files``: one for each rank under ZeRO 3, in which every parameter is ``partitioned``, else only those of data
    rank 0: one for each model-parallel rank.

    ``grid``: the ranks that saved. ``shards``: under AutoTP, how each parameter is cut. ``layers``: the files of a
    pipeline's layers, each with its entries under the module's names, which ``files`` do not have. ``pipeline``: all of
    these entries. ``experts``: the files of AutoEP's experts, each with its part of the weights of its layer.
    ``recorded``: without ZeRO, which saves no shapes, the trained parameters by flat tensor, by model-parallel rank.
    """

    files: list[StepFile]
    partitioned: bool
    grid: RankGrid
    shards: Mapping[str, Shards] = field(default_factory=dict)
    layers: Sequence[tuple[StepFile, StateDict]] = ()
    pipeline: StateDict = field(default_factory=dict)
    experts: Sequence[tuple[StepFile, StateDict]] = ()
    recorded: Mapping[int, Sequence[Sequence[str]]] = field(default_factory=dict)

    @property
    def first(self) -> StepFile:
        return self.files[0]

    @property
    def module(self) -> StateDict:
        """The module's state dict, on rank 0."""
        return self.pipeline if self.first.of_pipeline else self.first.module

    @property
    def of_model_ranks(self) -> list[StepFile]:
        """The first file of each model-parallel rank."""
        return [file for file in self.files if not file.data_rank]

    def groups(self, file: StepFile | None = None) -> list[FlatGroup]:
        """The shapes of the trained parameters by flat tensor, from ``file`` (the first). Raises SourceCorruptError."""
        file = self.first if file is None else file
        groups = file.root.get("param_shapes")
        if groups is None and file.model_rank in self.recorded:
            recorded: list[FlatGroup] = []
            for names in self.recorded[file.model_rank]:
                recorded.append({name: self._shape_of(name, file) for name in names})
            return recorded
        if not isinstance(groups, (list, tuple)) or not groups:
            raise contradiction(file.path, "it does not say the shapes of the parameters (param_shapes)")
        shapes = [_shapes_in(group, file.path) for group in groups]
        require_in_one_group(shapes, file.path)
        return shapes

    def _shape_of(self, name: str, file: StepFile) -> tuple[int, ...]:
        """The shape of a parameter in the module."""
        leaf = (self.pipeline if file.of_pipeline else file.module).get(name)
        if not isinstance(leaf, StoredTensor):
            raise contradiction(file.path, f"the optimizer trains {name}, which the module does not have")
        return leaf.shape

    def aliases(self) -> dict[str, str]:
        """Parameters that share storage, each with the name under which it is stored. Under ZeRO 3 only rank 0 has
        them.
        """
        aliases: dict[str, str] = {}
        for file in self.of_model_ranks:
            shared = file.root.get("shared_params")
            if isinstance(shared, dict):
                aliases.update({str(name): str(other) for name, other in shared.items()})
        return aliases

    def buffers(self) -> set[str]:
        """The names of the module's buffers."""
        listed = [file.root.get("buffer_names") for file in self.of_model_ranks]
        return {str(name) for names in listed if isinstance(names, (list, tuple, set)) for name in names}

    def untrained(self, exclude: Collection[str]) -> PartContents:
        """Buffers and frozen parameters as ``model``, and extras. ``exclude``: the names of the trained
        parameters and of those that share their storage.
        """
        fragments = self._fragments()
        merged = merge_files(self.files, [self._untrained_in(file, exclude, fragments) for file in self.files])
        merged.problems += self._add_separate(section_of(merged, "model"), lambda name: name not in exclude)
        return merged

    def _add_separate(self, model: dict[Key, Value], wanted: Callable[[Key], bool]) -> list[Problem]:
        """Add to ``model`` the wanted entries that are in files of their own; what is wrong with those of experts."""
        for file, entries in self.layers:  # the data of each is in its own file
            own = {name: value for name, value in entries.items() if wanted(name)}
            model.update(section_of(merge_files([file], [{"model": own}]), "model"))
        experts = self._of_experts(wanted)
        model.update(section_of(experts, "model"))
        return experts.problems

    def _of_experts(self, wanted: Callable[[Key], bool]) -> PartContents:
        """The wanted weights of AutoEP's experts, of which each file has a part."""
        files: list[StepFile] = []
        models: list[StateDict] = []
        for file, entries in self.experts:
            files.append(file)
            models.append({name: value for name, value in entries.items() if wanted(name)})
        if not any(models):
            return merge_files(self.files[:1], [{"model": {}}])
        return merge_files(files, [{"model": model} for model in models])

    def copies(self, trained: Collection[str]) -> dict[str, Tensor]:
        """The module's own weights of the ``trained`` parameters. Under ZeRO 3 it has none."""
        if self.partitioned:
            return {}

        def wanted(name: Key) -> bool:
            return name in trained

        fragments = self._fragments()  # none without ZeRO 3
        roots: list[StateDict] = [{"model": self._model_in(file, wanted, fragments)} for file in self.files]
        found = section_of(merge_files(self.files, roots), "model")
        self._add_separate(found, wanted)
        return {str(name): leaf for name, leaf in found.items() if isinstance(leaf, Tensor)}

    def in_order(self, leaves: Mapping[Key, Value]) -> dict[Key, Value]:
        """``leaves`` in the order of the module's state dict, shared parameters under all of their names."""
        aliases = self.aliases()
        model: dict[Key, Value] = OrderedDict()
        for key in (*self.module, *leaves):
            leaf = leaves.get(aliases.get(str(key), key))
            if leaf is not None or key in leaves:
                model.setdefault(key, leaf)
        return model

    def notes_on_copies(self, trained: Collection[str], dtype: str = "float32") -> list[Note]:
        """A note if the module has copies of the ``trained`` parameters whose dtype is not ``dtype``."""
        copies = self.module
        leaves = [leaf for name in trained if isinstance(leaf := copies.get(name), StoredTensor)]
        return notes_on_copies({leaf.dtype.name for leaf in leaves} - {dtype}, dtype)

    def _untrained_in(self, file: StepFile, exclude: Collection[str], fragments: _Fragments) -> StateDict:
        model = self._model_in(file, lambda name: name not in exclude, fragments)
        described = _DESCRIBED | {MAP_INFO, AUTOEP_LAYERS} if self.shards or self.experts else _DESCRIBED
        extra = {key: plain_scaler(value) for key, value in file.root.items() if key not in described}
        if self.recorded or extra.get("optimizer") is None:  # a copy of rank 0's part; else the user's own
            extra.pop("optimizer", None)
        return {"model": model, "extra": extra}

    def _model_in(self, file: StepFile, takes: Callable[[Key], bool], fragments: _Fragments) -> StateDict:
        """The entries of the module in ``file`` whose names ``takes`` accepts."""
        model: StateDict = {}
        for name, value in ({} if file.of_pipeline else file.module).items():
            if not takes(name):
                continue
            slices = fragments.slices.get((file.rank, str(name)))
            shards = self.shards.get(str(name))
            if slices is not None:
                model[name] = fragments.partitions.part(file.rank, file.model_rank, str(name), *slices)
            elif shards is not None:
                stored = _shard_in(file, str(name), value, shards)
                model[name] = whole_shard(self.grid, file.rank, file.model_rank, shards, stored)
            else:
                model[name] = value
        return model

    def _fragments(self) -> _Fragments:
        """The frozen parameters under ZeRO 3, of which each rank has a part."""
        parameters: dict[str, Shards] = {}
        found: dict[tuple[int, str], tuple[StoredTensor, Slice | None]] = {}
        for file in self.files if self.partitioned else ():
            frozen, shapes = file.root.get("frozen_param_fragments"), file.root.get("frozen_param_shapes")
            if not isinstance(frozen, dict) or not isinstance(shapes, dict):
                continue
            for key, leaf in frozen.items():
                name, shape = str(key), size_of(shapes.get(key))
                if not isinstance(leaf, StoredTensor) or len(leaf.shape) != 1 or shape is None:
                    raise contradiction(file.path, f"the frozen parameter {name} is not a flat tensor with a shape")
                shards = self.shards.get(name, Shards(shape, {file.model_rank: ModelShard.of_whole(shape)}))
                if shards.by_rank[file.model_rank].shape != shape:
                    raise contradiction(file.path, _other_shape(name, shape, shards.by_rank[file.model_rank]))
                parameters.setdefault(name, shards)
                try:
                    flat = partitions_of_params([{name: shape}], [[leaf.shape[0]]] * self.grid.data)
                except PartitionError as error:
                    raise contradiction(file.path, str(error)) from None
                found[file.rank, name] = leaf, flat.slices[file.data_rank][0][0]
        partitions = Partitions(self.grid, parameters)
        model_ranks = {file.rank: file.model_rank for file in self.files}
        for (rank, _), (_, part) in found.items():
            partitions.add(model_ranks[rank], [part] if part is not None else [])
        return _Fragments(partitions, found)


@dataclass(frozen=True, slots=True)
class _Fragments:
    """The parts of frozen parameters, by rank and name: the flat tensor, and what it is of the parameter."""

    partitions: Partitions
    slices: dict[tuple[int, str], tuple[StoredTensor, Slice | None]]


def _shard_in(file: StepFile, name: str, value: object, shards: Shards) -> StoredTensor:
    """``value``, the shard of a parameter in the module of ``file``. Raises SourceCorruptError."""
    shard = shards.by_rank[file.model_rank]
    if not isinstance(value, StoredTensor):
        raise contradiction(file.path, f"{name} is not a tensor")
    if value.shape != shard.shape:
        raise contradiction(file.path, _other_shape(name, value.shape, shard))
    return value


def _other_shape(name: str, shape: tuple[int, ...], shard: ModelShard) -> str:
    return f"{name} has the shape {list(shape)}, and {list(shard.shape)} in {MAP_INFO}"


def require_in_one_group(groups: Sequence[FlatGroup], path: str) -> None:
    """Raises SourceCorruptError if a parameter is in several of ``groups``, from the file ``path``."""
    repeated = [name for name, count in Counter(chain.from_iterable(groups)).items() if count > 1]
    if repeated:
        raise contradiction(path, f"param_shapes has {repeated[0]} in several groups")


def _shapes_in(group: object, path: str) -> FlatGroup:
    shapes: FlatGroup = {}
    for name, stored in as_mapping(group, path, "param_shapes").items():
        shape = size_of(stored)
        if not isinstance(name, str) or shape is None:
            raise contradiction(path, f"param_shapes has {name!r} with an impossible shape")
        shapes[name] = shape
    return shapes
