"""Experts of DeepSpeed's MoE layers, which expert-parallel ranks have: checkpoints that DeepSpeed saved on 4 ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from tests.makers import Change, Make, add_copy, copied, edit, files, lose, packed, put, with_truth
from tests.oracle.compare import identical
from tests.readers.contents import opened
from tests.readers.test_deepspeed import GOLDEN
from tests.refusals import Refusal, corrupt, each_of, incomplete, unsupported

NAMES = ["experts", "experts-data-first", "expert-pipeline"]
UNTRAINED = {"expert-pipeline": {"1.scale", "2.scale"}}
each = pytest.mark.parametrize("name", NAMES)
STEP = "global_step3"
LOCAL = 2  # experts of a layer on each rank
EXPERT = re.compile(r"(?<=deepspeed_experts\.)\d+")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_truth(tmp_path_factory.mktemp("experts"), (GOLDEN / f"{name}.tar.xz" for name in NAMES))


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
            assert identical(written.to(value.dtype), value), local
        for local, fragment in of_rank["fragments"].items():
            key, start = in_model(local, of_rank["expert_rank"]), fragment["start"]
            for moment, value in fragment["values"].items():
                whole = state["model"][key] if moment == "fp32" else state["optimizer"]["state"][key][moment]
                assert identical(whole.flatten()[start : start + len(value)], value), (key, moment)
                assert whole.shape == fragment["shape"]
            elements[key] = elements.get(key, 0) + len(fragment["values"]["fp32"])
    assert elements == {key: state["model"][key].numel() for key in state["optimizer"]["state"]}
    dense, experts = (group["params"] for group in state["optimizer"]["param_groups"])
    assert sorted([*dense, *experts]) == sorted(elements) and len(experts) == 2 * 4 * 4
    assert set(state["model"]) - set(elements) == UNTRAINED.get(name, {"mask", "head.bias"})


def test_inspect_says_of_which_ranks_it_is(runs: Path) -> None:
    evidence = [each.message for each in opened(runs / "experts").ledger.evidence]
    assert any("2 data-parallel ranks of 2 expert-parallel ranks" in message for message in evidence)
    evidence = [each.message for each in opened(runs / "expert-pipeline").ledger.evidence]
    assert any("of 2 expert-parallel ranks in each of 2 pipeline stages" in message for message in evidence)


def test_the_values_of_a_step_of_plain_values_alone_fit_together(tmp_path: Path) -> None:
    step = plain_step(tmp_path)
    assert opened(step).problems == () and not fsdpckpt.verify(str(step)).problems


def plain_step(directory: Path) -> Path:
    """A step of 4 ranks with plain values alone: one layer of two experts, one of them on each rank."""
    whole = {"w": torch.randn(5), **{f"{PREFIX}{expert}.a": torch.randn(3) for expert in range(2)}}
    local = [{f"{PREFIX}0.a": whole[f"{PREFIX}{expert}.a"]} for expert in range(2)]
    shapes = [{"w": torch.Size([5])}, {f"{PREFIX}0.a": torch.Size([3])}]
    module = {"module": {"w": whole["w"], "mask": torch.ones(2)}, "param_shapes": shapes, "buffer_names": ["mask"]}
    step = directory / "step"
    step.mkdir()
    torch.save({**module, "dp_world_size": 4, "mp_world_size": 1}, step / "mp_rank_00_model_states.pt")
    for expert in range(2):
        entries = {f"{PREFIX}{expert}.a": whole[f"{PREFIX}{expert}.a"]}
        torch.save(entries, step / f"layer_0_expert_{expert}_mp_rank_00_model_states.pt")
    padded = torch.cat([whole["w"], torch.zeros(3)])
    for rank in range(4):
        of_expert = torch.cat([local[rank % 2][f"{PREFIX}0.a"], torch.zeros(1)])[rank // 2 * 2 :][:2]
        parts = [padded[rank * 2 : rank * 2 + 2].clone(), of_expert.clone()]
        groups = [{"params": [0], "name": "all"}, {"params": [1], "name": "ep_size_2", "moe": True}]
        base = {"state": {number: {"exp_avg": part} for number, part in enumerate(parts)}, "param_groups": groups}
        states = {"base_optimizer_state": base, "single_partition_of_fp32_groups": parts, "partition_count": [4, 2]}
        torch.save({"optimizer_state_dict": states}, step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return step


def run(*changes: Change) -> Make:
    """A maker of a step that DeepSpeed saved, changed."""
    return packed(GOLDEN / "experts.tar.xz", f"experts/{STEP}", *changes)


def staged(*changes: Change) -> Make:
    """The same of two pipeline stages."""
    return packed(GOLDEN / "expert-pipeline.tar.xz", f"expert-pipeline/{STEP}", *changes)


def plain(*changes: Change) -> Make:
    """A maker of ``plain_step``, changed."""

    def make(directory: Path) -> Path:
        step = plain_step(directory)
        for change in changes:
            change(step)
        return step

    return make


def group(number: int, **settings: Any) -> Change:
    """A param group of every rank has other settings."""

    def change(content: Any) -> None:
        content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][number].update(settings)

    return edit("*optim_states.pt", change)


def without_zero(*experts: int) -> Make:
    """As DeepSpeed 0.19 saves it (run with the library): ids in each expert-parallel rank's own order."""
    return files(lambda: files_without_zero(experts))


