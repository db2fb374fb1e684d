"""Jobs whose mesh has tensor parallelism outside of FSDP: FSDP2 lists its own dimension first all the same."""

from __future__ import annotations

import json
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
from tests.converters.target.test_mesh import assert_held, save, to_ranks
from tests.converters.test_empty_shards import save_each, without_replicas
from tests.oracle.compare import identical
from tests.readers.played_ranks import as_rank
from tests.writers.meshes import MeshCase, assert_equal, held, net, over_tp

pytestmark = pytest.mark.filterwarnings("ignore")


def outside(**shape: int) -> MeshCase:
    return MeshCase(shape, tuple(name for name in shape if name != "tp"), "tp")


SOURCE = outside(tp=2, dp_shard=2)
INSIDE_REPLICAS = outside(dp_replicate=2, tp=2, dp_shard=2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("outside")
    save(SOURCE, base / "tp", size=1)
    save(INSIDE_REPLICAS, base / "replicas", size=1)
    return base


@pytest.mark.parametrize(
    ("source", "options", "case"),
    [
        ("tp", {"world_size": 4}, SOURCE),
        ("tp", {"world_size": 6}, outside(tp=2, dp_shard=3)),
        ("tp", {"mesh": "tp=3,dp_shard=2"}, outside(tp=3, dp_shard=2)),
        ("replicas", {"world_size": 12}, outside(dp_replicate=2, tp=2, dp_shard=3)),
        ("replicas", {"mesh": "dp_replicate=1,tp=2,dp_shard=2"}, outside(dp_replicate=1, tp=2, dp_shard=2)),
    ],
    ids=str,
)
def test_its_ranks_hold_what_fsdp2_holds(
    saved: Path, tmp_path: Path, source: str, options: dict[str, Any], case: MeshCase
) -> None:
    to_ranks(saved / source, tmp_path / "new", **options, verify="full")
    assert_held(tmp_path / "new", case, size=1)


@pytest.mark.parametrize("case", [SOURCE, INSIDE_REPLICAS, outside(tp=3, dp_shard=2)], ids=str)
def test_a_placements_file_for_it_lists_the_dimensions_as_fsdp2_does(
    saved: Path, tmp_path: Path, case: MeshCase
) -> None:
    fsdpckpt.convert(saved / "tp", tmp_path / "full.pt", to="full")
    rules = tmp_path / "placements.json"
    rules.write_text(json.dumps(without_replicas(case)))
    to_ranks(tmp_path / "full.pt", tmp_path / "new", mesh=str(case.mesh), placements=rules)
    assert_held(tmp_path / "new", case, size=1)


def test_it_can_move_inside_and_back(saved: Path, tmp_path: Path) -> None:
    save(over_tp(2, 2), tmp_path / "inside", size=1)
    to_ranks(saved / "tp", tmp_path / "moved", like=tmp_path / "inside")
    assert_held(tmp_path / "moved", over_tp(2, 2), size=1)
    to_ranks(tmp_path / "moved", tmp_path / "back", like=saved / "tp")
    assert_held(tmp_path / "back", SOURCE, size=1)


def test_a_dcp_directory_has_it_in_the_files_of_its_ranks(saved: Path, tmp_path: Path) -> None:
    fsdpckpt.convert(saved / "tp", tmp_path / "dcp", to="sharded", container="dcp")
    assert fsdpckpt.diff(saved / "tp", tmp_path / "dcp").same
    by_rank = open_checkpoint(str(tmp_path / "dcp"), sources=Sources(), locate=Locate.NOTHING)
    assert by_rank.model is not None
    chunks = by_rank.model.params["row.weight"].chunks  # type: ignore[union-attr]
    for rank, start in zip(chunks.rank.tolist(), chunks.start.tolist(), strict=True):
        with as_rank(rank, 4):
            local = held(SOURCE, 3, 1)["model"]["row.weight"].to_local()
        found = torch.load(saved / f"tp/model_world_size_4_rank_{rank}.pt", weights_only=True)
        assert identical(found["row.weight"].to_local(), local) and start == [3 * (rank % 2), 4 * (rank // 2)]


@pytest.mark.parametrize("version", ["2.5", "2.8", "2.10", "2.14"])
def test_it_is_written_in_the_form_of_every_version(saved: Path, tmp_path: Path, version: str) -> None:
    to_ranks(saved / "replicas", tmp_path / "new", torch_version=version)
    assert fsdpckpt.diff(saved / "replicas", tmp_path / "new").same
    shardings = []
    for path in (saved / "replicas", tmp_path / "new"):
        opened = open_checkpoint(str(path), sources=Sources(), locate=Locate.NOTHING)
        shardings.append([tensor.sharding for tensor in opened.leaves()])
    assert shardings[0] == shardings[1]
    assert {str(one.mesh) for one in shardings[0] if one is not None and len(one.dims) == 3} == {
        str(INSIDE_REPLICAS.mesh)
    }


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
def test_a_job_that_names_fsdps_dimensions_keeps_the_order_of_its_mesh(tmp_path: Path, target: MeshCase) -> None:
    """4 columns on 3 ranks: the last has none, and its local tensor no rows, in either order."""
    source = MeshCase(dict.fromkeys(target.shape, 2), target.fsdp, "tp")
    save_each(tmp_path / "source", 4, lambda _: spmd(source))
    to_ranks(tmp_path / "source", tmp_path / "new", mesh=str(target.mesh))
    save_each(tmp_path / "theirs", 6, lambda _: spmd(target))
    assert fsdpckpt.verify(tmp_path / "new").whole and fsdpckpt.verify(tmp_path / "theirs").whole
    for rank in range(6):
        with as_rank(rank, 6):
            found = torch.load(tmp_path / f"new/model_world_size_6_rank_{rank}.pt", weights_only=True)
            assert_equal(found, spmd(target), "model")
