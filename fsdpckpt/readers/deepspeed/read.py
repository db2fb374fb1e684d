"""Joins the files of one DeepSpeed ZeRO step: parameters and their states by name, buffers, and extras.

Each rank's pair of files is rewritten as if FSDP had saved it, with boxes of parameters in place of flat tensors.
``readers.torch_ranks`` then merges the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import cast

import numpy as np

from fsdpckpt import flags
from fsdpckpt.errors import SourceUnsupportedError
from fsdpckpt.formats.torch.distributed import Distributed
from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.ir.checkpoint import Evidence, EvidenceKind, Layout, Note
from fsdpckpt.ir.dtypes import numpy_dtype
from fsdpckpt.ir.values import Key, Object, Value
from fsdpckpt.readers.deepspeed.layers import module_of, open_layers
from fsdpckpt.readers.deepspeed.required_files import ZERO_1_OR_2, ZERO_3, require_all_ranks
from fsdpckpt.readers.deepspeed.step import (
    FlatGroup,
    FlatGroups,
    ModuleStates,
    PartitionError,
    Slice,
    StateDict,
    StepFile,
    add_archives,
    add_extras,
    as_mapping,
    contradiction,
    distributed_slice,
    groups_by_name,
    is_count,
    merge_files,
    open_files,
    optimizer_order,
    partitions_of_groups,
    partitions_of_params,
    plain,
    require_one_run,
    require_same,
    section_of,
)
from fsdpckpt.readers.protocol import FileTable, Tree, file_name
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import count_text, plural, some_of, step_text

DESCRIBED_STATES = frozenset({
    "base_optimizer_state", "base_optimizer_state_step", "single_partition_of_fp32_groups", "fp32_flat_groups",
    "optimizer_state_dict", "param_slice_mappings", "group_paddings", "param_alignment_paddings", "partition_count",
    "zero_stage", "ds_version",
})  # fmt: skip  # of the optimizer's states: they describe the partitions
_NUMBERS = ("float", "int", "uint")
_SWAPPED = "offloaded_tensors"
_MAX_LAYERS = 6  # in a message
_MAX_RANKS = 100_000  # names have five digits


def read_zero(
    directory: str,
    optim_paths: Mapping[int, str],
    model_paths: Mapping[int, str],
    layers: Mapping[int, str],
    table: FileTable,
    sources: Sources,
) -> Tree:
    """Read the model, the optimizer and the extras of one step. ``directory``: its name in messages.

    ``optim_paths``: the states of every data-parallel rank; ``model_paths``: the module states by rank, or of rank 0
    alone (ZeRO 1 and 2); ``layers``: by number, the files of the layers of a pipeline of one stage.

    Raises SourceCorruptError if the files contradict themselves or each other, SourceUnsupportedError for states that
    are cut in an unknown way, and what ``read_archive`` raises.
    """
    optim, module = open_files(optim_paths, table, sources), open_files(model_paths, table, sources)
    stage_3 = {file.path: "fp32_flat_groups" in file.states for file in optim}
    stage_3 |= {file.path: not file_name(file.path).startswith("mp_rank_") for file in module}
    require_same(directory, [*optim, *module], lambda file: ZERO_3 if stage_3[file.path] else ZERO_1_OR_2)
    ranks = require_one_run(directory, [*optim, *module])
    names = ({file.rank: file_name(file.path) for file in files} for files in (optim, module))
    partitioned = stage_3[optim[0].path]
    whole = not partitioned and bool(module) and bool(module[0].root.get("module"))
    require_all_ranks(directory, *names, per_rank=partitioned, world_size=min(ranks, _MAX_RANKS), whole_module=whole)
    _require_in_files(directory, optim, sources)
    states = ModuleStates(module, partitioned)
    if layers:
        states = _with_layers(states, directory, layers, table, sources)
    return _Step(directory, optim, states, sources).tree()


def _with_layers(
    states: ModuleStates, directory: str, layers: Mapping[int, str], table: FileTable, sources: Sources
) -> ModuleStates:
    """``states`` with the module of the files of a pipeline's ``layers``."""
    root = states.first.root
    ranks, found = root.get("mp_world_size"), None
    if root.get("module") is not None:
        found = "the module in the file of module states, too"
    elif states.partitioned:
        found = "ZeRO 3, which DeepSpeed does not combine with a pipeline"
    elif is_count(ranks) and cast(int, ranks) > 1:
        found = f"{plural(cast(int, ranks), 'stage')} or tensor-parallel ranks"
    if found is not None:
        raise SourceUnsupportedError(
            f"{directory} is a DeepSpeed checkpoint with files of pipeline stages, which fsdpckpt does not read",
            details=[file_name(path) for _, path in sorted(layers.items())][:_MAX_LAYERS],
            file=next(iter(layers.values())),
            expected="one stage without tensor parallelism",
            found=found,
            why="how the tensors of these files belong together is in the code of the model, not in the files",
            next_step="convert it with the model's own script (ds_to_universal.py, or convert_*.py of the trainer)",
        )
    shapes = {name: shape for group in states.groups() for name, shape in group.items()}
    frozen, buffers = root.get("frozen_param_shapes"), root.get("buffer_names")
    others = {*states.aliases(), *states.aliases().values(), *(frozen if isinstance(frozen, dict) else ())}
    others.update(map(str, buffers) if isinstance(buffers, (list, tuple, set)) else ())
    opened = open_layers(states.first, layers, shapes, {str(name) for name in others}, table, sources)
    pairs = [(layer.file, layer.named()) for layer in opened]
    return replace(states, layers=pairs, pipeline=module_of(opened))


