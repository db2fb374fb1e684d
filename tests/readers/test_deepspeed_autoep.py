"""Experts that AutoEP of DeepSpeed 0.19 divided among ranks: a Mixtral that it saved on 4 ranks, two expert-parallel
ones of two data-parallel ranks. Under ZeRO 1 the experts of the second layer are frozen; under ZeRO 3 neighbours have
the same experts."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import FsdpckptError, SourceCorruptError, SourceIncompleteError
from tests.makers import with_truth
from tests.oracle.compare import identical
from tests.readers.contents import opened
from tests.readers.test_deepspeed import GOLDEN

NAMES = ["autoep-zero1", "autoep-zero3"]
each = pytest.mark.parametrize("name", NAMES)
STEP = "global_step3"
LOCAL = 2  # experts of a layer on each rank
LAYERS = "ds_autoep_layers"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_truth(tmp_path_factory.mktemp("autoep"), (GOLDEN / f"{name}.tar.xz" for name in NAMES))


def of_rank(whole: torch.Tensor, name: str, rank: int) -> torch.Tensor:
    """What an expert-parallel rank has of a tensor."""
    return whole[rank * LOCAL :][:LOCAL] if ".experts.w" in name else whole


@each
def test_every_value_is_what_the_ranks_had_in_memory(name: str, runs: Path, tmp_path: Path) -> None:
    """DeepSpeed's own record of which elements a rank has (ZeRO 1), what it gathers (ZeRO 3), and the module."""
    fsdpckpt.convert(runs / name, tmp_path / "full.pt", verify="full")
    state = torch.load(tmp_path / "full.pt")
    elements: dict[str, set[tuple[int, int]]] = {}
    for rank in torch.load(runs / f"{name}.pt"):
        place = rank["expert_rank"]
        for key, value in rank["module"].items():
            assert identical(of_rank(state["model"][key], key, place).to(value.dtype), value), key
        for key, fragment in rank["fragments"].items():
            for moment, value in fragment["values"].items():
                whole = state["model"][key] if moment == "fp32" else state["optimizer"]["state"][key][moment]
                own = of_rank(whole, key, place)
                assert own.shape == tuple(fragment["shape"])
                assert identical(own.flatten()[fragment["start"] :][: len(value)], value), (key, moment)
            first = own.numel() * place * (".experts.w" in key) + fragment["start"]
            elements.setdefault(key, set()).add((first, first + len(value)))
    for key, found in elements.items():
        assert sum(end - start for start, end in found) == state["model"][key].numel(), key
    dense, experts = (group["params"] for group in state["optimizer"]["param_groups"])
    frozen = [f"model.layers.1.mlp.experts.w{number}" for number in (1, 2, 3)] if name == "autoep-zero1" else []
    assert sorted([*dense, *experts]) == sorted(elements) == sorted(state["optimizer"]["state"])
    assert len(experts) == 6 - len(frozen) and all(".mlp.experts.w" in key for key in experts)
    assert not {*frozen} - state["model"].keys() and not {*frozen} & {*elements}
    assert state["model"]["model.layers.1.mlp.experts.w2"].shape == (4, 6, 8)
    assert LAYERS not in state and "universal_checkpoint_info" not in state and state["epoch"] == 3


@each
def test_verify_and_the_ways_through_dcp_and_rank_files_find_the_same_values(
    name: str, runs: Path, tmp_path: Path
) -> None:
    assert not fsdpckpt.verify(runs / name).problems
    fsdpckpt.convert(runs / name, tmp_path / "dcp", to="sharded", container="dcp", world_size=3)
    fsdpckpt.convert(runs / name, tmp_path / "ranks", to="sharded", container="torch", world_size=2)
    assert fsdpckpt.diff(runs / name, tmp_path / "dcp").same and fsdpckpt.diff(runs / name, tmp_path / "ranks").same
    found = opened(runs / name)
    assert all(file.fate == "read" for file in found.ledger.account.files)
    assert any("2 data-parallel ranks of 2 expert-parallel ranks" in each.message for each in found.ledger.evidence)


def change(path: Path, edit: Callable[[Any], object]) -> None:
    content = torch.load(path, weights_only=False)
    edit(content)
    torch.save(content, path)


def of_layer(edit: Callable[[dict[str, Any]], object]) -> Callable[[Any], object]:
    return lambda content: edit(content[LAYERS][0])


