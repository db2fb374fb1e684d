"""Jobs whose mesh has tensor parallelism outside of FSDP: FSDP2 lists its own dimension first all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as fully_shard_api
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fsdpckpt
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.readers.protocol import Locate
from fsdpckpt.storage.sources import Sources
from tests.converters.meshes import (
    assert_held,
    on_each_rank,
    placements_for,
    require_held,
    rules,
    save_each,
    state_of,
    to_ranks,
)
from tests.oracle.compare import identical
from tests.writers.meshes import MeshCase, net, over_tp

pytestmark = pytest.mark.filterwarnings("ignore")

OnMesh = Callable[..., Path]
SMALL = {"size": 1, "odd": 3}


def outside(**shape: int) -> MeshCase:
    return MeshCase(shape, tuple(name for name in shape if name != "tp"), "tp")


SOURCE = outside(tp=2, dp_shard=2)
INSIDE_REPLICAS = outside(dp_replicate=2, tp=2, dp_shard=2)


@pytest.mark.parametrize(
    ("source", "options", "case"),
    [
        (SOURCE, {"world_size": 4}, SOURCE),
        (SOURCE, {"world_size": 6}, outside(tp=2, dp_shard=3)),
        (SOURCE, {"mesh": "tp=3,dp_shard=2"}, outside(tp=3, dp_shard=2)),
        (INSIDE_REPLICAS, {"world_size": 12}, outside(dp_replicate=2, tp=2, dp_shard=3)),
        (
            INSIDE_REPLICAS,
            {"mesh": "dp_replicate=1,tp=2,dp_shard=2"},
            outside(dp_replicate=1, tp=2, dp_shard=2),
        ),
    ],
    ids=str,
)
def test_its_ranks_hold_what_fsdp2_holds(
    on_mesh: OnMesh, source: MeshCase, options: dict[str, Any], case: MeshCase
) -> None:
    to_ranks(on_mesh(source, **SMALL), "new", **options, verify="full")
    assert_held("new", case, **SMALL)


@pytest.mark.parametrize("case", [SOURCE, INSIDE_REPLICAS, outside(tp=3, dp_shard=2)], ids=str)
def test_a_placements_file_for_it_lists_the_dimensions_as_fsdp2_does(on_mesh: OnMesh, case: MeshCase) -> None:
    full = on_mesh(SOURCE, full=True, **SMALL)
    to_ranks(full, "new", mesh=str(case.mesh), placements=rules(placements_for(case)))
    assert_held("new", case, **SMALL)


def test_it_can_move_inside_and_back(on_mesh: OnMesh) -> None:
    to_ranks(on_mesh(SOURCE, **SMALL), "moved", like=on_mesh(over_tp(2, 2), **SMALL))
    assert_held("moved", over_tp(2, 2), **SMALL)
    to_ranks("moved", "back", like=on_mesh(SOURCE, **SMALL))
    assert_held("back", SOURCE, **SMALL)


def opened(path: Path | str) -> Any:
    return open_checkpoint(str(path), sources=Sources(), locate=Locate.NOTHING)


def test_a_dcp_directory_has_it_in_the_files_of_its_ranks(on_mesh: OnMesh) -> None:
    source = on_mesh(SOURCE, **SMALL)
    fsdpckpt.convert(source, "dcp", to="sharded", container="dcp")
    assert fsdpckpt.diff(source, "dcp").same
    chunks = opened("dcp").model.params["row.weight"].chunks
    starts = dict(zip(chunks.rank.tolist(), chunks.start.tolist(), strict=True))
    for rank in on_each_rank(4, starts):
        local = state_of(SOURCE, **SMALL)["model"]["row.weight"].to_local()
        found = torch.load(source / f"model_world_size_4_rank_{rank}.pt")["row.weight"].to_local()
        assert identical(found, local) and starts[rank] == [3 * (rank % 2), 4 * (rank // 2)]


@pytest.mark.parametrize("version", ["2.5", "2.8", "2.10", "2.14"])
def test_it_is_written_in_the_form_of_every_version(on_mesh: OnMesh, version: str) -> None:
    source = on_mesh(INSIDE_REPLICAS, **SMALL)
    to_ranks(source, "new", torch_version=version)
    assert fsdpckpt.diff(source, "new").same
    ours, theirs = ([tensor.sharding for tensor in opened(path).leaves()] for path in ("new", source))
    assert ours == theirs
    on_all = {str(one.mesh) for one in theirs if one is not None and len(one.dims) == 3}
    assert on_all == {str(INSIDE_REPLICAS.mesh)}


def spmd(mesh: MeshCase) -> dict[str, Any]:
    """The model of ``fully_shard(dp_mesh_dims=...)``, whose DTensors are on the whole mesh, in its own order."""
    device_mesh = init_device_mesh("cpu", tuple(mesh.shape.values()), mesh_dim_names=tuple(mesh.shape))
    model = net(1, 0)
    cuts = {"col.weight": Shard(0), "col.bias": Shard(0), "row.weight": Shard(1)}
    for name, parameter in list(model.named_parameters()):
        owner, _, own_name = name.rpartition(".")
        placements = [cuts.get(name, Replicate()) if dim == "tp" else Replicate() for dim in mesh.shape]
        whole = distribute_tensor(parameter.detach(), device_mesh, placements, src_data_rank=None)
        model.get_submodule(owner).register_parameter(own_name, torch.nn.Parameter(whole))
    dims = fully_shard_api.DataParallelMeshDims(shard="dp_shard")
    fully_shard(model, mesh=device_mesh, dp_mesh_dims=dims)
    return model.state_dict()


@pytest.mark.skipif(not hasattr(fully_shard_api, "DataParallelMeshDims"), reason="fully_shard of older torch")
@pytest.mark.parametrize("target", [outside(tp=3, dp_shard=2), over_tp(2, 3)], ids=str)
def test_a_job_that_names_fsdps_dimensions_keeps_the_order_of_its_mesh(target: MeshCase) -> None:
    """4 columns on 3 ranks: the last has none, and its local tensor no rows, in either order."""
    source = MeshCase(dict.fromkeys(target.shape, 2), target.fsdp, "tp")
    to_ranks(save_each("source", 4, lambda _: spmd(source)), "new", mesh=str(target.mesh))
    save_each("theirs", 6, lambda _: spmd(target))
    assert fsdpckpt.verify("new").whole and fsdpckpt.verify("theirs").whole
    require_held("new", 6, lambda: spmd(target))
