"""A ``step`` of shape (1,), as capturable optimizers keep it, is a count on every rank, whatever its parameter's shape.

What one process trains on is the truth: each rank of FSDP2 loads its file, and the next step of AdamW is the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsdpckpt
from tests.converters.jobs import RANK_FILES, converted, recorded, save, states
from tests.oracle.compare import identical, require_identical
from tests.oracle.fake_group import as_rank, rows

pytestmark = pytest.mark.filterwarnings("ignore")
RANKS = 2


class Model(nn.Module):
    """Two parameters have one element, as the step has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(3, 5)
        self.scale = nn.LayerNorm(1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The same gradients, however ``model`` is sharded."""
    for number, param in enumerate(model.parameters()):
        param.grad = (param.detach() * 0 + 1) * (number + 1)
    optimizer.step()


def trained(*, without: int | None = None) -> tuple[Model, torch.optim.AdamW]:
    """Saves ``ids.pt``, and ``names.pt`` if every parameter has states."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    for _ in range(2):
        step(model, optimizer)
        for held in optimizer.state.values():
            held["step"] = held["step"].reshape(1)
    content = optimizer.state_dict()
    content["state"].pop(without, None)
    save({"model": model.state_dict(), "optimizer": content}, "ids.pt")
    if without is None:
        fsdpckpt.convert("ids.pt", "names.pt", key_type="name")
    return model, optimizer


MADE: dict[str, dict[str, Any]] = {
    "ids.pt": {},
    "names.pt": {},
    "dcp": {"to": "sharded", "container": "dcp"},
    "flat": {"to": "flattened", "unit": ["linear"], "use_orig_params": True, "buffers": ["none"]},
    "mesh": {**RANK_FILES, "mesh": ["dp_shard=2"]},
}


@pytest.mark.parametrize("made", MADE)
def test_every_rank_of_fsdp2_takes_the_next_step(made: str) -> None:
    model, optimizer = trained()
    if MADE[made]:
        fsdpckpt.convert("names.pt", made, **{"world_size": RANKS, **MADE[made]})
    if made == "flat":  # a count is whole on every rank of flat parameters, and in DCP
        for rank in range(RANKS):
            held = torch.load(f"flat/optim_world_size_{RANKS}_rank_{rank}.pt")["state"]
            assert {tuple(entry["step"].shape) for entry in held.values()} == {(1,)}
    if made == "dcp":
        metadata = dcp.FileSystemReader("dcp").read_metadata().state_dict_metadata
        assert [len(each.chunks) for key, each in metadata.items() if key.endswith(".step")] == [1] * 4
    fsdpckpt.convert(made, "ranks", **RANK_FILES, world_size=RANKS, key_type="id")
    step(model, optimizer)
    names = ("dp_shard",) if made == "mesh" else None
    for rank in range(RANKS):
        files = [f"ranks/{section}_world_size_{RANKS}_rank_{rank}.pt" for section in ("model", "optim")]
        weights, held = (torch.load(path, weights_only=False) for path in files)
        with as_rank(rank, RANKS):
            resumed = Model()
            fully_shard(resumed, mesh=init_device_mesh("cpu", (RANKS,), mesh_dim_names=names))
            own = torch.optim.AdamW(resumed.parameters(), lr=0.1, foreach=True)
            resumed.load_state_dict(weights)
            own.load_state_dict(held)
            step(resumed, own)
            for param, whole in zip(resumed.parameters(), model.parameters(), strict=True):
                assert identical(param.to_local().detach(), rows(whole.detach(), rank, RANKS)), rank


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize(
    ("shape", "world_size"), [((), 1), ((), 3), ((1,), 2)], ids=["0-dim, 1 rank", "0-dim", "padding alone"]
)
def test_flat_parameters_keep_the_count_whatever_their_ranks_hold(
    shape: tuple[int, ...], world_size: int, orig: bool
) -> None:
    """FSDP1 leaves a parameter without dimensions as it is: of its states only the count is a vector.

    A unit of one element is padding on the other rank, in slices of the length of the count.
    """
    shapes: dict[str, tuple[int, ...]] = {"one.scale": shape, "linear.weight": (2, 3)}
    held = {
        name: {"step": torch.tensor([2.0]), "exp_avg": torch.randn(shape), "exp_avg_sq": torch.randn(shape)}
        for name, shape in shapes.items()
    }
    model = {name: torch.randn(shape) for name, shape in shapes.items()}
    save({"model": model, "optimizer": {"state": held, "param_groups": [{"params": list(shapes)}]}})
    unit = ["one", "linear"] if shape else ["linear"]
    flat: dict[str, Any] = {"to": "flattened", "world_size": world_size, "unit": unit, "use_orig_params": orig}
    fsdpckpt.convert("source.pt", "flat", **flat)
    if shape:  # now the padding has to prove the units
        Path("flat/units.json").write_text(json.dumps(recorded("flat")["units"]))
        Path("flat/fsdpckpt.json").unlink()
        assert not fsdpckpt.verify("flat").problems
    require_identical(states(converted("flat", "back.pt", to="full", key_type="name")), held)


def test_a_parameter_without_states_gets_the_count_of_the_others() -> None:
    """As it does where the count has no dimensions: a new step of 0 would be another schedule of bias correction."""
    trained(without=3)
    made = states(converted("ids.pt", "filled.pt", key_type="name", missing_state="zeros"))["scale.bias"]
    assert identical(made["step"], torch.tensor([2.0])) and identical(made["exp_avg"], torch.zeros(1))