def swapped(layer: dict[str, Any]) -> None:
    first, second = layer["expert_placement"]["ranks"]
    first["experts"], second["experts"] = second["experts"], first["experts"]


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (of_layer(swapped), "affine_maps and expert_placement do not say the same of rank 0"),
        (of_layer(lambda layer: layer["expert_placement"]["ranks"].pop()), "expert_placement is not of 2 ranks"),
        (of_layer(lambda layer: layer["expert_placement"]["ranks"][1].update(experts=[1, 2])), "each of 4 experts"),
        (of_layer(lambda layer: layer["expert_placement"].update(version=2)), "expert_placement has an unknown form"),
        (of_layer(lambda layer: layer["affine_maps"].update(version=2)), "affine_maps have version 2"),
        (of_layer(lambda layer: layer["affine_maps"]["params"].clear() or layer["affine_maps"]["params"].update(x=1)),
         "it is not in affine_maps"),
        (of_layer(lambda layer: layer.update(num_experts=1 << 40)), "num_experts is"),
        (of_layer(lambda layer: layer.update(expert_key_prefix="other")), "no layer of AutoEP has it"),
        (lambda content: content.update({LAYERS: [1]}), f"{LAYERS} is not a dict"),
        (lambda content: content["universal_checkpoint_info"] and content.update(mp_world_size=2), "mp_rank_01"),
    ],
)  # fmt: skip
def test_layers_that_contradict_themselves_are_refused(
    edit: Callable[[Any], object], found: str, runs: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(runs / "autoep-zero1", tmp_path / "run") / STEP
    change(copied / "mp_rank_00_model_states.pt", edit)
    with pytest.raises(FsdpckptError) as error:
        opened(copied)
    assert found in str(error.value), str(error.value)


def test_a_record_without_placement_is_read_as_older_versions_wrote_it(runs: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(runs / "autoep-zero1", tmp_path / "run") / STEP

    def edit(content: dict[str, Any]) -> None:
        for layer in content[LAYERS]:
            del layer["expert_placement"], layer["affine_maps"]

    change(copied / "mp_rank_00_model_states.pt", edit)
    assert fsdpckpt.diff(copied, runs / "autoep-zero1").same


def test_experts_and_ranks_that_are_missing_or_swapped_are_named(runs: Path, tmp_path: Path) -> None:
    one = shutil.copytree(runs / "autoep-zero1", tmp_path / "one") / STEP
    three = shutil.copytree(runs / "autoep-zero3", tmp_path / "three") / STEP
    file = one / "layer_1_expert_2_mp_rank_00_model_states.pt"
    data = file.read_bytes()
    file.unlink()
    with pytest.raises(SourceIncompleteError, match="files of 1 expert are missing") as missing:
        opened(one)
    assert missing.value.details == (file.name,)
    file.write_bytes((one / "layer_1_expert_3_mp_rank_00_model_states.pt").read_bytes())
    with pytest.raises(SourceCorruptError, match="which is not of expert 2"):
        opened(one)
    file.write_bytes(data)
    extra = one / "layer_2_expert_0_mp_rank_00_model_states.pt"
    extra.write_bytes(data)
    with pytest.raises(SourceCorruptError, match=f"an expert that is not in {LAYERS}"):
        opened(one)
    first = three / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    change(first, of_layer(lambda layer: layer.update(ep_rank=1, expert_data_parallel_rank=0)))
    with pytest.raises(SourceCorruptError, match="expert-parallel rank 1 and data-parallel rank 0 saved it") as swap:
        opened(three)
    assert "its name is that of 0 and 1" in str(swap.value)
    first.unlink()
    with pytest.raises(SourceIncompleteError, match="pp_rank_1"):
        opened(three)


def test_weights_without_the_optimizer_of_zero_are_whole(runs: Path, tmp_path: Path) -> None:
    """As a step without ZeRO has them: all experts from their files, in the dtype that the model computed with."""
    step = shutil.copytree(runs / "autoep-zero1", tmp_path / "run") / STEP
    for file in step.glob("*optim_states.pt"):
        file.unlink()
    fsdpckpt.convert(step, tmp_path / "model.pt", only="model", verify="full")
    model = torch.load(tmp_path / "model.pt")
    seen = set()
    for rank in torch.load(runs / "autoep-zero1.pt"):
        for key, value in rank["module"].items():
            assert identical(of_rank(model[key], key, rank["expert_rank"]), value), key
            seen.add(key)
    assert seen == {*model}


def test_what_deepspeed_itself_joins_is_the_same(runs: Path, tmp_path: Path) -> None:
    """``ds_to_universal.py`` of DeepSpeed 0.19.8 made it of the checkpoint with ZeRO 3."""
    with tarfile.open(GOLDEN / "autoep-zero3-universal.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    made = tmp_path / "autoep-zero3-universal"
    assert fsdpckpt.diff(runs / "autoep-zero3", made).same
    path = made / "zero" / "model.layers.0.mlp.experts.w1" / "exp_avg.pt"
    torch.save(torch.load(path)["param"][:2].clone(), path)
    with pytest.raises(SourceCorruptError, match=r"model\.layers\.0\.mlp\.experts\.w1 has \[4, 8, 6\]"):
        opened(made)
