"""Models on meshes of two and three dimensions, sharded by torch itself on the fake process group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from fsdpckpt.ir import placements as ir
from fsdpckpt.ir.placements import MeshShape, Sharding
from tests.oracle.compare import identical

__all__ = [
    "MESHES",
    "MeshCase",
    "Net",
    "all_three",
    "assert_equal",
    "held",
    "hsdp",
    "net",
    "our_sharding",
    "sharded_model",
    "over_tp",
    "with_moments",
]


class Net(nn.Module):
    """Weights that tensor parallelism cuts by columns, by rows, replicates, and leaves alone; and a buffer."""

    def __init__(self, scale: int, odd: int) -> None:
        super().__init__()
        width = 4 * scale + odd
        self.col = nn.Linear(6, width)
        self.row = nn.Linear(width, 6)
        self.norm = nn.LayerNorm(6)
        self.free = nn.Linear(6, 3)
        self.register_buffer("seen", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.free(self.row(torch.tanh(self.col(x))))
        return found


@dataclass(frozen=True)
class MeshCase:
    """A mesh: which of its dimensions FSDP has, and tensor parallelism (None: there is none)."""

    shape: Mapping[str, int]
    fsdp: tuple[str, ...]
    tp: str | None = None
    rows: int = 0  # the dimension that FSDP cuts

    @property
    def world_size(self) -> int:
        return torch.Size(self.shape.values()).numel()

    @property
    def mesh(self) -> MeshShape:
        return MeshShape(tuple(self.shape.values()), tuple(self.shape))

    def __str__(self) -> str:
        return f"{self.mesh}-Shard({self.rows})".replace(",", "-")


def hsdp(replicate: int, shard: int) -> MeshCase:
    return MeshCase({"dp_replicate": replicate, "dp_shard": shard}, ("dp_replicate", "dp_shard"))


def over_tp(shard: int, tp: int) -> MeshCase:
    return MeshCase({"dp_shard": shard, "tp": tp}, ("dp_shard",), "tp")


def all_three(replicate: int, shard: int, tp: int) -> MeshCase:
    return MeshCase({"dp_replicate": replicate, "dp_shard": shard, "tp": tp}, ("dp_replicate", "dp_shard"), "tp")


MESHES = [
    hsdp(1, 2), hsdp(2, 1), hsdp(2, 2), hsdp(2, 4), hsdp(4, 4), hsdp(4, 8),
    over_tp(1, 2), over_tp(2, 1), over_tp(2, 2), over_tp(4, 2), over_tp(2, 4), over_tp(4, 4), over_tp(8, 4),
    all_three(2, 1, 2), all_three(2, 2, 2), all_three(2, 4, 2), all_three(2, 4, 4),
    MeshCase({"fsdp": 4}, ("fsdp",), rows=1), MeshCase({"a": 2, "b": 2}, ("a", "b"), rows=1),
    MeshCase({"fsdp": 16}, ("fsdp",), rows=1), MeshCase({"a": 4, "b": 8}, ("a", "b"), rows=1),
]  # fmt: skip


def sharded_model(case: MeshCase, build: Callable[[], nn.Module]) -> nn.Module:
    """This rank's model, sharded as a training script would."""
    mesh: DeviceMesh = init_device_mesh("cpu", tuple(case.shape.values()), mesh_dim_names=tuple(case.shape))
    model = build()
    if case.tp is not None:
        plan = {"col": ColwiseParallel(), "row": RowwiseParallel(), "norm": SequenceParallel()}
        parallelize_module(model, mesh[case.tp], plan, src_data_rank=None)

    def columns(parameter: nn.Parameter) -> Shard:
        ranks = list(case.shape.values())[-1]
        return Shard(1 if parameter.ndim > 1 and parameter.shape[1] % ranks == 0 else 0)

    fully_shard(
        model,
        mesh=mesh[case.fsdp] if len(case.fsdp) < len(case.shape) else mesh,
        shard_placement_fn=columns if case.rows else None,
    )
    return model


def our_sharding(case: MeshCase, value: Any) -> Sharding:
    """What torch says of a DTensor, on the whole mesh."""
    said = dict(zip(value.device_mesh.mesh_dim_names, value.placements, strict=True))
    placements = [said.get(name) for name in case.shape]
    return Sharding(case.mesh, tuple(None if one is None else _ours(one) for one in placements))


def _ours(placement: Any) -> ir.Placement:
    if isinstance(placement, _StridedShard):
        return ir.StridedShard(placement.dim, placement.split_factor)
    return ir.Replicate() if isinstance(placement, Replicate) else ir.Shard(placement.dim)


def net(size: int, odd: int) -> Net:
    """The weights that every case of this size has."""
    torch.manual_seed(3)
    return Net(size, odd)


def held(case: MeshCase, odd: int, size: int | None = None) -> dict[str, Any]:
    """This rank's state dict of a net of that ``size`` (default: the world's), as torch itself has it."""
    return with_moments(sharded_model(case, lambda: net(size or case.world_size, odd)))


def with_moments(model: nn.Module) -> dict[str, Any]:
    """This rank's state dicts of ``model``, with one moment of each parameter."""
    state = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        moment = DTensor.from_local(
            parameter.to_local().detach() * 2, parameter.device_mesh, parameter.placements,
            run_check=False, shape=parameter.shape, stride=parameter.stride(),
        )  # fmt: skip
        state[name] = {"step": torch.tensor(4.0), "exp_avg": moment}
    groups = [{"params": list(state), "lr": 0.1, "betas": (0.9, 0.99)}]
    return {"model": model.state_dict(), "optimizer": {"state": state, "param_groups": groups}}


def assert_equal(found: Any, expected: Any, where: str, *, first_mesh: bool = True) -> None:
    """Both state dicts hold the same bytes, sharded alike on equal meshes.

    ``first_mesh``: the job makes this mesh before any other, so that its process groups are numbered from 1.
    """
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_equal(found[key], value, f"{where}.{key}", first_mesh=first_mesh)
    elif isinstance(expected, list):
        assert isinstance(found, list) and len(found) == len(expected), where
        for number, value in enumerate(expected):
            assert_equal(found[number], value, f"{where}.{number}", first_mesh=first_mesh)
    elif isinstance(expected, DTensor):
        assert type(found) is DTensor, where
        assert found._spec == expected._spec, where
        assert hash(found._spec) == hash(expected._spec), where
        # Placements are made by their __setstate__: without it they are equal all the same, and crash when used.
        assert [one.is_replicate() for one in found.placements] == [one.is_replicate() for one in expected.placements]
        assert found.stride() == expected.stride(), where
        assert identical(found.to_local(), expected.to_local()), where
        ours, theirs = found.device_mesh, expected.device_mesh
        if not first_mesh:
            assert ours == theirs and ours.get_coordinate() == theirs.get_coordinate(), where
            return
        for mine, real in ((ours, theirs), (ours._get_root_mesh(), theirs._get_root_mesh())):
            assert mine._dim_group_names == real._dim_group_names, where
            assert mine.get_coordinate() == real.get_coordinate(), where
            assert identical(mine.mesh, real.mesh) and mine.get_rank() == real.get_rank(), where
            assert vars(mine).keys() == vars(real).keys()
    elif isinstance(expected, torch.Tensor):
        assert type(found) is torch.Tensor and identical(found, expected), where
    else:
        assert found == expected, where
