"""accelerate's rank files (``use_dcp=False``) of several models and optimizers: a file for each, by its number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import fsdpckpt
from tests.readers.played_ranks import as_rank
from tests.writers.meshes import assert_equal

pytestmark = pytest.mark.filterwarnings("ignore")

SHAPES = ((5, 7), (3, 4))


def files_of_rank(world_size: int, rank: int) -> dict[str, Any]:
    """What ``save_fsdp_model`` and ``save_fsdp_optimizer`` save on this rank, by file name."""
    files: dict[str, Any] = {}
    for number, (columns, rows) in enumerate(SHAPES):
        torch.manual_seed(number)
        model = nn.Sequential(nn.Linear(columns, rows), nn.LayerNorm(rows))
        grads = {name: torch.randn_like(param) for name, param in model.named_parameters()}
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
        for name, param in model.named_parameters():
            param.grad = distribute_tensor(grads[name], param.device_mesh, param.placements, src_data_rank=None)  # type: ignore[attr-defined]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (number + 1))
        optimizer.step()
        files[f"pytorch_model_fsdp_{number}_rank{rank}.bin"] = model.state_dict()
        files[f"optimizer_{number}_rank{rank}.bin"] = get_optimizer_state_dict(model, optimizer)
    return files


def save(folder: Path, world_size: int) -> None:
    folder.mkdir()
    for rank in range(world_size):
        with as_rank(rank, world_size):
            for name, content in files_of_rank(world_size, rank).items():
                torch.save(content, folder / name)
        torch.save({}, folder / f"random_states_{rank}.pkl")
    for name in ("scheduler.bin", "scheduler_1.bin"):
        torch.save({"last_epoch": 3}, folder / name)


@pytest.mark.parametrize("options", [{}, {"container": "torch"}], ids=str)
def test_each_is_written_for_other_ranks_under_its_own_number(tmp_path: Path, options: dict[str, Any]) -> None:
    source, target = tmp_path / "2", tmp_path / "3"
    save(source, 2)
    fsdpckpt.convert(source, target, world_size=3, **options)
    for rank in range(3):
        with as_rank(rank, 3):
            for name, expected in files_of_rank(3, rank).items():
                assert_equal(torch.load(target / name, weights_only=False), expected, name)
    assert len(list(target.glob("*.bin"))) == 3 * 4 + 2
    assert fsdpckpt.diff(source, target).same
    assert fsdpckpt.verify(target, flavor="accelerate").whole
