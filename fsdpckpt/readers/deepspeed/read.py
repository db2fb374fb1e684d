"""Joins the files of one DeepSpeed ZeRO step: parameters and their states by name, buffers, and extras.

Each rank's pair of files is rewritten as if FSDP had saved it, with boxes of parameters in place of flat tensors.
``readers.torch_ranks`` then merges the ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from fsdpckpt import flags
from fsdpckpt.errors import SourceIncompleteError, SourceUnsupportedError
from fsdpckpt.formats.torch.distributed import Distributed
from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.ir.checkpoint import Evidence, EvidenceKind, Layout, Note, Problem, Section
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.readers.deepspeed.autoep import AutoExperts, auto_experts, require_places
from fsdpckpt.readers.deepspeed.autotp import shards_of_autotp
from fsdpckpt.readers.deepspeed.columns import (
    Column,
    columns_of,
    flat_tensors_of_experts,
    group_members,
    parameters_of,
)
from fsdpckpt.readers.deepspeed.experts import (
    Experts,
    data_first,
    experts_of,
    is_of_experts,
    of_all_stages,
    open_experts,
    with_expert_ranks,
)
from fsdpckpt.readers.deepspeed.layers import with_layers, with_stages
from fsdpckpt.readers.deepspeed.module_states import ModuleStates
from fsdpckpt.readers.deepspeed.partitions import FlatGroup, Slice
from fsdpckpt.readers.deepspeed.pieces import MAP_INFO, Partitions
from fsdpckpt.readers.deepspeed.rank_states import (
    DESCRIBED_STATES,
    RankStates,
    rank_states,
    recorded_names,
    require_in_files,
    steps_of,
)
from fsdpckpt.readers.deepspeed.required_files import (
    WITH_ZERO_1,
    ZERO_1_OR_2,
    ZERO_3,
    ExpertFile,
    required_grid,
    unsupported,
)
from fsdpckpt.readers.deepspeed.step import (
    MAX_RANKS,
    StateDict,
    StepFile,
    add_archives,
    add_extras,
    contradiction,
    groups_by_name,
    merge_files,
    model_ranks_of,
    open_files,
    open_grid,
    plain_scaler,
    require_one_run,
    require_same,
    section_of,
)
from fsdpckpt.readers.model_shards import RankGrid
from fsdpckpt.readers.protocol import FileTable, PartContents, file_name
from fsdpckpt.readers.torch_ranks.read import separate_extras
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import plural


def read_zero(
    directory: str,
    optim_paths: Mapping[int, Mapping[int, str]],
    model_paths: Mapping[int, Mapping[int, str]],
    layers: Mapping[int, str],
    expert_files: Sequence[ExpertFile],
    table: FileTable,
    sources: Sources,
) -> PartContents:
    """Read the model, the optimizer and the extras of one step. ``directory``: its name in messages.

    By model-parallel rank, ``optim_paths``: the states of every data-parallel rank; ``model_paths``: the module states
    by rank, or of rank 0 alone (ZeRO 1 and 2). ``layers``: by number, the files of the layers of a pipeline, whose
    stages are then the model-parallel ranks. ``expert_files``: those of MoE layers.

    Raises SourceCorruptError if the files contradict themselves or each other, SourceUnsupportedError for states that
    are cut in an unknown way, and what ``read_archive`` raises.
    """
    optim, module = open_grid(optim_paths, table, sources), open_grid(model_paths, table, sources)
    stage_3 = {file.path: "fp32_flat_groups" in file.states for file in optim}
    stage_3 |= {file.path: not file_name(file.path).startswith("mp_rank_") for file in module}
    require_same(directory, [*optim, *module], lambda file: ZERO_3 if stage_3[file.path] else ZERO_1_OR_2)
    ranks = require_one_run(directory, [*optim, *module])
    partitioned = stage_3[optim[0].path]
    model_ranks = model_ranks_of(module)
    alone = not partitioned and model_ranks == 1 and optim_paths.keys() == {0} == model_paths.keys()
    grid = required_grid(
        directory,
        optim_paths,
        model_paths,
        per_rank=partitioned,
        world_size=min(ranks, MAX_RANKS),
        model_ranks=model_ranks,
        whole_module=alone and bool(module[0].root.get("module")),
    )
    require_in_files(directory, optim, sources)
    states = ModuleStates(module, partitioned, RankGrid(*grid), recorded=_recorded(module, optim))
    if not layers and any(file.of_pipeline for file in module):
        raise SourceIncompleteError(
            f"{directory}: the files of a pipeline's layers are missing",
            file=f"{directory.rstrip('/')}/layer_00-model_states.pt",
            why="the module states have no parameters, as in a pipeline: its layers are in separate files, which were "
            "not copied",
            next_step="copy all layer_*-model_states.pt into the directory",
        )
    auto = auto_experts(directory, module, ranks or len(optim))
    if auto is not None and grid[1] > 1:
        raise unsupported(
            directory,
            "experts",
            [module[0].path],
            "AutoEP's experts alone",
            "tensor-parallel ranks, too",
            why="tensor-parallel ranks list different parameters, and DeepSpeed 0.19.8 does not join them either",
        )
    if states.recorded and (auto is not None or expert_files):
        raise unsupported(
            directory,
            "experts",
            [module[0].path],
            "ZeRO, which saves all shapes",
            "bf16 without ZeRO",
            why="the files have neither the shapes of the experts of a rank, nor which of them are whose",
            next_step=WITH_ZERO_1,
        )
    if layers:
        states = with_layers(states, directory, layers, table, sources)
    elif states.grid.model > 1 and expert_files:
        states = with_stages(states, directory, [file.path for file in expert_files])
    elif states.grid.model > 1:
        states = replace(states, shards=shards_of_autotp(directory, states))
    step = _Step(directory, optim, states, table, sources)
    if auto is not None:
        return step.with_auto_experts(auto, expert_files).tree()
    return step.tree() if not expert_files else step.with_experts(expert_files).tree()


def _recorded(module: Sequence[StepFile], optim: Sequence[StepFile]) -> dict[int, list[list[str]]]:
    """What ``BF16_Optimizer`` records of the parameters in its flat tensors, by model-parallel rank: without ZeRO,
    module states have no ``param_shapes``. {} if they have, or if it records nothing.
    """
    if any(file.root.get("param_shapes") is not None for file in module):
        return {}
    files: dict[int, list[StepFile]] = {}
    for file in optim:
        files.setdefault(file.model_rank, []).append(file)
    found = {rank: recorded_names(of_rank) for rank, of_rank in files.items()}
    return found if all(found.values()) else {}


@dataclass(slots=True)
class _Step:
    """One step while it is read."""

    directory: str
    optim: list[StepFile]
    module: ModuleStates
    table: FileTable
    sources: Sources
    experts: Experts | AutoExperts | None = None
    stages: int = 1  # of a pipeline with MoE layers

    def with_auto_experts(self, experts: AutoExperts, files: Sequence[ExpertFile]) -> _Step:
        """The same step, of a model whose ``experts`` AutoEP divided: each expert-parallel rank is a model-parallel one
        of its own, among which the other parameters are replicated. ``files``: of the experts, without ZeRO 3.
        """
        numbers = flat_tensors_of_experts(rank_states(self.optim[0]).groups)
        of_experts = [shapes for number, shapes in enumerate(self.module.groups()) if number in numbers]
        module = replace(self.module, shards=experts.shards(self.directory, self.module.first, of_experts))
        if module.partitioned:  # each rank's module states have its part of the experts
            module = replace(module, files=self._placed(module.files, experts))
            require_places(module.files)
        else:
            opened = [(file, open_files({0: file.path}, self.table, self.sources)[0]) for file in files]
            module = replace(module, experts=experts.joined(self.directory, opened))
        return self._on_expert_ranks(experts, module)

    def with_experts(self, files: Sequence[ExpertFile]) -> _Step:
        """The same step, of a model whose experts are in ``files``: each expert-parallel rank is a model-parallel one
        of its own, among which the other parameters are replicated.
        """
        if self.module.partitioned:
            paths = [file.path for file in files]
            raise unsupported(self.directory, "experts", paths, "ZeRO 1 or 2", "ZeRO 3")
        stages: list[tuple[StepFile, Experts]] = []
        shapes: FlatGroup = {}
        for file in self.module.of_model_ranks:
            first = next(each for each in self.optim if each.model_rank == file.model_rank)
            groups, param_groups = self.module.groups(file), rank_states(first).groups
            own = experts_of(self.directory, file, groups, param_groups, self.module.grid.data)
            stages.append((file, own))
            for expert_rank in range(own.size):
                shapes.update(own.shapes(groups, expert_rank))
        experts = of_all_stages(self.directory, stages)
        opened = open_experts(self.directory, files, experts, shapes, self.table, self.sources)
        return self._on_expert_ranks(experts, replace(self.module, layers=[*self.module.layers, *opened]))

    def _on_expert_ranks(self, experts: Experts | AutoExperts, module: ModuleStates) -> _Step:
        """The same step with ``module``, on a grid of which each expert-parallel rank is a model-parallel one."""
        stages = module.grid.model
        if stages > 1:
            recorded = {stage * experts.size: names for stage, names in module.recorded.items()}
            module = replace(module, files=self._placed(module.files, experts), recorded=recorded)
        grid = RankGrid(self.module.grid.data // experts.size, stages * experts.size)
        optim = self._placed(self.optim, experts)
        return replace(self, optim=optim, module=replace(module, grid=grid), experts=experts, stages=stages)

    def _placed(self, files: Sequence[StepFile], experts: Experts | AutoExperts) -> list[StepFile]:
        """``files`` with their places among the ranks that have the same experts."""
        grid = self.module.grid
        return with_expert_ranks(files, experts.size, grid.data, grid.model, data_first=data_first(self._config()))

    def tree(self) -> PartContents:
        ranks = [rank_states(file) for file in self.optim]
        steps = {rank.file.path: steps_of(rank, self.sources) for rank in ranks}
        require_same(self.directory, self.optim, lambda file: steps[file.path])
        if self.experts is None and any(map(is_of_experts, ranks[0].groups)):
            raise SourceIncompleteError(
                f"{self.directory}: the files of its experts are missing",
                file=f"{self.directory.rstrip('/')}/layer_0_expert_0_mp_rank_00_model_states.pt",
                why=f"{ranks[0].file.path} has a param group of experts (moe), and each expert is in a separate file",
                next_step="copy all layer_*_expert_*_model_states.pt into the directory",
            )
        columns = columns_of(self.module, ranks, self.experts, round_robin=self._round_robin())
        partitions = Partitions(self.module.grid, parameters_of(columns, self.module.shards))
        for column in columns:
            for slices in column.flat.slices:
                partitions.add(column.model_rank, chain(*slices))
        members = group_members(columns)
        named = [self._named(rank, columns[rank.file.model_rank], partitions, members) for rank in ranks]
        merged = merge_files(self.optim, named)
        trained = partitions.parameters
        rest = self.module.untrained(trained.keys() | self.module.aliases().keys())
        model = self.module.in_order({**section_of(rest, "model"), **section_of(merged, "model")})
        root: dict[Key, Value] = {"model": model, "optimizer": section_of(merged, "optimizer")}
        tree = PartContents(root, Layout.SHARDED, "deepspeed", len(self.optim))
        add_extras(tree, [rest, merged])
        layers = [file for file, _ in (*self.module.layers, *self.module.experts)]
        opened = {file.path: file.archive for file in (*self.optim, *self.module.files, *layers)}
        add_archives(tree, list(opened.values()))
        separate_extras(tree, self.table, self.sources)
        tree.copies = self.module.copies(trained)
        tree.problems += self._without_copy(trained, tree.copies)
        self._describe(tree, trained)
        return tree

    # DeepSpeed's configuration

    def _round_robin(self) -> bool:
        """Whether the parameters of a flat tensor were dealt to the ranks in turn."""
        config = self._config()
        zero = config.get("zero_optimization") if isinstance(config, dict) else None
        return isinstance(zero, dict) and zero.get("round_robin_gradients") is True

    def _config(self) -> object:
        """DeepSpeed's configuration."""
        return self.optim[0].root.get("ds_config", self.module.first.root.get("ds_config"))

    # The ranks' files, rewritten

    def _named(
        self, rank: RankStates, column: Column, partitions: Partitions, members: Sequence[Sequence[str]]
    ) -> StateDict:
        """One rank's optimizer file with parameters in place of flat tensors. ``members``: of each param group."""
        slices = {part.name: part for group in column.flat.slices[rank.file.data_rank] for part in group}
        model: StateDict = {}
        states: StateDict = {}
        for number, names in enumerate(column.flat.params):
            for name in names:
                model[name], entry = self._parameter(rank, number, name, slices.get(name), partitions)
                if entry:
                    states[name] = entry
        groups_by_name(rank.groups, column.flat.params, rank.file.path)  # each lists its flat tensors
        groups = [{**group, "params": list(names)} for group, names in zip(rank.groups, members, strict=True)]
        left_out = DESCRIBED_STATES | {MAP_INFO} if self.module.shards else DESCRIBED_STATES
        extra = {key: plain_scaler(value) for key, value in rank.file.states.items() if key not in left_out}
        return {"model": model, "optimizer": {"state": states, "param_groups": groups}, "extra": extra}

    def _parameter(
        self, rank: RankStates, number: int, name: str, place: Slice | None, partitions: Partitions
    ) -> tuple[Distributed, StateDict]:
        """The weight and the states of one parameter: its parts of ``rank``'s flat tensor ``number``."""
        path, weight = rank.file.path, rank.weights[number]
        lengths = ((weight.shape[0],), (weight.shape[0] + rank.paddings[number],))

        def part(what: str, stored: StoredTensor) -> Distributed:
            if place is not None and place.at + place.count > stored.shape[0]:
                flat, end = f"flat tensor {number} ({what})", place.at + place.count
                raise contradiction(path, f"{flat} has {stored.shape[0]} elements, and {place.name} ends at {end}")
            return partitions.part(rank.file.rank, rank.file.model_rank, name, stored, place)

        cut, states = part("fp32 weights", weight), dict(rank.states[number])
        for key, leaf in states.items():
            if not isinstance(leaf, StoredTensor) or not leaf.shape or (key == "step" and leaf.shape == (1,)):
                continue  # all parameters of the flat tensor share it
            if leaf.shape not in lengths:
                raise SourceUnsupportedError(
                    f"{path}: the state {key!s} is not split like the weights",
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

    def _without_copy(self, trained: Collection[str], copies: Collection[str]) -> list[Problem]:
        """A fatal problem for each parameter that the optimizer trains and the module does not have."""
        first = self.module.first
        if self.module.partitioned or self.module.layers or not first.module:
            return []
        message = "model {}: the optimizer trains it, and the module in {} does not have it"
        return [
            Problem("names", message.format(name, first.path), file=first.path, key=name, section=Section.MODEL)
            for name in trained
            if name not in copies
        ]

    def _describe(self, tree: PartContents, trained: Collection[str]) -> None:
        stage, grid = "3" if self.module.partitioned else "1 or 2", self.module.grid
        message = f"{self.directory} is a DeepSpeed ZeRO {stage} checkpoint of {plural(len(self.optim), 'rank')}"
        if grid.model > 1:
            kind = "pipeline stage" if self.module.layers else "tensor-parallel rank"
            kind = kind if self.experts is None else "expert-parallel rank"
            count = f"{plural(grid.data, 'data-parallel rank')} of {plural(grid.model // self.stages, kind)}"
            message += f": {count}" + (f" in each of {self.stages} pipeline stages" if self.stages > 1 else "")
        tree.evidence.append(Evidence(EvidenceKind.CONTAINER, message))
        tree.notes += self.module.notes_on_copies(trained)
        if isinstance(self.optim[0].states.get("base_optimizer_state"), list):
            tree.groups_rebuilt = True
            tree.notes.append(
                Note("groups-rebuilt", "an elastic checkpoint has no hyper-parameters of its param groups")
            )
