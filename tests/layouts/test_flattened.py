"""Flat parameters against real FSDP1 for any rank of any world, and the identities of the arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp._flat_param import _get_aligned_numel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdpckpt.flat.live import dtype_of, flattens_in_memory_order
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.tensors import Box
from fsdpckpt.ir.unit_lists import units_of_lists
from fsdpckpt.ir.units import Strategy, Unit
from fsdpckpt.layouts.flattened import FILLER, FlatLayout, alignment, flat_boxes, is_flat_key, layout_of, place_units
from tests.oracle.compare import identical
from tests.oracle.fake_group import as_rank

F32 = DTYPES["float32"]
WORLDS = (1, 2, 3, 5, 8, 16, 64, 512)
SHAPES = ((17, 9), (1,), (5, 3, 2), (28,), (3, 1), (7, 11), (2,))  # of one unit, in order


class Block(nn.Module):
    """Parameters of odd sizes, random, one of them in memory order."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.params = nn.ParameterList([torch.randn(shape).to(dtype) for shape in SHAPES])
        self.strided = nn.Parameter(torch.randn(2, 4, 5, 3).to(dtype).to(memory_format=torch.channels_last))


def flattened_by_fsdp(
    dtype: torch.dtype, world_size: int, rank: int, group: int, **options: Any
) -> Iterator[tuple[list[torch.Tensor], Any]]:
    """(the unit's parameters before, its flat parameter) of real FSDP1 on this rank, root and nested."""
    with as_rank(rank, world_size):
        if options.get("sharding_strategy") is ShardingStrategy.HYBRID_SHARD:
            own = range(rank - rank % group, rank - rank % group + group)
            options["process_group"] = tuple(dist.new_group(list(ranks)) for ranks in (own, range(world_size)))
        torch.manual_seed(11)
        model = nn.Sequential(nn.Linear(3, 5, dtype=dtype), Block(dtype))
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        wrapped = FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), **options
        )
        for module in FullyShardedDataParallel.fsdp_modules(wrapped):
            prefix = "1." if isinstance(module.module, Block) else ""
            flat = module._handle.flat_param
            yield [before[prefix + name] for name in flat._fqns], flat


