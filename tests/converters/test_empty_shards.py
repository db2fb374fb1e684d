"""Ranks that hold no element of a tensor: the shapes of their local tensors, as FSDP2 and DTensor give them."""

from __future__ import annotations

import io
import json
import pickle
import shutil
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
from tests.converters.target.test_mesh import PLACEMENTS, assert_held, save, to_ranks
from tests.oracle.compare import identical
from tests.readers.played_ranks import as_rank, save_as_ranks
from tests.writers.meshes import MeshCase, all_three, held, over_tp

pytestmark = pytest.mark.filterwarnings("ignore")

ONE_IS_EMPTY = over_tp(2, 3)  # 4 columns on 3 ranks: 2, 2, and none


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("empty")
    save(over_tp(2, 2), base / "tp", size=1, odd=0)
    save(ONE_IS_EMPTY, base / "empty", size=1, odd=0)
    return base


@pytest.mark.parametrize("case", [over_tp(4, 3), all_three(2, 2, 3)], ids=str)
def test_a_rank_without_columns_holds_no_rows_either(saved: Path, tmp_path: Path, case: MeshCase) -> None:
    rules = tmp_path / "placements.json"
    rules.write_text(json.dumps(without_replicas(case)))
    to_ranks(saved / "tp", tmp_path / "new", mesh=str(case.mesh), placements=rules, verify="full")
    assert_held(tmp_path / "new", case, ranks=range(2, case.world_size, 3), size=1, odd=0)
    assert fsdpckpt.verify(tmp_path / "new").whole
    with as_rank(case.world_size - 1, case.world_size):
        assert held(case, 0, 1)["model"]["row.weight"].to_local().shape == (0, 0)


def without_replicas(case: MeshCase) -> dict[str, Any]:
    """Placements for the mesh of ``case``, which may have no replicas."""
    return {glob: entry and {n: entry[n] for n in case.shape if n in entry} for glob, entry in PLACEMENTS.items()}


def test_what_real_ranks_hold_is_whole_and_is_kept(saved: Path, tmp_path: Path) -> None:
    assert fsdpckpt.verify(saved / "empty").whole
    to_ranks(saved / "empty", tmp_path / "new", world_size=3)
    assert_held(tmp_path / "new", over_tp(1, 3), size=1, odd=0)


def stored_shapes(directory: Path) -> dict[Any, tuple[int, ...]]:
    """The shape of the tensor in each item of a DCP directory."""
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    shapes = {}
    for index, place in metadata.storage_data.items():
        with open(directory / place.relative_path, "rb") as file:
            file.seek(place.offset)
            value = torch.load(io.BytesIO(file.read(place.length)), weights_only=False)
        shapes[index.fqn, tuple(index.offset or ())] = tuple(getattr(value, "shape", ()))
    return shapes


def test_items_of_dcp_have_the_shapes_that_torch_stores(saved: Path, tmp_path: Path) -> None:
    case = ONE_IS_EMPTY
    fsdpckpt.convert(saved / "tp", tmp_path / "ours", to="sharded", container="dcp", like=saved / "empty")
    states: list[dict[str, Any]] = []
    for rank in range(case.world_size):
        with as_rank(rank, case.world_size):
            states.append(held(case, 0, 1))
    save_as_ranks(tmp_path / "theirs", lambda rank: states[rank], case.world_size)
    ours, theirs = stored_shapes(tmp_path / "ours"), stored_shapes(tmp_path / "theirs")
    assert {key: ours[key] for key in theirs} == theirs
    assert theirs["model.row.weight", (0, 4)] == theirs["model.row.weight", (3, 4)] == (0, 0)


