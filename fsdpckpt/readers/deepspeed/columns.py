"""Which parameters each model-parallel rank of a DeepSpeed step trains, and where they are in its flat tensors.

A *column* is one model-parallel rank with its data-parallel ranks, which divide its flat tensors. With experts each
expert-parallel rank is one: the flat tensors of experts are divided among the ranks that have the same experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

from fsdpckpt.readers.deepspeed.autoep import AutoExperts
from fsdpckpt.readers.deepspeed.experts import Experts, is_of_experts
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
from fsdpckpt.readers.deepspeed.pieces import MAP_INFO
from fsdpckpt.readers.deepspeed.rank_states import RankStates, gaps_of, require_record
from fsdpckpt.readers.deepspeed.step import StateDict, StepFile, contradiction, groups_by_name
from fsdpckpt.readers.model_shards import ModelShard, Shards
from fsdpckpt.text import plural


@dataclass(frozen=True, slots=True)
class Column:
    """One model-parallel rank: the file of its module states, the flat tensors of its data-parallel ranks, the shapes
    of its trained parameters, and these by param group.
    """

    module: StepFile
    model_rank: int
    flat: FlatGroups
    shapes: FlatGroup
    members: list[list[str]]


def columns_of(
    module: ModuleStates,
    ranks: Sequence[RankStates],
    experts: Experts | AutoExperts | None,
    *,
    round_robin: bool,
) -> list[Column]:
    """The columns of a step. ``round_robin``: the parameters of a flat tensor were dealt to the ranks in turn."""
    columns = _Columns(module, round_robin)
    of_experts = columns.of_expert_ranks(ranks, experts) if experts is not None else []
    return of_experts or [columns.of_model_rank(file, ranks) for file in module.of_model_ranks]


def group_members(columns: Sequence[Column]) -> list[list[str]]:
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


def parameters_of(columns: Sequence[Column], all_shards: Mapping[str, Shards]) -> dict[str, Shards]:
    """All trained parameters, with what each model-parallel rank holds of them."""
    parameters: dict[str, Shards] = {}
    held: dict[str, dict[int, ModelShard]] = {}
    for column in columns:
        for name, shape in column.shapes.items():
            shards = all_shards.get(name)
            if shards is None:  # it is whole, on each stage of a pipeline that has it
                by_rank = held.setdefault(name, {})
                by_rank[column.model_rank] = ModelShard.of_whole(shape)
                parameters.setdefault(name, Shards(shape, by_rank))
            elif shards.by_rank[column.model_rank].shape != shape:
                raise contradiction(column.module.path, f"{name} has another shape than in {MAP_INFO}")
            else:
                parameters[name] = shards
    return parameters


def flat_tensors_of_experts(groups: Sequence[StateDict]) -> set[int]:
    """The flat tensors of param groups of experts: one each, or under ZeRO 3 the sub-groups of each."""
    listed = [group.get("params") for group in groups if is_of_experts(group)]
    found = [number for each in listed if isinstance(each, (list, tuple)) for number in each]
    return {number for number in found if is_count(number)}


@dataclass(frozen=True, slots=True)
class _Columns:
    """Makes the columns of a step with these module states."""

    module: ModuleStates
    round_robin: bool

    def of_model_rank(self, module: StepFile, ranks: Sequence[RankStates]) -> Column:
        """The flat tensors of one model-parallel rank, whose module states are in ``module``."""
        groups = self.module.groups(module)
        of_rank = [rank for rank in ranks if rank.file.model_rank == module.model_rank]
        flat = self._partitions(of_rank, groups)
        shapes = {name: shape for group in groups for name, shape in group.items()}
        return Column(module, module.model_rank, flat, shapes, _group_members_of_rank(of_rank[0], flat))

    def of_expert_ranks(self, ranks: Sequence[RankStates], experts: Experts | AutoExperts) -> list[Column]:
        """The flat tensors of each expert-parallel rank. Those of experts are divided among the ranks that have them,
        the others among all of their pipeline stage.
        """
        columns: list[Column] = []
        for file in self.module.of_model_ranks:
            stage, expert_rank = divmod(file.model_rank, experts.size)
            if expert_rank == 0:  # under ZeRO 3 the others have files of module states, too
                of_stage = [rank for rank in ranks if rank.file.model_rank // experts.size == stage]
                columns += self._columns_of_stage(file, of_stage, experts)
        return columns

    def _columns_of_stage(
        self, file: StepFile, ranks: Sequence[RankStates], experts: Experts | AutoExperts
    ) -> list[Column]:
        """The flat tensors of each expert-parallel rank of one stage, whose module states are in ``file``."""
        groups = self.module.groups(file)
        own = flat_tensors_of_experts(ranks[0].groups)
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
            joined = _joined(
                [
                    _FlatTensors(shared, common, members),
                    _FlatTensors(sorted(own), flat, range(len(members))),
                ],
                names,
                flat_tensors=len(groups),
                ranks=len(members),
            )
            shapes = experts.shapes(groups, expert_rank)
            columns.append(Column(file, model_rank, joined, shapes, _group_members_of_rank(of_rank[0], joined)))
        return columns

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
        if self.round_robin:
            flat.params = [optimizer_order(names, len(ranks)) for names in flat.params]
        else:  # with it, DeepSpeed 0.19 computes its own record for the wrong order
            require_record(ranks, flat, numbers)
        return flat


class _FlatTensors(NamedTuple):
    """Some flat tensors of the ranks that have the same experts."""

    numbers: Sequence[int]  # among all flat tensors
    groups: FlatGroups
    ranks: Sequence[int]  # the numbers of these ranks in ``groups``, which may have others


def _joined(parts: Sequence[_FlatTensors], names: Mapping[str, str], *, flat_tensors: int, ranks: int) -> FlatGroups:
    """All flat tensors of some ranks, in their order, from ``parts``. ``names``: what each parameter is called."""
    params: list[list[str]] = [[] for _ in range(flat_tensors)]
    slices: list[list[list[Slice]]] = []
    for _ in range(ranks):
        slices.append([[] for _ in range(flat_tensors)])
    for part in parts:
        for at, number in enumerate(part.numbers):
            params[number] = [names[name] for name in part.groups.params[at]]
            for of_rank, rank in zip(slices, part.ranks, strict=True):
                of_rank[number] = [replace(each, name=names[each.name]) for each in part.groups.slices[rank][at]]
    return FlatGroups(params, slices)


def _group_members_of_rank(rank: RankStates, flat: FlatGroups) -> list[list[str]]:
    """The parameters of each param group of ``rank``."""
    groups = groups_by_name(rank.groups, flat.params, rank.file.path)
    return [cast("list[str]", group["params"]) for group in groups]
