"""Gathers, shards, scatters and broadcasts state dicts, by PyTorch's rules but for one: nothing is cast or skipped in
silence.

``gather`` makes sharded state dicts whole, on every rank or on one, as ``_gather_state_dict`` of PyTorch: 1. all ranks
compare the structure of their state dicts; 2. all say which boxes they hold, and check that these are everything;
3. holders send each box once, straight into the whole tensors.

``shard`` (every rank has the whole state dict), ``scatter`` and ``broadcast`` (one rank has it) follow
``_distribute_state_dict`` and ``_broadcast_state_dict``. Either ``like`` says what goes where: a state dict as this
rank needs it, whose tensors are filled in place (new ones are made where they are on the meta device); or ``mesh`` and
``placements``, for new DTensors as ``distribute_tensor`` makes them. Every rank gets 0-dim tensors and other values
whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    held_boxes,
    kind_of,
    local_tensors,
    on_group_device,
    stream_nbytes,
    view_of,
)
from fsdpckpt.comm.exchanger import BUDGET, exchange, spread
from fsdpckpt.comm.protocol import Group
from fsdpckpt.comm.trees import (
    StateDict,
    Tree,
    agree_on_structure,
    collected,
    join_tensors,
    raise_on_all_ranks,
    split_tensors,
)
from fsdpckpt.errors import UsageError
from fsdpckpt.ir.tensors import Box


@dataclass(frozen=True, slots=True)
class _Sharded:
    """A sharded tensor, its slot in the state dict, and the boxes of it that this rank holds."""

    slot: int
    key: str
    tensor: torch.Tensor
    local_boxes: list[HeldBox]

    @property
    def device(self) -> torch.device:
        """Where the shards are; a ShardedTensor has no other device."""
        return next((tensor.device for tensor in local_tensors(self.tensor)), torch.device("cpu"))


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
    sharded: list[_Sharded] = []
    problems: list[str] = []
    tree = _split(state, problems)
    for slot, (key, tensor) in enumerate(zip(tree.keys, tree.tensors, strict=True)):
        with collected(problems, key):
            if kind_of(tensor) != "Tensor":
                sharded.append(_Sharded(slot, key, tensor, held_boxes(tensor, key)))
    agree_on_structure(group, state, problems, to=to)
    shapes = [tuple(each.tensor.shape) for each in sharded]
    local_boxes = [[held.box for held in each.local_boxes] for each in sharded]
    boxes_by_rank = all_boxes(group, local_boxes, list(map(len, shapes)))
    check_coverage([each.key for each in sharded], shapes, boxes_by_rank)
    sends = assign_senders(boxes_by_rank, [each.tensor.dtype.itemsize for each in sharded], to=to)
    receives = to is None or to == group.rank
    whole = [
        torch.empty(shape, dtype=each.tensor.dtype, device="cpu" if cpu_offload else each.device)
        for each, shape in zip(sharded, shapes, strict=True)
        if receives
    ]
    _transfer(group, sharded, whole, sends, to=to, budget=budget)
    if not receives:
        return {}
    tensors = list(tree.tensors)
    for slot, tensor in enumerate(tensors):
        if cpu_offload and kind_of(tensor) == "Tensor":
            tensors[slot] = tensor.detach().cpu()
    for each, tensor in zip(sharded, whole, strict=True):
        tensors[each.slot] = tensor
    return join_tensors(tree.skeleton, tensors)


def _split(state: StateDict, problems: list[str]) -> Tree:
    """``split_tensors(state)``; if that is not possible, an empty one, and the reason in ``problems``."""
    with collected(problems):
        return split_tensors(state)
    return Tree(None, (), ())


def _transfer(
    group: Group,
    sharded: list[_Sharded],
    whole: list[torch.Tensor],
    sends: list[list[TensorBox]],
    *,
    to: int | None,
    budget: int,
) -> None:
    local = [{held.box: held.data for held in each.local_boxes} for each in sharded]
    outgoing = Stream([local[part.index][part.box] for part in sends[group.rank]])
    into: list[Stream | None] = [None] * len(sends)  # by sender
    if whole:
        for sender, parts in enumerate(sends):
            into[sender] = Stream([view_of(whole[part.index], part.box) for part in parts])
    on_device = on_group_device(group, [*whole, *(data for boxes in local for data in boxes.values())])

    def read(_: int, offset: int, buffer: torch.Tensor) -> None:
        outgoing.read(offset, buffer)

    def write(source: int, offset: int, buffer: torch.Tensor) -> None:
        stream = into[source]
        if stream is not None:
            stream.write(offset, buffer)

    with torch.no_grad():
        for tensor, boxes in zip(whole, local, strict=False):  # a rank that receives nothing has no whole tensors
            for box, data in boxes.items():
                view_of(tensor, box).copy_(data)
        if to is None:
            sizes: list[int] = []
            for parts in sends:
                boxes_of_sender = [(part.box.sizes, sharded[part.index].tensor.dtype.itemsize) for part in parts]
                sizes.append(stream_nbytes(boxes_of_sender))
            spread(group, sizes=sizes, read=read, write=write, budget=budget, on_device=on_device, name="gather")
            return
        exchange(
            group,
            sends={to: outgoing.size} if group.rank != to else {},
            receives={
                rank: stream.size for rank, stream in enumerate(into) if stream is not None and rank != group.rank
            },
            read=read,
            write=write,
            budget=budget,
            on_device=on_device,
            name="gather",
        )


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
    problems: list[str] = []
    with group.step("shard"):
        tree = _split(state, problems)
        destinations = _destinations(tree, like, mesh, placements, device, problems, has_values=True)
    raise_on_all_ranks(group, problems)
    _fill(destinations, tree.tensors)
    return join_tensors(tree.skeleton, [destination.tensor for destination in destinations])


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
    problems: list[str] = []
    with group.step("scatter"):
        tree = _broadcast_structure(group, state if group.rank == source else None, source)
        target, has_values = device or torch.device(group.device), group.rank == source
        destinations = _destinations(tree, like, mesh, placements, target, problems, has_values=has_values)
    raise_on_all_ranks(group, problems)
    needed_boxes = [[held.box for held in destination.boxes] for destination in destinations]
    needed_by_rank = all_boxes(group, needed_boxes, [tensor.dim() for tensor in tree.tensors])
    with torch.no_grad():
        if group.rank == source:
            _fill(destinations, tree.tensors)
        _send(group, source, tree, destinations, needed_by_rank, budget)
    return join_tensors(tree.skeleton, [destination.tensor for destination in destinations])


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


def _broadcast_structure(group: Group, state: StateDict | None, source: int) -> Tree:
    """The whole ``state`` of rank ``source``; on the other ranks its tensors are on the meta device. Collective."""
    if group.rank == source:
        if state is None:
            raise UsageError(f"rank {source} is the source and has no state dict", next_step="pass its rank as source")
        tree = split_tensors(state)
        shapes, dtypes = [tensor.shape for tensor in tree.tensors], [tensor.dtype for tensor in tree.tensors]
        group.broadcast_object((tree.skeleton, tree.keys, shapes, dtypes), source=source)
        return tree
    received = cast(
        "tuple[object, tuple[str, ...], list[torch.Size], list[torch.dtype]]", group.broadcast_object(source=source)
    )
    skeleton, keys, shapes, dtypes = received
    pairs = zip(shapes, dtypes, strict=True)
    return Tree(skeleton, keys, tuple(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in pairs))


def _destinations(
    tree: Tree,
    like: StateDict | None,
    mesh: DeviceMesh | None,
    placements: Placements | None,
    device: torch.device | None,
    problems: list[str],
    *,
    has_values: bool,
) -> list[Destination]:
    """A destination for each tensor of ``tree``. Adds to ``problems`` what does not match or cannot be sent.

    ``has_values``: the tensors are those to send, not another rank's on the meta device.
    """
    if (mesh is None) != (placements is None) or (like is not None and mesh is not None):
        raise UsageError("pass like, or mesh and placements: they say where tensors go")
    templates: dict[str, torch.Tensor] = {}
    if like is not None:
        like_tree = _split(like, problems)
        templates = dict(zip(like_tree.keys, like_tree.tensors, strict=True))
        problems += _misfits(tree, templates)
    destinations: list[Destination] = []
    for key, tensor in zip(tree.keys, tree.tensors, strict=True):
        with collected(problems, key):
            shape = tuple(tensor.shape)
            kind = kind_of(tensor)
            if kind != "Tensor":
                raise UsageError(f"a {kind} where a whole tensor is needed", next_step="gather the state dict first")
            local_tensors(tensor)  # refuses subclasses
            if has_values and tensor.is_meta:
                raise UsageError("a tensor on the meta device has no values", next_step="load or initialize it first")
            target = (device or tensor.device) if shape else torch.device("cpu")
            chosen = None  # a tensor without dimensions is on every rank
            if shape:
                chosen = placements(key, shape) if callable(placements) else placements
            if key in templates:
                destination = destination_like(templates[key], key, target)
            elif mesh is not None and chosen is not None:
                destination = destination_on_mesh(shape, tensor.dtype, key, target, mesh, chosen)
            elif tensor.is_meta:
                destination = destination_like(tensor, key, target)
            else:
                moved = tensor.detach().to(target)
                destination = Destination(held_boxes(moved, key), moved, filled=True)
            destinations.append(destination)
    return destinations


def _misfits(tree: Tree, templates: Mapping[str, torch.Tensor]) -> list[str]:
    whole = dict(zip(tree.keys, tree.tensors, strict=True))
    misfits = [f"{key}: not in the whole state dict" for key in templates if key not in whole]
    misfits += [f"{key}: nothing asks for it" for key in whole if key not in templates]
    for key, tensor in whole.items():
        like = templates.get(key, tensor)
        if like.shape != tensor.shape or like.dtype != tensor.dtype:
            misfits.append(f"{key}: {list(tensor.shape)} {tensor.dtype}, wanted {list(like.shape)} {like.dtype}")
    return misfits


def _fill(destinations: Sequence[Destination], tensors: Sequence[torch.Tensor]) -> None:
    """Copy the boxes of this rank out of the whole ``tensors``."""
    with torch.no_grad():
        for destination, tensor in zip(destinations, tensors, strict=True):
            for held in () if destination.filled else destination.boxes:
                held.data.copy_(view_of(tensor, held.box))


def _send(
    group: Group,
    source: int,
    tree: Tree,
    destinations: list[Destination],
    needed_by_rank: list[list[list[Box]]],
    budget: int,
) -> None:
    """Broadcast the boxes that all ranks need; send the others to the ranks that need them."""
    shared: list[int] = []
    cut: list[int] = []
    for index in range(len(destinations)):
        (shared if _same_box_everywhere([boxes[index] for boxes in needed_by_rank]) else cut).append(index)
    local = [held.data for destination in destinations for held in destination.boxes]
    common = Stream([held.data for index in shared for held in destinations[index].boxes])
    into = Stream([held.data for index in cut for held in destinations[index].boxes])
    out: dict[int, Stream] = {}
    if group.rank == source:
        local += tree.tensors
        common = Stream([view_of(tree.tensors[index], needed_by_rank[source][index][0]) for index in shared])
        for rank, boxes in enumerate(needed_by_rank):
            if rank != source:  # it has its own already
                out[rank] = Stream([view_of(tree.tensors[index], box) for index in cut for box in boxes[index]])
    on_device = on_group_device(group, local)
    spread(
        group,
        sizes=[common.size if rank == source else 0 for rank in range(group.world_size)],
        read=lambda _, offset, buffer: common.read(offset, buffer),
        write=lambda _, offset, buffer: common.write(offset, buffer),
        budget=budget,
        on_device=on_device,
        name="broadcast",
    )
    exchange(
        group,
        sends={rank: stream.size for rank, stream in out.items()},
        receives={} if group.rank == source else {source: into.size},
        read=lambda rank, offset, buffer: out[rank].read(offset, buffer),
        write=lambda _, offset, buffer: into.write(offset, buffer),
        budget=budget,
        on_device=on_device,
        name="scatter",
    )


def _same_box_everywhere(needed: Sequence[Sequence[Box]]) -> bool:
    """Whether all ranks need the same one box: a tensor that is not cut, or a shard in a group of its replicas."""
    return len(needed[0]) == 1 and all(list(boxes) == list(needed[0]) for boxes in needed)
