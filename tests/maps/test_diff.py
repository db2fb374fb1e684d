"""A checkpoint is compared with one of another model: what a map makes of the first, with the second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, UsageError
from tests.cli.conftest import Run, run
from tests.maps import experts, test_torchtitan
from tests.maps.experts import State

__all__ = ["run"]


@pytest.fixture
def saved(tmp_path: Path, saved: State) -> State:
    """``fused.pt`` beside ``apart.pt``, as PyTorch writes it: its groups list their parameters in another order."""
    groups = []
    for routers, of in zip((False, True), saved["optimizer"]["param_groups"], strict=True):
        names = [name for name, _ in experts.fused().named_parameters() if ("router" in name) is routers]
        groups.append({**of, "params": names[::-1]})
    moments = {
        name: experts.written_out({key: entry[name] for key, entry in saved["optimizer"]["state"].items()})
        for name in ("exp_avg", "exp_avg_sq")
    }
    states = {
        key: {"step": torch.tensor(2.0), **{name: of[key] for name, of in moments.items()}}
        for key in moments["exp_avg"]
    }
    fused = {"model": experts.written_out(saved["model"]), "optimizer": {"state": states, "param_groups": groups}}
    torch.save(fused, tmp_path / "fused.pt")
    return fused


def test_weights_and_states_are_compared_with_what_the_map_makes(tmp_path: Path, saved: State, run: Run) -> None:
    fsdpckpt.convert(tmp_path / "apart.pt", tmp_path / "dcp", to="sharded", world_size=3)
    options = {"map": tmp_path / "experts.toml"}
    for source in ("apart.pt", "dcp"):
        assert fsdpckpt.diff(tmp_path / source, tmp_path / "fused.pt", **options).same
    back = fsdpckpt.diff(tmp_path / "fused.pt", tmp_path / "apart.pt", inverse=True, **options)
    assert back.same and "experts.toml" in back.notes[0]
    words = [str(tmp_path / name) for name in ("dcp", "fused.pt")]
    assert run("diff", *words, "--map", str(options["map"])).code == 0
    assert run("diff", *words).code == 1


@pytest.mark.parametrize("section", ["model", "optim"])
def test_one_element_that_differs_is_named_as_in_the_second(tmp_path: Path, saved: State, section: str) -> None:
    of_state = saved["optimizer"]["state"]["blocks.1.gate_up"]["exp_avg_sq"]
    (saved["model"]["blocks.1.gate_up"] if section == "model" else of_state)[2, 3, 1] += 1
    torch.save(saved, tmp_path / "fused.pt")
    found = fsdpckpt.diff(tmp_path / "apart.pt", tmp_path / "fused.pt", map=tmp_path / "experts.toml")
    (entry,) = [entry for entry in found.entries if entry.sigil != "="]
    assert (str(entry.section), entry.param) == (section, "blocks.1.gate_up")


def test_a_name_that_the_map_does_not_make_is_only_in_one(tmp_path: Path, saved: State) -> None:
    saved["model"]["blocks.0.extra"] = saved["model"].pop("blocks.0.down")
    torch.save(saved, tmp_path / "fused.pt")
    found = fsdpckpt.diff(tmp_path / "apart.pt", tmp_path / "fused.pt", map=tmp_path / "experts.toml", only="model")
    assert [(e.sigil, e.key) for e in found.entries if e.sigil != "="] == [
        ("-", "blocks.0.down"),
        ("+", "blocks.0.extra"),
    ]


def test_a_checkpoint_of_torchtitan_is_compared_with_its_export(tmp_path: Path) -> None:
    """The numbers of the model are in the export's own ``config.json``."""
    torch.save(test_torchtitan.checkpoint(), tmp_path / "titan.pt")
    (tmp_path / "base").mkdir()
    numbers = {"head_dim": test_torchtitan.HEAD, "num_key_value_heads": test_torchtitan.GROUPS}
    config = {"hidden_size": test_torchtitan.DIM, "num_attention_heads": test_torchtitan.HEADS, **numbers}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    options: dict[str, Any] = {"map": "torchtitan-llama3", "only": "model"}
    written: dict[str, Any] = {"reference": tmp_path / "base", "flavor": "huggingface"}
    fsdpckpt.convert(tmp_path / "titan.pt", tmp_path / "hf", map="torchtitan-llama3", **written)
    assert fsdpckpt.diff(tmp_path / "titan.pt", tmp_path / "hf", **options).same
    (tmp_path / "hf" / "config.json").unlink()
    with pytest.raises(NeedsInformationError, match="head_dim"):
        fsdpckpt.diff(tmp_path / "titan.pt", tmp_path / "hf", **options)
    given = {"head_dim": "6", "key_value_heads": "2", "heads_per_group": "2"}
    assert fsdpckpt.diff(tmp_path / "titan.pt", tmp_path / "hf", map_value=given, **options).same


@pytest.mark.parametrize("options", [{"inverse": True}, {"map_value": {"half": "3"}}])
def test_what_belongs_to_a_map_is_refused_without_one(tmp_path: Path, saved: State, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="no effect"):
        fsdpckpt.diff(tmp_path / "apart.pt", tmp_path / "fused.pt", **options)