def test_a_dcp_directory_whose_empty_chunks_are_declared_larger_is_whole(tmp_path: Path) -> None:
    weight = torch.arange(48.0).reshape(8, 6)  # 6 columns on 4 ranks: none for the last

    def state_of(_rank: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        cut = distribute_tensor(weight, mesh["tp"], [Shard(1)], src_data_rank=None)
        layer = torch.nn.Linear(6, 8, bias=False)
        layer.weight = torch.nn.Parameter(cut)
        torch.distributed.fsdp.fully_shard(layer, mesh=mesh["dp"])
        return {"model": layer.state_dict()}

    save_as_ranks(tmp_path / "dcp", state_of, 8)
    assert fsdpckpt.verify(tmp_path / "dcp").whole
    fsdpckpt.convert(tmp_path / "dcp", tmp_path / "whole.pt")
    assert identical(torch.load(tmp_path / "whole.pt")["model"]["weight"], weight)


def test_tensors_that_dtensor_alone_cut_keep_their_shapes(tmp_path: Path) -> None:
    weight = torch.arange(24.0).reshape(4, 6)

    def state(tp: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2, tp), mesh_dim_names=("dp", "tp"))
        return {"weight": distribute_tensor(weight, mesh, [Shard(0), Shard(1)], src_data_rank=None)}

    save_each(tmp_path / "source", 8, lambda _: state(4))
    to_ranks(tmp_path / "source", tmp_path / "new", mesh="dp=2,tp=5", verify="full")
    for rank in range(10):
        with as_rank(rank, 10):
            found = torch.load(tmp_path / f"new/model_world_size_10_rank_{rank}.pt", weights_only=True)["weight"]
            assert identical(found.to_local(), state(5)["weight"].to_local())
    assert found.to_local().shape == (2, 0)


def save_each(path: Path, world_size: int, state_of: Any) -> None:
    path.mkdir()
    for rank in range(world_size):
        with as_rank(rank, world_size):
            torch.save(state_of(rank), path / f"model_world_size_{world_size}_rank_{rank}.pt")


def reshaped(state: dict[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """``state`` with another local tensor for the weight that has no elements here."""
    weight = state["row.weight"]
    other = DTensor(torch.empty(shape), weight._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return {**state, "row.weight": other}


@pytest.mark.parametrize(("shape", "ranks"), [((2, 0), {2}), ((3, 0), {2}), ((0, 5), {2, 5})], ids=str)
def test_a_shape_that_no_job_gives_is_found(
    saved: Path, tmp_path: Path, shape: tuple[int, ...], ranks: set[int]
) -> None:
    """(3, 0) is what DTensor's cuts alone give: rank 5 shows that FSDP2 cut it."""
    shutil.copytree(saved / "empty", tmp_path / "source", ignore=shutil.ignore_patterns("optim*"))
    for rank in ranks:
        path = tmp_path / f"source/model_world_size_6_rank_{rank}.pt"
        with as_rank(rank, 6):
            torch.save(reshaped(torch.load(path, weights_only=True), shape), path)
    (problem,) = fsdpckpt.verify(tmp_path / "source").problems
    assert (problem.kind, problem.key, problem.fatal) == ("local-shape", "row.weight", False)
    assert "row.weight is empty on rank" in problem.message and "load_state_dict refuses it" in problem.message
    fsdpckpt.convert(tmp_path / "source", tmp_path / "whole.pt")  # no element is missing


def test_the_check_of_the_output_finds_the_wrong_shape(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtensor_pickle.DTensorPickle, "_local_size", lambda _self, size, _sharding: size)
    with pytest.raises(InternalError) as error:
        to_ranks(saved / "tp", tmp_path / "new", mesh="dp_shard=2,tp=3")
    assert "row.weight was written with empty shards in other shapes" in "".join(error.value.details)


@pytest.mark.parametrize(("version", "by_fsdp"), [("2.5", False), ("2.6", True), ("2.14", True)])
def test_fsdp2_of_older_versions_keeps_the_rows(saved: Path, tmp_path: Path, version: str, by_fsdp: bool) -> None:
    """As its source says: ``padded_sharded_param[: sharded_param.size(0)]`` up to 2.5."""
    options: dict[str, Any] = {"mesh": "dp_shard=2,tp=3", "torch_version": version, "only": "model"}
    to_ranks(saved / "tp", tmp_path / "new", **options)
    checkpoint = open_checkpoint(str(tmp_path / "new"), sources=Sources())
    assert not checkpoint.problems
    assert {tensor.sharding.by_fsdp for tensor in checkpoint.leaves() if tensor.sharding} == {by_fsdp}
