"""What each rank holds of random parameters: FSDP2, against ``fully_shard`` and ``distribute_tensor`` themselves."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from fsdpckpt.ir.placements import MeshShape, Sharding
from fsdpckpt.ir.tensors import contiguous_stride
from fsdpckpt.layouts import as_fully_shard, emptied, emptied_dimension, last_cuts_of_empty, mesh_box
from tests.layouts.test_sharded import ours
from tests.oracle.compare import identical
from tests.oracle.fake_group import as_rank

Parameter = tuple[tuple[int, ...], int, Placement | None]
"""A shape, the dimension that FSDP cuts, and what other parallelism makes of it; None: it has none."""

PARAMETERS = 40
MESHES = [
    {"dp": 2, "tp": 2},
    {"dp": 3, "tp": 4},
    {"dp": 1, "tp": 5},
    {"dp": 6, "tp": 1},
    {"efsdp": 2, "ep": 4},
    {"dp_replicate": 2, "dp_shard": 2, "tp": 3},
    {"dp_replicate": 2, "dp_shard": 3},
    {"dp": 5},
]


def random_parameters(mesh: dict[str, int], seed: int) -> list[Parameter]:
    """Those that ``fully_shard`` takes: along other dimensions than the first it cuts evenly only."""
    chosen = random.Random(seed)
    parameters: list[Parameter] = []
    parallel = [*mesh.values()][-1]
    fsdp = mesh.get("dp", mesh.get("efsdp", mesh.get("dp_shard", 1)))
    while len(parameters) < PARAMETERS:
        shape = tuple(chosen.choice((0, 1, 2, 3, 4, 5, 7, 12)) for _ in range(chosen.choice((1, 2, 2, 3))))
        placement = chosen.choice((None, Replicate(), Shard(0), Shard(len(shape) - 1)))
        placement = placement if "tp" in mesh or "ep" in mesh else None
        dim = chosen.choice((0, 0, len(shape) - 1))
        length = shape[dim]
        if isinstance(placement, Shard) and placement.dim == dim:
            lengths = {len(part) for part in torch.arange(length).chunk(parallel)} | {0} if length else {0}
        else:
            lengths = {length}
        if dim == 0 or all(rows % fsdp == 0 for rows in lengths):
            parameters.append((shape, dim, placement))
    return parameters


class Parameters(nn.Module):
    def __init__(self, parameters: list[Parameter], mesh: Any) -> None:
        super().__init__()
        self.cut_along: dict[nn.Parameter, int] = {}
        for number, (shape, dim, placement) in enumerate(parameters):
            whole = torch.arange(torch.Size(shape).numel() * 1.0).reshape(shape)
            if placement is not None:
                whole = distribute_tensor(whole, mesh[mesh.mesh_dim_names[-1]], [placement], src_data_rank=None)
            self.register_parameter(f"p{number}", nn.Parameter(whole))
            self.cut_along[getattr(self, f"p{number}")] = dim


def sharding_of(mesh: dict[str, int], parameter: Parameter) -> Sharding:
    _, dim, placement = parameter
    said: dict[str, Placement | None] = dict.fromkeys(mesh)
    if "tp" in mesh or "ep" in mesh:
        said[[*mesh][-1]] = placement
    if "dp_replicate" in mesh:
        said["dp_replicate"] = Replicate()
    said[next(name for name in ("dp", "efsdp", "dp_shard") if name in mesh)] = Shard(dim)
    placements = [None if one is None else ours([one])[0] for one in said.values()]
    return as_fully_shard(MeshShape(tuple(mesh.values()), tuple(mesh)), placements)


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "-".join(f"{n}={s}" for n, s in mesh.items()))
def test_every_rank_holds_what_fully_shard_gives_it(mesh: dict[str, int]) -> None:
    parameters = random_parameters(mesh, seed=len(str(mesh)))
    world_size = torch.Size(mesh.values()).numel()
    empty = 0
    for rank in range(world_size):
        with as_rank(rank, world_size):
            device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
            module = Parameters(parameters, device_mesh)
            cut_along = module.cut_along
            parallel = "tp" in mesh or "ep" in mesh
            fsdp_mesh = device_mesh[tuple(mesh)[:-1]] if parallel else device_mesh
            fully_shard(module, mesh=fsdp_mesh, shard_placement_fn=lambda p, along=cut_along: Shard(along[p]))
            held = [value.detach() for value in module.state_dict().values()]
        for parameter, value in zip(parameters, held, strict=True):
            assert isinstance(value, DTensor)
            shape, sharding = parameter[0], sharding_of(mesh, parameter)
            box = mesh_box(shape, sharding, rank)
            local = value._local_tensor
            assert tuple(local.shape) == emptied(box.sizes, emptied_dimension(sharding)), (parameter, rank)
            assert local.stride() == contiguous_stride(box.sizes), (parameter, rank)
            if box.numel:
                there = tuple(slice(at, at + n) for at, n in zip(box.offsets, box.sizes, strict=True))
                assert identical(local, torch.arange(torch.Size(shape).numel() * 1.0).reshape(shape)[there])
            else:
                empty += 1
    assert empty > world_size  # or the test shows nothing


def test_distribute_tensor_alone_leaves_the_sizes_that_its_cuts_give() -> None:
    plans = [(Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(0), Shard(0)), (Replicate(), Shard(1))]
    mesh = MeshShape((2, 4), ("a", "b"))
    differing = 0
    for rank in range(8):
        with as_rank(rank, 8):
            device_mesh = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)
            for plan in plans:
                for shape in ((4, 5), (3, 3), (1, 6), (0, 4), (5, 0)):
                    whole = torch.zeros(shape)
                    local = distribute_tensor(whole, device_mesh, plan, src_data_rank=None).to_local()
                    sharding = Sharding(mesh, tuple(ours(plan)), by_fsdp=False)
                    sizes = mesh_box(shape, sharding, rank).sizes
                    assert tuple(local.shape) == emptied(sizes, emptied_dimension(sharding)), (plan, shape, rank)
                    if not local.numel():
                        placements, place = tuple(ours(plan)), mesh.coordinate(rank)
                        last = last_cuts_of_empty(shape, mesh.sizes, placements, place, tuple(local.shape))
                        assert None in last
                        differing += 0 not in last and not isinstance(plan[0], Replicate)
    assert differing > 4
