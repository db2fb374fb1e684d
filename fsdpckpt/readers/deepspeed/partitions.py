"""Computes the place of each parameter in the flat tensors of ZeRO.

ZeRO 1 and 2 join the parameters of a param group to one flat tensor, pad it, and cut it into equal parts, one for each
rank (``deepspeed/runtime/zero/stage_1_and_2.py``, ``bf16_optimizer.py``). ZeRO 3 cuts every parameter by itself, into
parts of ``ceil(numel / ranks)`` elements, and joins a rank's parts of a *sub-group* of parameters (``stage3.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from fsdpckpt.ir.dtypes import MAX_DIMENSIONS
from fsdpckpt.text import plural

FlatGroup: TypeAlias = dict[str, tuple[int, ...]]
"""The parameters of one flat tensor, in order, with their shapes."""

MAX_ELEMENTS = 1 << 59  # of a tensor


def is_count(value: object) -> bool:
    """Whether it is a possible number of elements of a tensor."""
    return type(value) is int and 0 <= value < MAX_ELEMENTS


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
        if len(shape) > MAX_DIMENSIONS or prod(shape) >= MAX_ELEMENTS:
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
    used = [sum(parts[name] for name, _ in flat) for flat in placed or [[]]]
    if used != ends:
        raise PartitionError(f"the parameters take {used} elements of the flat tensors, which have {ends}")
    result = FlatGroups([], [[] for _ in range(ranks)])
    for flat in placed:
        result.params.append([name for name, _ in flat])
        for rank, slices in enumerate(result.slices):
            slices.append([_slice_of_rank(name, numels[name], ranks, rank, at) for name, at in flat])
    return result


def _slice_of_rank(name: str, numel: int, ranks: int, rank: int, at: int) -> Slice:
    """The part of one parameter that ``rank`` holds under ZeRO 3. If it does not divide evenly, the last parts are
    padding.
    """
    part = -(-numel // ranks)
    begin = min(rank * part, numel)
    return Slice(name, begin, min(part, numel - begin), at)
