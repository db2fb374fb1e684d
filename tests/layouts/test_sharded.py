"""The sharded layout against PyTorch's own: torch.chunk, FSDP1, DTensor and fully_shard, on the fake process group."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, _utils, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from fsdpckpt.ir import placements as ir
from fsdpckpt.ir.tensors import Box
from fsdpckpt.layouts import (
    LocalBox,
    as_fully_shard,
    chunk,
    distribute_tensor_boxes,
    local_boxes,
    local_shape,
    mesh_box,
    on_mesh,
    row_sharding,
    shard_order_of,
)
from tests.oracle.compare import identical
from tests.oracle.fake_group import as_rank
from tests.readers.played_ranks import shard_rows_twice

ROWS = (1, 2, 3, 5, 7, 8, 9, 12, 13)


def ours(placements: Sequence[Any]) -> list[ir.Placement]:
    made: list[ir.Placement] = []
    for placement in placements:
        if isinstance(placement, _StridedShard):
            made.append(ir.StridedShard(placement.dim, placement.split_factor))
        elif isinstance(placement, Shard):
            made.append(ir.Shard(placement.dim))
        else:
            made.append(ir.Replicate())
    return made


def cut_out(whole: torch.Tensor, boxes: Sequence[LocalBox], shape: Sequence[int]) -> torch.Tensor:
    """A local tensor of ``shape``, filled from the global one box by box."""
    local = torch.full(tuple(shape), -1, dtype=whole.dtype)
    for held in boxes:
        there = tuple(slice(at, at + n) for at, n in zip(held.box.offsets, held.box.sizes, strict=True))
        here = tuple(slice(at, at + n) for at, n in zip(held.local_offsets, held.box.sizes, strict=True))
        assert (local[here] == -1).all()
        local[here] = whole[there]
    return local


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


@given(length=st.integers(0, 200), parts=st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_chunks_are_those_of_torch_chunk(length: int, parts: int) -> None:
    chunks = list(torch.chunk(numbered(length), parts)) if length else []
    chunks += [numbered(0)] * (parts - len(chunks))
    for index in range(parts):
        start, size = chunk(length, parts, index)
        assert identical(numbered(length)[start : start + size], chunks[index])
        assert mesh_box((length, 10), row_sharding(parts), index) == Box((start, 0), (size, 10))


@pytest.mark.parametrize("mesh_shape", [(5,), (2, 2), (3, 2), (2, 1, 3)])
def test_what_distribute_tensor_gives_each_rank(mesh_shape: tuple[int, ...]) -> None:
    world = torch.Size(mesh_shape).numel()
    kinds = [Shard(0), Shard(1), Replicate(), _StridedShard(0, split_factor=2), _StridedShard(0, split_factor=3)]
    kinds = kinds[: 5 if len(mesh_shape) < 3 else 4]
    compared = 0
    for rank in range(world):
        with as_rank(rank, world), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mesh = init_device_mesh("cpu", mesh_shape)
            place = mesh.get_coordinate()
            assert place is not None
            for rows, placements in itertools.product(ROWS[::2], itertools.product(kinds, repeat=len(mesh_shape))):
                whole = numbered(rows, 5)
                local = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
                boxes = distribute_tensor_boxes(whole.shape, mesh_shape, ours(placements), place)
                assert identical(cut_out(whole, boxes, local.shape), local), (rows, placements, place)
                if boxes:
                    assert local_shape(boxes) == tuple(local.shape)
                if not any(isinstance(placement, _StridedShard) for placement in placements):
                    assert boxes == local_boxes(whole.shape, mesh_shape, ours(placements), place)
                compared += 1
    assert compared >= 5 * 5 * world


@pytest.mark.parametrize(("data", "tensor"), [(2, 2), (3, 2), (4, 2), (2, 4), (3, 3)])
def test_what_fully_shard_leaves_of_a_tensor_parallel_shard(data: int, tensor: int) -> None:
    """Both cut dimension 0; torch's own offsets are wrong for some of these sizes."""
    weights = {f"w{rows}": numbered(rows, 3).float() for rows in ROWS}
    seen = dict.fromkeys(weights, 0)
    for rank in range(data * tensor):
        with as_rank(rank, data * tensor):
            state = shard_rows_twice(weights, data, tensor)
            for name, whole in weights.items():
                value = state[f"{name}.weight"]
                placements = ours(value.placements)
                assert isinstance(placements[0], ir.StridedShard)
                boxes = local_boxes(whole.shape, (data, tensor), placements, divmod(rank, tensor))
                assert identical(cut_out(whole, boxes, value.to_local().shape), value.to_local()), (name, rank)
                seen[name] += sum(held.box.numel for held in boxes)
    assert seen == {name: whole.numel() for name, whole in weights.items()}


