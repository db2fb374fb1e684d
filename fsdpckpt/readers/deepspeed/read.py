"""Put the files of one DeepSpeed ZeRO step together: parameters and their states by name, buffers, and extras.

Every rank's pair of files is rewritten as if FSDP had saved it: in the place of flat tensors stand the boxes of the
parameters in them. ``readers.torch_ranks`` then merges the ranks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from fsdpckpt.errors import SourceCorruptError, SourceUnsupportedError
from fsdpckpt.formats.torch.archive import TorchArchive, read_archive
from fsdpckpt.formats.torch.distributed import BoxInFile, Distributed, all_ranks
from fsdpckpt.formats.torch.tensors import StoredTensor, size_of
from fsdpckpt.ir.checkpoint import Checksums, Evidence, EvidenceKind, Layout, Note
from fsdpckpt.ir.values import Key, Object, Value
from fsdpckpt.readers.deepspeed import ZeroFiles
from fsdpckpt.readers.deepspeed.partitions import (
    FlatGroups,
    PartitionError,
    Slice,
    dealt,
    partitions_of_groups,
    partitions_of_params,
)
from fsdpckpt.readers.flat_slices import boxes_of_range
from fsdpckpt.readers.protocol import FileTable, Tree
from fsdpckpt.readers.torch_ranks.merge import Merge
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import first_of

__all__ = ["read_zero"]

_DESCRIBED = frozenset({
    "module", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params",
    "buffer_names",
})  # fmt: skip  # of the module states: what they say is in the sections
_ZERO_KEYS = frozenset({
    "base_optimizer_state", "base_optimizer_state_step", "single_partition_of_fp32_groups", "fp32_flat_groups",
    "optimizer_state_dict", "param_slice_mappings", "group_paddings", "param_alignment_paddings", "partition_count",
    "zero_stage", "ds_version",
})  # fmt: skip  # of the optimizer's states: they describe the partitions
_SHOWN = 4

_Dict = dict[Key, object]


def read_zero(zero: ZeroFiles, table: FileTable, sources: Sources) -> Tree:
    """The model, the optimizer and the extras of the step in ``zero``.

    Raises SourceCorruptError where the files contradict themselves or each other, SourceUnsupportedError for states
    that are cut in an unknown way, and what ``read_archive`` raises.
    """
    optim = _open_all(zero.optim, table, sources)
    model = _open_all(zero.model, table, sources)
    return _Step(zero, optim, model).tree()


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    number: int
    rank: int
    archive: TorchArchive

    @property
    def root(self) -> _Dict:
        return _mapping(self.archive.root, self.path, "its content")

    @property
    def states(self) -> _Dict:
        """What ``optimizer.state_dict()`` gave, of an optimizer's file."""
        return _mapping(self.root.get("optimizer_state_dict"), self.path, "optimizer_state_dict")

    @property
    def module(self) -> _Dict:
        """What ``module.state_dict()`` gave, of a file of module states."""
        return _mapping(self.root.get("module"), self.path, "module")


def _open_all(paths: Mapping[int, str], table: FileTable, sources: Sources) -> list[_File]:
    files: list[_File] = []
    for rank, path in paths.items():
        source = sources.open(path)
        number = table.add(path, source.nbytes)
        files.append(_File(path, number, rank, read_archive(source, number)))
    return files


@dataclass(frozen=True, slots=True)
class _RankStates:
    """One rank's flat tensors: the fp32 weights, the states of each, and the param groups with the numbers of their
    flat tensors."""

    file: _File
    weights: list[StoredTensor]
    states: list[_Dict]
    groups: list[_Dict]
    paddings: list[int]


