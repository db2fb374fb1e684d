"""State dicts in host memory: a place made once (pinned, or shared with other processes), and copies into it.

A trainer that saves every few minutes keeps one such place: pinned memory takes copies from a GPU while it computes,
shared memory lets another process write the file. Nothing is communicated; sharded tensors keep their shards.
"""

from __future__ import annotations

import copy
from typing import cast

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from fsdpckpt.comm.similarity import check_similar
from fsdpckpt.comm.trees import StateDict, rebuild, taken_apart

__all__ = ["copy_state_dict", "empty_on_cpu", "offload_to_cpu"]


def empty_on_cpu(state: StateDict, *, pin: bool = False, share: bool = False) -> StateDict:
    """A state dict of the structure of ``state``, its tensors new and unfilled in host memory.

    ``pin``: page-locked, as far as this torch can (a GPU is needed). ``share``: visible to other processes.
    """
    tree = taken_apart(state)
    return _rebuilt(tree.skeleton, [_mapped(tensor, pin=pin, share=share) for tensor in tree.tensors])


def copy_state_dict(state: StateDict, into: StateDict, *, non_blocking: bool = False) -> StateDict:
    """Copy every tensor of ``state`` into its companion in ``into``; returns ``state`` with those in place of its own.

    Raises StateDictMismatchError, with every difference, before anything is copied. ``non_blocking``: copies to pinned
    memory may be under way on return; synchronize the device before reading.
    """
    check_similar(state, into)
    tree, companion = taken_apart(state), taken_apart(into)
    with torch.no_grad():
        for one, other in zip(tree.tensors, _in_order(tree.keys, companion.keys, companion.tensors), strict=True):
            for source, target in zip(_locals(one), _locals(other), strict=True):
                target.copy_(source, non_blocking=non_blocking)
    return _rebuilt(tree.skeleton, _in_order(tree.keys, companion.keys, companion.tensors))


def offload_to_cpu(state: StateDict) -> StateDict:
    """A copy of ``state`` in host memory; tensors that lie there already are copied too."""
    return copy_state_dict(state, empty_on_cpu(state))


def _in_order(keys: tuple[str, ...], others: tuple[str, ...], tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    by_key = dict(zip(others, tensors, strict=True))
    return [by_key[key] for key in keys]


def _locals(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The memory of ``tensor`` on this rank."""
    if isinstance(tensor, ShardedTensor):
        return [each.tensor for each in tensor.local_shards()]
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor]


def _mapped(tensor: torch.Tensor, *, pin: bool, share: bool) -> torch.Tensor:
    if isinstance(tensor, ShardedTensor):
        made = copy.copy(tensor)
        made._local_shards = [copy.copy(each) for each in tensor.local_shards()]
        for each in made._local_shards:
            each.tensor = _empty(each.tensor, pin=pin, share=share)
        return made
    if isinstance(tensor, DTensor):
        local = _empty(tensor.to_local(), pin=pin, share=share)
        return DTensor(local, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return _empty(tensor, pin=pin, share=share)


def _empty(tensor: torch.Tensor, *, pin: bool, share: bool) -> torch.Tensor:
    can_pin = pin and torch.cuda.is_available() and tensor.numel() > 0
    made = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=can_pin and not share)
    if share:
        made.share_memory_()  # type: ignore[no-untyped-call]
    if can_pin and share:
        # Shared memory is made first; the driver then locks its pages where they are.
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostRegister(made.data_ptr(), made.numel() * made.element_size(), 0)
    return made


def _rebuilt(skeleton: object, tensors: list[torch.Tensor]) -> StateDict:
    return cast("StateDict", rebuild(skeleton, tensors))
