"""Sharded state dicts made whole: on every rank, or on one. The rules are ``_gather_state_dict``'s of PyTorch.

Steps: 1. all ranks compare the structure of their state dicts; 2. all tell which boxes they hold, and check that
together they are everything; 3. holders send each box once, straight into the whole tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from fsdpckpt.comm.boxes import HeldBox, held, kind_of, view_of
from fsdpckpt.comm.exchange import BUDGET, exchange, spread
from fsdpckpt.comm.group import Group
from fsdpckpt.comm.holdings import Wanted, all_boxes, check_coverage, on_group_device, senders
from fsdpckpt.comm.similarity import agree_on_structure
from fsdpckpt.comm.streams import Stream, stream_bytes
from fsdpckpt.comm.trees import StateDict, rebuild, taken_apart

__all__ = ["gather"]


@dataclass(frozen=True, slots=True)
class _Sharded:
    """One sharded tensor: its place in the state dict, what it is, and this rank's boxes of it."""

    slot: int
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    here: list[HeldBox]

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize


def gather(
    group: Group,
    state: StateDict,
    *,
    to: int | None = None,
    cpu_offload: bool = False,
    budget: int = BUDGET,
) -> StateDict:
    """``state`` with every DTensor and ShardedTensor whole. All ranks, each with its own shards.

    ``to``: the rank that gets it, the others get ``{}`` and allocate nothing; None: all. Whole tensors lie where the
    shards do, with ``cpu_offload`` in host memory. Plain tensors and other values stay each rank's own. Beside the
    result no rank needs more than ``budget`` bytes. Raises StateDictMismatchError, alike on all ranks, when the
    ranks' state dicts differ in structure or do not hold every element.
    """
    agree_on_structure(group, state)
    tree = taken_apart(state)
    sharded = [
        _Sharded(slot, key, tuple(tensor.shape), tensor.dtype, _device(tensor), held(tensor, key))
        for slot, (key, tensor) in enumerate(zip(tree.keys, tree.tensors, strict=True))
        if kind_of(tensor) != "Tensor"
    ]
    every = all_boxes(group, [[h.box for h in each.here] for each in sharded], [len(each.shape) for each in sharded])
    check_coverage([each.key for each in sharded], [each.shape for each in sharded], every)
    sends = senders(every, [each.itemsize for each in sharded], to=to)
    receives = to is None or to == group.rank
    whole = [
        torch.empty(s.shape, dtype=s.dtype, device="cpu" if cpu_offload else s.device) for s in sharded if receives
    ]
    _transfer(group, sharded, whole, sends, to=to, budget=budget)
    if not receives:
        return {}
    tensors = [
        tensor.detach().cpu() if cpu_offload and kind_of(tensor) == "Tensor" else tensor for tensor in tree.tensors
    ]
    for each, tensor in zip(sharded, whole, strict=True):
        tensors[each.slot] = tensor
    return cast("StateDict", rebuild(tree.skeleton, tensors))


def _empty(each: _Sharded, *, cpu_offload: bool) -> torch.Tensor:
    return torch.empty(each.shape, dtype=each.dtype, device="cpu" if cpu_offload else each.device)


def _device(tensor: torch.Tensor) -> torch.device:
    shards = getattr(tensor, "local_shards", None)
    if shards is None:
        return tensor.device
    return next((shard.tensor.device for shard in shards()), torch.device("cpu"))


def _transfer(
    group: Group,
    sharded: list[_Sharded],
    whole: list[torch.Tensor],
    sends: list[list[Wanted]],
    *,
    to: int | None,
    budget: int,
) -> None:
    here = [{each.box: each.data for each in one.here} for one in sharded]
    mine = Stream([here[wanted.index][wanted.box] for wanted in sends[group.rank]])
    into = [Stream([view_of(whole[w.index], w.box) for w in each]) if whole else None for each in sends]
    on_device = on_group_device(group, [*whole, *(data for one in here for data in one.values())])

    def read(_: int, offset: int, buffer: torch.Tensor) -> None:
        mine.read(offset, buffer)

    def write(source: int, offset: int, buffer: torch.Tensor) -> None:
        stream = into[source]
        if stream is not None:
            stream.write(offset, buffer)

    with torch.no_grad():
        for index, tensor in enumerate(whole):
            for box, data in here[index].items():
                view_of(tensor, box).copy_(data)
        if to is None:
            sizes = [stream_bytes([(w.box[1], sharded[w.index].itemsize) for w in each]) for each in sends]
            spread(group, sizes=sizes, read=read, write=write, budget=budget, on_device=on_device, name="gather")
            return
        coming = {rank: stream.size for rank, stream in enumerate(into) if stream is not None and rank != group.rank}
        leaving = {to: mine.size} if group.rank != to else {}
        exchange(
            group,
            sends=leaving,
            receives=coming,
            read=read,
            write=write,
            budget=budget,
            on_device=on_device,
            name="gather",
        )