@dataclass(slots=True)
class _Step:
    """One step, being read."""

    zero: ZeroFiles
    optim: list[_File]
    model: list[_File]

    @property
    def _stage_3(self) -> bool:
        return "fp32_flat_groups" in self.optim[0].states

    def tree(self) -> Tree:
        ranks = [self._rank_states(file) for file in self.optim]
        shapes = self._shapes()
        flat = self._partitions(ranks, shapes)
        by_name = {name: shape for group in shapes for name, shape in group.items()}
        aliases = self._aliases()
        merged = self._merge(self.optim, [self._named(one, flat, by_name) for one in ranks])
        rest = self._merge(self.model, [self._beside(file, by_name.keys() | aliases.keys()) for file in self.model])
        model = self._in_order({**_values(rest, "model"), **_values(merged, "model")}, aliases)
        root: dict[Key, Value] = {"model": model, "optimizer": _values(merged, "optimizer")}
        tree = Tree(root, Layout.SHARDED, "deepspeed", len(self.optim))
        for one in (rest, merged):
            extras = {key: f"{key!s}_" if key in root else key for key in _values(one, "extra")}
            root.update({name: _values(one, "extra")[key] for key, name in extras.items()})
            tree.problems.extend(one.problems)
            for (section, *path), values in one.rank_values.items():
                place = (extras[cast(Key, path[0])], *path[1:]) if section == "extra" else (section, *path)
                tree.rank_values[place] = values
        archives = [file.archive for file in (*self.optim, *self.model)]
        tree.checksums = Checksums.of([row for archive in archives for row in archive.checksums])
        tree.notes.extend(note for archive in archives for note in archive.notes)
        self._describe(tree, by_name)
        return tree

    # What the files say

    def _shapes(self) -> list[dict[str, tuple[int, ...]]]:
        groups, path = self.model[0].root.get("param_shapes"), self.model[0].path
        if not isinstance(groups, (list, tuple)) or not groups:
            raise self._contradiction(path, "it does not say the shapes of the parameters (param_shapes)")
        return [self._shapes_in(group, path) for group in groups]

    def _shapes_in(self, group: object, path: str) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, stored in _mapping(group, path, "param_shapes").items():
            shape = size_of(stored)
            if not isinstance(name, str) or shape is None:
                raise self._contradiction(path, f"param_shapes has {name!r} with a shape that is none")
            shapes[name] = shape
        return shapes

    def _rank_states(self, file: _File) -> _RankStates:
        states = file.states
        stage_3 = "fp32_flat_groups" in states
        base = states.get("optimizer_state_dict" if stage_3 else "base_optimizer_state")
        weights = states.get("fp32_flat_groups" if stage_3 else "single_partition_of_fp32_groups")
        if not isinstance(weights, (list, tuple)) or not all(_is_vector(one) for one in weights):
            raise self._contradiction(file.path, "its fp32 weights are no list of flat tensors")
        count = len(weights)
        paddings = [0] * count
        found = states.get("group_paddings")
        stripped = "zero_stage" in states  # BF16_Optimizer does not take the padding off, and names no stage
        if stripped and isinstance(found, (list, tuple)) and len(found) == count and all(map(_is_count, found)):
            paddings = [int(one) for one in found]
        flat = cast("list[StoredTensor]", list(weights))
        if isinstance(base, list):  # elastic checkpoints have the states alone
            if len(base) != count:
                raise self._contradiction(file.path, f"it has the states of {len(base)} of {count} flat tensors")
            by_number = [_mapping(one, file.path, "base_optimizer_state") for one in base]
            return _RankStates(file, flat, by_number, [{"params": [number]} for number in range(count)], paddings)
        optimizer = _mapping(base, file.path, "the optimizer's state dict")
        held = _mapping(optimizer.get("state"), file.path, "state")
        groups = optimizer.get("param_groups")
        if not isinstance(groups, list) or set(held) - set(range(count)):
            raise self._contradiction(file.path, f"its optimizer does not have the states of {count} flat tensors")
        param_groups = [_mapping(group, file.path, "param_groups") for group in groups]
        self._require_every_number(param_groups, count, file.path)
        by_number = [_mapping(held.get(number, {}), file.path, f"state.{number}") for number in range(count)]
        return _RankStates(file, flat, by_number, param_groups, paddings)

    def _require_every_number(self, groups: Sequence[_Dict], count: int, path: str) -> None:
        listed: list[object] = []
        for group in groups:
            if group.get("moe"):
                raise SourceUnsupportedError(
                    f"{path} holds a param group of experts (moe), which fsdpckpt does not read",
                    file=path,
                    why="every rank may hold other experts, and the files do not say whose they are",
                    next_step="convert it with DeepSpeed's own ds_to_universal.py",
                )
            params = group.get("params")
            listed += params if isinstance(params, (list, tuple)) else []
        if listed != list(range(count)):
            raise self._contradiction(
                path, f"its param groups list {first_of(listed, _SHOWN)} for {count} flat tensors"
            )

    def _partitions(self, ranks: Sequence[_RankStates], shapes: Sequence[dict[str, tuple[int, ...]]]) -> FlatGroups:
        lengths = [[one.shape[0] + pad for one, pad in zip(rank.weights, rank.paddings, strict=True)] for rank in ranks]
        try:
            if self._stage_3:
                return partitions_of_params(shapes, lengths)
            flat = partitions_of_groups(shapes, self._gaps(ranks[0], len(shapes)), lengths)
        except PartitionError as error:
            raise self._contradiction(ranks[0].file.path, str(error)) from None
        if self._round_robin():
            flat.params = [dealt(names, len(ranks)) for names in flat.params]
        else:  # with it, DeepSpeed 0.19 computes its own record for the wrong order
            self._require_record(ranks, flat)
        return flat

    def _gaps(self, rank: _RankStates, groups: int) -> list[list[int]]:
        """The padding after each parameter of each flat tensor (``parameter_alignment``)."""
        gaps = rank.file.states.get("param_alignment_paddings")
        if gaps is None:
            return [[]] * groups
        if not isinstance(gaps, (list, tuple)) or len(gaps) != groups:
            raise self._contradiction(rank.file.path, "its param_alignment_paddings are not those of its flat tensors")
        if not all(isinstance(one, (list, tuple)) and all(map(_is_count, one)) for one in gaps):
            raise self._contradiction(rank.file.path, "its param_alignment_paddings are no numbers of elements")
        return [[int(gap) for gap in cast("list[int]", one)] for one in gaps]

    def _require_record(self, ranks: Sequence[_RankStates], flat: FlatGroups) -> None:
        """The files' own record of what is where in each part, since 0.7, is what was computed."""
        for rank in ranks:
            record = self._record(rank)
            if record is None:
                continue
            computed = [{one.name: (one.count, one.at) for one in group} for group in flat.slices[rank.file.rank]]
            if record != computed:
                raise self._contradiction(
                    rank.file.path, "its parameters are not where the shapes and the number of ranks put them"
                )

    def _round_robin(self) -> bool:
        """Whether the parameters of a flat tensor were dealt to the ranks in turn."""
        config = self.optim[0].root.get("ds_config", self.model[0].root.get("ds_config"))
        zero = config.get("zero_optimization") if isinstance(config, dict) else None
        return isinstance(zero, dict) and zero.get("round_robin_gradients") is True

    def _record(self, rank: _RankStates) -> list[dict[str, tuple[int, int]]] | None:
        groups = rank.file.states.get("param_slice_mappings")
        if groups is None:
            return None
        if not isinstance(groups, (list, tuple)):
            raise self._contradiction(rank.file.path, "its param_slice_mappings are no list")
        return [
            {
                str(name): self._fragment(address, rank.file.path)
                for name, address in _mapping(group, rank.file.path, "param_slice_mappings").items()
            }
            for group in groups
        ]

    def _fragment(self, address: object, path: str) -> tuple[int, int]:
        state = address.state if isinstance(address, Object) else None
        numel, start = (state.get("numel"), state.get("start")) if isinstance(state, dict) else (None, None)
        if not _is_count(numel) or not _is_count(start):
            raise self._contradiction(path, "its param_slice_mappings hold addresses of an unknown form")
        return cast(int, numel), cast(int, start)

    # The ranks' files, rewritten

    def _named(self, rank: _RankStates, flat: FlatGroups, shapes: Mapping[str, tuple[int, ...]]) -> _Dict:
        """One rank's optimizer file with parameters in the places of flat tensors."""
        number_of = {name: number for number, group in enumerate(flat.params) for name in group}
        slices = {one.name: one for group in flat.slices[rank.file.rank] for one in group}
        model: _Dict = {}
        states: _Dict = {}
        for name, number in number_of.items():
            place = slices.get(name)
            model[name] = self._cut(rank, number, "fp32 weights", rank.weights[number], place, shapes[name])
            entry: _Dict = {
                key: self._state(rank, number, str(key), leaf, place, shapes[name])
                for key, leaf in rank.states[number].items()
            }
            if entry:
                states[name] = entry
        groups = [
            {**group, "params": [name for number in cast("list[int]", group["params"]) for name in flat.params[number]]}
            for group in rank.groups
        ]
        extra = {key: _plain(value) for key, value in rank.file.states.items() if key not in _ZERO_KEYS}
        return {"model": model, "optimizer": {"state": states, "param_groups": groups}, "extra": extra}

    def _state(
        self, rank: _RankStates, number: int, key: str, leaf: object, place: Slice | None, shape: tuple[int, ...]
    ) -> object:
        """One state of one parameter: its part of a flat tensor, or what all parameters of the flat tensor share."""
        if not isinstance(leaf, StoredTensor) or not leaf.shape or (key == "step" and leaf.shape == (1,)):
            return leaf
        length = rank.weights[number].shape[0]
        if leaf.shape not in ((length,), (length + rank.paddings[number],)):
            raise SourceUnsupportedError(
                f"{rank.file.path}: the state {key} is not cut as the weights are",
                file=rank.file.path,
                key=key,
                rank=rank.file.rank,
                expected=f"{length} elements",
                found=f"shape {list(leaf.shape)}",
                why="an optimizer that factors or quantizes its states keeps them in a form of its own under ZeRO",
                next_step="convert the weights alone with --only model",
            )
        return self._cut(rank, number, key, leaf, place, shape)

    def _cut(
        self,
        rank: _RankStates,
        number: int,
        what: str,
        stored: StoredTensor,
        place: Slice | None,
        shape: tuple[int, ...],
    ) -> Distributed:
        if place is not None and place.at + place.count > stored.shape[0]:
            raise self._contradiction(
                rank.file.path,
                f"flat tensor {number} ({what}) has {stored.shape[0]} elements, and {place.name} ends at "
                f"{place.at + place.count}",
            )
        return self._part(rank.file.rank, stored, place, shape)

    def _part(self, rank: int, stored: StoredTensor, place: Slice | None, shape: tuple[int, ...]) -> Distributed:
        """What ``rank`` holds of a parameter of ``shape``, in the flat tensor ``stored``; None: nothing."""
        boxes: list[BoxInFile] = []
        if place is not None:
            boxes = boxes_of_range(shape, place.begin, place.begin + place.count, place.at - place.begin, stored)
        world = all_ranks(len(self.optim))
        return Distributed("ZeRO partition", stored.dtype, shape, "flattened", rank, world, world, tuple(boxes))

    def _beside(self, file: _File, elsewhere: Collection[str]) -> _Dict:
        """One file of module states: buffers, frozen parameters, and extras. ``elsewhere``: trained parameters, which
        are the fp32 ones, and names that share another's storage."""
        root = file.root
        frozen = root.get("frozen_param_fragments")
        shapes = root.get("frozen_param_shapes")
        parts: dict[Key, object] = {}
        if isinstance(frozen, dict) and isinstance(shapes, dict) and self._stage_3:
            for name, leaf in frozen.items():
                parts[name] = self._frozen(file, str(name), leaf, size_of(shapes.get(name)))
        model = {name: parts.get(name, value) for name, value in file.module.items() if name not in elsewhere}
        extra = {key: _plain(value) for key, value in root.items() if key not in _DESCRIBED}
        return {"model": model, "extra": extra}

    def _frozen(self, file: _File, name: str, leaf: object, shape: tuple[int, ...] | None) -> Distributed:
        """A frozen parameter under ZeRO 3: each rank has its part."""
        if not isinstance(leaf, StoredTensor) or len(leaf.shape) != 1 or shape is None:
            raise self._contradiction(file.path, f"the frozen parameter {name} is no flat tensor with a shape")
        try:
            flat = partitions_of_params([{name: shape}], [[leaf.shape[0]]] * len(self.optim))
        except PartitionError as error:
            raise self._contradiction(file.path, str(error)) from None
        return self._part(file.rank, leaf, flat.slices[file.rank][0][0], shape)

    def _aliases(self) -> dict[str, str]:
        """Parameters that share another's storage, and that other's name. Under ZeRO 3 only rank 0 knows."""
        shared = self.model[0].root.get("shared_params")
        return {str(name): str(other) for name, other in shared.items()} if isinstance(shared, dict) else {}

    def _merge(self, files: Sequence[_File], roots: Sequence[_Dict]) -> Tree:
        merge = Merge([file.rank for file in files], [file.number for file in files], sharded=True)
        tree = Tree(merge.value(roots), Layout.SHARDED, "deepspeed", len(files))
        tree.problems.extend(merge.problems)
        tree.rank_values.update(merge.rank_values)
        return tree

    def _in_order(self, leaves: dict[Key, Value], aliases: Mapping[str, str]) -> dict[Key, Value]:
        """The model in the order of the module's state dict, shared parameters under all of their names."""
        model: dict[Key, Value] = OrderedDict()
        for key in (*self.model[0].module, *leaves):
            leaf = leaves.get(aliases.get(str(key), key))
            if leaf is not None or key in leaves:
                model.setdefault(key, leaf)
        return model

    # Reports

    def _describe(self, tree: Tree, trained: Mapping[str, tuple[int, ...]]) -> None:
        message = f"{self.zero.directory} is a DeepSpeed ZeRO {'3' if self._stage_3 else '1 or 2'} checkpoint"
        tree.evidence.append(Evidence(EvidenceKind.CONTAINER, f"{message} of {len(self.optim)} ranks"))
        copies = self.model[0].module
        held = [leaf for name in trained if isinstance(leaf := copies.get(name), StoredTensor)]
        dtypes = {leaf.dtype.name for leaf in held} - {"float32"}
        if dtypes:
            message = (
                f"the {len(trained)} trained parameters are the optimizer's float32 weights, not the "
                f"{' and '.join(sorted(dtypes))} copies that the model computed with; --dtype {min(dtypes)} gives those"
            )
            tree.notes.append(Note("master-weights", message))
        if isinstance(self.optim[0].states.get("base_optimizer_state"), list):
            message = "an elastic checkpoint has no hyper-parameters of its param groups"
            tree.notes.append(Note("groups-rebuilt", message))

    def _contradiction(self, path: str, what: str) -> SourceCorruptError:
        return SourceCorruptError(
            f"{path}: {what}",
            file=path,
            expected=f"one save of DeepSpeed ZeRO by {len(self.optim)} ranks",
            why="files of different saves or world sizes lie together, or a version of DeepSpeed that is not known "
            "wrote them",
            next_step="give a directory with the files of one save, or report it with the version of DeepSpeed",
        )


def _mapping(value: object, path: str, what: str) -> _Dict:
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


def _values(tree: Tree, section: str) -> dict[Key, Value]:
    """One section of merged files, {} where no file has it."""
    root = cast("dict[Key, Value]", tree.root)
    return cast("dict[Key, Value]", root.get(section, {}))


def _is_vector(value: object) -> bool:
    return isinstance(value, StoredTensor) and len(value.shape) == 1


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 59


def _plain(value: object) -> object:
    """A loss scaler as the dict of its attributes, so that whoever loads it needs no DeepSpeed."""
    if isinstance(value, Object) and value.function.module.startswith("deepspeed."):
        return value.state if isinstance(value.state, dict) else None
    return value
