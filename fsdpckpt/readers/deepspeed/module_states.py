"""Read the files of module states of one DeepSpeed step: names and shapes, buffers, frozen parameters, and extras.

Under ZeRO 3 every rank has one, else rank 0 alone (``_common_checkpoint_state`` of ``deepspeed/runtime/engine.py``).
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias, cast

from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.formats.torch.archive import TorchArchive, notes_on_dropped, read_archive
from fsdpckpt.formats.torch.distributed import BoxInFile, Distributed, all_ranks
from fsdpckpt.formats.torch.tensors import StoredTensor, size_of
from fsdpckpt.ir.checkpoint import Checksums, Layout, Note
from fsdpckpt.ir.values import Key, Object, Value
from fsdpckpt.readers.deepspeed.partitions import PartitionError, Slice, partitions_of_params
from fsdpckpt.readers.flat_slices import boxes_of_range
from fsdpckpt.readers.optimizer_forms import notes_on_copies
from fsdpckpt.readers.protocol import FileTable, Tree
from fsdpckpt.readers.torch_ranks import NamedRank, check_names
from fsdpckpt.readers.torch_ranks.merge import Merge
from fsdpckpt.readers.torch_ranks.rank_files import Group, RankFile
from fsdpckpt.storage.sources import Sources

StateDict: TypeAlias = dict[Key, object]
FlatGroup: TypeAlias = dict[str, tuple[int, ...]]
"""The parameters of one flat tensor, in order, with their shapes."""

_RANK = re.compile(r"^((?:bf16_|fp16_)?zero_pp_rank_)(\d{1,5})(_mp_rank_\d{1,5}_(?:optim|model)_states)$")
_DESCRIBED = frozenset({
    "module", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params", "buffer_names",
})  # fmt: skip  # what they say is in the sections


def contradiction(path: str, what: str) -> SourceCorruptError:
    """The error for a file that contradicts itself or the others of its step."""
    return SourceCorruptError(
        f"{path}: {what}",
        file=path,
        expected="the files of one save of DeepSpeed",
        why="files of different saves or world sizes lie together, or a version of DeepSpeed that is not known "
        "wrote them",
        next_step="give a directory with the files of one save, or report it with the version of DeepSpeed",
    )


def as_mapping(value: object, path: str, what: str) -> StateDict:
    """``value``, which has to be a dict. Raises SourceCorruptError."""
    if not isinstance(value, dict):
        raise SourceCorruptError(
            f"{path}: {what} is no dict",
            file=path,
            expected="a file that DeepSpeed's save_checkpoint wrote",
            found=f"a {type(value).__name__}",
            why="the file was changed, or a version of DeepSpeed that is not known wrote it",
            next_step="save it again, or report it with the version of DeepSpeed",
        )
    return value


def is_count(value: object) -> bool:
    """Whether it is a number of elements that a tensor can have."""
    return type(value) is int and 0 <= value < 1 << 59


def plain(value: object) -> object:
    """A loss scaler as the dict of its attributes, so that whoever loads it needs no DeepSpeed."""
    if isinstance(value, Object) and value.function.module.startswith("deepspeed."):
        return value.state if isinstance(value.state, dict) else None
    return value


@dataclass(frozen=True, slots=True)
class StepFile:
    """One opened file of a step. ``rank``: the data-parallel rank that wrote it."""

    path: str
    number: int
    rank: int
    archive: TorchArchive

    @property
    def root(self) -> StateDict:
        return as_mapping(self.archive.root, self.path, "its content")

    @property
    def states(self) -> StateDict:
        """What ``optimizer.state_dict()`` gave, of an optimizer's file."""
        return as_mapping(self.root.get("optimizer_state_dict"), self.path, "optimizer_state_dict")

    @property
    def module(self) -> StateDict:
        """What ``module.state_dict()`` gave, of a file of module states."""
        return as_mapping(self.root.get("module"), self.path, "module")


def _named_rank(stem: str) -> NamedRank | None:
    match = _RANK.match(stem)
    if match is None:
        return None
    return NamedRank(f"{match[1]} {match[3]}", bare=False, world=None, rank=int(match[2]))


def open_files(paths: Mapping[int, str], table: FileTable, sources: Sources) -> list[StepFile]:
    """The files at ``paths``, by rank. Raises what ``check_names`` and ``read_archive`` raise."""
    check_names(paths, sources, _named_rank)
    files: list[StepFile] = []
    for rank, path in paths.items():
        source = sources.open(path)
        number = table.add(path, source.nbytes)
        files.append(StepFile(path, number, rank, read_archive(source, number)))
    return files


def merge_files(files: Sequence[StepFile], roots: Sequence[StateDict]) -> Tree:
    """The state dicts that the ranks of ``files`` have, as one."""
    groups = [Group(file.root, [RankFile(file.rank, file.number, file.archive)]) for file in files]
    merge = Merge(groups, sharded=True)
    tree = Tree(merge.value(roots), Layout.SHARDED, "deepspeed", len(files))
    tree.problems.extend(merge.problems)
    tree.rank_values.update(merge.rank_values)
    return tree


def section_of(tree: Tree, section: str) -> dict[Key, Value]:
    """One section of merged files, {} where no file has it."""
    root = cast("dict[Key, Value]", tree.root)
    return cast("dict[Key, Value]", root.get(section, {}))


