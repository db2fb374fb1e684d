"""Which rank holds which boxes of the sharded tensors of a state dict, told to everyone; and who sends which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from fsdpckpt.comm.protocol import Group
from fsdpckpt.errors import StateDictMismatchError
from fsdpckpt.ir.coverage import box_text, flaws
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.tensors import Chunks, Int64Array, Tensor
from fsdpckpt.layouts.boxes import Box

__all__ = ["Wanted", "all_boxes", "check_coverage", "on_group_device", "senders"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Box ``box`` of tensor number ``index``."""

    index: int
    box: Box


def all_boxes(group: Group, boxes: Sequence[Sequence[Box]], dimensions: Sequence[int]) -> list[list[list[Box]]]:
    """Every rank's ``boxes`` (one list a tensor, whose number of ``dimensions`` all know), by rank. All ranks."""
    mine = _packed(boxes)
    every = cast("list[Int64Array]", group.all_gather_objects(mine, name="tell who holds what"))
    return [_unpacked(row, dimensions) for row in every]


def _packed(boxes: Sequence[Sequence[Box]]) -> Int64Array:
    numbers: list[int] = []
    for each in boxes:
        numbers.append(len(each))
        for box in each:
            numbers += [*box.offsets, *box.sizes]
    return np.asarray(numbers, np.int64)


def _unpacked(row: Int64Array, dimensions: Sequence[int]) -> list[list[Box]]:
    numbers, at = row.tolist(), 0
    found: list[list[Box]] = []
    for d in dimensions:
        count, at = numbers[at], at + 1
        steps = range(at, at + count * 2 * d, 2 * d) if d else [at] * count
        found.append([Box(tuple(numbers[i : i + d]), tuple(numbers[i + d : i + 2 * d])) for i in steps])
        at += count * 2 * d
    return found


def check_coverage(keys: Sequence[str], shapes: Sequence[Sequence[int]], every: list[list[list[Box]]]) -> None:
    """Raise StateDictMismatchError unless the ranks' boxes hold every element of every tensor, replicas aside."""
    found: list[str] = []
    for index, (key, shape) in enumerate(zip(keys, shapes, strict=True)):
        rows = [(rank, box) for rank, boxes in enumerate(every) for box in boxes[index]]
        chunks = Chunks.rows(
            ndim=len(shape),
            rank=[rank for rank, _ in rows],
            file=[0] * len(rows),
            offset=[0] * len(rows),
            start=[box.offsets for _, box in rows],
            size=[box.sizes for _, box in rows],
        )
        if not rows and 0 in shape:
            continue
        tensor = Tensor(DTYPES["uint8"], tuple(shape), chunks, sharded=True, placement="boxes")
        found += [f"{key}: {f.elements} elements {f.kind}, first {box_text(f.start, f.size)}" for f in flaws(tensor)]
    if found:
        raise StateDictMismatchError("the ranks do not hold every element exactly once", details=found)


def senders(every: list[list[list[Box]]], itemsizes: Sequence[int], *, to: int | None = None) -> list[list[Wanted]]:
    """For each rank the boxes that it sends: each box once, replicas' holders balanced by bytes.

    ``to``: the only receiver; what it holds itself is its own to send.
    """
    loads = [0] * len(every)
    sends: list[list[Wanted]] = [[] for _ in every]
    for index, itemsize in enumerate(itemsizes):
        holders: dict[Box, list[int]] = {}
        for rank, boxes in enumerate(every):
            for box in boxes[index]:
                if 0 not in box.sizes:
                    holders.setdefault(box, []).append(rank)
        for box, ranks in holders.items():
            rank = to if to in ranks else min(ranks, key=lambda r: (loads[r], r))
            loads[rank] += box.numel * itemsize
            sends[rank].append(Wanted(index, box))
    return sends


def on_group_device(group: Group, tensors: Sequence[torch.Tensor]) -> bool:
    """True when the data lies where the group communicates, so that no host memory is needed in between."""
    device = torch.device(group.device)
    return device.type != "cpu" and all(tensor.device == device for tensor in tensors)
