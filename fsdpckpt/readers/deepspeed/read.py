"""Joins the files of one DeepSpeed ZeRO step: parameters and their states by name, buffers, and extras.

Each rank's pair of files is rewritten as if FSDP had saved it, with boxes of parameters in place of flat tensors.
``readers.torch_ranks`` then merges the ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import cast

from fsdpckpt import flags
from fsdpckpt.errors import SourceIncompleteError, SourceUnsupportedError
from fsdpckpt.formats.torch.distributed import Distributed
from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.ir.checkpoint import Evidence, EvidenceKind, Layout, Note, Problem, Section
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.readers.deepspeed.autoep import AutoExperts, auto_experts, require_places
from fsdpckpt.readers.deepspeed.autotp import shards_of_autotp
from fsdpckpt.readers.deepspeed.experts import (
    Experts,
    data_first,
    experts_of,
    is_of_experts,
    of_all_stages,
    open_experts,
    placed,
)
from fsdpckpt.readers.deepspeed.layers import with_layers, with_stages
from fsdpckpt.readers.deepspeed.module_states import ModuleStates
from fsdpckpt.readers.deepspeed.partitions import (
    FlatGroup,
    FlatGroups,
    PartitionError,
    Slice,
    is_count,
    optimizer_order,
    partitions_of_groups,
    partitions_of_params,
)
from fsdpckpt.readers.deepspeed.pieces import MAP_INFO, Partitions
from fsdpckpt.readers.deepspeed.rank_states import (
    DESCRIBED_STATES,
    RankStates,
    gaps_of,
    rank_states,
    recorded_names,
    require_in_files,
    require_record,
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
    plain,
    require_one_run,
    require_same,
    section_of,
)
from fsdpckpt.readers.model_shards import ModelShard, RankGrid, Shards
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


@dataclass(frozen=True, slots=True)
class _Column:
    """One model-parallel rank: the file of its module states, the flat tensors of its data-parallel ranks, the shapes
    of its trained parameters, and these by param group.
    """

    module: StepFile
    model_rank: int
    flat: FlatGroups
    shapes: FlatGroup
    members: list[list[str]]


def _flat_tensors_of_experts(groups: Sequence[StateDict]) -> set[int]:
    """The flat tensors of param groups of experts: one each, or under ZeRO 3 the sub-groups of each."""
    listed = [group.get("params") for group in groups if is_of_experts(group)]
    found = [number for each in listed if isinstance(each, (list, tuple)) for number in each]
    return {number for number in found if is_count(number)}


def _members_of(rank: RankStates, flat: FlatGroups) -> list[list[str]]:
    """The parameters of each param group of ``rank``."""
    groups = groups_by_name(rank.groups, flat.params, rank.file.path)
    return [cast("list[str]", group["params"]) for group in groups]


def _members(columns: Sequence[_Column]) -> list[list[str]]:
    """The parameters of each param group, on all model-parallel ranks. Raises SourceCorruptError unless all ranks have
    the same number of groups.
    """
    first = columns[0]
    members: list[dict[str, None]] = [{} for _ in first.members]
    for column in columns:
        if len(column.members) != len(members):
            groups = plural(len(column.members), "param group")
            raise contradiction(column.module.path, f"its optimizer has {groups}, and the first one {len(members)}")
        for listed, names in zip(members, column.members, strict=True):
            listed.update(dict.fromkeys(names))
    return [list(listed) for listed in members]


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
        numbers = _flat_tensors_of_experts(rank_states(self.optim[0]).groups)
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
        return placed(files, experts.size, grid.data, grid.model, data_first=data_first(self._config()))

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
        columns = self._expert_columns(ranks, self.experts) if self.experts is not None else []
        columns = columns or [self._column(file, ranks) for file in self.module.of_model_ranks]
        partitions = Partitions(self.module.grid, self._parameters(columns))
        for column in columns:
            for slices in column.flat.slices:
                partitions.add(column.model_rank, chain(*slices))
        members = _members(columns)
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

    def _column(self, module: StepFile, ranks: Sequence[RankStates]) -> _Column:
        """The flat tensors of one model-parallel rank, whose module states are in ``module``."""
        groups = self.module.groups(module)
        of_rank = [rank for rank in ranks if rank.file.model_rank == module.model_rank]
        flat = self._partitions(of_rank, groups)
        shapes = {name: shape for group in groups for name, shape in group.items()}
        return _Column(module, module.model_rank, flat, shapes, _members_of(of_rank[0], flat))

    def _expert_columns(self, ranks: Sequence[RankStates], experts: Experts | AutoExperts) -> list[_Column]:
        """The flat tensors of each expert-parallel rank. Those of experts are divided among the ranks that have them,
        the others among all of their pipeline stage.
        """
        columns: list[_Column] = []
        for file in self.module.of_model_ranks:
            stage, expert_rank = divmod(file.model_rank, experts.size)
            if expert_rank == 0:  # under ZeRO 3 the others have files of module states, too
                of_stage = [rank for rank in ranks if rank.file.model_rank // experts.size == stage]
                columns += self._columns_of_stage(file, of_stage, experts)
        return columns

    def _columns_of_stage(
        self, file: StepFile, ranks: Sequence[RankStates], experts: Experts | AutoExperts
    ) -> list[_Column]:
        """The flat tensors of each expert-parallel rank of one stage, whose module states are in ``file``."""
        groups = self.module.groups(file)
        own = _flat_tensors_of_experts(ranks[0].groups)
        shared = [number for number in range(len(groups)) if number not in own]
        if len(ranks[0].weights) != len(groups) or not own <= set(range(len(groups))):
            what = f"it has {plural(len(ranks[0].weights), 'flat tensor')}"
            raise contradiction(ranks[0].file.path, f"{what}, and the module has {plural(len(groups), 'group')}")
        common = self._partitions(ranks, [groups[number] for number in shared], shared)
        columns = []
        for expert_rank in range(experts.size):
            model_rank = file.model_rank + expert_rank
            members = [number for number, rank in enumerate(ranks) if rank.file.model_rank == model_rank]
            of_rank = [ranks[number] for number in members]
            flat = self._partitions(of_rank, [groups[number] for number in sorted(own)], sorted(own))
            names = {name: new for group in groups for name, new in experts.named(group, expert_rank).items()}
            params: list[list[str]] = [[] for _ in groups]
            slices: list[list[list[Slice]]] = [[[] for _ in groups] for _ in members]
            for numbers, part, rows in ((shared, common, members), (sorted(own), flat, range(len(members)))):
                for at, number in enumerate(numbers):
                    params[number] = [names[name] for name in part.params[at]]
                    for of, row in zip(slices, rows, strict=True):
                        of[number] = [replace(each, name=names[each.name]) for each in part.slices[row][at]]
            placed_in = FlatGroups(params, slices)
            shapes = experts.shapes(groups, expert_rank)
            columns.append(_Column(file, model_rank, placed_in, shapes, _members_of(of_rank[0], placed_in)))
        return columns

    def _parameters(self, columns: Sequence[_Column]) -> dict[str, Shards]:
        """All trained parameters, with what each model-parallel rank holds of them."""
        parameters: dict[str, Shards] = {}
        held: dict[str, dict[int, ModelShard]] = {}
        for column in columns:
            for name, shape in column.shapes.items():
                shards = self.module.shards.get(name)
                if shards is None:  # it is whole, on each stage of a pipeline that has it
                    by_rank = held.setdefault(name, {})
                    by_rank[column.model_rank] = ModelShard.of_whole(shape)
                    parameters.setdefault(name, Shards(shape, by_rank))
                elif shards.by_rank[column.model_rank].shape != shape:
                    raise contradiction(column.module.path, f"{name} has another shape than in {MAP_INFO}")
                else:
                    parameters[name] = shards
        return parameters

    # The content of the files

    def _partitions(
        self, ranks: Sequence[RankStates], shapes: Sequence[FlatGroup], numbers: Sequence[int] | None = None
    ) -> FlatGroups:
        """The places of the parameters in the flat tensors that are divided among ``ranks``: those with these
        ``numbers``, or all of them.
        """
        count = len(ranks[0].weights)
        numbers = range(count) if numbers is None else numbers
        if any(len(rank.weights) != count for rank in ranks) or any(number >= count for number in numbers):
            raise contradiction(ranks[0].file.path, f"it has {plural(count, 'flat tensor')}, and other ranks others")
        lengths = [rank.lengths(numbers) for rank in ranks]
        try:
            if self.module.partitioned:
                return partitions_of_params(shapes, lengths)
            flat = partitions_of_groups(shapes, gaps_of(ranks[0], numbers), lengths)
        except PartitionError as error:
            raise contradiction(ranks[0].file.path, str(error)) from None
        if self._round_robin():
            flat.params = [optimizer_order(names, len(ranks)) for names in flat.params]
        else:  # with it, DeepSpeed 0.19 computes its own record for the wrong order
            require_record(ranks, flat, numbers)
        return flat

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
        self, rank: RankStates, column: _Column, partitions: Partitions, members: Sequence[Sequence[str]]
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
        extra = {key: plain(value) for key, value in rank.file.states.items() if key not in left_out}
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
