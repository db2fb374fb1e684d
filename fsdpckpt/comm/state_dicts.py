"""Gathers, shards, scatters and broadcasts state dicts, by PyTorch's rules but for one: nothing is cast or skipped in
silence.

``gather`` makes sharded state dicts whole, on every rank or on one, as ``_gather_state_dict`` of PyTorch: 1. all ranks
compare the structure of their state dicts; 2. all tell which boxes they hold, and check that together they are
everything; 3. holders send each box once, straight into the whole tensors.

``shard`` (every rank has the whole state dict), ``scatter`` and ``broadcast`` (one rank has it) follow
``_distribute_state_dict`` and ``_broadcast_state_dict``. What goes where is said by ``like``, a state dict as this rank
wants it, whose tensors are filled in place (new ones are made where they are on the meta device); or by ``mesh`` and
``placements``, for new DTensors as ``distribute_tensor`` makes them. 0-dim tensors and other values come whole to every
rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdpckpt.comm.boxes import (
    Destination,
    HeldBox,
    Placements,
    Stream,
    TensorBox,
    all_boxes,
    assign_senders,
    check_coverage,
    destination_like,
    destination_on_mesh,
    destination_whole,
    held_boxes,
    kind_of,
    on_group_device,
    stream_nbytes,
    view_of,
)
from fsdpckpt.comm.exchanger import BUDGET, exchange, spread
from fsdpckpt.comm.protocol import Group
from fsdpckpt.comm.trees import StateDict, Tree, agree_on_structure, join_tensors, raise_on_all_ranks, split_tensors
from fsdpckpt.errors import UsageError
from fsdpckpt.ir.tensors import Box


@dataclass(frozen=True, slots=True)
class _Sharded:
    """One sharded tensor: its place in the state dict, its metadata, and this rank's boxes of it."""

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
    """Return ``state`` with every DTensor and ShardedTensor whole. Collective, each rank with its own shards.

    ``to``: the rank that gets it, the others get ``{}`` and allocate nothing; None: all. Whole tensors are on the
    device of the shards, with ``cpu_offload`` in host memory. Plain tensors and other values stay each rank's own.
    Besides the result no rank needs more than ``budget`` bytes. Raises StateDictMismatchError, the same on all ranks,
    if the ranks' state dicts differ in structure or do not hold every element.
    """
    agree_on_structure(group, state)
    tree = split_tensors(state)
    sharded = [
        _Sharded(slot, key, tuple(tensor.shape), tensor.dtype, _device(tensor), held_boxes(tensor, key))
        for slot, (key, tensor) in enumerate(zip(tree.keys, tree.tensors, strict=True))
        if kind_of(tensor) != "Tensor"
    ]
    every = all_boxes(group, [[h.box for h in each.here] for each in sharded], [len(each.shape) for each in sharded])
    check_coverage([each.key for each in sharded], [each.shape for each in sharded], every)
    sends = assign_senders(every, [each.itemsize for each in sharded], to=to)
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
    return cast("StateDict", join_tensors(tree.skeleton, tensors))


def _device(tensor: torch.Tensor) -> torch.device:
    shards = getattr(tensor, "local_shards", None)
    if shards is None:
        return tensor.device
    return next((shard.tensor.device for shard in shards()), torch.device("cpu"))


def _transfer(
    group: Group,
    sharded: list[_Sharded],
    whole: list[torch.Tensor],
    sends: list[list[TensorBox]],
    *,
    to: int | None,
    budget: int,
) -> None:
    here = [{each.box: each.data for each in one.here} for one in sharded]
    outgoing = Stream([here[wanted.index][wanted.box] for wanted in sends[group.rank]])
    into = [Stream([view_of(whole[w.index], w.box) for w in each]) if whole else None for each in sends]
    on_device = on_group_device(group, [*whole, *(data for one in here for data in one.values())])

    def read(_: int, offset: int, buffer: torch.Tensor) -> None:
        outgoing.read(offset, buffer)

    def write(source: int, offset: int, buffer: torch.Tensor) -> None:
        stream = into[source]
        if stream is not None:
            stream.write(offset, buffer)

    with torch.no_grad():
        for index, tensor in enumerate(whole):
            for box, data in here[index].items():
                view_of(tensor, box).copy_(data)
        if to is None:
            sizes = [stream_nbytes([(w.box.sizes, sharded[w.index].itemsize) for w in each]) for each in sends]
            spread(group, sizes=sizes, read=read, write=write, budget=budget, on_device=on_device, name="gather")
            return
        coming = {rank: stream.size for rank, stream in enumerate(into) if stream is not None and rank != group.rank}
        leaving = {to: outgoing.size} if group.rank != to else {}
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


