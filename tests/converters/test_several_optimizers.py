"""Several optimizers, and several models, of one FSDP2 job: of each rank in one file, or in files by their numbers."""

from __future__ import annotations

from collections.abc import Callable
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
from tests.converters.jobs import RANK_FILES, messages
from tests.oracle.fake_group import as_rank
from tests.writers.meshes import assert_equal

pytestmark = pytest.mark.filterwarnings("ignore")

Files = Callable[[int, int], dict[str, Any]]


def sharded(model: nn.Module, world_size: int) -> dict[str, nn.Parameter]:
    """The parameters, with gradients that are the same for any number of ranks."""
    grads = {name: torch.randn_like(param) for name, param in model.named_parameters()}
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    params = dict(model.named_parameters())
    for name, param in params.items():
        param.grad = distribute_tensor(grads[name], param.device_mesh, param.placements, src_data_rank=None)
    return params


def save(path: str, files: Files, world_size: int) -> None:
    Path(path).mkdir()
    for rank in range(world_size):
        with as_rank(rank, world_size):
            for name, content in files(world_size, rank).items():
                torch.save(content, Path(path, name))


def require_held(path: str, files: Files, world_size: int) -> None:
    for rank in range(world_size):
        with as_rank(rank, world_size):
            for name, expected in files(world_size, rank).items():
                assert_equal(torch.load(Path(path, name)), expected, name)


def state_of(form: str, world_size: int) -> dict[str, Any]:
    """What this rank saves after one step of real optimizers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False))
    params = sharded(model, world_size)
    of = {
        "in backward": {name: torch.optim.AdamW([param]) for name, param in params.items()},
        "adam": torch.optim.AdamW([params["0.weight"], params["0.bias"]], lr=0.01),
        "sgd": torch.optim.SGD([params["1.weight"]], lr=0.1, momentum=0.9),
    }
    each = list(of["in backward"].values()) if form == "in backward" else [of["adam"], of["sgd"]]
    for optimizer in each:
        optimizer.step()
    saved = [optimizer.state_dict() for optimizer in each]
    forms: dict[str, dict[str, Any]] = {
        "apart": dict(zip(("adam", "sgd"), saved, strict=False)),
        "list": {"optimizers": saved},
        "in backward": {"optimizer": dict(zip(params, saved, strict=False))},
    }
    return {"model": model.state_dict(), **forms[form]}


@pytest.mark.parametrize("form", ["apart", "list", "in backward"])
def test_every_rank_gets_the_states_of_every_optimizer(form: str) -> None:
    def written(world_size: int, rank: int) -> dict[str, Any]:
        state = state_of(form, world_size)
        file = f"world_size_{world_size}_rank_{rank}.pt"
        return {f"model_{file}": state.pop("model"), f"extra_state_{file}": state}

    for world_size in (1, 2):
        save(
            str(world_size),
            lambda size, rank: {f"ckpt_world_size_{size}_rank_{rank}.pt": state_of(form, size)},
            world_size,
        )
    assert messages(fsdpckpt.convert("2", "ranks", **RANK_FILES, world_size=3), "optimizers found")
    require_held("ranks", written, 3)
    fsdpckpt.convert("2", "full.pt")
    fsdpckpt.convert("2", "dcp", to="sharded", container="dcp", world_size=3)
    assert fsdpckpt.diff("1", "full.pt").same and fsdpckpt.diff("1", "dcp").same


def files_of_rank(world_size: int, rank: int) -> dict[str, Any]:
    """What accelerate saves with ``use_dcp=False`` (``save_fsdp_model`` and ``save_fsdp_optimizer``) on this rank."""
    files: dict[str, Any] = {}
    for number, (columns, rows) in enumerate(((5, 7), (3, 4))):
        torch.manual_seed(number)
        model = nn.Sequential(nn.Linear(columns, rows), nn.LayerNorm(rows))
        optimizer = torch.optim.AdamW(sharded(model, world_size).values(), lr=0.01 * (number + 1))
        optimizer.step()
        files[f"pytorch_model_fsdp_{number}_rank{rank}.bin"] = model.state_dict()
        files[f"optimizer_{number}_rank{rank}.bin"] = get_optimizer_state_dict(model, optimizer)
    return files


@pytest.mark.parametrize("options", [{}, {"container": "torch"}], ids=str)
def test_rank_files_of_several_models_are_written_for_other_ranks_under_their_own_numbers(
    options: dict[str, Any],
) -> None:
    save("2", files_of_rank, 2)
    others = ("random_states_0.pkl", "random_states_1.pkl", "scheduler.bin", "scheduler_1.bin")
    for name in others:
        torch.save({"last_epoch": 3} if "scheduler" in name else {}, Path("2", name))
    fsdpckpt.convert("2", "3", world_size=3, **options)
    require_held("3", files_of_rank, 3)
    assert len(list(Path("3").glob("*.bin"))) == 3 * 4 + 2
    assert fsdpckpt.diff("2", "3").same and fsdpckpt.verify("3", flavor="accelerate").whole
