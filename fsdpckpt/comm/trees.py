"""Splits state dicts into structure and tensors, compares structures, and copies state dicts to host memory.

``split_tensors`` collects the tensors of a state dict in one list and leaves a ``Slot`` in the place of each. It
descends into dicts, lists and tuples and keeps the types of keys; any other value stays where it is.

A trainer that saves every few minutes reuses one state dict in host memory (``empty_on_cpu``). Pinned memory lets the
GPU compute while it is copied from; shared memory lets another process write the file. These copies need no
communication: sharded tensors keep their shards.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from fsdpckpt.comm.boxes import kind_of
from fsdpckpt.comm.dtensor import DTensor
from fsdpckpt.comm.objects import Slot
from fsdpckpt.comm.protocol import Group
from fsdpckpt.errors import StateDictMismatchError

StateDict: TypeAlias = dict[str, object]


@dataclass(frozen=True, slots=True)
class Tree:
    """A split state dict: ``skeleton`` has ``Slot(i)`` for ``tensors[i]``, whose dotted key is ``keys[i]``."""

    skeleton: object
    keys: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]


def split_tensors(state: object) -> Tree:
    """Split ``state``; the tensors are in the order of the dicts."""
    keys: list[str] = []
    tensors: list[torch.Tensor] = []

    def visit(value: object, key: str) -> object:
        if isinstance(value, torch.Tensor):
            keys.append(key)
            tensors.append(value)
            return Slot(len(tensors) - 1)
        return value

    skeleton = _map_leaves(state, visit, "")
    return Tree(skeleton, tuple(keys), tuple(tensors))


def join_tensors(skeleton: object, tensors: list[torch.Tensor]) -> object:
    """The reverse of ``split_tensors``: the state dict with ``tensors`` in the slots of ``skeleton``."""
    return _map_leaves(skeleton, lambda value, _: tensors[value.index] if isinstance(value, Slot) else value, "")


def _map_leaves(value: object, visit: Callable[[object, str], object], key: str) -> object:
    if type(value) in {dict, OrderedDict}:
        mapping: dict[object, object] = value  # type: ignore[assignment]  # by the exact type
        items = [
            (name, _map_leaves(child, visit, f"{key}.{name}" if key else str(name))) for name, child in mapping.items()
        ]
        if not isinstance(mapping, OrderedDict):
            return dict(items)
        ordered = OrderedDict(items)
        vars(ordered).update(vars(mapping))  # torch's _metadata
        return ordered
    if type(value) in {list, tuple}:
        children = [_map_leaves(child, visit, f"{key}[{i}]") for i, child in enumerate(value)]  # type: ignore[arg-type,var-annotated]
        return children if type(value) is list else tuple(children)
    return visit(value, key)


Description: TypeAlias = dict[str, str]
"""Dotted key to a description of the value: ``DTensor [5, 3] float32``, ``int``, ``dict of 2``."""

MOST_SHOWN = 200  # differences listed in one message, which also gives their total number


def describe(state: object, *, plain_shapes: bool = True) -> Description:
    """The structure of ``state``. ``plain_shapes`` False: without shapes and dtypes of plain tensors.

    Keys that are not strings are shown by their ``repr``, and so are strings of digits, so that 0 and "0" differ.
    """
    found: Description = {}
    _describe(state, "", found, plain_shapes=plain_shapes)
    return found


def _describe(value: object, key: str, found: Description, *, plain_shapes: bool) -> None:
    if isinstance(value, torch.Tensor):
        kind = kind_of(value)
        words = f"{kind} {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        found[key] = words if plain_shapes or kind != "Tensor" else kind
    elif isinstance(value, Mapping):
        found[key] = f"dict of {len(value)}"
        for name, child in value.items():
            part = name if isinstance(name, str) and not name.isdigit() else repr(name)
            _describe(child, f"{key}.{part}" if key else part, found, plain_shapes=plain_shapes)
    elif isinstance(value, (list, tuple)):
        found[key] = f"{type(value).__name__} of {len(value)}"
        for index, child in enumerate(value):
            _describe(child, f"{key}[{index}]", found, plain_shapes=plain_shapes)
    else:
        found[key] = type(value).__name__


def differences(one: Description, other: Description, names: tuple[str, str] = ("one", "the other")) -> list[str]:
    """Every difference, one line each. A dict is not listed itself when only its entries differ."""
    found = [f"{key}: only in {names[0]} ({words})" for key, words in one.items() if key not in other]
    found += [f"{key}: only in {names[1]} ({words})" for key, words in other.items() if key not in one]
    for key, words in one.items():
        if key in other and words != other[key] and not (words.startswith("dict of") and "dict of" in other[key]):
            found.append(f"{key or 'the whole'}: {words} in {names[0]}, {other[key]} in {names[1]}")
    return found


def check_similar(state: object, companion: object) -> None:
    """Raise StateDictMismatchError unless both have the same keys, kinds, shapes and dtypes."""
    _raise(differences(describe(state), describe(companion), ("the state dict", "its companion")))


def agree_on_structure(group: Group, state: object) -> None:
    """Collective. Raise the same StateDictMismatchError on all ranks unless their state dicts have one structure.

    Plain tensors may differ in shape and dtype from rank to rank.
    """
    description = describe(state, plain_shapes=False)
    digest = hashlib.sha256(json.dumps(description).encode()).hexdigest()
    if len(set(group.all_gather_objects(digest, name="compare structures"))) == 1:
        return
    every = cast("list[Description]", group.all_gather_objects(description, name="list the differences"))
    found: list[str] = []
    for rank, other in enumerate(every[1:], 1):
        found += differences(every[0], other, ("rank 0", f"rank {rank}"))
    _raise(found or ["the keys are in a different order"])


def raise_on_all_ranks(group: Group, problems: list[str]) -> None:
    """Collective. Raise StateDictMismatchError with the ``problems`` of all ranks on every rank, if there are any."""
    every = cast("list[list[str]]", group.all_gather_objects(problems, name="compare structures"))
    found: dict[str, list[int]] = {}
    for rank, rank_problems in enumerate(every):
        for problem in rank_problems:
            found.setdefault(problem, []).append(rank)
    _raise([text if len(ranks) == len(every) else f"{text} (rank {ranks[0]})" for text, ranks in found.items()])


def _raise(found: list[str]) -> None:
    if not found:
        return
    more = [f"and {len(found) - MOST_SHOWN} more"] if len(found) > MOST_SHOWN else []
    raise StateDictMismatchError(
        f"the state dicts do not match: {len(found)} difference{'s' if len(found) > 1 else ''}",
        details=[*found[:MOST_SHOWN], *more],
        next_step="build the same model and optimizer on every rank, wrapped the same way",
    )


def empty_on_cpu(state: StateDict, *, pin: bool = False, share: bool = False) -> StateDict:
    """A state dict with the structure of ``state`` and new, uninitialized tensors in host memory.

    ``pin``: page-locked, where torch can do that (it needs a GPU). ``share``: visible to other processes.
    """
    tree = split_tensors(state)
    return _joined(tree.skeleton, [_empty_like(tensor, pin=pin, share=share) for tensor in tree.tensors])


def copy_state_dict(state: StateDict, into: StateDict, *, non_blocking: bool = False) -> StateDict:
    """Copy every tensor of ``state`` into the one of the same key in ``into``; returns ``state`` with the copies.

    Raises StateDictMismatchError, which lists every difference, before anything is copied. ``non_blocking``: copies to
    pinned memory may still be running on return; synchronize the device before reading them.
    """
    check_similar(state, into)
    tree, companion = split_tensors(state), split_tensors(into)
    with torch.no_grad():
        for one, other in zip(tree.tensors, _in_order(tree.keys, companion.keys, companion.tensors), strict=True):
            for source, target in zip(_locals(one), _locals(other), strict=True):
                target.copy_(source, non_blocking=non_blocking)
    return _joined(tree.skeleton, _in_order(tree.keys, companion.keys, companion.tensors))


def offload_to_cpu(state: StateDict) -> StateDict:
    """A copy of ``state`` in host memory; tensors that are on the CPU already are copied too."""
    return copy_state_dict(state, empty_on_cpu(state))


def _in_order(keys: tuple[str, ...], others: tuple[str, ...], tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    by_key = dict(zip(others, tensors, strict=True))
    return [by_key[key] for key in keys]


def _locals(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The local shards of ``tensor``, or the tensor itself when it is plain."""
    if isinstance(tensor, ShardedTensor):
        return [each.tensor for each in tensor.local_shards()]
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor]


def _empty_like(tensor: torch.Tensor, *, pin: bool, share: bool) -> torch.Tensor:
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
        # Shared memory cannot be allocated pinned: allocate it, then let the driver lock its pages.
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostRegister(made.data_ptr(), made.numel() * made.element_size(), 0)
    return made


def _joined(skeleton: object, tensors: list[torch.Tensor]) -> StateDict:
    return cast("StateDict", join_tensors(skeleton, tensors))
