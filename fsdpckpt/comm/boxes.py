"""Boxes of global tensors that ranks hold, send and fill: each one a view of memory on this rank.

A plain tensor is one box on every rank; a DTensor's and a ShardedTensor's boxes follow their own metadata, by the rules
of ``layouts``. ``all_boxes`` gathers the boxes of all ranks, and ``assign_senders`` decides who sends which. ``Stream``
makes tensors one sequence of bytes, of which any part can be read or written: each tensor (a view, of any strides)
contributes its elements in row-major order, from a multiple of 16 bytes on, so that a chunk whose bounds are multiples
of 16 cuts no element. Elements are copied as bits: no value is interpreted. ``destination_like`` and
``destination_on_mesh`` make what a rank fills.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias, cast

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh

from fsdpckpt import layouts
from fsdpckpt.comm.dtensor import DTensor, Placement, Shard, compute_local_shape_and_global_offset
from fsdpckpt.comm.protocol import Group
from fsdpckpt.errors import InternalError, StateDictMismatchError, UsageError
from fsdpckpt.ir import placements as ir
from fsdpckpt.ir.coverage import box_text, flaws
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.placements import Sharded
from fsdpckpt.ir.tensors import Box, Chunks, Int64Array, Tensor, contiguous_stride
from fsdpckpt.layouts.flattened import flat_boxes


@dataclass(frozen=True, slots=True)
class HeldBox:
    """``box`` of a global tensor, and ``data``, a view of the memory that holds it."""

    box: Box
    data: torch.Tensor


def kind_of(tensor: torch.Tensor) -> str:
    """``DTensor``, ``ShardedTensor`` or ``Tensor``. Raises UsageError for a tensor that is not dense."""
    if isinstance(tensor, DTensor):
        return "DTensor"
    if isinstance(tensor, ShardedTensor):
        return "ShardedTensor"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise UsageError(
            f"a tensor of layout {tensor.layout} cannot be sent between workers", next_step="make it dense"
        )
    return "Tensor"


def local_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The local shards of ``tensor``, or the tensor itself if it is plain.

    Raises UsageError for a subclass of Tensor (torchao's): its elements are not simply in its memory.
    """
    if isinstance(tensor, ShardedTensor):
        return [_simple(shard.tensor) for shard in tensor.local_shards()]
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return [_simple(tensor.to_local())]
    return [_simple(tensor)]


def _simple(tensor: torch.Tensor) -> torch.Tensor:
    if hasattr(tensor, "wait"):  # the result of a collective that is still in flight
        tensor = tensor.wait()
    if type(tensor) not in {torch.Tensor, torch.nn.Parameter}:
        raise UsageError(
            f"a tensor of the subclass {type(tensor).__module__}.{type(tensor).__qualname__} cannot be copied or sent "
            "between workers",
            next_step="turn it into plain tensors first",
        )
    return tensor


def empty_like(tensor: torch.Tensor, make: Callable[[Sequence[int], torch.dtype], torch.Tensor]) -> torch.Tensor:
    """A new tensor that is cut like ``tensor``, of local tensors that ``make(shape, dtype)`` returns."""
    if isinstance(tensor, ShardedTensor):
        copied = copy.copy(tensor)
        copied._local_shards = [
            replace(shard, tensor=make(shard.tensor.shape, tensor.dtype)) for shard in tensor.local_shards()
        ]
        return copied
    if isinstance(tensor, DTensor):
        local = make(tensor.to_local().shape, tensor.dtype)
        return DTensor(local, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return make(tensor.shape, tensor.dtype)


def held_boxes(tensor: torch.Tensor, key: str) -> list[HeldBox]:
    """The boxes of ``tensor`` on this rank; none if the rank holds nothing. ``key``: its name in messages."""
    if isinstance(tensor, ShardedTensor):
        return [
            HeldBox(Box(tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes)), local.detach())
            for s, local in zip(tensor.local_shards(), local_tensors(tensor), strict=True)
            if local.numel()
        ]
    if isinstance(tensor, DTensor):
        (local,) = local_tensors(tensor)
        spec = tensor._spec
        boxes = mesh_boxes(tuple(tensor.shape), spec.mesh, spec.placements, _shard_order(spec), key)
        return _held(local, boxes)
    plain = local_tensors(tensor)[0].detach()
    return [HeldBox(Box.whole(tuple(plain.shape)), plain)] if plain.numel() else []