def ranks_of(world_size: int) -> list[int]:
    chosen = {0, 1, 2, world_size // 2, world_size - 2, world_size - 1}
    return sorted(rank for rank in chosen if 0 <= rank < world_size)


def check_against_fsdp(
    dtype: torch.dtype, world_size: int, rank: int, *, orig: bool, group: int | None = None, **options: Any
) -> None:
    size = group or world_size
    for params, flat in flattened_by_fsdp(dtype, world_size, rank, size, use_orig_params=orig, **options):
        mixed: MixedPrecision | None = options.get("mixed_precision")
        low = mixed.param_dtype if mixed is not None else None
        strategy = options.get("sharding_strategy", ShardingStrategy.FULL_SHARD)
        unit = Unit(
            "",
            tuple(Parameter(str(number), tuple(param.shape), dtype_of(dtype)) for number, param in enumerate(params)),
            Strategy[strategy.name],
            None if low is None else dtype_of(low),
        )
        layout = layout_of(unit, use_orig_params=orig, world_size=world_size, shard_size=size)
        ends = np.cumsum(flat._numels_with_padding)
        starts = (ends - flat._numels_with_padding)[~np.asarray(flat._is_padding_mask)]
        assert layout.start.tolist() == starts.tolist()
        assert layout.total == flat._unpadded_unsharded_size.numel() == ends[-1]
        assert layout.shard_numel == flat._sharded_size.numel()
        own = 0 if layout.shard_count == 1 else rank % size
        if layout.shard_count > 1:
            assert slices_of(layout, own) == [
                (number, info.intra_param_start_idx, info.numel_in_shard, info.offset_in_shard)
                for number, info in enumerate(flat._shard_param_infos)
                if info.in_shard
            ]
        assert identical(written(layout, own, params, dtype), flat.detach())


def slices_of(layout: FlatLayout, rank: int) -> list[tuple[int, int, int, int]]:
    found = layout.slices()
    columns = zip(found.rank, found.param, found.begin, found.count, found.offset, strict=True)
    return [tuple(map(int, row[1:])) for row in columns if row[0] == rank]  # type: ignore[misc]


def written(layout: FlatLayout, rank: int, params: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The shard of ``rank``, put together from ``parts`` and ``flat_boxes``."""
    chunks = []
    for part in layout.parts(rank):
        if part.param is None:
            chunks.append(torch.full((part.count,), part.filler, dtype=dtype))
            continue
        param = params[part.param]
        row_major = param.is_contiguous() or not flattens_in_memory_order()
        order = None if row_major else tuple(sorted(range(param.ndim), key=lambda d: -param.stride(d)))
        for box in flat_boxes(param.shape, part.begin, part.count, order):
            cut = param[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))]
            chunks.append((cut if order is None else cut.permute(order)).reshape(-1))
    return torch.cat(chunks) if chunks else torch.empty(0, dtype=dtype)


NO_SHARD, HYBRID = ({"sharding_strategy": ShardingStrategy[name]} for name in ("NO_SHARD", "HYBRID_SHARD"))
SINGLE = torch.float32
HELD: dict[str, tuple[torch.dtype, int, dict[str, Any]]] = {
    **{f"{dtype} on {ranks}": (dtype, ranks, {})
       for dtype in (SINGLE, torch.bfloat16, torch.float64) for ranks in WORLDS},
    # Without sharding every rank holds all, with the same padding
    **{f"NO_SHARD on {ranks}": (SINGLE, ranks, NO_SHARD) for ranks in (1, 2, 3, 5, 64)},
    # Groups of hybrid sharding pad for their own ranks
    **{f"groups of {group} of {ranks}": (SINGLE, ranks, {**HYBRID, "group": group})
       for ranks, group in ((7, 1), (4, 2), (10, 5))},
    # Mixed precision decides the alignment
    **{f"mixed with {low} on {ranks}": (SINGLE, ranks, {"mixed_precision": MixedPrecision(param_dtype=low)})
       for low in (torch.bfloat16, torch.float64, torch.float16) for ranks in (1, 2, 3, 5, 16)},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("name", HELD)
def test_every_shard_is_the_one_fsdp_holds(name: str, orig: bool) -> None:
    dtype, world_size, options = HELD[name]
    for rank in ranks_of(world_size):
        check_against_fsdp(dtype, world_size, rank, orig=orig, **options)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64, torch.complex128])
def test_parameters_are_aligned_as_fsdp_aligns_them(dtype: torch.dtype) -> None:
    assert alignment(dtype.itemsize) == _get_aligned_numel(dtype)


@pytest.mark.parametrize(
    ("key", "flat"),
    [("_flat_param", True), ("a.b._flat_param", True), ("a_flat_param", False), ("_flat_param.a", False), (3, False)],
)
def test_a_flat_parameter_is_known_by_the_last_part_of_its_key(key: object, flat: bool) -> None:
    assert is_flat_key(key) is flat


layouts = st.tuples(
    st.lists(st.integers(0, 40) | st.just(1), min_size=1, max_size=12).filter(any),
    st.sampled_from([1, 2, 3, 4, 5, 7, 16, 100]),
    st.sampled_from([None, 1, 2, 4, 8, 16]),
    st.booleans(),
)


def build(drawn: tuple[list[int], int, int | None, bool]) -> FlatLayout:
    numels, world_size, aligned, sharded = drawn
    return FlatLayout.of(numels, world_size=world_size, aligned=aligned, sharded=sharded)


@settings(max_examples=200, deadline=None)
@given(layouts)
def test_shards_in_rank_order_are_the_flat_parameter(drawn: tuple[list[int], int, int | None, bool]) -> None:
    """Flatten, cut, join: each element of each parameter once, in order; only filler in between, zeros at the end."""
    layout, (numels, _, aligned, _) = build(drawn), drawn
    joined: list[tuple[int | None, int]] = []
    for rank in range(layout.shard_count):
        parts = layout.parts(rank)
        assert sum(part.count for part in parts) == layout.shard_numel
        joined += [(p.param, p.begin + i if p.param is not None else p.filler) for p in parts for i in range(p.count)]
    assert [item for item in joined if item[0] is not None] == [
        (n, i) for n, size in enumerate(numels) for i in range(size)
    ]
    assert {item[1] for item in joined[: layout.total] if item[0] is None} <= {FILLER}
    assert set(joined[layout.total :]) <= {(None, 0)}
    if aligned is None:
        assert layout.total == sum(numels)
    else:
        assert all(start % aligned == 0 for start in layout.start.tolist())
        assert layout.total - sum(numels) < aligned * len(numels) + drawn[1]
    slices = []
    for rank in range(layout.shard_count):
        offset = 0
        for part in layout.parts(rank):
            if part.param is not None:
                slices.append((rank, part.param, part.begin, part.count, offset))
            offset += part.count
        begin, end = layout.shard_range(rank)
        assert 0 <= begin <= end <= layout.total
        assert end - begin <= layout.shard_numel
    found = layout.slices()
    rows = list(zip(found.rank, found.param, found.begin, found.count, found.offset, strict=True))
    assert sorted(slices, key=lambda row: (row[1], row[0])) == [tuple(map(int, row)) for row in rows]


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int, tuple[int, ...] | None]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    begin = draw(st.integers(0, prod(shape)))
    count = draw(st.integers(0, prod(shape) - begin))
    order = draw(st.none() | st.permutations(range(len(shape))).map(tuple))
    return shape, begin, count, order


@settings(max_examples=200, deadline=None)
@given(ranges())
def test_boxes_of_a_range_are_its_elements_in_order(
    drawn: tuple[tuple[int, ...], int, int, tuple[int, ...] | None],
) -> None:
    shape, begin, count, order = drawn
    axes = tuple(range(len(shape))) if order is None else order
    memory = np.arange(prod(shape)).reshape([shape[axis] for axis in axes])
    logical = memory.transpose(np.argsort(axes))
    assert logical.shape == shape
    boxes = flat_boxes(shape, begin, count, order)
    read = [
        logical[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))].transpose(axes).reshape(-1)
        for box in boxes
    ]
    assert np.concatenate([np.empty(0, int), *read]).tolist() == list(range(begin, begin + count))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


def test_a_unit_without_elements_is_a_layout_without_shards() -> None:
    for numels in ([], [0], [0, 0]):
        layout = FlatLayout.of(numels, world_size=3)
        assert (layout.total, layout.shard_numel, layout.parts(2), len(layout.slices().rank)) == (0, 0, [], 0)


def test_a_thousand_units_on_four_thousand_ranks_are_laid_out_in_moments() -> None:
    import time

    generator = np.random.default_rng(3)
    units = [generator.integers(1, 5_000_000, 9).tolist() for _ in range(1000)]
    begun = time.perf_counter()
    rows = sum(len(FlatLayout.of(numels, world_size=4096, aligned=4).slices().rank) for numels in units)
    assert rows > 4_000_000
    assert time.perf_counter() - begun < 5  # 2 s on an idle machine is what is promised; this one may be busy


@pytest.mark.parametrize(("world_size", "shard_size", "shards"), [(4, None, 4), (6, 2, 2), (1, None, 1), (3, 1, 1)])
def test_units_are_placed_in_sharding_groups_and_shards_without_elements_have_no_box(world_size, shard_size, shards):
    small, large = (Unit(prefix, (Parameter(f"{prefix}.w", (numel,), F32),)) for prefix, numel in (("a", 2), ("b", 11)))
    units = units_of_lists((small, large), use_orig_params=False, parameters=("a.w", "b.w"), shard_size=shard_size)
    placed = place_units(units, world_size)
    assert [one.unit for one in placed] == [small, large]
    for one, numel in zip(placed, (2, 11), strict=True):
        assert (one.layout.shard_count, one.sharded) == (shards, shards > 1)
        starts = range(0, numel, -(-numel // shards))
        assert one.boxes == tuple(Box((at,), (min(-(-numel // shards), numel - at),)) for at in starts)
        assert one.parts(shards + 1) is one.parts(1 % shards)
