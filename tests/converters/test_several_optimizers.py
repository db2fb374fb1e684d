"""Several optimizers of one FSDP2 job: saved apart, in a list, or one a parameter, run in backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import fsdpckpt
from tests.readers.played_ranks import as_rank
from tests.writers.meshes import assert_equal

pytestmark = pytest.mark.filterwarnings("ignore")


def state_of(form: str, world_size: int) -> dict[str, Any]:
    """What this rank saves after one step of real optimizers, whose gradients are the same for any number of ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False))
    grads = {name: torch.randn_like(param) for name, param in model.named_parameters()}
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    params = dict(model.named_parameters())
    for name, param in params.items():
        param.grad = distribute_tensor(grads[name], param.device_mesh, param.placements, src_data_rank=None)  # type: ignore[attr-defined]
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
def test_every_rank_gets_the_states_of_every_optimizer(form: str, tmp_path: Path) -> None:
    for world_size in (1, 2):
        (tmp_path / str(world_size)).mkdir()
        for rank in range(world_size):
            with as_rank(rank, world_size):
                path = tmp_path / str(world_size) / f"ckpt_world_size_{world_size}_rank_{rank}.pt"
                torch.save(state_of(form, world_size), path)
    report = fsdpckpt.convert(tmp_path / "2", tmp_path / "ranks", to="sharded", container="torch", world_size=3)
    assert any("optimizers found" in note.message for note in report.notes)
    for rank in range(3):
        with as_rank(rank, 3):
            expected = state_of(form, 3)
            for section in ("model", "extra_state"):
                found = torch.load(tmp_path / "ranks" / f"{section}_world_size_3_rank_{rank}.pt", weights_only=True)
                truth = expected.pop("model") if section == "model" else expected
                assert_equal(found, truth, section)
    for target in ("full.pt", "dcp"):
        options = {"to": "full"} if target == "full.pt" else {"to": "sharded", "container": "dcp", "world_size": 3}
        fsdpckpt.convert(tmp_path / "2", tmp_path / target, **options)
        assert fsdpckpt.diff(tmp_path / "1", tmp_path / target).same