def _require_in_files(step: str, optim: Sequence[StepFile], sources: Sources) -> None:
    """Refuse an optimizer that DeepSpeed offloaded to NVMe: its flat tensors are empty, and their content is in swap
    files beside them, raw and without shapes (``save_checkpoint`` of ``deepspeed/runtime/engine.py``).
    """
    flat = optim[0].states.get("fp32_flat_groups")
    swapped = isinstance(flat, (list, tuple)) and any(_is_vector(tensor) and not tensor.shape[0] for tensor in flat)
    directory = f"{step.rstrip('/')}/{_SWAPPED}"
    if swapped and sources.stat(directory) is not None:
        raise SourceUnsupportedError(
            f"{step} was saved with the optimizer on NVMe: its weights and states are in swap files",
            file=directory,
            why="with offload_optimizer to nvme only DeepSpeed knows which parameter is where in them",
            next_step="load it with DeepSpeed as it was saved, collect all with safe_get_full_fp32_param and "
            "safe_get_full_optimizer_state, and save that with torch.save; or save with offload_optimizer to cpu",
        )


@dataclass(frozen=True, slots=True)
class _RankStates:
    """One rank's flat tensors: the fp32 weights, the states of each, and the param groups, which refer to flat tensors
    by number.
    """

    file: StepFile
    weights: list[StoredTensor]
    states: list[StateDict]
    groups: list[StateDict]
    paddings: list[int]


