"""Reads the files of one DeepSpeed step: names and shapes, buffers, frozen parameters, extras, and the place of each
parameter in the flat tensors.

Under ZeRO 3 every rank has a file of module states, otherwise only rank 0 (``_common_checkpoint_state`` of
``deepspeed/runtime/engine.py``).

ZeRO 1 and 2 join the parameters of a param group to one flat tensor, pad it, and cut it into equal parts, one for each
rank (``deepspeed/runtime/zero/stage_1_and_2.py``, ``bf16_optimizer.py``). ZeRO 3 cuts every parameter by itself, into
parts of ``ceil(numel / ranks)`` elements, and joins a rank's parts of a *sub-group* of parameters (``stage3.py``).
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import TypeAlias, cast

from fsdpckpt.errors import SourceCorruptError, damaged
from fsdpckpt.formats.torch import TorchArchive, notes_on_dropped
from fsdpckpt.formats.torch.distributed import BoxInFile, Distributed, all_ranks
from fsdpckpt.formats.torch.tensors import StoredTensor, size_of
from fsdpckpt.ir.checkpoint import Checksums, Layout, Note
from fsdpckpt.ir.dtypes import MAX_DIMENSIONS
from fsdpckpt.ir.tensors import Flattened
from fsdpckpt.ir.values import Key, Object, Value
from fsdpckpt.readers.deepspeed.required_files import require_one_save
from fsdpckpt.readers.flat_slices import boxes_of_range
from fsdpckpt.readers.optimizer_forms import notes_on_copies
from fsdpckpt.readers.protocol import FileTable, KeyPath, Tree, file_name
from fsdpckpt.readers.torch_ranks import NamedRank, check_names
from fsdpckpt.readers.torch_ranks.merge import Merge
from fsdpckpt.readers.torch_ranks.rank_files import Group, RankFile, open_ranks
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import count_text, plural, some_of

StateDict: TypeAlias = dict[Key, object]
FlatGroup: TypeAlias = dict[str, tuple[int, ...]]
"""The parameters of one flat tensor, in order, with their shapes."""

_RANK = re.compile(r"^((?:bf16_|fp16_)?zero_pp_rank_)(\d{1,5})(_mp_rank_\d{1,5}_(?:optim|model)_states)$")
_MAX_ELEMENTS = 1 << 59
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


def is_count(value: object) -> bool:
    """Whether it is a possible number of elements of a tensor."""
    return type(value) is int and 0 <= value < _MAX_ELEMENTS


def plain(value: object) -> object:
    """A loss scaler as the dict of its attributes, so that it can be loaded without DeepSpeed."""
    if isinstance(value, Object) and value.function.module.startswith("deepspeed."):
        return value.state if isinstance(value.state, dict) else None
    return value


class StepFile(RankFile):
    """One opened file of a step. ``rank``: the data-parallel rank that wrote it."""

    __slots__ = ()

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
    require_same(directory, files, lambda file: "by more ranks" if file.rank >= ranks > 0 else _by_ranks(ranks))
    return ranks


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


def open_files(paths: Mapping[int, str], table: FileTable, sources: Sources) -> list[StepFile]:
    """The files at ``paths``, by rank. Raises what ``check_names`` and ``read_archive`` raise."""
    check_names(paths, sources, _named_rank)
    opened = open_ranks(paths, table, sources, alike=False)
    return [StepFile(file.rank, file.file, file.archive) for file in opened]


def merge_files(files: Sequence[StepFile], roots: Sequence[StateDict]) -> Tree:
    """Merge ``roots``, the state dicts of the ranks' ``files``."""
    merge = Merge([Group(root, [file]) for file, root in zip(files, roots, strict=True)], sharded=True)
    tree = Tree(merge.value(roots), Layout.SHARDED, "deepspeed", len(files))
    tree.problems.extend(merge.problems)
    tree.missing.update(merge.missing)
    tree.rank_values.update(merge.rank_values)
    tree.absences.update(merge.absences)
    return tree


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
    return [
        {**group, "params": [name for number in of_group for name in members[number]]}
        for group, of_group in zip(groups, numbers, strict=True)
    ]


def section_of(tree: Tree, section: str) -> dict[Key, Value]:
    """One section of merged files, {} if no file has it."""
    root = cast("dict[Key, Value]", tree.root)
    return cast("dict[Key, Value]", root.get(section, {}))


def add_extras(tree: Tree, merged: Sequence[Tree]) -> None:
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


def add_archives(tree: Tree, archives: Sequence[TorchArchive]) -> None:
    """Add the checksums and notes of the files of ``tree`` to it."""
    tree.checksums = Checksums.joined(archive.checksums for archive in archives)
    tree.notes.extend(notes_on_dropped(archives))