def test_shards_are_cut_in_the_order_the_spec_says() -> None:
    placements = [ir.Shard(0), ir.Shard(0)]
    default = local_boxes((8, 2), (2, 2), placements, (0, 1))
    reversed_order = local_boxes((8, 2), (2, 2), placements, (0, 1), {0: (1, 0)})
    assert default == (LocalBox(Box((2, 0), (2, 2)), (0, 0)),)
    assert reversed_order == (LocalBox(Box((4, 0), (2, 2)), (0, 0)),)
    strided = [ir.StridedShard(0, 2), ir.Shard(0)]
    assert local_boxes((8, 2), (2, 2), strided, (0, 1)) == reversed_order


def test_split_factors_are_decoded_as_dtensor_encodes_them() -> None:
    """Against DTensorSpec's encoding, for every order of three mesh dimensions."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry

    with as_rank(0, 24):
        mesh = init_device_mesh("cpu", (4, 3, 2))
        for order in itertools.permutations(range(3)):
            entry = (ShardOrderEntry(tensor_dim=0, mesh_dims=order),)
            placements = DTensorSpec._convert_shard_order_to_StridedShard(entry, (Shard(0),) * 3, mesh)
            decoded = shard_order_of((4, 3, 2), ours(placements))
            assert decoded == {0: order}


def test_packed_weights_are_interleaved_boxes() -> None:
    boxes = local_boxes((8, 3), (2,), [ir.StridedShard(0, 2)], (1,))
    assert boxes == (LocalBox(Box((2, 0), (2, 3)), (0, 0)), LocalBox(Box((6, 0), (2, 3)), (2, 0)))


def test_placements_read_as_pytorch_writes_them() -> None:
    placements = [ir.Replicate(), ir.StridedShard(1, 2), ir.Shard(0)]
    assert ir.placements_text(placements) == "[Replicate(), _StridedShard(1, sf=2), Shard(0)]"


@pytest.mark.skipif(
    not hasattr(_utils, "_compute_local_shape_and_global_offset"),
    reason="this torch computes boxes for live meshes only",
)
@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (2, 4), (3, 2), (8, 8), (2, 2, 2), (4, 4, 4)])
def test_each_rank_of_a_mesh_has_the_box_that_torch_says_where_that_is_right(sizes: tuple[int, ...]) -> None:
    """Empty boxes and their offsets too. Where torch is wrong, another size tells: no rank holds so many rows."""
    mesh = ir.MeshShape(sizes)
    kinds = (Shard(0), Shard(1), Replicate())
    compared = wrong = 0
    for rows, plan in itertools.product((1, 2, 5, 7, 9, 16), itertools.product(kinds, repeat=len(sizes))):
        if max(map(plan.count, plan)) > 2:
            continue  # of three cuts of one dimension torch's offsets are wrong with right sizes, too
        placed = as_fully_shard(mesh, ours(plan))
        theirs = [_theirs(placement) for placement in placed.placements]
        for rank in range(0, mesh.world_size, 1 + mesh.world_size // 20):
            place = mesh.coordinate(rank)
            box = mesh_box((rows, 3), placed, rank)
            held = local_boxes((rows, 3), sizes, placed.placements, place)  # type: ignore[arg-type]
            assert [one.box for one in held] == ([box] if box.numel else [])
            size, offset = _utils._compute_local_shape_and_global_offset((rows, 3), sizes, place, theirs)
            compared += 1
            if size == box.sizes:
                assert offset == box.offsets, (rows, plan, rank)
            else:
                wrong += 1
    assert compared > 100 and wrong < compared / 10


def _theirs(placement: Any) -> Any:
    if isinstance(placement, ir.StridedShard):
        return _StridedShard(placement.dim, split_factor=placement.split_factor)
    return Shard(placement.dim) if isinstance(placement, ir.Shard) else Replicate()


@pytest.mark.parametrize("plan", [("S0", "S0"), ("S0", "S1"), ("R", "S0"), ("S1", "S1")])
def test_cuts_keep_their_order_on_a_mesh_of_other_sizes(plan: tuple[str, ...]) -> None:
    kinds = {"S0": ir.Shard(0), "S1": ir.Shard(1), "R": ir.Replicate()}
    small, large = ir.MeshShape((1, 2)), ir.MeshShape((4, 8))
    for one, other in itertools.permutations((small, large, ir.MeshShape((2, 1))), 2):
        placements = [kinds[name] for name in plan]
        assert on_mesh(as_fully_shard(one, placements), other) == as_fully_shard(other, placements)
    plain = ir.Sharding(large, (ir.Shard(0), ir.Shard(0)))  # as distribute_tensor cuts: the first first
    assert on_mesh(plain, ir.MeshShape((2, 2))).placements == plain.placements
