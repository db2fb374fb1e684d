"""A ``--mesh`` of dimensions that the source has: its placements along them are kept, those along others dropped."""

from __future__ import annotations

from collections.abc import Callable
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
from tests.converters.jobs import RANK_FILES, messages, refused
from tests.converters.meshes import ODD, SIZE, assert_held, on_each_rank, require_held, to_ranks
from tests.oracle.compare import identical
from tests.writers.experts import ExpertMesh
from tests.writers.meshes import MeshCase, all_three, hsdp, net, over_tp

pytestmark = pytest.mark.filterwarnings("ignore")

TP, HSDP, THREE = over_tp(2, 2), hsdp(2, 2), all_three(2, 2, 2)
OnMesh = Callable[..., Path]


def tensor_parallel_alone(ranks: int) -> dict[str, Any]:
    """This rank's state dicts of a job without FSDP, whose parameters outside of the plan are plain tensors."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    model = net(SIZE, ODD)
    plan = {"col": ColwiseParallel(), "row": RowwiseParallel(), "norm": SequenceParallel()}
    parallelize_module(model, mesh, plan, src_data_rank=None)
    state = {n: {"step": torch.tensor(4.0), "exp_avg": p.detach() * 2} for n, p in model.named_parameters()}
    groups = [{"params": list(state), "lr": 0.1, "betas": (0.9, 0.99)}]
    return {"model": model.state_dict(), "optim": {"state": state, "param_groups": groups}}


@pytest.mark.parametrize(("source", "ranks"), [(TP, 3), (THREE, 2), (TP, 8)], ids=str)
def test_tensor_parallelism_without_fsdp_is_what_such_a_job_holds(
    on_mesh: OnMesh, source: MeshCase, ranks: int
) -> None:
    report = to_ranks(on_mesh(source), "new", mesh=f"tp={ranks}", verify="full")
    (note,) = messages(report, "dropped")
    assert f"{'dp_replicate and dp_shard' if source is THREE else 'dp_shard'} of the source's mesh" in note
    assert f"keep their placements on tp={ranks}" in note
    assert "2 tensors are whole on every rank" in note  # of the layer that is not in the plan
    for section in ("model", "optim"):
        require_held("new", ranks, lambda section=section: tensor_parallel_alone(ranks)[section], section)


@pytest.mark.parametrize(
    ("source", "mesh", "case"),
    [
        (THREE, "dp_shard=2,tp=3", over_tp(2, 3)),
        (THREE, "dp_replicate=2,dp_shard=3", hsdp(2, 3)),
        (THREE, "dp_shard=5", MeshCase({"dp_shard": 5}, ("dp_shard",))),
        (TP, "dp_shard=3", MeshCase({"dp_shard": 3}, ("dp_shard",))),
        (HSDP, "dp_shard=3", MeshCase({"dp_shard": 3}, ("dp_shard",))),
        (THREE, None, THREE),  # as many ranks as before
    ],
    ids=str,
)
def test_the_other_dimensions_are_those_of_such_a_job(
    on_mesh: OnMesh, source: MeshCase, mesh: str | None, case: MeshCase
) -> None:
    report = to_ranks(on_mesh(source), "new", mesh=mesh, verify="full")
    assert_held("new", case, None if mesh else [0, 5])
    assert len(list(Path("new").glob("*.pt"))) == 2 * case.world_size
    assert any("dropped" in message for message in messages(report, "of the source's mesh")) is (mesh is not None)


def test_replicas_alone_are_replicas(on_mesh: OnMesh) -> None:
    to_ranks(on_mesh(HSDP), "new", mesh="dp_replicate=3")
    for rank in on_each_rank(3):
        found = torch.load(f"new/model_world_size_3_rank_{rank}.pt")
        for name, value in net(SIZE, ODD).named_parameters():
            assert isinstance(found[name], DTensor) and found[name].placements == (Replicate(),)
            assert identical(found[name].to_local(), value)


def test_several_meshes_drop_a_dimension_that_all_have(on_mesh: OnMesh) -> None:
    hybrid = on_mesh(ExpertMesh(2, 4, 2))
    to_ranks(hybrid, "new", mesh=("efsdp=2,ep=2", "fsdp=4"))
    assert_held("new", ExpertMesh(1, 4, 2))
    words = "cannot tell how tensors are placed on mesh='ep=4'"  # the dense weights have no such dimension
    refused(NeedsInformationError, words, hybrid, "ep", **RANK_FILES, mesh="ep=4")
    to_ranks(hybrid, "dense", mesh="fsdp=3")  # which cuts rows, as FSDP without experts
    assert fsdpckpt.diff(hybrid, "dense").same


@pytest.mark.parametrize(
    ("mesh", "meant", "example"),
    [
        ("dp=4,tp=2", "dp_shard=4,tp=2", '{"dp": "Shard(0)", "tp": "Shard(0)"}'),
        ("tp=4,dp_shard=2", "dp_shard=2,tp=4", '{"tp": "Shard(0)", "dp_shard": "Shard(0)"}'),
        ("dp_replicate=2,dp_shard=2,tp=2", None, '{"dp_replicate": "Replicate()", "dp_shard": "Shard(0)", "tp"'),
    ],
)
def test_the_refusal_names_the_mesh_that_works(on_mesh: OnMesh, mesh: str, meant: str | None, example: str) -> None:
    error = refused(NeedsInformationError, "", on_mesh(TP), "new", **RANK_FILES, mesh=mesh)
    assert example in str(error.next_step)
    assert (f"give --mesh {meant}, which keeps" in str(error.next_step)) is (meant is not None)
    if meant is not None:
        to_ranks(on_mesh(TP), "new", mesh=meant)


def test_columns_that_fully_shard_does_not_cut_are_a_warning(on_mesh: OnMesh) -> None:
    columns = on_mesh(MeshCase({"fsdp": 4}, ("fsdp",), rows=1), size=4, odd=0)  # 16 columns
    assert not to_ranks(columns, "even", world_size=2, only="model").warnings
    (warning,) = to_ranks(columns, "new", world_size=3, only="model").warnings
    assert "FSDP2 refuses such a mesh" in warning
    assert "1 parameter does not divide: row.weight [6, 16], [Shard(1)], over 3 ranks of fsdp" in warning
    for _ in on_each_rank(3, [0]):
        with pytest.raises(NotImplementedError, match="does not support uneven sharding on dim 1"):
            fully_shard(net(4, 0), mesh=init_device_mesh("cpu", (3,)), shard_placement_fn=lambda p: Shard(p.ndim - 1))
    # Tensor parallelism cuts columns unevenly, and loads them.
    assert not to_ranks(on_mesh(TP), "tp-4", mesh="dp_shard=1,tp=4").warnings
