"""Experts of DeepSpeed's MoE layers, which expert-parallel ranks have: checkpoints that DeepSpeed saved on 4 ranks."""

from __future__ import annotations

import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import FsdpckptError, SourceCorruptError, SourceIncompleteError, SourceUnsupportedError
from tests.readers.contents import opened
from tests.readers.junk import refusals
from tests.readers.test_deepspeed import GOLDEN

NAMES = ["experts", "experts-data-first"]
each = pytest.mark.parametrize("name", NAMES)
STEP = "global_step3"
LOCAL = 2  # experts of a layer on each rank
EXPERT = re.compile(r"(?<=deepspeed_experts\.)\d+")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("experts")
    for name in NAMES:
        with tarfile.open(GOLDEN / f"{name}.tar.xz") as archive:
            archive.extractall(top, filter="data")
        (top / name / "truth.pt").rename(top / f"{name}.pt")
    return top


def in_model(name: str, expert_rank: int) -> str:
    """What the model calls the parameter ``name`` of a rank."""
    return EXPERT.sub(lambda number: str(expert_rank * LOCAL + int(number[0])), name)


@each
def test_every_value_is_what_the_ranks_had_in_memory(name: str, runs: Path, tmp_path: Path) -> None:
    """DeepSpeed's own record of which elements of a parameter a rank has, and the module that each computed with."""
    fsdpckpt.convert(str(runs / name), str(tmp_path / "full.pt"))
    state = torch.load(tmp_path / "full.pt")
    elements: dict[str, int] = {}
    for of_rank in torch.load(runs / f"{name}.pt"):
        for local, value in of_rank["module"].items():
            written = state["model"][in_model(local, of_rank["expert_rank"])]
            assert torch.equal(written.to(value.dtype), value), local
        for local, fragment in of_rank["fragments"].items():
            key, start = in_model(local, of_rank["expert_rank"]), fragment["start"]
            for moment, value in fragment["values"].items():
                whole = state["model"][key] if moment == "fp32" else state["optimizer"]["state"][key][moment]
                assert torch.equal(whole.flatten()[start : start + len(value)], value), (key, moment)
                assert whole.shape == fragment["shape"]
            elements[key] = elements.get(key, 0) + len(fragment["values"]["fp32"])
    assert elements == {key: state["model"][key].numel() for key in state["optimizer"]["state"]}
    dense, experts = (group["params"] for group in state["optimizer"]["param_groups"])
    assert sorted([*dense, *experts]) == sorted(elements) and len(experts) == 2 * 4 * 4
    assert {key for key in state["model"] if key not in elements} == {"mask", "head.bias"}


@each
def test_verify_and_the_way_through_dcp_find_the_same_values(name: str, runs: Path, tmp_path: Path) -> None:
    assert not fsdpckpt.verify(str(runs / name)).problems
    fsdpckpt.convert(str(runs / name), str(tmp_path / "dcp"), to="sharded", container="dcp", world_size=3)
    assert fsdpckpt.diff(str(runs / name), str(tmp_path / "dcp")).same
    found = opened(runs / name)
    assert all(file.fate == "read" for file in found.ledger.account.files)
    assert any("2 data-parallel ranks of 2 expert-parallel ranks" in each.message for each in found.ledger.evidence)


