"""Reads what one rank's optimizer file of ZeRO contains: flat tensors, their states, and the param groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

import numpy as np

from fsdpckpt.errors import SourceUnsupportedError
from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.ir.dtypes import numpy_dtype
from fsdpckpt.ir.values import Object
from fsdpckpt.readers.deepspeed.partitions import FlatGroups, is_count
from fsdpckpt.readers.deepspeed.step import StateDict, StepFile, as_mapping, contradiction
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import count_text, some_of, step_text

DESCRIBED_STATES = frozenset({
    "base_optimizer_state", "base_optimizer_state_step", "single_partition_of_fp32_groups", "fp32_flat_groups",
    "optimizer_state_dict", "param_slice_mappings", "group_paddings", "param_alignment_paddings", "partition_count",
    "zero_stage", "ds_version", "ds_zero_partition_groups",
})  # fmt: skip  # of the optimizer's states: they describe the partitions
_NUMBERS = ("float", "int", "uint")
_SWAPPED = "offloaded_tensors"


@dataclass(frozen=True, slots=True)
class RankStates:
    """One rank's flat tensors: the fp32 weights, the states of each, and the param groups, which refer to flat tensors
    by number.
    """

    file: StepFile
    weights: list[StoredTensor]
    states: list[StateDict]
    groups: list[StateDict]
    paddings: list[int]

    def lengths(self, numbers: Sequence[int]) -> list[int]:
        """The elements of the flat tensors with these ``numbers``, padding included."""
        return [self.weights[number].shape[0] + self.paddings[number] for number in numbers]


def rank_states(file: StepFile) -> RankStates:
    """The content of ``file``. Raises SourceCorruptError."""
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
        return RankStates(file, flat, by_number, [{"params": [number]} for number in range(count)], paddings)
    optimizer = as_mapping(base, file.path, "the optimizer's state dict")
    state = as_mapping(optimizer.get("state"), file.path, "state")
    groups = optimizer.get("param_groups")
    if not isinstance(groups, list) or set(state) - set(range(count)):
        raise contradiction(file.path, f"its optimizer does not have the states of {count} flat tensors")
    param_groups = [as_mapping(group, file.path, "param_groups") for group in groups]
    by_number = [as_mapping(state.get(number, {}), file.path, f"state.{number}") for number in range(count)]
    return RankStates(file, flat, by_number, param_groups, paddings)


def steps_of(rank: RankStates, sources: Sources) -> str | None:
    """The optimizer's steps of the flat tensors; None if they have none."""
    steps: dict[str, None] = {}
    for states in rank.states:
        step = states.get("step")
        if isinstance(step, StoredTensor) and prod(step.shape) == 1 and step.dtype.kind in _NUMBERS:
            data = sources.open(rank.file.path).read(rank.file.offset(step), step.dtype.itemsize)
            steps[step_text(float(np.frombuffer(data, numpy_dtype(step.dtype))[0]))] = None
        elif is_count(step):
            steps[count_text(cast(int, step))] = None
    return f"after {some_of(list(steps))} steps of the optimizer" if steps else None


def gaps_of(rank: RankStates, numbers: Sequence[int]) -> list[list[int]]:
    """The padding after each parameter of the flat tensors ``numbers`` (``parameter_alignment``)."""
    gaps = rank.file.states.get("param_alignment_paddings")
    if gaps is None:
        return [[]] * len(numbers)
    if not isinstance(gaps, (list, tuple)) or len(gaps) != len(rank.weights):
        raise contradiction(rank.file.path, "its param_alignment_paddings are not those of its flat tensors")
    if not all(isinstance(counts, (list, tuple)) and all(map(is_count, counts)) for counts in gaps):
        raise contradiction(rank.file.path, "its param_alignment_paddings are not numbers of elements")
    return [list(map(int, cast("list[int]", gaps[number]))) for number in numbers]


def require_record(ranks: Sequence[RankStates], flat: FlatGroups, numbers: Sequence[int]) -> None:
    """Compare the computed places with those that the files record since DeepSpeed 0.7."""
    for rank, slices in zip(ranks, flat.slices, strict=True):
        record = _record(rank)
        if record is None:
            continue
        computed: list[dict[str, tuple[int, int]]] = []
        for of_tensor in slices:
            computed.append({part.name: (part.count, part.at) for part in of_tensor})
        if len(record) != len(rank.weights) or [record[number] for number in numbers] != computed:
            what = "its parameters are not where the shapes and the number of ranks put them"
            raise contradiction(rank.file.path, what)


def recorded_names(files: Sequence[StepFile]) -> list[list[str]]:
    """The parameters of each flat tensor as the files of one model-parallel rank record them, in order; [] if they do
    not.
    """
    records = [_record(rank_states(file)) for file in sorted(files, key=lambda file: file.data_rank)]
    known = [record for record in records if record is not None]
    # Of use only where every rank has one, of as many flat tensors as the others'.
    if not known or len(known) < len(records) or len(set(map(len, known))) > 1:
        return []
    by_tensor: list[dict[str, None]] = [{} for _ in known[0]]
    for record in known:
        for names, of_rank in zip(by_tensor, record, strict=True):
            names.update(dict.fromkeys(of_rank))
    return [list(names) for names in by_tensor]


def require_in_files(step: str, optim: Sequence[StepFile], sources: Sources) -> None:
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
            why="only DeepSpeed knows where in these files each parameter is (offload_optimizer to nvme)",
            next_step="load it with DeepSpeed as it was saved, collect all with safe_get_full_fp32_param and "
            "safe_get_full_optimizer_state, and save that with torch.save; or save with offload_optimizer to cpu",
        )


def _record(rank: RankStates) -> list[dict[str, tuple[int, int]]] | None:
    """Of each flat tensor the parameters that ``rank`` has a part of: how many elements, and where they begin. None
    without a record.
    """
    groups = rank.file.states.get("param_slice_mappings")
    if groups is None:
        return None
    if not isinstance(groups, (list, tuple)):
        raise contradiction(rank.file.path, "its param_slice_mappings are not a list")
    record: list[dict[str, tuple[int, int]]] = []
    for group in groups:
        addresses = as_mapping(group, rank.file.path, "param_slice_mappings")
        record.append({str(name): _fragment(address, rank.file.path) for name, address in addresses.items()})
    return record


def _fragment(address: object, path: str) -> tuple[int, int]:
    state = address.state if isinstance(address, Object) else None
    numel, start = (state.get("numel"), state.get("start")) if isinstance(state, dict) else (None, None)
    if not is_count(numel) or not is_count(start):
        raise contradiction(path, "its param_slice_mappings hold addresses of an unknown form")
    return cast(int, numel), cast(int, start)


def _is_vector(value: object) -> bool:
    return isinstance(value, StoredTensor) and len(value.shape) == 1
