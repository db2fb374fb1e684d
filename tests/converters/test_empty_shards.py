"""Ranks that hold no element of a tensor: the shapes of their local tensors, as FSDP2 and DTensor give them."""

from __future__ import annotations

import io
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fsdpckpt
from fsdpckpt.errors import InternalError
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.storage.sources import Sources
from fsdpckpt.writers import dtensor_pickle
from tests.converters.jobs import RANK_FILES, converted, refused
from tests.converters.meshes import assert_held, on_each_rank, placements_for, rules, save_each, state_of, to_ranks
from tests.oracle.compare import identical
from tests.readers.played_ranks import save_as_ranks
from tests.writers.meshes import MeshCase, all_three, over_tp

pytestmark = pytest.mark.filterwarnings("ignore")

OnMesh = Callable[..., Path]
SMALL = {"size": 1, "odd": 0}
EMPTY = over_tp(2, 3)  # 4 columns on 3 ranks: 2, 2, and none


@pytest.fixture
def tp(on_mesh: OnMesh) -> Path:
    return on_mesh(over_tp(2, 2), **SMALL)


@pytest.mark.parametrize("case", [over_tp(4, 3), all_three(2, 2, 3)], ids=str)
def test_a_rank_without_columns_holds_no_rows_either(tp: Path, case: MeshCase) -> None:
    to_ranks(tp, "new", mesh=str(case.mesh), placements=rules(placements_for(case)), verify="full")
    assert_held("new", case, range(2, case.world_size, 3), **SMALL)
    assert fsdpckpt.verify("new").whole
    for _ in on_each_rank(case.world_size, [case.world_size - 1]):
        assert state_of(case, **SMALL)["model"]["row.weight"].to_local().shape == (0, 0)


def test_what_real_ranks_hold_is_whole_and_is_kept(on_mesh: OnMesh) -> None:
    assert fsdpckpt.verify(on_mesh(EMPTY, **SMALL)).whole
    to_ranks(on_mesh(EMPTY, **SMALL), "new", world_size=3)
    assert_held("new", over_tp(1, 3), **SMALL)


def stored_shapes(directory: str) -> dict[Any, tuple[int, ...]]:
    """The shape of the tensor in each item of a DCP directory."""
    shapes = {}
    for index, place in pickle.loads(Path(directory, ".metadata").read_bytes()).storage_data.items():
        data = Path(directory, place.relative_path).read_bytes()[place.offset : place.offset + place.length]
        value = torch.load(io.BytesIO(data), weights_only=False)
        shapes[index.fqn, tuple(index.offset or ())] = tuple(getattr(value, "shape", ()))
    return shapes


def test_items_of_dcp_have_the_shapes_that_torch_stores(on_mesh: OnMesh, tp: Path) -> None:
    fsdpckpt.convert(tp, "ours", to="sharded", container="dcp", like=on_mesh(EMPTY, **SMALL))
    states = [state_of(EMPTY, **SMALL) for _ in on_each_rank(EMPTY.world_size)]
    save_as_ranks(Path("theirs"), lambda rank: states[rank], EMPTY.world_size)
    ours, theirs = stored_shapes("ours"), stored_shapes("theirs")
    assert {key: ours[key] for key in theirs} == theirs
    assert theirs["model.row.weight", (0, 4)] == theirs["model.row.weight", (3, 4)] == (0, 0)


def test_a_dcp_directory_whose_empty_chunks_are_declared_larger_is_whole() -> None:
    weight = torch.arange(48.0).reshape(8, 6)  # 6 columns on 4 ranks: none for the last

    def state(_rank: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        layer = torch.nn.Linear(6, 8, bias=False)
        layer.weight = torch.nn.Parameter(distribute_tensor(weight, mesh["tp"], [Shard(1)], src_data_rank=None))
        torch.distributed.fsdp.fully_shard(layer, mesh=mesh["dp"])
        return {"model": layer.state_dict()}

    save_as_ranks(Path("dcp"), state, 8)
    assert fsdpckpt.verify("dcp").whole
    assert identical(converted("dcp", "whole.pt")["model"]["weight"], weight)


def test_tensors_that_dtensor_alone_cut_keep_their_shapes() -> None:
    weight = torch.arange(24.0).reshape(4, 6)

    def state(tp: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2, tp), mesh_dim_names=("dp", "tp"))
        return {"weight": distribute_tensor(weight, mesh, [Shard(0), Shard(1)], src_data_rank=None)}

    to_ranks(save_each("source", 8, lambda _: state(4)), "new", mesh="dp=2,tp=5", verify="full")
    for rank in on_each_rank(10):
        found = torch.load(f"new/model_world_size_10_rank_{rank}.pt")["weight"].to_local()
        assert identical(found, state(5)["weight"].to_local())
    assert found.shape == (2, 0)


@pytest.mark.parametrize(("shape", "ranks"), [((2, 0), {2}), ((3, 0), {2}), ((0, 5), {2, 5})], ids=str)
def test_a_shape_that_no_job_gives_is_found(on_mesh: OnMesh, shape: tuple[int, ...], ranks: set[int]) -> None:
    """(3, 0) is what DTensor's cuts alone give: rank 5 shows that FSDP2 cut it."""
    shutil.copytree(on_mesh(EMPTY, **SMALL), "source", ignore=shutil.ignore_patterns("optim*"))
    for rank in on_each_rank(6, ranks):
        path = f"source/model_world_size_6_rank_{rank}.pt"
        state = torch.load(path)
        state["row.weight"] = DTensor(torch.empty(shape), state["row.weight"]._spec, requires_grad=False)
        torch.save(state, path)
    (problem,) = fsdpckpt.verify("source").problems
    assert (problem.kind, problem.key, problem.fatal) == ("local-shape", "row.weight", False)
    assert "row.weight is empty on rank" in problem.message and "load_state_dict refuses it" in problem.message
    fsdpckpt.convert("source", "whole.pt")  # no element is missing


def test_the_check_of_the_output_finds_the_wrong_shape(tp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtensor_pickle.DTensorPickle, "_local_size", lambda _self, size, _sharding: size)
    error = refused(InternalError, "", tp, "new", **RANK_FILES, mesh="dp_shard=2,tp=3")
    assert "row.weight was written with empty shards in other shapes" in "".join(error.details)


@pytest.mark.parametrize(("version", "by_fsdp"), [("2.5", False), ("2.6", True), ("2.14", True)])
def test_fsdp2_of_older_versions_keeps_the_rows(tp: Path, version: str, by_fsdp: bool) -> None:
    """As its source says: ``padded_sharded_param[: sharded_param.size(0)]`` up to 2.5."""
    to_ranks(tp, "new", mesh="dp_shard=2,tp=3", torch_version=version, only="model")
    checkpoint = open_checkpoint("new", sources=Sources())
    assert not checkpoint.problems
    assert {tensor.sharding.by_fsdp for tensor in checkpoint.leaves() if tensor.sharding} == {by_fsdp}
