"""Extras that a producer has no place for are said, and what was written is whole by its own word."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import SourceUnrecognisedError

DCP = {"to": "sharded", "world_size": 2, "buffers": ["none"]}


@pytest.fixture
def full(tmp_path: Path) -> str:
    path = str(tmp_path / "full.pt")
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    state = optimizer.state_dict()
    state["state"] = {names[number]: states for number, states in state["state"].items()}
    state["param_groups"][0]["params"] = names
    extras = {"rng": torch.get_rng_state(), "best_loss": torch.rand(3), "mystuff": {"lr": 0.25}}
    torch.save({"model": model.state_dict(), "optimizer": state, **extras}, path)
    return path


def _not_carried(report: fsdpckpt.Report) -> str:
    return " ".join(note.message for note in report.notes if note.kind == "not-carried")


def test_directories_below_are_held_against_the_manifest(full: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    fsdpckpt.convert(full, str(out), flavor="accelerate", **DCP)
    assert fsdpckpt.verify(str(out)).whole
    shards = sorted((out / "pytorch_model_fsdp_0").glob("*.distcp"))
    data = bytearray(shards[0].read_bytes())
    data[len(data) // 2] ^= 1
    shards[0].write_bytes(data)
    assert not fsdpckpt.verify(str(out)).whole


def test_extras_without_a_place_are_named(full: str, tmp_path: Path) -> None:
    report = fsdpckpt.convert(full, str(tmp_path / "out"), flavor="accelerate", **DCP)
    assert "mystuff" in _not_carried(report)
    inside = tmp_path / "inside"
    fsdpckpt.convert(full, str(inside / "pytorch_model_fsdp_0"), **DCP)
    again = fsdpckpt.convert(str(inside), str(tmp_path / "again"), flavor="accelerate", **DCP)
    assert "mystuff" in _not_carried(again)


@pytest.mark.parametrize("flavor", ["torchtitan", "torchtitan-old"])
def test_tensors_among_the_extras_do_not_become_parameters(full: str, tmp_path: Path, flavor: str) -> None:
    report = fsdpckpt.convert(full, str(tmp_path / "out"), flavor=flavor, **DCP)
    keys = fsdpckpt.inspect(str(tmp_path / "out")).to_json()["sections"]["model"]
    assert keys["tensors"] == 4
    if flavor == "torchtitan":
        assert "rng" in _not_carried(report)
        assert "best_loss" in _not_carried(report)


@pytest.mark.parametrize("flavor", ["lightning", "fabric"])
def test_a_meta_file_of_tensors_is_no_second_model(full: str, tmp_path: Path, flavor: str) -> None:
    fsdpckpt.convert(full, str(tmp_path / "out"), flavor=flavor, **DCP)
    with fsdpckpt.open(str(tmp_path / "out")) as found, fsdpckpt.open(full) as held:
        assert torch.equal(found["0.weight"].torch(), held["0.weight"].torch())


def test_a_url_of_a_local_file_is_no_way_around_the_paths(full: str, tmp_path: Path) -> None:
    for target in (full, str(tmp_path / "other.pt")):
        with pytest.raises(SourceUnrecognisedError, match="given by its path"):
            fsdpckpt.convert(f"file://{full}", target, overwrite=True)
    assert set(torch.load(full)) == {"model", "optimizer", "rng", "best_loss", "mystuff"}
