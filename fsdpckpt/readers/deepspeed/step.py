"""Reads the files of one DeepSpeed step: names and shapes, buffers, frozen parameters, and extras.

Under ZeRO 3 every rank has a file of module states, otherwise only rank 0 (``_common_checkpoint_state`` of
``deepspeed/runtime/engine.py``).
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias, cast

from fsdpckpt.errors import SourceCorruptError, damaged
from fsdpckpt.formats.torch import TorchArchive, notes_on_dropped
from fsdpckpt.formats.torch.tensors import StoredTensor, size_of
from fsdpckpt.formats.zip import top_folder
from fsdpckpt.ir.checkpoint import Checksums, Note, Problem
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Object, Value
from fsdpckpt.readers.deepspeed.partitions import FlatGroup, PartitionError, Slice, is_count, partitions_of_params
from fsdpckpt.readers.deepspeed.pieces import MAP_INFO, Partitions
from fsdpckpt.readers.deepspeed.required_files import require_one_save
from fsdpckpt.readers.model_shards import ModelShard, RankGrid, Shards, whole_shard
from fsdpckpt.readers.optimizer_forms import notes_on_copies
from fsdpckpt.readers.protocol import FileTable, KeyPath, PartContents, file_name
from fsdpckpt.readers.torch_ranks import NamedRank, check_names
from fsdpckpt.readers.torch_ranks.merge import merge_distributed
from fsdpckpt.readers.torch_ranks.rank_files import RankFile, open_ranks
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import count_text, plural, some_of

StateDict: TypeAlias = dict[Key, object]

_RANK = re.compile(r"^((?:bf16_|fp16_)?zero_pp_rank_)(\d{1,5})(_mp_rank_\d{1,5}_(?:optim|model)_states)$")
_MODEL_RANK = re.compile(r"^(?:.*_)?mp_rank_(\d{1,5})_(?:optim|model)_states$", re.DOTALL)
MAX_RANKS = 100_000  # names have five digits
AUTOEP_LAYERS = "ds_autoep_layers"
_MAX_NAMES = 4
_DESCRIBED = frozenset({
    "module", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params", "buffer_names",
})  # fmt: skip  # what they say is in the sections


def contradiction(path: str, what: str) -> SourceCorruptError:
    """The error for a file that contradicts itself or the other files of its step."""
    return damaged(
        path,
        what,
        "the files of one save of DeepSpeed",
        why="files of different saves or world sizes are mixed, or a version of DeepSpeed that is not known wrote them",
        next_step="give a directory with the files of one save, or report it with the version of DeepSpeed",
    )


def as_mapping(value: object, path: str, what: str) -> StateDict:
    """``value``, which must be a dict. Raises SourceCorruptError."""
    if not isinstance(value, dict):
        raise damaged(
            path,
            f"{what} is not a dict",
            "a file that DeepSpeed's save_checkpoint wrote",
            f"a {type(value).__name__}",
            why="the file was changed, or a version of DeepSpeed that is not known wrote it",
            next_step="save it again, or report it with the version of DeepSpeed",
        )
    return value


def plain(value: object) -> object:
    """A loss scaler as the dict of its attributes, so that it can be loaded without DeepSpeed."""
    if isinstance(value, Object) and value.function.module.startswith("deepspeed."):
        return value.state if isinstance(value.state, dict) else None
    return value


@dataclass(frozen=True, slots=True, eq=False)
class StepFile(RankFile):
    """One opened file of a step. ``data_rank``, ``model_rank``: the data-parallel and the model-parallel rank that
    wrote it; ``rank``: the number of both, see ``RankGrid``.
    """

    data_rank: int = 0
    model_rank: int = 0

    @property
    def path(self) -> str:
        return self.archive.path

    @property
    def root(self) -> StateDict:
        return as_mapping(self.archive.root, self.path, "its content")

    @property
    def states(self) -> StateDict:
        """The result of ``optimizer.state_dict()``, in an optimizer's file."""
        return as_mapping(self.root.get("optimizer_state_dict"), self.path, "optimizer_state_dict")

    @property
    def of_pipeline(self) -> bool:
        """Whether a pipeline left the module to the files of its layers."""
        return "module" in self.root and self.root["module"] is None

    @property
    def module(self) -> StateDict:
        """The result of ``module.state_dict()``, in a file of module states."""
        return as_mapping(self.root.get("module"), self.path, "module")


def require_same(directory: str, files: Sequence[StepFile], how_saved: Callable[[StepFile], str | None]) -> None:
    """Raises SourceCorruptError that lists ``files`` by save unless all that show ``how_saved`` show the same."""
    require_one_save(directory, {file_name(file.path): how for file in files if (how := how_saved(file)) is not None})


def require_one_run(directory: str, files: Sequence[StepFile]) -> int:
    """The number of ranks that saved ``files``, 0 if none of them records it. Raises what ``require_same`` does if they
    differ in it, or in the step.
    """
    require_same(directory, files, lambda file: _by_ranks(_recorded_ranks(file)))
    require_same(directory, files, _global_step)
    ranks = max(map(_recorded_ranks, files))
    require_same(directory, files, lambda file: "by more ranks" if file.data_rank >= ranks > 0 else _by_ranks(ranks))
    return ranks


def model_ranks_of(module: Sequence[StepFile]) -> int:
    """The number of model-parallel ranks in files of module states, 1 if none of them records it."""
    recorded = [file.root.get("mp_world_size") for file in module]
    return min(max((cast(int, ranks) for ranks in recorded if is_count(ranks)), default=1), MAX_RANKS)


