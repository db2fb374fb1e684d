"""Meshes that do not list their ranks in ascending order: FSDP2 and ``full_tensor`` go by the process group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import fsdpckpt
from tests.oracle.compare import differences, identical
from tests.readers.played_ranks import StackOf, as_rank

ORDERS: dict[str, Any] = {
    "turned": [3, 2, 1, 0],
    "mixed": [2, 0, 3, 1],
    "replicas": [[3, 1], [0, 2]],
    "transposed": [[0, 2], [1, 3]],
}
WEIGHTS = {
    "even": torch.arange(24.0).reshape(8, 3),
    "uneven": torch.arange(100.0, 114.0).reshape(7, 2),
    "few": torch.arange(200.0, 206.0).reshape(3, 2),
}


def held(order: Any) -> dict[str, Any]:
    model = StackOf(WEIGHTS)
    names = None if isinstance(order[0], int) else ("replicate", "shard")
    fully_shard(model, mesh=DeviceMesh("cpu", order, mesh_dim_names=names))
    return model.state_dict()


def ranks(order: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    for rank in range(4):
        with as_rank(rank, 4):
            yield rank, held(order)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_files_of_ranks_in_any_order_are_put_together_as_fsdp2_cut_them(tmp_path: Path, order: Any) -> None:
    (tmp_path / "ranks").mkdir()
    for rank, state in ranks(order):
        torch.save(state, tmp_path / "ranks" / f"model_world_size_4_rank_{rank}.pt")
    assert fsdpckpt.verify(tmp_path / "ranks").whole
    fsdpckpt.convert(tmp_path / "ranks", tmp_path / "full.pt", to="full", only="model")
    found = torch.load(tmp_path / "full.pt")
    assert all(identical(found[f"{name}.weight"], weight) for name, weight in WEIGHTS.items())


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_ranks_in_any_order_are_filled_as_fsdp2_cuts_them(tmp_path: Path, order: Any) -> None:
    torch.save({"model": {f"{name}.weight": weight for name, weight in WEIGHTS.items()}}, tmp_path / "full.pt")
    for _, expected in ranks(order):
        state = {"model": {name: torch.zeros_like(value) for name, value in expected.items()}}
        dcp.load(state, storage_reader=fsdpckpt.StorageReader(tmp_path / "full.pt"), no_dist=True)
        assert not differences(state["model"], expected)