def test_experts_and_ranks_that_are_missing_are_named(runs: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(runs / "experts", tmp_path / "run") / STEP
    (copied / "layer_1_expert_2_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(SourceIncompleteError, match="files of 1 expert are missing") as error:
        opened(copied)
    assert error.value.details == ("layers.1.deepspeed_moe.experts.deepspeed_experts.2",)
    for file in copied.glob("layer_*"):
        file.unlink()
    with pytest.raises(SourceIncompleteError, match="files of its experts are missing"):
        opened(copied)
    shutil.copytree(runs / "experts" / STEP, copied, dirs_exist_ok=True)
    (copied / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(SourceIncompleteError, match="pp_rank_2"):
        opened(copied)


def change(path: Path, edit: Callable[[Any], object]) -> None:
    content = torch.load(path, weights_only=False)
    edit(content)
    torch.save(content, path)


def of_groups(edit: Callable[[list[dict[str, Any]]], object]) -> Callable[[Any], object]:
    return lambda content: edit(content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"])


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (of_groups(lambda groups: groups[1].update(name="mine")), "a group 'mine'"),
        (of_groups(lambda groups: groups[1].update(moe=False)), "experts in a group without moe"),
        (of_groups(lambda groups: groups[0].update(moe=True, name="ep_size_2")), "others in a group with moe"),
    ],
)
def test_groups_that_do_not_say_which_experts_they_are_of_are_refused(
    edit: Callable[[Any], object], found: str, tmp_path: Path
) -> None:
    step = plain_step(tmp_path)
    for file in step.glob("*optim_states.pt"):
        change(file, edit)
    with pytest.raises(SourceUnsupportedError, match="files of experts") as error:
        opened(step)
    assert error.value.found == found


def plain_step(directory: Path) -> Path:
    """A step of 4 ranks with plain values alone: one layer of two experts, one of them on each rank."""
    prefix = "moe.deepspeed_moe.experts.deepspeed_experts."
    whole = {"w": torch.randn(5), **{f"{prefix}{expert}.a": torch.randn(3) for expert in range(2)}}
    local = [{f"{prefix}0.a": whole[f"{prefix}{expert}.a"]} for expert in range(2)]
    shapes = [{"w": torch.Size([5])}, {f"{prefix}0.a": torch.Size([3])}]
    module = {"module": {"w": whole["w"], "mask": torch.ones(2)}, "param_shapes": shapes, "buffer_names": ["mask"]}
    step = directory / "step"
    step.mkdir()
    torch.save({**module, "dp_world_size": 4, "mp_world_size": 1}, step / "mp_rank_00_model_states.pt")
    for expert in range(2):
        entries = {f"{prefix}{expert}.a": whole[f"{prefix}{expert}.a"]}
        torch.save(entries, step / f"layer_0_expert_{expert}_mp_rank_00_model_states.pt")
    padded = torch.cat([whole["w"], torch.zeros(3)])
    for rank in range(4):
        of_expert = torch.cat([local[rank % 2][f"{prefix}0.a"], torch.zeros(1)])[rank // 2 * 2 :][:2]
        parts = [padded[rank * 2 : rank * 2 + 2].clone(), of_expert.clone()]
        groups = [{"params": [0], "name": "all"}, {"params": [1], "name": "ep_size_2", "moe": True}]
        base = {"state": {number: {"exp_avg": part} for number, part in enumerate(parts)}, "param_groups": groups}
        states = {"base_optimizer_state": base, "single_partition_of_fp32_groups": parts, "partition_count": [4, 2]}
        torch.save({"optimizer_state_dict": states}, step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return step


def test_files_that_contradict_each_other_are_corrupt(tmp_path: Path) -> None:
    step = plain_step(tmp_path)
    assert opened(step).problems == () and not fsdpckpt.verify(str(step)).problems
    file = step / "layer_0_expert_1_mp_rank_00_model_states.pt"
    kept = file.read_bytes()
    change(file, lambda content: content.update({next(iter(content)): torch.zeros(4)}))
    with pytest.raises(SourceCorruptError, match="another shape than in param_shapes"):
        opened(step)
    shutil.copy(step / "layer_0_expert_0_mp_rank_00_model_states.pt", file)
    with pytest.raises(SourceCorruptError, match="not of expert 1"):
        opened(step)
    file.write_bytes(kept)
    change(file, lambda content: content.update({"moe.deepspeed_moe.experts.deepspeed_experts.7.a": torch.zeros(3)}))
    with pytest.raises(SourceCorruptError, match="not of expert 1"):
        opened(step)
    torch.save({"moe.deepspeed_moe.experts.deepspeed_experts.7.a": torch.zeros(3)}, file.with_name(
        "layer_0_expert_7_mp_rank_00_model_states.pt"))  # fmt: skip
    file.write_bytes(kept)
    with pytest.raises(SourceCorruptError, match="of an expert that no rank trains"):
        opened(step)


def test_experts_beside_other_kinds_of_parallelism_are_refused(tmp_path: Path) -> None:
    step = plain_step(tmp_path)
    shutil.copy(step / "mp_rank_00_model_states.pt", step / "mp_rank_01_model_states.pt")
    with pytest.raises(SourceUnsupportedError, match="files of experts") as error:
        opened(step)
    assert error.value.found == "other model-parallel ranks, too"


def test_files_of_junk_are_refused_or_read(tmp_path: Path) -> None:
    step = plain_step(tmp_path)
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    states = torch.load(step / name)["optimizer_state_dict"]
    base = {**states["base_optimizer_state"], "state": {}}
    assert refusals({name: {"optimizer_state_dict": {**states, "base_optimizer_state": base}}}, step, seed=3) > 40


def test_without_zero_the_weights_are_read_and_the_optimizer_is_refused(tmp_path: Path) -> None:
    """As DeepSpeed 0.19 saves it (run with the library): ids in each expert-parallel rank's own order."""
    prefix = "moe.deepspeed_moe.experts.deepspeed_experts."
    weights = {"w": torch.randn(5), **{f"{prefix}{expert}.a": torch.randn(3) for expert in range(2)}}
    optimizer = {"state": {0: {"exp_avg": torch.zeros(5)}}, "param_groups": [{"params": [0, 1], "lr": 0.1}]}
    module = {"module": {"w": weights["w"], "mask": torch.ones(2)}, "optimizer": optimizer, "num_experts": [2]}
    step = tmp_path / "step"
    step.mkdir()
    torch.save({**module, "param_shapes": None, "buffer_names": ["mask"]}, step / "mp_rank_00_model_states.pt")
    for rank in range(2):
        name = f"{prefix}{rank}.a"
        torch.save({name: weights[name]}, step / f"layer_0_expert_{rank}_mp_rank_00_model_states.pt")
        torch.save({"optimizer": optimizer}, step / f"expp_rank_{rank}_mp_rank_00_optim_states.pt")
    (problem,) = fsdpckpt.verify(str(step)).problems
    assert "ZeRO 1 saves their names" in problem.message
    with pytest.raises(FsdpckptError, match="ZeRO 1 saves their names"):
        fsdpckpt.convert(str(step), str(tmp_path / "full.pt"))
    fsdpckpt.convert(str(step), str(tmp_path / "model.pt"), only="model")
    written = torch.load(tmp_path / "model.pt")
    assert set(written) == {*weights, "mask"}
    assert all(torch.equal(written[name], value) for name, value in weights.items())
    stale = step / "layer_0_expert_2_mp_rank_00_model_states.pt"
    torch.save({f"{prefix}2.a": torch.randn(3)}, stale)
    with pytest.raises(SourceCorruptError, match=r"expert_2_.* it is of an expert that is not in num_experts=\[2\]"):
        opened(step)
    stale.unlink()
    (step / "layer_0_expert_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(SourceIncompleteError, match="files of 1 expert are missing"):
        opened(step)


def test_module_states_of_zero_alone_are_not_whole(runs: Path, tmp_path: Path) -> None:
    """Without any of the ranks' files the optimizer and the float32 weights are gone, and nothing else shows it."""
    experts = shutil.copytree(runs / "experts" / STEP, tmp_path / "experts")
    dense = shutil.copytree(GOLDEN / "zero1-bf16" / STEP, tmp_path / "dense")
    for step in (experts, dense):
        for file in step.glob("*_optim_states.pt"):
            file.unlink()
        (problem,) = fsdpckpt.verify(str(step)).problems
        assert problem.kind == "missing-section"
        with pytest.raises(SourceIncompleteError, match=r"has no \*_optim_states\.pt: DeepSpeed's ZeRO"):
            fsdpckpt.convert(str(step), str(tmp_path / "full.pt"))
        fsdpckpt.convert(str(step), str(step.with_suffix(".pt")), only="model")
    assert not fsdpckpt.verify(str(dense / "mp_rank_00_model_states.pt")).problems  # asked for by its name