def add_extras(tree: Tree, merged: Sequence[Tree]) -> None:
    """Put the extras of ``merged`` files beside the sections in ``tree``, and what was found wrong with them.

    A key that is taken gets an underscore at its end, and a note says so.
    """
    root = cast("dict[Key, Value]", tree.root)
    taken = {*root, *(key for one in merged for key in section_of(one, "extra"))}
    for one in merged:
        names: dict[Key, Key] = {}
        for key, value in section_of(one, "extra").items():
            name = key
            while name in root or (name != key and name in taken):
                name = f"{name!s}_"
            root[name] = value
            names[key] = name
            if name != key:
                tree.notes.append(Note("renamed", f"the extra {key!s} is called {name!s} here: {key!s} is taken"))
        tree.problems.extend(one.problems)
        for (section, *path), values in one.rank_values.items():
            place = (names[cast(Key, path[0])], *path[1:]) if section == "extra" else (section, *path)
            tree.rank_values[place] = values


def add_archives(tree: Tree, archives: Sequence[TorchArchive]) -> None:
    """Put the checksums and notes of the files of ``tree`` into it."""
    tree.checksums = Checksums.joined(archive.checksums for archive in archives)
    tree.notes.extend(notes_on_dropped(archives))


def part_of(rank: int, ranks: int, stored: StoredTensor, place: Slice | None, shape: tuple[int, ...]) -> Distributed:
    """What ``rank`` of ``ranks`` holds of a parameter of ``shape``, in the flat tensor ``stored``; None: nothing."""
    boxes: list[BoxInFile] = []
    if place is not None:
        boxes = boxes_of_range(shape, place.begin, place.begin + place.count, place.at - place.begin, stored)
    world = all_ranks(ranks)
    return Distributed("ZeRO partition", stored.dtype, shape, "flattened", rank, world, world, tuple(boxes))


@dataclass(frozen=True, slots=True)
class ModuleStates:
    """``files``: one of each rank under ZeRO 3, which has every parameter ``partitioned``, else rank 0's alone."""

    files: list[StepFile]
    partitioned: bool

    @property
    def first(self) -> StepFile:
        return self.files[0]

    def groups(self, file: StepFile | None = None) -> list[FlatGroup]:
        """The shapes of the trained parameters by flat tensor, as ``file`` (the first) says. Raises
        SourceCorruptError."""
        file = self.first if file is None else file
        groups = file.root.get("param_shapes")
        if not isinstance(groups, (list, tuple)) or not groups:
            raise contradiction(file.path, "it does not say the shapes of the parameters (param_shapes)")
        found = [_shapes_in(group, file.path) for group in groups]
        repeated = [name for name, count in Counter(chain.from_iterable(found)).items() if count > 1]
        if repeated:
            raise contradiction(file.path, f"param_shapes has {repeated[0]} in several groups")
        return found

    def aliases(self) -> dict[str, str]:
        """Parameters that share another's storage, and that other's name. Under ZeRO 3 only rank 0 knows."""
        shared = self.first.root.get("shared_params")
        return {str(name): str(other) for name, other in shared.items()} if isinstance(shared, dict) else {}

    def untrained(self, elsewhere: Collection[str]) -> Tree:
        """Buffers and frozen parameters as ``model``, and extras. ``elsewhere``: names that are not taken, which are
        the trained parameters and those that share another's storage."""
        return merge_files(self.files, [self._beside(file, elsewhere) for file in self.files])

    def in_order(self, leaves: Mapping[Key, Value]) -> dict[Key, Value]:
        """``leaves`` in the order of the module's state dict, shared parameters under all of their names."""
        aliases = self.aliases()
        model: dict[Key, Value] = OrderedDict()
        for key in (*self.first.module, *leaves):
            leaf = leaves.get(aliases.get(str(key), key))
            if leaf is not None or key in leaves:
                model.setdefault(key, leaf)
        return model

    def notes_on_copies(self, trained: Collection[str], dtype: str = "float32") -> list[Note]:
        """A note where the module has copies of the ``trained`` parameters in another type than ``dtype``, theirs."""
        copies = self.first.module
        held = [leaf for name in trained if isinstance(leaf := copies.get(name), StoredTensor)]
        return notes_on_copies({leaf.dtype.name for leaf in held} - {dtype}, dtype)

    def _beside(self, file: StepFile, elsewhere: Collection[str]) -> StateDict:
        root = file.root
        frozen, shapes = root.get("frozen_param_fragments"), root.get("frozen_param_shapes")
        parts: dict[Key, object] = {}
        if isinstance(frozen, dict) and isinstance(shapes, dict) and self.partitioned:
            for name, leaf in frozen.items():
                parts[name] = self._frozen(file, str(name), leaf, size_of(shapes.get(name)))
        model = {name: parts.get(name, value) for name, value in file.module.items() if name not in elsewhere}
        extra = {key: plain(value) for key, value in root.items() if key not in _DESCRIBED}
        if extra.get("optimizer") is None:  # ZeRO leaves it empty; anything else is the user's own
            extra.pop("optimizer", None)
        return {"model": model, "extra": extra}

    def _frozen(self, file: StepFile, name: str, leaf: object, shape: tuple[int, ...] | None) -> Distributed:
        """A frozen parameter under ZeRO 3: each rank has its part."""
        ranks = len(self.files)
        if not isinstance(leaf, StoredTensor) or len(leaf.shape) != 1 or shape is None:
            raise contradiction(file.path, f"the frozen parameter {name} is no flat tensor with a shape")
        try:
            flat = partitions_of_params([{name: shape}], [[leaf.shape[0]]] * ranks)
        except PartitionError as error:
            raise contradiction(file.path, str(error)) from None
        return part_of(file.rank, ranks, leaf, flat.slices[file.rank][0][0], shape)


def _shapes_in(group: object, path: str) -> FlatGroup:
    shapes: FlatGroup = {}
    for name, stored in as_mapping(group, path, "param_shapes").items():
        shape = size_of(stored)
        if not isinstance(name, str) or shape is None:
            raise contradiction(path, f"param_shapes has {name!r} with a shape that is none")
        shapes[name] = shape
    return shapes