@dataclass(frozen=True, slots=True)
class _Whole:
    """What all ranks know of the whole state dict: its structure, and each tensor's key, shape and dtype."""

    skeleton: object
    keys: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]


def shard(
    group: Group,
    state: StateDict,
    *,
    like: StateDict | None = None,
    mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    device: torch.device | None = None,
) -> StateDict:
    """Return this rank's shards of ``state``, which every rank has whole and equal. Communicates only structures.

    ``device``: the device of new tensors (default: that of ``state``). Raises StateDictMismatchError on all ranks, with
    every difference, if ``state`` does not match ``like``.
    """
    tree = split_tensors(state)
    whole = _describe(tree)
    destinations, problems = _destinations(whole, like, mesh, placements, device, tree)
    raise_on_all_ranks(group, problems)
    _fill(destinations, tree.tensors)
    return cast("StateDict", join_tensors(whole.skeleton, [destination.tensor for destination in destinations]))


def scatter(
    group: Group,
    state: StateDict | None,
    *,
    source: int = 0,
    like: StateDict | None = None,
    mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    device: torch.device | None = None,
    budget: int = BUDGET,
) -> StateDict:
    """Return this rank's shards of the ``state`` that rank ``source`` has whole; other ranks' ``state`` is ignored.
    Collective.

    Each rank is sent only what it needs; besides its own shards it needs at most ``budget`` bytes. ``device``: the
    device of new tensors (default: the group's). Raises StateDictMismatchError on all ranks, with every difference, if
    the state dict does not match a rank's ``like``.
    """
    with group.step("scatter"):
        tree = split_tensors(state) if group.rank == source else None
        parts = None if tree is None else _itemsizes(_describe(tree))
        whole = _Whole(*cast("tuple[object, ...]", group.broadcast_object(parts, source=source)))  # type: ignore[arg-type]
        destinations, problems = _destinations(
            whole, like, mesh, placements, device or torch.device(group.device), tree
        )
    raise_on_all_ranks(group, problems)
    wants = [[each.box for each in destination.boxes] for destination in destinations]
    every = all_boxes(group, wants, [len(shape) for shape in whole.shapes])
    with torch.no_grad():
        if tree is not None:
            _fill(destinations, tree.tensors)
        _send(group, source, tree, destinations, every, budget)
    return cast("StateDict", join_tensors(whole.skeleton, [destination.tensor for destination in destinations]))


def broadcast(
    group: Group,
    state: StateDict | None,
    *,
    source: int = 0,
    device: torch.device | None = None,
    budget: int = BUDGET,
) -> StateDict:
    """Return rank ``source``'s ``state`` on every rank, tensors and all else; ``source`` gets its own back. Collective.

    ``device``: the device of the other ranks' tensors (default: the group's).
    """
    return scatter(group, state, source=source, device=device, budget=budget)


def _describe(tree: Tree) -> _Whole:
    for key, tensor in zip(tree.keys, tree.tensors, strict=True):
        if kind_of(tensor) != "Tensor":
            raise UsageError(
                f"a {kind_of(tensor)} where a whole tensor is needed", key=key, next_step="gather the state dict first"
            )
    shapes = tuple(tuple(tensor.shape) for tensor in tree.tensors)
    return _Whole(tree.skeleton, tree.keys, shapes, tuple(tensor.dtype for tensor in tree.tensors))


def _itemsizes(whole: _Whole) -> tuple[object, ...]:
    return whole.skeleton, whole.keys, whole.shapes, whole.dtypes


def _destinations(
    whole: _Whole,
    like: StateDict | None,
    mesh: DeviceMesh | None,
    placements: Placements | None,
    device: torch.device | None,
    tree: Tree | None,
) -> tuple[list[Destination], list[str]]:
    """A destination for each tensor, and what does not match."""
    if (mesh is None) != (placements is None) or (like is not None and mesh is not None):
        raise UsageError("pass like, or mesh and placements: they say where tensors go")
    destinations: list[Destination] = []
    templates: dict[str, torch.Tensor] = {}
    problems: list[str] = []
    if like is not None:
        wanted = split_tensors(like)
        templates = dict(zip(wanted.keys, wanted.tensors, strict=True))
        problems = _misfits(whole, templates)
    for index, (key, shape, dtype) in enumerate(zip(whole.keys, whole.shapes, whole.dtypes, strict=True)):
        source = None if tree is None else tree.tensors[index]
        target = (
            torch.device("cpu") if not shape else device or (torch.device("cpu") if source is None else source.device)
        )
        destinations.append(_destination(key, shape, dtype, target, source, templates.get(key), mesh, placements))
    return destinations, problems