MODULE, EXPERT_FILE = "mp_rank_00_model_states.pt", "layer_{}_expert_{}_mp_rank_00_model_states.pt"
PREFIX = "moe.deepspeed_moe.experts.deepspeed_experts."
FIRST, SECOND, EIGHTH = (EXPERT_FILE.format(0, expert) for expert in (0, 1, 7))
OF_EIGHTH = {f"{PREFIX}7.a": torch.zeros(3)}
OF_FIRST_STAGE, OF_SECOND_STAGE = (f"layer_0_expert_3_mp_rank_0{stage}_model_states.pt" for stage in range(2))
SECOND_STAGE = "2.moe.deepspeed_moe.experts.deepspeed_experts."
DEGREES, TWO_CUT = "checkpoint_parallel_dimensions", {"pp_degree": 1, "tp_degree": 2}
REFUSALS = (
    incomplete(
        "an expert is missing",
        run(lose(EXPERT_FILE.format(1, 2))),
        "files of 1 expert are missing\n  - layers.1.deepspeed_moe.experts.deepspeed_experts.2\n",
    ),
    incomplete("all experts are missing", run(lose("layer_*")), "files of its experts are missing"),
    incomplete("a rank is missing", run(lose("bf16_zero_pp_rank_2_*")), "pp_rank_2"),
    unsupported("a group of another name", plain(group(1, name="mine")), "files of experts", "found a group 'mine'"),
    unsupported("a group without moe", plain(group(1, moe=False)), "found experts in a group without moe"),
    unsupported("moe of all", plain(group(0, moe=True, name="ep_size_2")), "found others in a group with moe"),
    unsupported("tensor parallelism too", staged(edit("mp_rank_*", lambda held: held[DEGREES].update(TWO_CUT))),
                "found 2 tensor-parallel ranks, too"),
    unsupported("model-parallel ranks of any kind", staged(edit("mp_rank_*", lambda held: held.pop(DEGREES))),
                "not said to be pipeline stages"),
    incomplete("an expert of the second stage is missing", staged(lose(OF_SECOND_STAGE)), f"  - {SECOND_STAGE}3"),
    corrupt("the first stage's expert in its place", staged(add_copy(OF_FIRST_STAGE, OF_SECOND_STAGE)),
            "it was saved as layer_0_expert_3_mp_rank_00"),
    corrupt("a shape that param_shapes has not", plain(put(SECOND, {f"{PREFIX}1.a": torch.zeros(4)})),
            "another shape than in param_shapes"),
    corrupt("the file of another expert", plain(add_copy(FIRST, SECOND)), "not of expert 1"),
    corrupt("a weight of another expert", plain(edit(SECOND, lambda held: held.update(OF_EIGHTH))), "not of expert 1"),
    corrupt("an expert too many", plain(put(EIGHTH, OF_EIGHTH)), "of an expert that no rank trains"),
    corrupt("an expert too many without ZeRO", without_zero(0, 1, 2),
            "expert_2_", "it is of an expert that is not in num_experts=[2]"),
    incomplete("an expert is missing without ZeRO", without_zero(0), "files of 1 expert are missing"),
    corrupt("an optimizer without ZeRO", without_zero(0, 1), "ZeRO 1 saves their names"),
    # Without any of the ranks' files the optimizer and the float32 weights are gone, and nothing else shows it.
    incomplete("no rank's file", run(lose("*_optim_states.pt")), "has no *_optim_states.pt: DeepSpeed's ZeRO"),
    incomplete("no rank's file without experts", copied(GOLDEN / "zero1-bf16" / STEP, lose("*_optim_states.pt")),
               "has no *_optim_states.pt: DeepSpeed's ZeRO"),
)  # fmt: skip


@each_of(REFUSALS)
def test_it_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    refusal.require(tmp_path)


@pytest.mark.parametrize("make", [run(lose("*_optim_states.pt")), without_zero(0, 1)], ids=["zero", "without-zero"])
def test_the_weights_are_read_where_the_optimizer_is_refused_and_verify_names_one_problem(
    make: Make, tmp_path: Path
) -> None:
    (tmp_path / "step").mkdir()
    step = make(tmp_path / "step") or tmp_path
    (problem,) = fsdpckpt.verify(str(step)).problems
    assert problem.kind == "missing-section" or "ZeRO 1 saves their names" in problem.message
    report = fsdpckpt.convert(str(step), str(tmp_path / "model.pt"), only="model")
    written = torch.load(tmp_path / "model.pt")
    assert report.tensors == len(written)
    for file in step.glob("layer_*"):
        for name, value in torch.load(file).items():
            assert identical(written[name].to(value.dtype), value)


def files_without_zero(experts: Sequence[int]) -> dict[str, Any]:
    optimizer = {"state": {0: {"exp_avg": torch.zeros(5)}}, "param_groups": [{"params": [0, 1], "lr": 0.1}]}
    module = {"module": {"w": torch.randn(5), "mask": torch.ones(2)}, "optimizer": optimizer, "num_experts": [2]}
    made: dict[str, Any] = {MODULE: {**module, "param_shapes": None, "buffer_names": ["mask"]}}
    for rank in experts:
        made[EXPERT_FILE.format(0, rank)] = {f"{PREFIX}{rank}.a": torch.randn(3)}
        made[f"expp_rank_{rank}_mp_rank_00_optim_states.pt"] = {"optimizer": optimizer}
    return made
