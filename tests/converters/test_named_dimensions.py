"""A ``--mesh`` of dimensions that the source has: its placements along them are kept, those along others dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError
from tests.converters.target import test_several_meshes as experts
from tests.converters.target.test_mesh import ODD, SIZE, assert_held, save, to_ranks
from tests.oracle.compare import identical
from tests.readers.played_ranks import as_rank
from tests.writers.meshes import MeshCase, all_three, assert_equal, hsdp, net, over_tp

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("named")
    for name, case in (("tp", over_tp(2, 2)), ("hsdp", hsdp(2, 2)), ("three", all_three(2, 2, 2))):
        save(case, base / name)
    return base


def tensor_parallel_alone(ranks: int) -> dict[str, Any]:
    """This rank's state dicts of a job without FSDP, whose parameters outside of the plan are plain tensors."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    model = net(SIZE, ODD)
    plan = {"col": ColwiseParallel(), "row": RowwiseParallel(), "norm": SequenceParallel()}
    parallelize_module(model, mesh, plan, src_data_rank=None)
    state = {n: {"step": torch.tensor(4.0), "exp_avg": p.detach() * 2} for n, p in model.named_parameters()}
    groups = [{"params": list(state), "lr": 0.1, "betas": (0.9, 0.99)}]
    return {"model": model.state_dict(), "optim": {"state": state, "param_groups": groups}}


@pytest.mark.parametrize(("source", "ranks"), [("tp", 3), ("three", 2), ("tp", 8)])
def test_tensor_parallelism_without_fsdp_is_what_such_a_job_holds(
    saved: Path, tmp_path: Path, source: str, ranks: int
) -> None:
    report = to_ranks(saved / source, tmp_path / "new", mesh=f"tp={ranks}", verify="full")
    dropped = "dp_replicate and dp_shard" if source == "three" else "dp_shard"
    (note,) = [note.message for note in report.notes if "dropped" in note.message]
    assert f"{dropped} of the source's mesh" in note and f"keep their placements on tp={ranks}" in note
    assert "2 tensors are whole on every rank" in note  # of the layer that is not in the plan
    for rank in range(ranks):
        with as_rank(rank, ranks):
            for section, value in tensor_parallel_alone(ranks).items():
                file = tmp_path / f"new/{section}_world_size_{ranks}_rank_{rank}.pt"
                assert_equal(torch.load(file, weights_only=True), value, section)


@pytest.mark.parametrize(
    ("source", "mesh", "case"),
    [
        ("three", "dp_shard=2,tp=3", over_tp(2, 3)),
        ("three", "dp_replicate=2,dp_shard=3", hsdp(2, 3)),
        ("three", "dp_shard=5", MeshCase({"dp_shard": 5}, ("dp_shard",))),
        ("tp", "dp_shard=3", MeshCase({"dp_shard": 3}, ("dp_shard",))),
        ("hsdp", "dp_shard=3", MeshCase({"dp_shard": 3}, ("dp_shard",))),
    ],
)
def test_the_other_dimensions_are_those_of_such_a_job(
    saved: Path, tmp_path: Path, source: str, mesh: str, case: MeshCase
) -> None:
    report = to_ranks(saved / source, tmp_path / "new", mesh=mesh, verify="full")
    assert_held(tmp_path / "new", case)
    assert any("of the source's mesh" in note.message and "dropped" in note.message for note in report.notes)


def test_replicas_alone_are_replicas(saved: Path, tmp_path: Path) -> None:
    to_ranks(saved / "hsdp", tmp_path / "new", mesh="dp_replicate=3")
    for rank in range(3):
        with as_rank(rank, 3):
            found = torch.load(tmp_path / f"new/model_world_size_3_rank_{rank}.pt", weights_only=True)
            for name, value in net(SIZE, ODD).named_parameters():
                assert isinstance(found[name], DTensor) and found[name].placements == (Replicate(),)
                assert identical(found[name].to_local(), value)


def test_several_meshes_drop_a_dimension_that_all_have(tmp_path: Path) -> None:
    experts.save(experts.HYBRID, tmp_path / "hybrid")
    mesh = ("efsdp=2,ep=2", "fsdp=4")
    to_ranks(tmp_path / "hybrid", tmp_path / "new", mesh=mesh)
    experts.assert_held(tmp_path / "new", experts.FOUR)
    with pytest.raises(NeedsInformationError, match="cannot tell how tensors are placed on mesh='ep=4'"):
        to_ranks(tmp_path / "hybrid", tmp_path / "ep", mesh="ep=4")  # the dense weights have no such dimension
    to_ranks(tmp_path / "hybrid", tmp_path / "dense", mesh="fsdp=3")  # which cuts rows, as FSDP without experts
    assert fsdpckpt.diff(tmp_path / "hybrid", tmp_path / "dense").same


@pytest.mark.parametrize(
    ("mesh", "meant", "example"),
    [
        ("dp=4,tp=2", "dp_shard=4,tp=2", '{"dp": "Shard(0)", "tp": "Shard(0)"}'),
        ("tp=4,dp_shard=2", "dp_shard=2,tp=4", '{"tp": "Shard(0)", "dp_shard": "Shard(0)"}'),
        ("dp_replicate=2,dp_shard=2,tp=2", None, '{"dp_replicate": "Replicate()", "dp_shard": "Shard(0)", "tp"'),
    ],
)
def test_the_refusal_names_the_mesh_that_works(
    saved: Path, tmp_path: Path, mesh: str, meant: str | None, example: str
) -> None:
    with pytest.raises(NeedsInformationError) as error:
        to_ranks(saved / "tp", tmp_path / "new", mesh=mesh)
    next_step = str(error.value.next_step)
    assert example in next_step
    assert (f"give --mesh {meant}, which keeps" in next_step) is (meant is not None)
    if meant is not None:
        to_ranks(saved / "tp", tmp_path / "new", mesh=meant)


def test_columns_that_fully_shard_does_not_cut_are_a_warning(tmp_path: Path) -> None:
    columns = MeshCase({"fsdp": 4}, ("fsdp",), rows=1)
    save(columns, tmp_path / "source", size=4, odd=0)  # 16 columns
    assert not to_ranks(tmp_path / "source", tmp_path / "even", world_size=2, only="model").warnings
    (warning,) = to_ranks(tmp_path / "source", tmp_path / "new", world_size=3, only="model").warnings
    assert "FSDP2 refuses such a mesh" in warning
    assert "1 parameter does not divide: row.weight [6, 16], [Shard(1)], over 3 ranks of fsdp" in warning
    with as_rank(0, 3), pytest.raises(NotImplementedError, match="does not support uneven sharding on dim 1"):
        fully_shard(net(4, 0), mesh=init_device_mesh("cpu", (3,)), shard_placement_fn=lambda p: Shard(p.ndim - 1))
    # Tensor parallelism cuts columns unevenly, and loads them.
    save(over_tp(2, 2), tmp_path / "tp")
    assert not to_ranks(tmp_path / "tp", tmp_path / "tp-4", mesh="dp_shard=1,tp=4").warnings


def test_rank_files_stay_those_of_as_many_ranks(saved: Path, tmp_path: Path) -> None:
    to_ranks(saved / "three", tmp_path / "new", only="model")
    assert len(list((tmp_path / "new").glob("model_world_size_8_rank_*.pt"))) == 8