def _destination(
    key: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    source: torch.Tensor | None,
    template: torch.Tensor | None,
    mesh: DeviceMesh | None,
    placements: Placements | None,
) -> Destination:
    if template is not None and (kind_of(template) != "Tensor" or source is None):
        return destination_like(template, key, device)
    chosen = (placements(key, shape) if callable(placements) else placements) if shape else None
    if mesh is not None and chosen is not None:
        return destination_on_mesh(shape, dtype, key, device, mesh, chosen)
    if source is not None:
        moved = source.detach().to(device)
        return Destination(held_boxes(moved, key), moved, filled=True)
    return destination_whole(shape, dtype, device)


def _misfits(whole: _Whole, templates: dict[str, torch.Tensor]) -> list[str]:
    there = dict(zip(whole.keys, zip(whole.shapes, whole.dtypes, strict=True), strict=True))
    misfits = [f"{key}: not in the whole state dict" for key in templates if key not in there]
    misfits += [f"{key}: nothing asks for it" for key in there if key not in templates]
    for key, (shape, dtype) in there.items():
        wanted = templates.get(key)
        if wanted is not None and (tuple(wanted.shape) != shape or wanted.dtype != dtype):
            misfits.append(f"{key}: {list(shape)} {dtype}, wanted {list(wanted.shape)} {wanted.dtype}")
    return misfits


def _fill(destinations: Sequence[Destination], tensors: Sequence[torch.Tensor]) -> None:
    """Copy this rank's boxes out of whole ``tensors`` that it has."""
    with torch.no_grad():
        for destination, tensor in zip(destinations, tensors, strict=True):
            for each in () if destination.filled else destination.boxes:
                each.data.copy_(view_of(tensor, each.box))


def _send(
    group: Group,
    source: int,
    tree: Tree | None,
    destinations: list[Destination],
    every: list[list[list[Box]]],
    budget: int,
) -> None:
    """Broadcast the tensors that all ranks need whole; send the boxes of the others to the ranks that need them."""
    shared = [_wanted_whole([boxes[index] for boxes in every]) for index in range(len(destinations))]
    whole = [index for index, is_shared in enumerate(shared) if is_shared]
    cut = [index for index, is_shared in enumerate(shared) if not is_shared]
    here = [each.data for destination in destinations for each in destination.boxes]
    on_device = on_group_device(group, here if tree is None else [*here, *tree.tensors])
    common = [each.data for index in whole for each in destinations[index].boxes]
    into = Stream([each.data for index in cut for each in destinations[index].boxes])
    out: dict[int, Stream] = {}
    if tree is not None:
        common = [tree.tensors[index] for index in whole]
        for rank, boxes in enumerate(every):
            out[rank] = Stream([view_of(tree.tensors[index], box) for index in cut for box in boxes[index]])
        del out[source]  # it has its own already
    _broadcast(group, source, Stream(common), budget=budget, on_device=on_device)
    exchange(
        group,
        sends={rank: stream.size for rank, stream in out.items()},
        receives={} if tree is not None else {source: into.size},
        read=lambda rank, offset, buffer: out[rank].read(offset, buffer),
        write=lambda _, offset, buffer: into.write(offset, buffer),
        budget=budget,
        on_device=on_device,
        name="scatter",
    )


def _wanted_whole(wants: Sequence[Sequence[Box]]) -> bool:
    """True if all ranks need the same and it is one box, as for a tensor that is not cut."""
    return len(wants[0]) == 1 and all(list(each) == list(wants[0]) for each in wants)


def _broadcast(group: Group, source: int, stream: Stream, *, budget: int, on_device: bool) -> None:
    spread(
        group,
        sizes=[stream.size if rank == source else 0 for rank in range(group.world_size)],
        read=lambda _, offset, buffer: stream.read(offset, buffer),
        write=lambda _, offset, buffer: stream.write(offset, buffer),
        budget=budget,
        on_device=on_device,
        name="broadcast",
    )