def distributed_slice(
    rank: int, ranks: int, stored: StoredTensor, where: Slice | None, shape: tuple[int, ...]
) -> Distributed:
    """The part that ``rank`` of ``ranks`` holds of a parameter of ``shape``, in the flat tensor ``stored``. ``where``
    is None if the rank holds none of it.
    """
    boxes: list[BoxInFile] = []
    if where is not None:
        boxes = boxes_of_range(shape, where.begin, where.begin + where.count, where.at - where.begin, stored)
    world = all_ranks(ranks)
    return Distributed("ZeRO partition", stored.dtype, shape, Flattened(), rank, world, world, tuple(boxes))


@dataclass(frozen=True, slots=True)
class ModuleStates:
    """``files``: one for each rank under ZeRO 3, in which every parameter is ``partitioned``, else only rank 0's.

    ``layers``: the files of a pipeline's layers, each with its entries under the module's names; then ``files`` have no
    module. ``pipeline``: all of these entries.
    """

    files: list[StepFile]
    partitioned: bool
    layers: Sequence[tuple[StepFile, StateDict]] = ()
    pipeline: StateDict = field(default_factory=dict)

    @property
    def first(self) -> StepFile:
        return self.files[0]

    @property
    def module(self) -> StateDict:
        """The module's state dict, on rank 0."""
        return self.pipeline if self.layers else self.first.module

    def groups(self, file: StepFile | None = None) -> list[FlatGroup]:
        """The shapes of the trained parameters by flat tensor, from ``file`` (the first). Raises SourceCorruptError."""
        file = self.first if file is None else file
        groups = file.root.get("param_shapes")
        if not isinstance(groups, (list, tuple)) or not groups:
            raise contradiction(file.path, "it does not say the shapes of the parameters (param_shapes)")
        shapes = [_shapes_in(group, file.path) for group in groups]
        repeated = [name for name, count in Counter(chain.from_iterable(shapes)).items() if count > 1]
        if repeated:
            raise contradiction(file.path, f"param_shapes has {repeated[0]} in several groups")
        return shapes

    def aliases(self) -> dict[str, str]:
        """Parameters that share storage, each with the name under which it is stored. Under ZeRO 3 only rank 0 has
        them.
        """
        shared = self.first.root.get("shared_params")
        return {str(name): str(other) for name, other in shared.items()} if isinstance(shared, dict) else {}

    def untrained(self, exclude: Collection[str]) -> Tree:
        """Buffers and frozen parameters as ``model``, and extras. ``exclude``: the names of the trained
        parameters and of those that share their storage.
        """
        merged = merge_files(self.files, [self._untrained_in(file, exclude) for file in self.files])
        for file, entries in self.layers:  # the data of each is in its own file
            own = {name: value for name, value in entries.items() if name not in exclude}
            section_of(merged, "model").update(section_of(merge_files([file], [{"model": own}]), "model"))
        return merged

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

    def _untrained_in(self, file: StepFile, exclude: Collection[str]) -> StateDict:
        root = file.root
        frozen, shapes = root.get("frozen_param_fragments"), root.get("frozen_param_shapes")
        parts: dict[Key, object] = {}
        if isinstance(frozen, dict) and isinstance(shapes, dict) and self.partitioned:
            for name, leaf in frozen.items():
                parts[name] = self._frozen(file, str(name), leaf, size_of(shapes.get(name)))
        module = {} if self.layers else file.module
        model = {name: parts.get(name, value) for name, value in module.items() if name not in exclude}
        extra = {key: plain(value) for key, value in root.items() if key not in _DESCRIBED}
        if extra.get("optimizer") is None:  # ZeRO leaves it empty; anything else is the user's own
            extra.pop("optimizer", None)
        return {"model": model, "extra": extra}

    def _frozen(self, file: StepFile, name: str, leaf: object, shape: tuple[int, ...] | None) -> Distributed:
        """A frozen parameter under ZeRO 3, joined from the ranks' parts."""
        ranks = len(self.files)
        if not isinstance(leaf, StoredTensor) or len(leaf.shape) != 1 or shape is None:
            raise contradiction(file.path, f"the frozen parameter {name} is not a flat tensor with a shape")
        try:
            flat = partitions_of_params([{name: shape}], [[leaf.shape[0]]] * ranks)
        except PartitionError as error:
            raise contradiction(file.path, str(error)) from None
        return distributed_slice(file.rank, ranks, leaf, flat.slices[file.rank][0][0], shape)


def _shapes_in(group: object, path: str) -> FlatGroup:
    shapes: FlatGroup = {}
    for name, stored in as_mapping(group, path, "param_shapes").items():
        shape = size_of(stored)
        if not isinstance(name, str) or shape is None:
            raise contradiction(path, f"param_shapes has {name!r} with an impossible shape")
        shapes[name] = shape
    return shapes


class PartitionError(Exception):
    """Describes how the files of the ranks contradict themselves or each other."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements ``begin`` .. ``begin + count`` of the parameter ``name``, flattened, at element ``at`` of a rank's flat
    tensor."""

    name: str
    begin: int
    count: int
    at: int


