"""Layout ``flattened``: FSDP1's flat parameters, and which slice of which parameter each rank holds.

The rules follow ``torch/distributed/fsdp/_flat_param.py``: ``FlatParamHandle._init_flat_param_and_metadata`` (order,
alignment, padding), ``_get_shard`` and ``_get_shard_metadata`` (shards), ``flatten_tensors`` (memory order).

With ``use_orig_params=False`` the parameters follow each other without gaps, every rank gets ceil(total / ranks)
elements and the last ranks are filled up with zeros. With ``use_orig_params=True`` each parameter begins at a multiple
of 16 bytes, the end is padded to a multiple of the ranks, and all of this padding holds the number 42.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from fsdpckpt.ir.tensors import Box, Int64Array
from fsdpckpt.ir.units import FLAT_PARAM, Strategy, Unit, Units

FILLER = 42
"""What FSDP1 writes into alignment padding (``FlatParamHandle._construct_padding_tensor``)."""

_ALIGNED_BYTES = 16


def is_flat_key(key: object) -> bool:
    """Whether a key of a state dict names a flat parameter: ``_flat_param`` or ``<unit>._flat_param``."""
    return isinstance(key, str) and (key == FLAT_PARAM or key.endswith(f".{FLAT_PARAM}"))


def alignment(itemsize: int) -> int:
    """Parameters begin at multiples of this many elements under ``use_orig_params=True``.

    ``itemsize``: bytes of ``MixedPrecision.param_dtype`` if there is one, else of the parameters' own dtype
    (``_get_aligned_numel``).
    """
    return max(_ALIGNED_BYTES // itemsize, 1)


@dataclass(frozen=True, slots=True, eq=False)
class FlatSlices:
    """Which rank holds which elements of which parameter: one row for each slice, sorted by parameter, then rank.

    ``param``: index in the unit. ``begin``, ``count``: elements of the flattened parameter. ``offset``: where the slice
    begins in the rank's shard, in elements. Empty slices are not listed.
    """

    rank: Int64Array
    param: Int64Array
    begin: Int64Array
    count: Int64Array
    offset: Int64Array


@dataclass(frozen=True, slots=True)
class FlatPart:
    """``count`` elements of a rank's shard: of parameter ``param`` from element ``begin``, or of the value ``filler``
    if ``param`` is None.
    """

    param: int | None
    begin: int
    count: int
    filler: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class FlatLayout:
    """One flat parameter over the ranks of its sharding group; everything in elements.

    ``start``, ``numel`` (n,): the range of each parameter in the flat parameter. ``total``: its length,
    ``_unpadded_unsharded_size``, alignment included. ``shard_numel``: the length of every rank's shard, padding
    included. ``shard_count``: the number of different shards, 1 for NO_SHARD.
    """

    start: Int64Array
    numel: Int64Array
    total: int
    shard_numel: int
    shard_count: int

    @classmethod
    def of(
        cls, numels: Sequence[int], *, world_size: int, aligned: int | None = None, sharded: bool = True
    ) -> FlatLayout:
        """The layout of parameters of ``numels`` elements over a sharding group of ``world_size`` ranks.

        ``aligned``: from ``alignment`` under ``use_orig_params=True``, None for ``use_orig_params=False``. ``sharded``
        is False for NO_SHARD, which pads the same way and cuts nothing.
        """
        numel = np.asarray(numels, np.int64).reshape(len(numels))
        padded = numel if aligned is None else -(-numel // aligned) * aligned
        start = np.cumsum(padded) - padded
        total = int(start[-1] + numel[-1]) if len(numel) else 0
        if aligned is not None:
            total = -(-total // world_size) * world_size
        shards = world_size if sharded else 1
        return cls(start, numel, total, -(-total // shards), shards)

    def shard_range(self, rank: int) -> tuple[int, int]:
        """(begin, end) in the flat parameter of the shard of ``rank``, without the padding to ``shard_numel``."""
        begin = min(rank * self.shard_numel, self.total)
        return begin, min(begin + self.shard_numel, self.total)

    def slices(self) -> FlatSlices:
        """All slices of all ranks."""
        filled = np.flatnonzero(self.numel)
        start, numel = self.start[filled], self.numel[filled]
        shard = max(self.shard_numel, 1)
        first = start // shard  # the first rank that holds a slice of each parameter
        chunks = (start + numel - 1) // shard - first + 1
        param = np.repeat(np.arange(len(filled)), chunks)
        rank = first[param] + np.arange(len(param)) - (np.cumsum(chunks) - chunks)[param]
        begin = np.maximum(start[param], rank * shard)
        end = np.minimum(start[param] + numel[param], (rank + 1) * shard)
        return FlatSlices(rank, filled[param], begin - start[param], end - begin, begin - rank * shard)

    def counts(self) -> Int64Array:
        """The number of elements of each parameter in each shard: (parameters, shards)."""
        slices = self.slices()
        table = np.zeros((len(self.numel), self.shard_count), np.int64)
        table[slices.param, slices.rank] = slices.count
        return table

    def parts(self, rank: int) -> list[FlatPart]:
        """The whole shard of ``rank``, front to back: slices of parameters, alignment (42), right padding (0)."""
        begin, end = self.shard_range(rank)
        parts: list[FlatPart] = []
        low = int(np.searchsorted(self.start + self.numel, begin, side="right"))
        at = begin
        for index in range(low, len(self.start)):
            start, numel = int(self.start[index]), int(self.numel[index])
            if start >= end:
                break
            if not numel:
                continue
            if start > at:
                parts.append(FlatPart(None, 0, start - at, FILLER))
                at = start
            count = min(start + numel, end) - at
            parts.append(FlatPart(index, at - start, count))
            at += count
        if at < end:
            parts.append(FlatPart(None, 0, end - at, FILLER))
        if self.shard_numel > end - begin:
            parts.append(FlatPart(None, 0, self.shard_numel - (end - begin)))
        return parts


def layout_of(unit: Unit, *, use_orig_params: bool, world_size: int, shard_size: int) -> FlatLayout:
    """The layout of one unit among ``world_size`` ranks in sharding groups of ``shard_size``.

    NO_SHARD pads for all ranks and cuts nothing. A sharding group of one rank cuts nothing either, and pads for that
    rank alone (``_init_core_state``).
    """
    sharded = unit.strategy is not Strategy.NO_SHARD
    return FlatLayout.of(
        [param.numel for param in unit.params],
        world_size=shard_size if sharded else world_size,
        aligned=alignment(unit.aligning_dtype.itemsize) if use_orig_params else None,
        sharded=sharded,
    )


@dataclass(frozen=True, eq=False)
class PlacedUnit:
    """One unit and its layout in a sharding group."""

    unit: Unit
    layout: FlatLayout
    _parts: dict[int, list[FlatPart]] = field(default_factory=dict)

    @property
    def sharded(self) -> bool:
        """Whether FSDP1 shards it at all: it does not under NO_SHARD or in a group of one rank."""
        return self.layout.shard_count > 1

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """The shards that have elements, in order."""
        ranges = map(self.layout.shard_range, range(self.layout.shard_count))
        return tuple(Box((begin,), (end - begin,)) for begin, end in ranges if begin < end)

    def parts(self, rank: int) -> list[FlatPart]:
        """The shard that ``rank`` holds, front to back. Computed once for each shard, as sections and states
        share it.
        """
        index = rank % self.layout.shard_count
        parts = self._parts.get(index)
        if parts is None:
            parts = self._parts[index] = self.layout.parts(index)
        return parts


def place_units(units: Units, world_size: int) -> list[PlacedUnit]:
    """Every unit with its layout among ``world_size`` ranks."""
    orig, shard_size = units.use_orig_params, units.shard_size or world_size
    return [
        PlacedUnit(unit, layout_of(unit, use_orig_params=orig, world_size=world_size, shard_size=shard_size))
        for unit in units.units
    ]


def flat_boxes(shape: Sequence[int], begin: int, count: int, order: Sequence[int] | None = None) -> list[Box]:
    """Elements [begin, begin + count) of a flattened tensor as boxes, one after the other.

    ``order``: the dimensions from slowest to fastest in memory, None for row-major. A range is at most 2 * ndim - 1
    boxes, each contiguous in that order: the rest of a row, whole rows, the rest of a plane, and so on.
    """
    dims = tuple(range(len(shape))) if order is None else tuple(order)
    boxes: list[Box] = []
    end = begin + count
    while begin < end:
        # The slowest dimension with ``begin`` at its boundary and room for a slice: one box of whole slices.
        inner, level = 1, len(dims)
        while level:
            slice_numel = inner * shape[dims[level - 1]]
            if begin % slice_numel or begin + slice_numel > end:
                break
            level -= 1
            inner = slice_numel
        start, size, rest = [0] * len(shape), [1] * len(shape), begin
        for dim in reversed(dims):
            rest, start[dim] = divmod(rest, shape[dim])
        for dim in dims[level:]:
            size[dim] = shape[dim]
        if level:
            dim = dims[level - 1]
            size[dim] = min(shape[dim] - start[dim], (end - begin) // inner)
            inner *= size[dim]
        boxes.append(Box(tuple(start), tuple(size)))
        begin += inner
    return boxes
