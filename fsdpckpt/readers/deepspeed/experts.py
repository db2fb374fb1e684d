"""Names the experts of DeepSpeed's MoE layers, of which each expert-parallel rank has some.

Every rank calls its experts ``<layer>.deepspeed_moe.experts.deepspeed_experts.<0, 1, ...>``: those of expert-parallel
rank ``e`` of ``E`` are ``e * local + 0, 1, ...`` of the model (``_save_moe_checkpoint`` of
``deepspeed/runtime/engine.py``). The name of a param group with ``moe`` says how many expert-parallel ranks there are:
``ep_size_<E>``. ZeRO divides such a group among the ranks with the same experts alone, which are every ``E``-th rank,
or neighbours under ``use_data_before_expert_parallelism`` (``_create_expert_and_data_parallel`` of
``deepspeed/utils/groups.py``). The copies that the model computed with are in a file for each expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.readers.deepspeed.partitions import FlatGroup
from fsdpckpt.readers.deepspeed.required_files import MAX_NAMES, ExpertFile, unsupported
from fsdpckpt.readers.deepspeed.step import StateDict, StepFile, as_mapping, contradiction, open_files
from fsdpckpt.readers.missing_ranks import ranks_missing
from fsdpckpt.readers.protocol import FileTable, file_name
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import plural, some_of

_NAME = re.compile(r"^(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,6})(\..+)$", re.DOTALL)
_GROUP = re.compile(r"^ep_size_(\d{1,6})$")


@dataclass(frozen=True, slots=True)
class Experts:
    """``size``: expert-parallel ranks, each with ``local`` experts of each layer, by the beginning of their names."""

    size: int
    local: Mapping[str, int]

    def named(self, group: FlatGroup, expert_rank: int) -> dict[str, str]:
        """The names in the model of what ``expert_rank`` has in ``group``."""
        names = {}
        for name in group:
            match = _NAME.match(name)
            number = int(match[2]) + expert_rank * self.local[match[1]] if match else 0
            names[name] = f"{match[1]}{number}{match[3]}" if match else name
        return names

    def shapes(self, groups: Sequence[FlatGroup], expert_rank: int) -> FlatGroup:
        """The shapes of all parameters of ``expert_rank``, under their names in the model."""
        shapes: FlatGroup = {}
        for group in groups:
            names = self.named(group, expert_rank)
            shapes.update({names[name]: shape for name, shape in group.items()})
        return shapes


def is_of_experts(group: StateDict) -> bool:
    """Whether it is a param group of experts."""
    return bool(group.get("moe"))


def experts_of(
    directory: str, module: StepFile, groups: Sequence[FlatGroup], param_groups: Sequence[StateDict], ranks: int
) -> Experts:
    """How many experts each of ``ranks`` ranks has. ``groups``: the shapes of the parameters of rank 0's
    ``param_groups``, whose experts are all that is named so.

    Raises SourceUnsupportedError if the groups do not say it.
    """
    sizes: set[int] = set()
    local: dict[str, int] = {}
    for group, settings in zip(groups, param_groups, strict=True):
        matches = [_NAME.match(name) for name in group]
        if not is_of_experts(settings):
            if any(matches):
                found = "experts in a group without moe"
                raise unsupported(directory, "experts", [module.path], "param groups of experts alone", found)
            continue
        of_group = _GROUP.match(str(settings.get("name")))
        if of_group is None or not all(matches):
            found = f"a group {settings.get('name')!r}" if of_group is None else "others in a group with moe"
            raise unsupported(directory, "experts", [module.path], "groups ep_size_N of MoE layers' experts", found)
        sizes.add(int(of_group[1]))
        for match in filter(None, matches):
            local[match[1]] = max(local.get(match[1], 0), int(match[2]) + 1)
    if len(sizes) != 1:
        found = some_of([f"ep_size_{size}" for size in sorted(sizes)], MAX_NAMES) or "no group of experts"
        raise unsupported(directory, "experts", [module.path], "one number of expert-parallel ranks", found)
    (size,) = sizes
    if not size or ranks % size:
        raise contradiction(module.path, f"its experts are on {plural(size, 'rank')} of {ranks}")
    return Experts(size, local)


def with_expert_ranks(
    files: Iterable[StepFile], size: int, ranks: int, stages: int = 1, *, data_first: bool
) -> list[StepFile]:
    """``files`` with their ranks among those with the same experts, and the expert-parallel rank as the model-parallel
    one; in a pipeline those of its stage. The order stays that of the files' names. ``ranks``: data-parallel ones.
    """
    places = []
    for file in files:
        expert_rank, data_rank = file.data_rank % size, file.data_rank // size
        if data_first:
            expert_rank, data_rank = divmod(file.data_rank, ranks // size)
        model_rank = file.model_rank * size + expert_rank
        number = data_rank * size * stages + model_rank
        places.append(replace(file, rank=number, data_rank=data_rank, model_rank=model_rank))
    return places


def of_all_stages(directory: str, stages: Sequence[tuple[StepFile, Experts]]) -> Experts:
    """The experts of all pipeline stages, each with the file of its module states.

    Raises SourceUnsupportedError if they are on several numbers of ranks.
    """
    first = stages[0][1]
    local: dict[str, int] = {}
    for file, experts in stages:
        if experts.size != first.size:
            expected, found = f"{first.size} expert-parallel ranks in each stage", str(experts.size)
            raise unsupported(directory, "experts", [file.path], expected, found)
        local.update(experts.local)
    return Experts(first.size, local)


def open_experts(
    directory: str,
    files: Sequence[ExpertFile],
    experts: Experts,
    shapes: Mapping[str, tuple[int, ...]],
    table: FileTable,
    sources: Sources,
) -> list[tuple[StepFile, StateDict]]:
    """The files of all experts, each with its entries under the model's names.

    ``shapes``: of all trained parameters. Raises SourceIncompleteError that lists the experts without a file,
    SourceCorruptError for an expert that is another in its file.
    """
    opened: list[tuple[StepFile, StateDict]] = []
    found: dict[tuple[str, int], str] = {}
    for expert in files:
        (file,) = open_files({0: expert.path}, table, sources)
        entries = as_mapping(file.root, file.path, "its content")
        for key, value in entries.items():
            name = str(key)
            match = _NAME.match(name)
            if match is None or int(match[2]) != expert.expert:
                raise contradiction(file.path, f"it contains {name}, which is not of expert {expert.expert}")
            if name in shapes and (not isinstance(value, StoredTensor) or value.shape != shapes[name]):
                raise contradiction(file.path, f"{name} has another shape than in param_shapes")
            found[match[1], expert.expert] = file.path
        opened.append((file, entries))
    numbers = {prefix: range(experts.size * local) for prefix, local in experts.local.items()}
    missing = [(prefix, number) for prefix in numbers for number in numbers[prefix] if (prefix, number) not in found]
    if missing:
        names = [f"{prefix}{number}" for prefix, number in missing]
        raise ranks_missing(
            f"{directory}: the files of {plural(len(missing), 'expert')} are missing",
            names,
            most_shown=MAX_NAMES,
            file=f"{directory.rstrip('/')}/layer_0_expert_{missing[0][1]}_mp_rank_00_model_states.pt",
        )
    others = [path for (prefix, number), path in found.items() if number not in numbers.get(prefix, range(0))]
    if others:
        raise contradiction(others[0], f"{file_name(others[0])} is of an expert that no rank trains")
    return opened


def data_first(config: object) -> bool:
    """Whether the ranks with the same experts are neighbours, by DeepSpeed's configuration."""
    settings = cast("dict[str, object]", config) if isinstance(config, dict) else {}
    return settings.get("use_data_before_expert_parallelism") is True