def _held(local: torch.Tensor, boxes: Sequence[layouts.LocalBox]) -> list[HeldBox]:
    return [HeldBox(each.box, view_of(local, Box(each.local_offsets, each.box.sizes))) for each in boxes]


def mesh_boxes(
    shape: Sequence[int],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    order: Mapping[int, Sequence[int]] | None,
    key: str,
) -> tuple[layouts.LocalBox, ...]:
    """The boxes of a tensor of ``shape`` that this rank holds on ``mesh``; none if it is not on the mesh."""
    coordinate = coordinate_in_groups(mesh)
    ir_placements = [_placement(placement, len(shape), key) for placement in placements]
    if coordinate is None:
        return ()
    return layouts.local_boxes(shape, tuple(mesh.mesh.shape), ir_placements, coordinate, order)


def coordinate_in_groups(mesh: DeviceMesh) -> tuple[int, ...] | None:
    """This rank's place in each process group of ``mesh``, which says what it holds; None if it is not on the mesh."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    return layouts.group_coordinate(coordinate, tuple(mesh.mesh.shape), mesh.mesh.flatten().tolist())


def _placement(placement: Placement, dimensions: int, key: str) -> ir.Placement:
    if placement.is_replicate():
        return ir.Replicate()
    dim = getattr(placement, "dim", None)
    if dim is None:
        raise UsageError(
            f"a tensor placed {placement} holds no values, only partial sums on each rank",
            key=key,
            next_step="redistribute it to Replicate() or Shard(dim) first",
        )
    dim = dim + dimensions if dim < 0 else dim
    if not 0 <= dim < dimensions:
        raise UsageError(
            f"{placement} shards a dimension that a tensor of {dimensions} dimensions does not have", key=key
        )
    factor = getattr(placement, "split_factor", None)
    return ir.Shard(dim) if factor is None or type(placement) is Shard else ir.StridedShard(dim, factor)


def _shard_order(spec: object) -> Mapping[int, Sequence[int]] | None:
    """``DTensorSpec.shard_order`` (torch 2.10+), None if there is none."""
    entries = getattr(spec, "shard_order", None) or ()
    return {entry.tensor_dim: tuple(entry.mesh_dims) for entry in entries} or None


def view_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The elements of ``box`` in ``tensor``, as a view."""
    for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


@dataclass(frozen=True, slots=True)
class TensorBox:
    """Box ``box`` of tensor number ``index``."""

    index: int
    box: Box


def all_boxes(group: Group, boxes: Sequence[Sequence[Box]], dimensions: Sequence[int]) -> list[list[list[Box]]]:
    """Every rank's ``boxes`` (one list for each tensor, whose number of ``dimensions`` all know), by rank.
    Collective.
    """
    rows = cast("list[Int64Array]", group.all_gather_objects(_packed(boxes), name="gather the boxes of all ranks"))
    return [_unpacked(row, dimensions) for row in rows]


def _packed(boxes: Sequence[Sequence[Box]]) -> Int64Array:
    numbers: list[int] = []
    for tensor_boxes in boxes:
        numbers.append(len(tensor_boxes))
        for box in tensor_boxes:
            numbers += [*box.offsets, *box.sizes]
    return np.asarray(numbers, np.int64)


