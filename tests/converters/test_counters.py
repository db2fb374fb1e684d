"""A ``step`` of shape (1,), as capturable optimizers keep it, is a count on every rank, whatever its parameter's shape.

What one process trains on is the truth: each rank of FSDP2 loads its file, and the next step of AdamW is the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsdpckpt
from tests.oracle.compare import identical
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


def trained() -> tuple[Model, torch.optim.AdamW]:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    for _ in range(2):
        step(model, optimizer)
        for states in optimizer.state.values():
            states["step"] = states["step"].reshape(1)
    return model, optimizer


@pytest.fixture
def source(tmp_path: Path) -> Path:
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "ids.pt")
    fsdpckpt.convert(tmp_path / "ids.pt", tmp_path / "names.pt", key_type="name")
    return tmp_path


MADE: dict[str, Callable[[Path], Path]] = {
    "ids": lambda at: at / "ids.pt",
    "names": lambda at: at / "names.pt",
    "dcp": lambda at: converted(at / "names.pt", at / "dcp", container="dcp"),
    "flat": lambda at: converted(
        at / "names.pt", at / "flat", to="flattened", unit=["linear"], use_orig_params=True, buffers=["none"]
    ),
    "on a mesh": lambda at: converted(at / "names.pt", at / "mesh", mesh=["dp_shard=2"], container="torch"),
}


def converted(source: Path, target: Path, **options: Any) -> Path:
    fsdpckpt.convert(source, target, **{"to": "sharded", "world_size": RANKS, **options})
    return target


@pytest.mark.parametrize("made", MADE)
def test_every_rank_of_fsdp2_takes_the_next_step(made: str, source: Path) -> None:
    ranks = converted(MADE[made](source), source / "ranks", container="torch", key_type="id")
    model, optimizer = trained()
    step(model, optimizer)
    truth = dict(model.named_parameters())
    names = ("dp_shard",) if made == "on a mesh" else None
    for rank in range(RANKS):
        files = [ranks / f"{section}_world_size_{RANKS}_rank_{rank}.pt" for section in ("model", "optim")]
        weights, states = (torch.load(path, weights_only=False) for path in files)
        with as_rank(rank, RANKS):
            resumed = Model()
            fully_shard(resumed, mesh=init_device_mesh("cpu", (RANKS,), mesh_dim_names=names))
            own = torch.optim.AdamW(resumed.parameters(), lr=0.1, foreach=True)
            resumed.load_state_dict(weights)
            own.load_state_dict(states)
            step(resumed, own)
            for name, param in resumed.named_parameters():
                held = param.to_local()  # type: ignore[attr-defined]
                assert identical(held.detach(), rows(truth[name].detach(), rank, RANKS)), (rank, name)


def test_a_count_is_whole_on_every_rank_of_flat_parameters_and_in_dcp(source: Path) -> None:
    flat = MADE["flat"](source)
    for rank in range(RANKS):
        states = torch.load(flat / f"optim_world_size_{RANKS}_rank_{rank}.pt", weights_only=True)["state"]
        assert {tuple(entry["step"].shape) for entry in states.values()} == {(1,)}
    metadata = dcp.FileSystemReader(MADE["dcp"](source)).read_metadata().state_dict_metadata
    counts = [each for key, each in metadata.items() if key.endswith(".step")]
    assert [len(each.chunks) for each in counts] == [1] * 4


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_parameter_without_dimensions_has_nothing_else_with_any(world_size: int, orig: bool, tmp_path: Path) -> None:
    """FSDP1 leaves it as it is, and of its states only the count is a vector."""
    shapes: dict[str, tuple[int, ...]] = {"scale.temperature": (), "linear.weight": (2, 3)}
    states = {
        name: {"step": torch.tensor([2.0]), "exp_avg": torch.randn(shape), "exp_avg_sq": torch.randn(shape)}
        for name, shape in shapes.items()
    }
    model = {name: torch.randn(shape) for name, shape in shapes.items()}
    content = {"model": model, "optimizer": {"state": states, "param_groups": [{"params": list(shapes)}]}}
    torch.save(content, tmp_path / "names.pt")
    flat = tmp_path / "flat"
    fsdpckpt.convert(
        tmp_path / "names.pt", flat, to="flattened", world_size=world_size, unit=["linear"], use_orig_params=orig
    )
    fsdpckpt.convert(flat, tmp_path / "back.pt", to="full", key_type="name")
    found = torch.load(tmp_path / "back.pt", weights_only=True)["optimizer"]["state"]
    assert found.keys() == states.keys()
    assert all(identical(found[name][state], value) for name in states for state, value in states[name].items())


@pytest.mark.parametrize("orig", [True, False])
def test_a_rank_with_padding_alone_has_the_count_too(orig: bool, tmp_path: Path) -> None:
    """A unit of one element is padding on the other rank, in slices of the length of the count."""
    shapes: dict[str, tuple[int, ...]] = {"one.bias": (1,), "linear.weight": (2, 3)}
    states = {name: {"step": torch.tensor([2.0]), "exp_avg": torch.randn(shape)} for name, shape in shapes.items()}
    model = {name: torch.randn(shape) for name, shape in shapes.items()}
    content = {"model": model, "optimizer": {"state": states, "param_groups": [{"params": list(shapes)}]}}
    torch.save(content, tmp_path / "names.pt")
    flat = tmp_path / "flat"
    units = ["one", "linear"]
    fsdpckpt.convert(tmp_path / "names.pt", flat, to="flattened", world_size=2, unit=units, use_orig_params=orig)
    manifest = flat / "fsdpckpt.json"
    (flat / "units.json").write_text(json.dumps(json.loads(manifest.read_text())["units"]))
    manifest.unlink()  # now the padding has to prove the units
    assert not fsdpckpt.verify(flat).problems
    fsdpckpt.convert(flat, tmp_path / "back.pt", to="full", key_type="name")
    found = torch.load(tmp_path / "back.pt", weights_only=True)["optimizer"]["state"]
    assert all(identical(found[name][state], value) for name in states for state, value in states[name].items())


def test_a_parameter_without_states_gets_the_count_of_the_others(tmp_path: Path) -> None:
    """As it does where the count has no dimensions: a new step of 0 would be another schedule of bias correction."""
    model, optimizer = trained()
    content = optimizer.state_dict()
    del content["state"][3]
    torch.save({"model": model.state_dict(), "optimizer": content}, tmp_path / "ids.pt")
    fsdpckpt.convert(tmp_path / "ids.pt", tmp_path / "filled.pt", key_type="name", missing_state="zeros")
    states = torch.load(tmp_path / "filled.pt", weights_only=True)["optimizer"]["state"]
    assert identical(states["scale.bias"]["step"], torch.tensor([2.0]))
    assert identical(states["scale.bias"]["exp_avg"], torch.zeros(1))