@dataclass(slots=True)
class _Step:
    """One step while it is read."""

    directory: str
    optim: list[StepFile]
    module: ModuleStates
    sources: Sources

    def tree(self) -> Tree:
        ranks = [self._rank_states(file) for file in self.optim]
        steps = {rank.file.path: self._steps(rank) for rank in ranks}
        require_same(self.directory, self.optim, lambda file: steps[file.path])
        groups = self.module.groups()
        flat = self._partitions(ranks, groups)
        shapes = {name: shape for group in groups for name, shape in group.items()}
        merged = merge_files(self.optim, [self._named(rank, flat, shapes) for rank in ranks])
        rest = self.module.untrained(shapes.keys() | self.module.aliases().keys())
        model = self.module.in_order({**section_of(rest, "model"), **section_of(merged, "model")})
        root: dict[Key, Value] = {"model": model, "optimizer": section_of(merged, "optimizer")}
        tree = Tree(root, Layout.SHARDED, "deepspeed", len(self.optim))
        add_extras(tree, [rest, merged])
        layers = [file for file, _ in self.module.layers]
        add_archives(tree, [file.archive for file in (*self.optim, *self.module.files, *layers)])
        self._describe(tree, shapes)
        return tree

    # The content of the files

    def _rank_states(self, file: StepFile) -> _RankStates:
        states = file.states
        stage_3 = "fp32_flat_groups" in states
        base = states.get("optimizer_state_dict" if stage_3 else "base_optimizer_state")
        weights = states.get("fp32_flat_groups" if stage_3 else "single_partition_of_fp32_groups")
        if not isinstance(weights, (list, tuple)) or not all(map(_is_vector, weights)):
            raise contradiction(file.path, "its fp32 weights are not a list of flat tensors")
        count = len(weights)
        paddings = [0] * count
        saved = states.get("group_paddings")
        stripped = "zero_stage" in states  # BF16_Optimizer does not take the padding off, and names no stage
        if stripped and isinstance(saved, (list, tuple)) and len(saved) == count and all(map(is_count, saved)):
            paddings = list(map(int, saved))
        flat = cast("list[StoredTensor]", list(weights))
        if isinstance(base, list):  # elastic checkpoints have only the states
            if len(base) != count:
                raise contradiction(file.path, f"it has the states of {len(base)} of {count} flat tensors")
            by_number = [as_mapping(states, file.path, "base_optimizer_state") for states in base]
            return _RankStates(file, flat, by_number, [{"params": [number]} for number in range(count)], paddings)
        optimizer = as_mapping(base, file.path, "the optimizer's state dict")
        state = as_mapping(optimizer.get("state"), file.path, "state")
        groups = optimizer.get("param_groups")
        if not isinstance(groups, list) or set(state) - set(range(count)):
            raise contradiction(file.path, f"its optimizer does not have the states of {count} flat tensors")
        param_groups = [as_mapping(group, file.path, "param_groups") for group in groups]
        _refuse_experts(param_groups, file.path)
        by_number = [as_mapping(state.get(number, {}), file.path, f"state.{number}") for number in range(count)]
        return _RankStates(file, flat, by_number, param_groups, paddings)

    def _steps(self, rank: _RankStates) -> str | None:
        """The optimizer's steps of the flat tensors; None if they have none."""
        steps: dict[str, None] = {}
        for states in rank.states:
            step = states.get("step")
            if isinstance(step, StoredTensor) and prod(step.shape) == 1 and step.dtype.kind in _NUMBERS:
                data = self.sources.open(rank.file.path).read(rank.file.offset(step), step.dtype.itemsize)
                steps[step_text(float(np.frombuffer(data, numpy_dtype(step.dtype))[0]))] = None
            elif is_count(step):
                steps[count_text(cast(int, step))] = None
        return f"after {some_of(list(steps))} steps of the optimizer" if steps else None

    def _partitions(self, ranks: Sequence[_RankStates], shapes: Sequence[FlatGroup]) -> FlatGroups:
        lengths = [
            [weight.shape[0] + padding for weight, padding in zip(rank.weights, rank.paddings, strict=True)]
            for rank in ranks
        ]
        try:
            if self.module.partitioned:
                return partitions_of_params(shapes, lengths)
            flat = partitions_of_groups(shapes, self._gaps(ranks[0], len(shapes)), lengths)
        except PartitionError as error:
            raise contradiction(ranks[0].file.path, str(error)) from None
        if self._round_robin():
            flat.params = [optimizer_order(names, len(ranks)) for names in flat.params]
        else:  # with it, DeepSpeed 0.19 computes its own record for the wrong order
            self._require_record(ranks, flat)
        return flat

    def _gaps(self, rank: _RankStates, groups: int) -> list[list[int]]:
        """The padding after each parameter of each flat tensor (``parameter_alignment``)."""
        gaps = rank.file.states.get("param_alignment_paddings")
        if gaps is None:
            return [[]] * groups
        if not isinstance(gaps, (list, tuple)) or len(gaps) != groups:
            raise contradiction(rank.file.path, "its param_alignment_paddings are not those of its flat tensors")
        if not all(isinstance(counts, (list, tuple)) and all(map(is_count, counts)) for counts in gaps):
            raise contradiction(rank.file.path, "its param_alignment_paddings are not numbers of elements")
        return [list(map(int, cast("list[int]", counts))) for counts in gaps]

    def _require_record(self, ranks: Sequence[_RankStates], flat: FlatGroups) -> None:
        """Compare the computed places with those that the files record since DeepSpeed 0.7."""
        for rank in ranks:
            record = self._record(rank)
            if record is None:
                continue
            computed = [{part.name: (part.count, part.at) for part in group} for group in flat.slices[rank.file.rank]]
            if record != computed:
                what = "its parameters are not where the shapes and the number of ranks put them"
                raise contradiction(rank.file.path, what)

    def _round_robin(self) -> bool:
        """Whether the parameters of a flat tensor were dealt to the ranks in turn."""
        config = self.optim[0].root.get("ds_config", self.module.first.root.get("ds_config"))
        zero = config.get("zero_optimization") if isinstance(config, dict) else None
        return isinstance(zero, dict) and zero.get("round_robin_gradients") is True

    def _record(self, rank: _RankStates) -> list[dict[str, tuple[int, int]]] | None:
        groups = rank.file.states.get("param_slice_mappings")
        if groups is None:
            return None
        if not isinstance(groups, (list, tuple)):
            raise contradiction(rank.file.path, "its param_slice_mappings are not a list")
        return [
            {
                str(name): self._fragment(address, rank.file.path)
                for name, address in as_mapping(group, rank.file.path, "param_slice_mappings").items()
            }
            for group in groups
        ]

    def _fragment(self, address: object, path: str) -> tuple[int, int]:
        state = address.state if isinstance(address, Object) else None
        numel, start = (state.get("numel"), state.get("start")) if isinstance(state, dict) else (None, None)
        if not is_count(numel) or not is_count(start):
            raise contradiction(path, "its param_slice_mappings hold addresses of an unknown form")
        return cast(int, numel), cast(int, start)

    # The ranks' files, rewritten

    def _named(self, rank: _RankStates, flat: FlatGroups, shapes: FlatGroup) -> StateDict:
        """One rank's optimizer file with parameters in place of flat tensors."""
        slices = {part.name: part for group in flat.slices[rank.file.rank] for part in group}
        model: StateDict = {}
        states: StateDict = {}
        for name, number in ((name, number) for number, group in enumerate(flat.params) for name in group):
            model[name], entry = self._parameter(rank, number, slices.get(name), shapes[name])
            if entry:
                states[name] = entry
        groups = groups_by_name(rank.groups, flat.params, rank.file.path)
        extra = {key: plain(value) for key, value in rank.file.states.items() if key not in DESCRIBED_STATES}
        return {"model": model, "optimizer": {"state": states, "param_groups": groups}, "extra": extra}

    def _parameter(
        self, rank: _RankStates, number: int, place: Slice | None, shape: tuple[int, ...]
    ) -> tuple[Distributed, StateDict]:
        """The weight and the states of one parameter: its parts of ``rank``'s flat tensor ``number``."""
        path, weight = rank.file.path, rank.weights[number]
        lengths = ((weight.shape[0],), (weight.shape[0] + rank.paddings[number],))

        def part(what: str, stored: StoredTensor) -> Distributed:
            if place is not None and place.at + place.count > stored.shape[0]:
                flat, end = f"flat tensor {number} ({what})", place.at + place.count
                raise contradiction(path, f"{flat} has {stored.shape[0]} elements, and {place.name} ends at {end}")
            return distributed_slice(rank.file.rank, len(self.optim), stored, place, shape)

        cut, states = part("fp32 weights", weight), dict(rank.states[number])
        for key, leaf in states.items():
            if not isinstance(leaf, StoredTensor) or not leaf.shape or (key == "step" and leaf.shape == (1,)):
                continue  # all parameters of the flat tensor share it
            if leaf.shape not in lengths:
                raise SourceUnsupportedError(
                    f"{path}: the state {key!s} is not cut as the weights are",
                    file=path,
                    key=str(key),
                    rank=rank.file.rank,
                    expected=f"{weight.shape[0]} elements",
                    found=f"shape {list(leaf.shape)}",
                    why="an optimizer that factors or quantizes its states keeps them in a different form under ZeRO",
                    next_step=f"convert the weights alone with {flags.only('model')}",
                )
            states[key] = part(str(key), leaf)
        return cut, states

    # Reports

    def _describe(self, tree: Tree, trained: FlatGroup) -> None:
        stage = "3" if self.module.partitioned else "1 or 2"
        message = f"{self.directory} is a DeepSpeed ZeRO {stage} checkpoint"
        tree.evidence.append(Evidence(EvidenceKind.CONTAINER, f"{message} of {plural(len(self.optim), 'rank')}"))
        tree.notes += self.module.notes_on_copies(trained)
        if isinstance(self.optim[0].states.get("base_optimizer_state"), list):
            tree.groups_rebuilt = True
            tree.notes.append(
                Note("groups-rebuilt", "an elastic checkpoint has no hyper-parameters of its param groups")
            )


def _is_vector(value: object) -> bool:
    return isinstance(value, StoredTensor) and len(value.shape) == 1


def _refuse_experts(groups: Sequence[StateDict], path: str) -> None:
    if any(group.get("moe") for group in groups):
        raise SourceUnsupportedError(
            f"{path} holds a param group of experts (moe), which fsdpckpt does not read",
            file=path,
            why="every rank may hold different experts, and the files do not say whose they are",
            next_step="convert it with DeepSpeed's own ds_to_universal.py",
        )