def _unpacked(row: Int64Array, dimensions: Sequence[int]) -> list[list[Box]]:
    numbers, at = row.tolist(), 0
    boxes: list[list[Box]] = []
    for d in dimensions:
        count, at = numbers[at], at + 1
        steps = range(at, at + count * 2 * d, 2 * d) if d else [at] * count
        boxes.append([Box(tuple(numbers[i : i + d]), tuple(numbers[i + d : i + 2 * d])) for i in steps])
        at += count * 2 * d
    return boxes


def check_coverage(keys: Sequence[str], shapes: Sequence[Sequence[int]], boxes_by_rank: list[list[list[Box]]]) -> None:
    """Raises StateDictMismatchError unless the ranks' boxes hold every element of every tensor, not counting
    replicas.
    """
    problems: list[str] = []
    for index, (key, shape) in enumerate(zip(keys, shapes, strict=True)):
        rows = [(rank, box) for rank, boxes in enumerate(boxes_by_rank) for box in boxes[index]]
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
        tensor = Tensor(DTYPES["uint8"], tuple(shape), chunks, sharded=True, cut=Sharded(()))
        problems += [f"{key}: {f.elements} elements {f.kind}, first {box_text(f.start, f.size)}" for f in flaws(tensor)]
    if problems:
        raise StateDictMismatchError("the ranks do not hold every element exactly once", details=problems)


def assign_senders(
    boxes_by_rank: list[list[list[Box]]], itemsizes: Sequence[int], *, to: int | None = None
) -> list[list[TensorBox]]:
    """For each rank the boxes that it sends: each box once, with replicas' holders balanced by bytes.

    ``to``: the only receiver; it sends itself the boxes that it holds.
    """
    loads = [0] * len(boxes_by_rank)
    sends: list[list[TensorBox]] = [[] for _ in boxes_by_rank]
    for index, itemsize in enumerate(itemsizes):
        holders: dict[Box, list[int]] = {}
        for rank, boxes in enumerate(boxes_by_rank):
            for box in boxes[index]:
                if 0 not in box.sizes:
                    holders.setdefault(box, []).append(rank)
        for box, ranks in holders.items():
            rank = to if to in ranks else min(ranks, key=lambda r: (loads[r], r))
            loads[rank] += box.numel * itemsize
            sends[rank].append(TensorBox(index, box))
    return sends


def on_group_device(group: Group, tensors: Sequence[torch.Tensor]) -> bool:
    """True if the data is on the group's device, so that no host memory is needed in between."""
    device = torch.device(group.device)
    return device.type != "cpu" and all(tensor.device == device for tensor in tensors)


ALIGNMENT = 16  # bytes: the largest element, complex128

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def stream_nbytes(sizes: Sequence[tuple[Sequence[int], int]]) -> int:
    """The length in bytes of the stream of tensors of these (shape, bytes per element)."""
    return sum(_aligned(prod(shape) * itemsize) for shape, itemsize in sizes)


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


class Stream:
    """The bytes of ``tensors`` as one sequence, read into buffers and written from buffers on any device."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._resolved = any(map(_is_lazy, tensors))  # a copy would be written to
        self._tensors = [_bits(tensor) for tensor in tensors]
        self._starts: list[int] = []
        self.size = 0
        for tensor in tensors:
            self._starts.append(self.size)
            self.size += _aligned(tensor.numel() * tensor.element_size())

    def read(self, offset: int, buffer: torch.Tensor) -> None:
        """Fill ``buffer`` (uint8) with the bytes from ``offset`` on."""
        self._move(offset, buffer, write=False)

    def write(self, offset: int, buffer: torch.Tensor) -> None:
        """Write the bytes in ``buffer`` to their tensors, from ``offset`` on."""
        if self._resolved:
            raise InternalError("a conjugated or negated view cannot be written to as bits")
        self._move(offset, buffer, write=True)

    def _move(self, offset: int, buffer: torch.Tensor, *, write: bool) -> None:
        end = offset + len(buffer)
        index = max(bisect_right(self._starts, offset) - 1, 0)
        while index < len(self._tensors) and self._starts[index] < end:
            tensor, start = self._tensors[index], self._starts[index]
            first = max(offset - start, 0)
            last = min(end - start, tensor.numel() * tensor.element_size())
            if first < last:
                _copy(tensor, first, buffer[start + first - offset : start + last - offset], write=write)
            index += 1


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether the memory of ``tensor`` has the conjugated or negated values of what it shows."""
    return tensor.is_conj() or tensor.is_neg()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain if plain.dtype is _BITS[plain.element_size()] else plain.view(_BITS[plain.element_size()])


