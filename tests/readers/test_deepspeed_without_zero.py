"""What DeepSpeed 0.19 saved without ZeRO: a pipeline of two stages of two data-parallel ranks in bf16, where
``BF16_Optimizer`` records the parameters of its flat tensors, and module states have no shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import SourceCorruptError, SourceIncompleteError, SourceUnsupportedError
from tests.makers import with_truth
from tests.oracle.compare import identical
from tests.readers.contents import opened
from tests.readers.test_deepspeed import GOLDEN


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return with_truth(tmp_path, [GOLDEN / "pipeline-bf16.tar.xz"]) / "pipeline-bf16"


def test_every_value_is_what_the_ranks_had_in_memory(run: Path, tmp_path: Path) -> None:
    fsdpckpt.convert(run, tmp_path / "full.pt", verify="full")
    state = torch.load(tmp_path / "full.pt")
    found: dict[str, set[tuple[int, int]]] = {}
    for rank in torch.load(tmp_path / "pipeline-bf16.pt"):
        for name, value in rank["module"].items():
            if name != "tied_modules.embed.scale":  # each stage has its own, and the first saves it
                assert identical(state["model"][name].to(value.dtype), value), name
        for name, fragment in rank["fragments"].items():
            start = fragment["start"]
            for moment, value in fragment["values"].items():
                whole = state["model"][name] if moment == "fp32" else state["optimizer"]["state"][name][moment]
                assert whole.shape == fragment["shape"]
                assert identical(whole.flatten()[start : start + len(value)], value), (name, moment)
            found.setdefault(name, set()).add((start, start + len(value)))
    for name, parts in found.items():
        covered = torch.zeros(state["model"][name].numel(), dtype=torch.bool)
        for start, end in parts:
            covered[start:end] = True
        assert covered.all(), name
    matrices, vectors = (group["params"] for group in state["optimizer"]["param_groups"])
    assert {*matrices, *vectors} == {*found} == {*state["optimizer"]["state"]}
    assert {*state["model"]} - {*found} == {
        "tied_modules.embed.scale", "1.count", "3.count", "4.count", "3.l.weight",
    }  # fmt: skip
    assert state["epoch"] == 3 and "optimizer_" not in state


def test_it_is_whole_and_goes_through_dcp(run: Path, tmp_path: Path) -> None:
    assert not fsdpckpt.verify(run).problems
    fsdpckpt.convert(run, tmp_path / "dcp", to="sharded", container="dcp", world_size=3)
    assert fsdpckpt.diff(run, tmp_path / "dcp").same
    assert all(file.fate == "read" or "latest" in file.path for file in opened(run).ledger.account.files)


def test_layers_and_stages_that_are_missing_are_named(run: Path) -> None:
    step = run / "global_step3"
    layer = (step / "layer_04-model_states.pt").rename(step / "x")
    with pytest.raises(SourceIncompleteError, match="that no file of a layer contains"):
        opened(step)
    layer.rename(step / "layer_04-model_states.pt")
    (step / "mp_rank_01_model_states.pt").unlink()
    with pytest.raises(SourceIncompleteError, match="mp_rank_01"):
        opened(step)


def test_a_layer_of_another_shape_is_refused(run: Path) -> None:
    """Its elements would be those of its neighbours: the record of places shows it."""
    path = run / "global_step3" / "layer_05-model_states.pt"
    content = torch.load(path)
    content["weight"] = content["weight"][:-1].clone()
    torch.save(content, path)
    with pytest.raises(SourceCorruptError, match="not where the shapes and the number of ranks put them"):
        opened(run)


def test_a_pipeline_whose_parameters_nothing_names_is_refused_with_a_way_that_works(run: Path) -> None:
    """In float32. DeepSpeed 0.19.8 loaded such a step under ZeRO 1, and what it saved had all weights by name."""
    for file in (run / "global_step3").glob("*optim_states.pt"):
        file.unlink()
    with pytest.raises(SourceUnsupportedError, match="pipeline stages without the states of ZeRO") as error:
        opened(run)
    assert "load_optimizer_states=False" in str(error.value.next_step) and "numbers its own" in str(error.value.why)
