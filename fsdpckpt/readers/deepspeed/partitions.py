"""Place every parameter in the flat tensors of DeepSpeed's ZeRO, from what each rank's file says about them.

ZeRO 1 and 2 join the parameters of a param group to one flat tensor, pad it, and cut it into equal parts, one a rank
(``deepspeed/runtime/zero/stage_1_and_2.py``, ``bf16_optimizer.py``). ZeRO 3 cuts every parameter by itself, into parts
of ``ceil(numel / ranks)`` elements, and joins a rank's parts of a *sub-group* of parameters (``stage3.py``). Nothing is
read here but descriptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from fsdpckpt.ir.dtypes import MAX_DIMENSIONS

_MOST_ELEMENTS = 1 << 59


class PartitionError(Exception):
    """How the files of the ranks contradict themselves or each other, in words."""


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
    """Flat tensors number 0 .. n - 1 of every rank. ``params``: the parameters of each, in order. ``slices``: by rank,
    then by number, what lies in it."""

    params: list[list[str]]
    slices: list[list[list[Slice]]]


def _numels(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    for name, shape in shapes.items():
        if len(shape) > MAX_DIMENSIONS or prod(shape) >= _MOST_ELEMENTS:
            raise PartitionError(f"the shape of {name} is {list(shape)}")
    return {name: prod(shape) for name, shape in shapes.items()}


def partitions_of_groups(
    groups: Sequence[Mapping[str, tuple[int, ...]]],
    gaps: Sequence[Sequence[int]],
    lengths: Sequence[Sequence[int]],
) -> FlatGroups:
    """ZeRO 1 and 2. ``groups``: the shape of every parameter, by param group, in the order of the flat tensors.
    ``gaps``: the elements of padding after each parameter, by group; [] for none. ``lengths``: by rank and group, the
    elements of the rank's part, padding included. Raises PartitionError.
    """
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
            slices.append(_slices(starts, numels, rank * part, (rank + 1) * part))
    return result


def _slices(starts: Mapping[str, int], numels: Mapping[str, int], begin: int, end: int) -> list[Slice]:
    """What of each parameter lies in elements ``begin`` .. ``end`` of a flat tensor."""
    slices: list[Slice] = []
    for name, start in starts.items():
        low, high = max(start, begin), min(start + numels[name], end)
        if low < high:
            slices.append(Slice(name, low - start, high - low, low - begin))
    return slices


def dealt(names: Sequence[str], ranks: int) -> list[str]:
    """The parameters of a group in the order in which the optimizer lists them, from that in its flat tensor.

    ``round_robin_gradients`` deals them to the ranks like cards, and joins the hands
    (``DeepSpeedZeroOptimizer._round_robin_reorder``).
    """
    order = [index for rank in range(ranks) for index in range(rank, len(names), ranks)]
    return [name for _, name in sorted(zip(order, names, strict=True))]


def partitions_of_params(
    shapes: Iterable[Mapping[str, tuple[int, ...]]], lengths: Sequence[Sequence[int]]
) -> FlatGroups:
    """ZeRO 3. ``shapes``: of every parameter, in the order of the sub-groups. ``lengths``: by rank, the elements of
    each of its flat tensors, one a sub-group. Raises PartitionError.
    """
    numels = _numels({name: shape for group in shapes for name, shape in group.items()})
    ranks = len(lengths)
    if any(list(one) != list(lengths[0]) for one in lengths):
        raise PartitionError("the flat tensors of the ranks do not have the same lengths")
    placed: list[list[tuple[str, int]]] = [[]]
    at = 0
    ends = list(lengths[0])
    for name, numel in numels.items():
        part = -(-numel // ranks)
        while len(placed) <= len(ends) and at + part > ends[len(placed) - 1] == at:
            placed.append([])
            at = 0
        if len(placed) > len(ends) or at + part > ends[len(placed) - 1]:
            raise PartitionError(f"{name} does not fit into the flat tensors, which have {ends} elements")
        placed[-1].append((name, at))
        at += part
    while len(placed) < len(ends):
        placed.append([])
    used = [sum(-(-numels[name] // ranks) for name, _ in group) for group in placed]
    if used != ends:
        raise PartitionError(f"the parameters take {used} elements of the flat tensors, which have {ends}")
    slices = [
        [[_part(name, numels[name], ranks, rank, at) for name, at in group] for group in placed]
        for rank in range(ranks)
    ]
    return FlatGroups([[name for name, _ in group] for group in placed], slices)


def _part(name: str, numel: int, ranks: int, rank: int, at: int) -> Slice:
    """What ``rank`` holds of one parameter under ZeRO 3; the last parts are padding where it does not divide."""
    part = -(-numel // ranks)
    begin = min(rank * part, numel)
    return Slice(name, begin, min(part, numel - begin), at)