def _copy(tensor: torch.Tensor, first: int, part: torch.Tensor, *, write: bool) -> None:
    """Copy between the bytes of ``tensor`` from ``first`` on, in row-major order, and all of ``part``."""
    itemsize = tensor.element_size()
    elements = part.view(tensor.dtype)
    if tensor.is_contiguous():
        flat = tensor.view(-1)[first // itemsize : first // itemsize + len(elements)]
        _assign(flat, elements, write=write)
        return
    at = 0
    for box in flat_boxes(tuple(tensor.shape), first // itemsize, len(elements)):
        count = box.numel
        _assign(view_of(tensor, box), elements[at : at + count].view(box.sizes), write=write)
        at += count


def _assign(tensor: torch.Tensor, elements: torch.Tensor, *, write: bool) -> None:
    if write:
        tensor.copy_(elements)
    else:
        elements.copy_(tensor)


Placements: TypeAlias = Sequence[Placement] | Callable[[str, tuple[int, ...]], Sequence[Placement] | None]
"""Those of all tensors, or a function of key and shape; if it returns None, the tensor stays whole on every rank."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a tensor goes on this rank. ``boxes``: what this rank needs of it, with the memory to fill.

    ``tensor``: the result, once that memory is filled. ``filled``: it is already.
    """

    boxes: list[HeldBox]
    tensor: torch.Tensor
    filled: bool = False


def destination_like(like: torch.Tensor, key: str, device: torch.device) -> Destination:
    """The memory of ``like`` itself; if that is on the meta device, new memory on ``device``, cut the same way.

    Raises UsageError for a tensor that cannot be filled.
    """
    if kind_of(like) == "Tensor" and _is_lazy(like):
        raise UsageError(
            "a conjugated or negated view cannot be filled", key=key, next_step="pass its resolve_conj().resolve_neg()"
        )
    if any(tensor.is_meta for tensor in local_tensors(like)):
        like = empty_like(like, lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device))
    boxes = held_boxes(like, key)
    if any(
        size > 1 and not stride
        for held in boxes
        for size, stride in zip(held.box.sizes, held.data.stride(), strict=True)
    ):
        raise UsageError("an expanded tensor cannot be filled", key=key, next_step="pass its contiguous()")
    return Destination(boxes, like)


def destination_on_mesh(
    shape: Sequence[int],
    dtype: torch.dtype,
    key: str,
    device: torch.device,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
) -> Destination:
    """A new DTensor, as ``distribute_tensor`` would make it from a whole contiguous tensor.

    Raises UsageError for placements that do not fit the mesh or the shape.
    """
    listed = isinstance(placements, (list, tuple)) and all(isinstance(placement, Placement) for placement in placements)
    if not listed or len(placements) != mesh.ndim:
        raise UsageError(
            f"the placements are {placements!r}, and the mesh has {mesh.ndim} dimension{'s' if mesh.ndim > 1 else ''}",
            next_step="pass a list of one placement for each dimension of the mesh",
        )
    boxes = mesh_boxes(shape, mesh, placements, None, key)
    local_shape = layouts.local_shape(boxes)
    if local_shape is None:
        # This rank holds nothing, of a shape that torch chooses.
        local_shape = tuple(compute_local_shape_and_global_offset(tuple(shape), mesh, list(placements))[0])
    local = torch.empty(local_shape, dtype=dtype, device=device)
    tensor = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=contiguous_stride(shape)
    )
    return Destination(_held(local, boxes), tensor)