def _by_ranks(ranks: int) -> str | None:
    return f"by {plural(ranks, 'rank')}" if ranks else None


def _recorded_ranks(file: StepFile) -> int:
    """The number of ranks in the file: that of parts of a flat tensor in an optimizer's, the ranks with an optimizer's
    file in one of module states.
    """
    states = file.root.get("optimizer_state_dict")
    recorded = states.get("partition_count") if isinstance(states, dict) else file.root.get("dp_world_size")
    counts = recorded if isinstance(recorded, (list, tuple)) else [recorded]
    return max(cast("Sequence[int]", counts), default=0) if all(map(is_count, counts)) else 0


def _global_step(file: StepFile) -> str | None:
    step = file.root.get("global_steps")
    return f"at step {count_text(cast(int, step))}" if is_count(step) else None


def _named_rank(stem: str) -> NamedRank | None:
    match = _RANK.match(stem)
    if match is None:
        return None
    return NamedRank(f"{match[1]} {match[3]}", bare=False, world=None, rank=int(match[2]))


def require_own_number(path: str, pattern: re.Pattern[str], sources: Sources) -> None:
    """Raises SourceCorruptError if ``path`` was saved under a name with another number, which nothing else need show.

    ``pattern``: of names without suffix; its first group is the number. A name of another pattern is accepted.
    """
    was = top_folder(sources.open(path))
    saved, named = pattern.match(was), pattern.match(file_name(path).rpartition(".")[0])
    if saved is not None and named is not None and int(saved[1]) != int(named[1]):
        raise contradiction(path, f"it was saved as {was}.pt")


def open_files(paths: Mapping[int, str], table: FileTable, sources: Sources) -> list[StepFile]:
    """The files at ``paths``, by data-parallel rank. Raises what ``check_names`` and ``read_archive`` raise."""
    return open_grid({0: paths}, table, sources)


def open_grid(paths: Mapping[int, Mapping[int, str]], table: FileTable, sources: Sources) -> list[StepFile]:
    """``open_files`` of several model-parallel ranks, one after the other."""
    grid = RankGrid(0, len(paths))
    files: list[StepFile] = []
    for model_rank, by_data_rank in sorted(paths.items()):
        check_names(by_data_rank, sources, _named_rank)
        for path in by_data_rank.values():
            require_own_number(path, _MODEL_RANK, sources)
        for file in open_ranks(by_data_rank, table, sources, alike=False):
            number = grid.number(file.rank, model_rank)
            files.append(StepFile(number, file.file, file.archive, None, file.rank, model_rank))
    return files


def merge_files(files: Sequence[StepFile], roots: Sequence[StateDict]) -> PartContents:
    """Merge ``roots``, the state dicts of the ranks' ``files``."""
    return merge_distributed(files, roots, "deepspeed")


def groups_by_name(groups: Sequence[StateDict], members: Sequence[Iterable[str]], path: str) -> list[StateDict]:
    """``groups``, the param groups in the file ``path``, which refer to flat tensors by number, with the names of
    ``members``, the parameters of each flat tensor. Raises SourceCorruptError unless they list each number once.
    """
    listed = [group.get("params") for group in groups]
    numbers = [list(params) if isinstance(params, (list, tuple)) else [] for params in listed]
    all_numbers = list(chain(*numbers))
    if all_numbers != list(range(len(members))):
        count = plural(len(members), "flat tensor")
        raise contradiction(path, f"its param groups list {some_of(all_numbers, _MAX_NAMES)} for {count}")
    named: list[StateDict] = []
    for group, of_group in zip(groups, numbers, strict=True):
        names = chain.from_iterable(members[number] for number in of_group)
        named.append({**group, "params": list(names)})
    return named


def section_of(tree: PartContents, section: str) -> dict[Key, Value]:
    """One section of merged files, {} if no file has it."""
    root = cast("dict[Key, Value]", tree.root)
    return cast("dict[Key, Value]", root.get(section, {}))


def add_extras(tree: PartContents, merged: Sequence[PartContents]) -> None:
    """Add the extras of ``merged`` files to ``tree``, beside the sections, and the problems found in them.

    If a key is taken, an underscore is appended, and a note says so.
    """
    root = cast("dict[Key, Value]", tree.root)
    taken = {*root, *(key for more in merged for key in section_of(more, "extra"))}
    for more in merged:
        names: dict[Key, Key] = {}
        for key, value in section_of(more, "extra").items():
            name = key
            while name in root or (name != key and name in taken):
                name = f"{name!s}_"
            root[name] = value
            names[key] = name
            if name != key:
                tree.notes.append(Note("renamed", f"the extra {key!s} is called {name!s} here: {key!s} is taken"))
        tree.problems += [*more.problems, *more.missing.values()]

        def place(path: KeyPath, names: dict[Key, Key] = names) -> KeyPath:
            return (names[path[1]], *path[2:]) if path[0] == "extra" else path

        tree.rank_values.update({place(path): values for path, values in more.rank_values.items()})
        tree.absences.update({place(path): ranks for path, ranks in more.absences.items()})


def add_archives(tree: PartContents, archives: Sequence[TorchArchive]) -> None:
    """Add the checksums and notes of the files of ``tree`` to it."""
    tree.checksums = Checksums.joined(archive.checksums for archive in archives)
    tree.notes.extend(notes_on_dropped(archives))


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
        extra = {key: plain(value) for key, value in file.root.items() if key not in described}
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