@dataclass(slots=True)
class FlatGroups:
    """Flat tensors 0 .. n - 1 of every rank. ``params``: the parameters of each, in order. ``slices``: by rank, then by
    number, the slices in it.
    """

    params: list[list[str]]
    slices: list[list[list[Slice]]]


def _numels(shapes: FlatGroup) -> dict[str, int]:
    for name, shape in shapes.items():
        if len(shape) > MAX_DIMENSIONS or prod(shape) >= _MAX_ELEMENTS:
            raise PartitionError(f"the shape of {name} is {list(shape)}")
    return {name: prod(shape) for name, shape in shapes.items()}


def partitions_of_groups(
    groups: Sequence[FlatGroup], gaps: Sequence[Sequence[int]], lengths: Sequence[Sequence[int]]
) -> FlatGroups:
    """ZeRO 1 and 2. ``groups``: the shape of every parameter, by param group, in the order of the flat tensors.
    ``gaps``: the elements of padding after each parameter, by group; [] for none. ``lengths``: by rank and group, the
    elements of the rank's part, padding included. Raises PartitionError.
    """
    counts = {len(rank_lengths) for rank_lengths in lengths}
    if counts != {len(groups)}:
        tensors = " or ".join(map(str, sorted(counts)))
        raise PartitionError(f"it has {tensors} flat tensors, and the module has {plural(len(groups), 'group')}")
    result = FlatGroups([list(group) for group in groups], [[] for _ in lengths])
    for number, (shapes, padding) in enumerate(zip(groups, gaps, strict=True)):
        numels = _numels(shapes)
        parts = {rank_lengths[number] for rank_lengths in lengths}
        if len(parts) > 1 or (padding and len(padding) != len(numels)):
            raise PartitionError(f"the parts of flat tensor {number} have {sorted(parts)} elements")
        (part,) = parts
        starts: dict[str, int] = {}
        total = 0
        for name, gap in zip(numels, padding or [0] * len(numels), strict=True):
            starts[name] = total
            total += numels[name] + gap
        if total > part * len(lengths):
            raise PartitionError(
                f"flat tensor {number} has {part * len(lengths)} elements, and its parameters take {total}"
            )
        for rank, slices in enumerate(result.slices):
            begin, end = rank * part, (rank + 1) * part
            slices.append([])
            for name, start in starts.items():
                low, high = max(start, begin), min(start + numels[name], end)
                if low < high:
                    slices[-1].append(Slice(name, low - start, high - low, low - begin))
    return result


def optimizer_order(names: Sequence[str], ranks: int) -> list[str]:
    """The parameters of a group in the order in which the optimizer lists them, from their order in its flat tensor.

    ``round_robin_gradients`` deals them to the ranks in turn and joins each rank's
    (``DeepSpeedZeroOptimizer._round_robin_reorder``).
    """
    order = [index for rank in range(ranks) for index in range(rank, len(names), ranks)]
    return [name for _, name in sorted(zip(order, names, strict=True))]


def partitions_of_params(shapes: Iterable[FlatGroup], lengths: Sequence[Sequence[int]]) -> FlatGroups:
    """ZeRO 3. ``shapes``: of every parameter, in the order of the sub-groups. ``lengths``: by rank, the elements of
    each of its flat tensors, one a sub-group. Raises PartitionError.
    """
    numels = _numels({name: shape for group in shapes for name, shape in group.items()})
    ranks = len(lengths)
    if any(list(of_rank) != list(lengths[0]) for of_rank in lengths):
        raise PartitionError("the flat tensors of the ranks do not have the same lengths")
    parts = {name: -(-numel // ranks) for name, numel in numels.items()}
    remaining, ends = deque(numels), list(lengths[0])
    placed: list[list[tuple[str, int]]] = []
    for end in ends:
        placed.append([])
        at = 0
        while remaining and at + parts[remaining[0]] <= end:
            placed[-1].append((remaining[0], at))
            at += parts[remaining.popleft()]
        if remaining and at < end:
            break
    if remaining:
        raise PartitionError(f"{remaining[0]} does not fit into the flat tensors, which have {ends} elements")
    used = [sum(parts[name] for name, _ in group) for group in placed or [[]]]
    if used != ends:
        raise PartitionError(f"the parameters take {used} elements of the flat tensors, which have {ends}")
    slices = [
        [[_slice_of_rank(name, numels[name], ranks, rank, at) for name, at in group] for group in placed]
        for rank in range(ranks)
    ]
    return FlatGroups([[name for name, _ in group] for group in placed], slices)


def _slice_of_rank(name: str, numel: int, ranks: int, rank: int, at: int) -> Slice:
    """The part of one parameter that ``rank`` holds under ZeRO 3. If it does not divide evenly, the last parts are
    padding.
    """
    part = -(-numel // ranks)
    begin = min(rank * part, numel)
    return Slice(name, begin, min(part, numel - begin), at)
