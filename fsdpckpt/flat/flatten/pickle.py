"""The pickle of one rank's flattened file: flat parameters, their shards, and slices of single parameters.

What FSDP1's ``LOCAL_STATE_DICT`` and the optimizer's own state dict hold on that rank (torch 2.13,
``torch/distributed/fsdp/_state_dict_utils.py`` and ``_optim_utils.py``), on a CPU device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from fsdpckpt.errors import SourceUnsupportedError
from fsdpckpt.formats.pickle.opcodes import StorageView
from fsdpckpt.ir.dtypes import DType, numpy_dtype
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.targets import TargetFile, WrittenTensor
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Value
from fsdpckpt.layouts.flattened import FlatPart, PlacedUnit, flat_boxes
from fsdpckpt.writers.rank_pickle import ShardedTensorPickle, ShardList


@dataclass(frozen=True, slots=True, eq=False)
class FlatShard:
    """A 1-D tensor of ``numel`` elements made of ``parts``, front to back: a rank's shard, or its slice of a parameter.

    ``params`` and ``tensors``: what ``FlatPart.param`` indexes.
    """

    params: Sequence[Parameter]
    tensors: Sequence[Tensor]
    parts: Sequence[FlatPart]
    dtype: DType
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def fill(self, file: TargetFile) -> None:
        for part in self.parts:
            if part.param is None:
                # Never large: padding is at most 16 bytes for each parameter and one element for each rank.
                file.add_literal(_element(part.filler, self.dtype) * part.count)
            else:
                tensor, param = self.tensors[part.param], self.params[part.param]
                _write_item(file, tensor, param, part.begin, part.count, self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class UnitState:
    """One state of a unit's parameters, or of one parameter: a tensor for each of ``params``, all written as ``dtype``.

    ``block``: the number of parameter elements for one element of the state; more than 1 for the scales of
    bitsandbytes' 8-bit states.
    """

    params: Sequence[Parameter]
    tensors: Sequence[Tensor]
    dtype: DType
    block: int = 1

    @classmethod
    def of_scales(cls, tensors: Sequence[Tensor], dtype: DType, block: int) -> UnitState:
        return cls([Parameter("", tensor.shape, tensor.dtype) for tensor in tensors], tensors, dtype, block)

    def shard(self, parts: Sequence[FlatPart]) -> FlatShard:
        """The state of the slice that consists of ``parts``."""
        if self.block > 1:
            parts = [
                replace(part, begin=part.begin // self.block, count=-(-part.count // self.block)) for part in parts
            ]
        return FlatShard(self.params, self.tensors, parts, self.dtype, sum(part.count for part in parts))


@dataclass(frozen=True, slots=True, eq=False)
class WholeParam:
    """A tensor in its parameter's memory order, which is not row-major. ``stride``: in elements."""

    content: WrittenTensor
    stride: tuple[int, ...]


def in_memory_order(
    param: Parameter | None, leaf: Tensor | Value, casts: Mapping[Tensor, DType]
) -> WholeParam | Tensor | Value:
    """``leaf`` in the memory order of ``param``, if it has its shape and that order is not row-major."""
    if param is None or param.stride is None or not isinstance(leaf, Tensor) or leaf.shape != param.shape:
        return leaf
    return WholeParam(WrittenTensor(leaf, casts.get(leaf, leaf.dtype), param.order), param.stride)


@dataclass(frozen=True, slots=True, eq=False)
class FlatParameter:
    """A flat parameter of ``total`` elements as a ShardedTensor; ``shard`` is None on a rank without elements."""

    placed: PlacedUnit
    shard: FlatShard | None
    dtype: DType


@dataclass(frozen=True, slots=True, eq=False)
class FlatView:
    """``count`` elements of a shard from element ``offset``, in the shard's own memory; with None, an empty tensor."""

    shard: FlatShard | None
    offset: int
    count: int
    dtype: DType


class FlatPickle(ShardedTensorPickle):
    """Writes the dict of flattened sections for ``rank`` of ``world_size``."""

    def __init__(self, *, rank: int, world_size: int, casts: Mapping[Tensor, DType]) -> None:
        super().__init__(rank=rank, world_size=world_size, shardings={}, casts=casts, canonical={})
        self._shard_size = world_size  # of the flat parameter that is written
        self._writers.update(
            {
                FlatShard: self._flat_shard,
                FlatView: self._flat_view,
                FlatParameter: self._flat_parameter,
                WholeParam: self._whole_param,
            }
        )

    def group(self) -> tuple[int, int]:
        return self.rank % self._shard_size, self._shard_size

    def _flat_shard(self, value: FlatShard) -> None:
        self.view(self._view(value, 0, value.numel))

    def _flat_view(self, value: FlatView) -> None:
        if value.shard is None:
            self.view(self._empty(value.dtype))
        else:
            self.view(self._view(value.shard, value.offset, value.count))

    def _view(self, shard: FlatShard, offset: int, count: int) -> StorageView:
        key = self._keys.get(shard)
        if key is None:
            key = self._keys[shard] = self.records.add(shard)
        return StorageView(key, shard.dtype, offset, (count,), (1,), shard.nbytes)

    def _empty(self, dtype: DType) -> StorageView:
        """What FSDP1 uses for a parameter without elements on this rank: one empty tensor for all of them."""
        key = self._keys.get(dtype)
        if key is None:
            key = self._keys[dtype] = self.records.add(b"")
        return StorageView(key, dtype, 0, (0,), (1,), 0)

    def _whole_param(self, value: WholeParam) -> None:
        content = value.content
        key, shape = self.records.add(content), content.tensor.shape
        self.view(StorageView(key, content.dtype, 0, shape, value.stride, content.nbytes))

    def _flat_parameter(self, value: FlatParameter) -> None:
        layout = value.placed.layout
        self._shard_size = layout.shard_count
        index, _ = self.group()
        first = self.rank - index
        local_shard = None if value.shard is None else (index, self._view(value.shard, 0, value.shard.numel))
        boxes = value.placed.boxes
        shards = ShardList((layout.total, layout.shard_numel), tuple(range(first, first + len(boxes))), boxes)
        self.sharded_tensor(
            (layout.total,), value.dtype, shards, local_shard, requires_grad=value.placed.unit.requires_grad
        )


def _write_item(file: TargetFile, tensor: Tensor, param: Parameter, begin: int, count: int, dtype: DType) -> None:
    """Write items for a range of a flattened parameter, one box after the other."""
    if count == param.numel:
        file.add_write_item(tensor, dtype=dtype, order=param.order)
        return
    for box in _boxes(param.shape, begin, count, param.order):
        file.add_write_item(tensor, start=box.offsets, size=box.sizes, dtype=dtype, order=param.order)


# The states of one parameter are cut alike.
_boxes = lru_cache(maxsize=4096)(flat_boxes)


def _element(value: int, dtype: DType) -> bytes:
    if not value:
        return bytes(dtype.itemsize)
    if dtype.numpy is None:
        raise SourceUnsupportedError(
            f"a flat parameter of {dtype.name} cannot be padded: the number {value} is unknown"
        )
    return np.array(value, numpy_dtype(dtype)).tobytes()
