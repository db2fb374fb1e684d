"""Reads DeepSpeed universal checkpoints: a directory for each parameter, with a file for its weight and each state.

``zero/<parameter>/{fp32,exp_avg,exp_avg_sq}.pt`` hold ``{"param": tensor, ...}``, whole however the model was parallel.
From ZeRO 3 they hold the tensor itself, flattened, and the step is only in ``zero/optimizer_state.pt``; from the other
stages it is in ``step.pt`` (``merge_tp_slices`` and ``merge_zero3_slices`` of
``deepspeed/checkpoint/ds_to_universal.py``).

There are thousands of such files, and many have the same pickle: it is parsed once (``ArchiveCache``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import cast

from fsdpckpt.errors import SourceIncompleteError
from fsdpckpt.formats.torch import TorchArchive, local_tensor, open_archive, parse_archive
from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.formats.zip import top_folder
from fsdpckpt.ir.checkpoint import Evidence, EvidenceKind, Layout, Note
from fsdpckpt.ir.counters import STEP
from fsdpckpt.ir.tensors import Tensor, contiguous_stride
from fsdpckpt.ir.values import Key, Object, Value
from fsdpckpt.readers.deepspeed.autoep import auto_experts
from fsdpckpt.readers.deepspeed.autotp import records_shards, shards_of_autotp
from fsdpckpt.readers.deepspeed.layers import with_layers
from fsdpckpt.readers.deepspeed.module_states import ModuleStates, require_in_one_group
from fsdpckpt.readers.deepspeed.partitions import FlatGroup
from fsdpckpt.readers.deepspeed.rank_states import DESCRIBED_STATES
from fsdpckpt.readers.deepspeed.required_files import OPTIMIZER_STATE, ZERO, required_grid
from fsdpckpt.readers.deepspeed.step import (
    StepFile,
    add_archives,
    add_extras,
    as_mapping,
    contradiction,
    groups_by_name,
    merge_files,
    model_ranks_of,
    open_files,
    open_grid,
    plain_scaler,
    require_one_run,
    section_of,
)
from fsdpckpt.readers.model_shards import RankGrid
from fsdpckpt.readers.protocol import FileTable, PartContents, file_name
from fsdpckpt.readers.torch_ranks.read import separate_extras
from fsdpckpt.storage import ByteSource, Entry
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import is_or_are, plural, some_of


class ArchiveCache:
    """Archives of one tensor, by all that their parsing depends on but the place of the data."""

    def __init__(self) -> None:
        self._parsed: dict[tuple[bytes, tuple[str, ...], bytes], tuple[int, TorchArchive]] = {}

    def read(self, source: ByteSource, file_id: int) -> TorchArchive:
        """The result of ``read_archive``. Files with the same pickle are parsed once."""
        opened = open_archive(source)
        records = opened.records
        data = [int(records.offset[row]) for name, row in records.numbers.items() if name.startswith("data/")]
        first = data[0] if data else 0
        key = opened.pickle, tuple(records), records.nbytes.tobytes()
        if key not in self._parsed:
            archive = parse_archive(opened, file_id)
            if len(data) > 1 or archive.dropped:
                return archive
            self._parsed[key] = first, archive
        parsed_first, archive = self._parsed[key]
        root = _moved(archive.root, first - parsed_first)
        return replace(archive, root=root, checksums=opened.checksums(file_id), path=source.path)


def _moved(root: Value, nbytes: int) -> Value:
    """``root`` with tensors ``nbytes`` later in their file. They may be changed and share no tuple: writers write one
    object once.
    """
    if isinstance(root, dict):
        return cast(Value, {key: _moved(value, nbytes) for key, value in root.items()})
    if not isinstance(root, StoredTensor):
        return root
    offset = root.offset + nbytes
    return cast(
        Value,
        StoredTensor(root.dtype, (*root.shape,), (*root.stride,), offset, root.sharded, root.cloned, root.array),
    )


_WEIGHT = "fp32"
_SUFFIX = ".pt"
_PADDED = "vocab_tensor"  # the rows that padded the vocabulary were taken off
_MAX_NAMES = 4


def read_universal(
    directory: str,
    model: Mapping[int, Mapping[int, str]],
    layers: Mapping[int, str],
    table: FileTable,
    sources: Sources,
) -> PartContents:
    """Read the model, the optimizer and the extras of the checkpoint in ``directory``.

    ``model``: the paths of the module states of each model-parallel rank, by data-parallel rank or of rank 0 alone;
    ``layers``: the files of a pipeline's layers, which DeepSpeed's program does not copy.

    Raises SourceIncompleteError that lists the parameters without a weight, SourceCorruptError if the files contradict
    each other, and what ``read_archive`` raises.
    """
    sources.prefetch_ends([*(path for paths in model.values() for path in paths.values()), *layers.values()])
    partitioned = not file_name(next(iter(model[0].values()))).startswith("mp_rank_")
    files = open_grid(model, table, sources)
    world_size = require_one_run(directory, files)
    ranks = model_ranks_of(files)
    grid = required_grid(directory, {}, model, per_rank=partitioned, world_size=world_size, model_ranks=ranks)
    module = ModuleStates(files, partitioned, RankGrid(*grid))
    if layers:
        module = with_layers(module, directory, layers, table, sources)
    elif len(model) > 1 and not any(file.of_pipeline for file in files):
        module = _with_shards(module, directory)
    auto = auto_experts(directory, files, world_size)
    if auto is not None:
        module = replace(
            module, shards={**module.shards, **auto.shards_among(directory, module.first, module.groups())}
        )
    return _Universal(directory, f"{directory.rstrip('/')}/{ZERO}", module, table, sources).tree()


def _with_shards(module: ModuleStates, directory: str) -> ModuleStates:
    """``module`` with how frozen parameters are cut, which tensor-parallel ranks have in their module states alone."""
    trained: set[str] = set()
    for file in module.of_model_ranks:
        trained.update(*module.groups(file))
    known = {*trained, *module.buffers(), *module.aliases()}
    listed = [file for file in module.of_model_ranks if "buffer_names" in file.root]
    if records_shards(module) or any(name not in known for file in listed for name in file.module):
        return replace(module, shards=shards_of_autotp(directory, module, joined=True))
    return module


@dataclass(slots=True)
class _Universal:
    """One checkpoint while it is read. ``zero``: the directory with the weights and states, in ``directory``."""

    directory: str
    zero: str
    module: ModuleStates
    table: FileTable
    sources: Sources
    archives: list[TorchArchive] = field(default_factory=list)
    cache: ArchiveCache = field(default_factory=ArchiveCache)

    def tree(self) -> PartContents:
        groups = self._groups()
        entries = {entry.name: entry for entry in self.sources.list_directory(self.zero)}
        shapes = {name: self._shape_of(name, shape) for group in groups for name, shape in group.items()}
        stored = self._stored(groups, shapes, entries)
        file = entries.get(OPTIMIZER_STATE)
        optimizer = None if file is None else open_files({0: file.path}, self.table, self.sources)[0]
        if optimizer is None and any(len(states) > 1 for states in stored.values()):
            raise self._incomplete([f"{self.zero}/{OPTIMIZER_STATE}"])
        common = self._common_states(optimizer, len(groups))
        weights: dict[Key, Value] = {}
        states: dict[Key, Value] = {}
        for number, group in enumerate(groups):
            for name in group:
                weights[name] = stored[name].pop(_WEIGHT)
                entry = {**common[number], **stored[name]}
                if entry:
                    states[name] = cast(Value, entry)
        rest = self.module.untrained(shapes.keys() | self.module.aliases().keys())
        model = self.module.in_order({**section_of(rest, "model"), **weights})
        root: dict[Key, Value] = {"model": model}
        merged = [rest]
        if optimizer is not None:
            saved = optimizer.root.get("param_groups")
            if not isinstance(saved, list):
                raise contradiction(optimizer.path, "it has no param_groups")
            saved = [as_mapping(group, optimizer.path, "param_groups") for group in saved]
            param_groups = groups_by_name(saved, groups, optimizer.path)
            extra = {key: plain_scaler(value) for key, value in optimizer.root.items() if key not in DESCRIBED_STATES}
            extra.pop("param_groups", None)
            merged.append(merge_files([optimizer], [{"optimizer": {"param_groups": param_groups}, "extra": extra}]))
            root["optimizer"] = {"state": states, **section_of(merged[-1], "optimizer")}
        dtypes = {leaf.dtype.name for leaf in weights.values() if isinstance(leaf, Tensor)}
        ranks = len(self.module.files)
        cut = any(isinstance(leaf, Tensor) and leaf.sharded for leaf in model.values())  # frozen parameters of ZeRO 3
        tree = PartContents(root, Layout.SHARDED if cut else Layout.FULL, "torch", ranks if cut else 1)
        add_extras(tree, merged)
        layers = [file for file, _ in self.module.layers]
        opened = [*self.module.files, *layers, *([optimizer] if optimizer is not None else [])]
        add_archives(tree, [*(file.archive for file in opened), *self.archives])
        message = f"{self.zero} has directories for {plural(len(shapes), 'parameter')} (DeepSpeed universal)"
        tree.notes += self.module.notes_on_copies(shapes, dtypes.pop()) if len(dtypes) == 1 else []
        separate_extras(tree, self.table, self.sources)
        weights_of = {name: leaf for name, leaf in weights.items() if isinstance(leaf, Tensor)}
        copies = self.module.copies(shapes) if not self.module.shards and self.module.grid.model == 1 else {}
        # ds_to_universal.py takes the rows that padded the vocabulary off the weights, and not off the copies.
        tree.copies = {name: copy for name, copy in copies.items() if copy.shape == weights_of[name].shape}
        tree.notes += self._not_copied(model)
        tree.evidence.append(Evidence(EvidenceKind.CONTAINER, message))
        return tree

    def _groups(self) -> list[FlatGroup]:
        """The parameters by flat tensor of the first rank, including those of other model-parallel ranks.

        Under ZeRO 3 each tensor-parallel rank has its own flat tensors, of the same parameters.
        """
        groups = self.module.groups()
        known = {name for group in groups for name in group}
        for file in self.module.of_model_ranks[1:]:
            more = self.module.groups(file)
            if self.module.partitioned and {name for group in more for name in group} == known:
                continue
            if len(more) != len(groups):
                what = f"it lists {plural(len(more), 'group')} of parameters, and rank 0 {len(groups)}"
                raise contradiction(file.path, what)
            for group, added in zip(groups, more, strict=True):
                group.update({name: shape for name, shape in added.items() if name not in group})
        require_in_one_group(groups, self.module.first.path)
        return groups

    def _shape_of(self, name: str, local: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole parameter of which a rank has ``local``."""
        shards = self.module.shards.get(name)
        return local if shards is None else shards.shape

    def _stored(
        self, groups: list[FlatGroup], shapes: FlatGroup, entries: Mapping[str, Entry]
    ) -> dict[str, dict[str, Value]]:
        """For each parameter its weight and its states, by the names of their files."""
        files: dict[str, dict[str, Entry]] = {}
        for name in shapes:
            entry = entries.get(name)
            inside = self.sources.list_directory(entry.path) if entry is not None and entry.directory else []
            files[name] = {
                file.name.removesuffix(_SUFFIX): file
                for file in sorted(inside, key=lambda file: file.name)
                if file.name.endswith(_SUFFIX) and not file.directory
            }
        missing: list[str] = []
        for group in groups:  # a parameter that never had a gradient has only its weight
            of_group = {_WEIGHT}.union(*(files[name] for name in group))
            for name in group:
                present = files[name].keys()
                expected = of_group if present - {_WEIGHT} else {_WEIGHT}
                missing += [f"{self.zero}/{name}/{state}{_SUFFIX}" for state in sorted(expected - present)]
        if missing:
            raise self._incomplete(missing)
        self.sources.prefetch_ends([entry.path for states in files.values() for entry in states.values()])
        stored: dict[str, dict[str, Value]] = {}
        for name, states in files.items():
            shape = shapes[name]
            stored[name] = {state: self._leaf(file.path, name, state, shape, states) for state, file in states.items()}
        return stored

    def _incomplete(self, missing: list[str]) -> SourceIncompleteError:
        return SourceIncompleteError(
            f"{self.directory}: {plural(len(missing), 'file')} of the universal checkpoint "
            f"{is_or_are(len(missing))} missing",
            details=missing,
            most_shown=_MAX_NAMES,
            files=missing,
            file=missing[0],
            why="the conversion by ds_to_universal.py, or the copy, did not finish",
            next_step="copy the checkpoint again",
        )

    def _leaf(self, path: str, name: str, state: str, shape: tuple[int, ...], beside: Collection[str]) -> Value:
        source = self.sources.open(path)
        number = self.table.add(path, source.nbytes)
        was = top_folder(source)
        if was != state and was in beside:  # they have the same shape, so nothing else shows it
            raise contradiction(path, f"it was saved as {was}{_SUFFIX}")
        archive = self.cache.read(source, number)
        self.archives.append(archive)
        root = archive.root
        padded = isinstance(root, dict) and root.get(_PADDED) is True
        leaf = root.get("param") if isinstance(root, dict) else root
        is_number = type(leaf) in (int, float) or (isinstance(leaf, Object) and leaf.number is not None)
        if state == STEP and is_number:
            return leaf
        if not isinstance(leaf, StoredTensor):
            raise contradiction(path, f"it holds no tensor of {name}")
        if state == STEP and prod(leaf.shape) == 1:
            return local_tensor(leaf, number)
        cut = self.module.grid.model > 1 and not self.module.shards  # nothing says how
        if leaf.shape != shape and not cut and not (padded and leaf.shape[1:] == shape[1:]):
            if prod(leaf.shape) != prod(shape) or leaf.stride != contiguous_stride(leaf.shape):
                raise contradiction(path, f"it has the shape {list(leaf.shape)}, and {name} has {list(shape)}")
            leaf.shape, leaf.stride = shape, contiguous_stride(shape)
        return local_tensor(leaf, number)

    def _not_copied(self, model: Collection[Key]) -> list[Note]:
        """A warning of the buffers that a pipeline has in the files of its layers."""
        lost = sorted(self.module.buffers() - {str(key) for key in model})
        if not lost or not self.module.first.of_pipeline:
            return []
        message = (
            f"{plural(len(lost), 'buffer')} of the pipeline, and its frozen parameters, are not in {self.directory}: "
            "ds_to_universal.py leaves the files of the layers behind. Copy layer_*-model_states.pt of the step into "
            f"it to have them: {some_of(lost, _MAX_NAMES)}"
        )
        return [Note("not-carried", message, keys=tuple(lost), warning=True)]

    # The optimizer's file

    def _common_states(self, file: StepFile | None, count: int) -> list[dict[str, Value]]:
        """For each flat tensor the states that all of its parameters share, from the optimizer of ZeRO 3's rank 0."""
        common: list[dict[str, Value]] = [{} for _ in range(count)]
        if file is None:
            return common
        inner = file.root.get("optimizer_state_dict")
        saved = inner.get("state") if isinstance(inner, dict) else None
        for number, states in saved.items() if isinstance(saved, dict) else ():
            if type(number) is not int or not 0 <= number < count:
                continue
            for key, leaf in as_mapping(states, file.path, f"state.{number}").items():
                if isinstance(leaf, StoredTensor) and prod(leaf.shape) == 1:
                    common[number][str(key)] = local_tensor(leaf, file.file)
                elif type(leaf) in (int, float):
                    common[number][str(key)] = cast(Value, leaf)
        return common
