"""What each rank of a DeepSpeed job had in memory: experts of its MoE layers and of AutoEP, a pipeline without ZeRO.

DeepSpeed 0.19 saved them on 4 ranks. ``autoep-*`` is a Mixtral on two expert-parallel ranks of two data-parallel
ranks: under ZeRO 1 the experts of the second layer are frozen, under ZeRO 3 neighbours have the same experts.
``pipeline-bf16`` has two stages; ``BF16_Optimizer`` records the parameters of its flat tensors, and module states have
no shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import SourceCorruptError
from tests.makers import Change, Make, add_copy, copied, edit, files, lose, packed, put, with_truth
from tests.oracle.compare import identical
from tests.readers.contents import opened
from tests.readers.test_deepspeed import GOLDEN
from tests.refusals import Refusal, corrupt, each_of, incomplete, unsupported

STEP = "global_step3"
LOCAL = 2  # experts of a layer on each rank
EXPERT = re.compile(r"(?<=deepspeed_experts\.)\d+")
FROZEN = {f"model.layers.1.mlp.experts.w{number}" for number in (1, 2, 3)}
GATES = {f"model.layers.{layer}.mlp.gate.gate.weight" for layer in range(2)}  # other names of the routers
OWN_SCALE = "tied_modules.embed.scale"  # each stage has its own, and the first saves it
UNTRAINED: dict[str, set[str]] = {  # parameters and buffers without states
    "experts": {"mask", "head.bias"},
    "experts-data-first": {"mask", "head.bias"},
    "expert-pipeline": {"1.scale", "2.scale"},
    "autoep-zero1": {*FROZEN, *GATES},
    "autoep-zero3": GATES,
    "pipeline-bf16": {OWN_SCALE, "1.count", "3.count", "4.count", "3.l.weight"},
}
OF_AUTOEP = {"ds_autoep_layers", "universal_checkpoint_info"}
NO_EXTRAS: dict[str, set[str]] = {"autoep-zero1": OF_AUTOEP, "autoep-zero3": OF_AUTOEP, "pipeline-bf16": {"optimizer_"}}
EXPERTS = {"experts": 32, "experts-data-first": 32, "expert-pipeline": 32, "autoep-zero1": 3, "autoep-zero3": 6}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_truth(tmp_path_factory.mktemp("experts"), (GOLDEN / f"{name}.tar.xz" for name in UNTRAINED))


def in_model(name: str, expert_rank: int) -> str:
    """What the model calls the parameter ``name`` of a rank."""
    return EXPERT.sub(lambda number: str(expert_rank * LOCAL + int(number[0])), name)


def of_rank(whole: torch.Tensor, name: str, rank: int) -> torch.Tensor:
    """What an expert-parallel rank of AutoEP has of a tensor."""
    return whole[rank * LOCAL :][:LOCAL] if ".experts.w" in name else whole


def require_modules(model: dict[str, torch.Tensor], truth: Path) -> None:
    """``model`` has all that the ranks' modules had, in any dtype, and nothing else; they are empty under ZeRO 3."""
    seen = {OWN_SCALE} & {*model}
    for rank in torch.load(truth):
        place = rank.get("expert_rank", 0)
        for local, value in rank["module"].items():
            if local != OWN_SCALE:
                key = in_model(local, place)
                assert identical(of_rank(model[key], key, place).to(value.dtype), value), key
                seen.add(key)
    assert seen in (set(), {*model})


@pytest.mark.parametrize("name", UNTRAINED)
def test_every_value_is_what_the_ranks_had_in_memory(name: str, runs: Path, tmp_path: Path) -> None:
    """DeepSpeed's own record of which elements a rank has, what it gathers, and the module that each computed with."""
    fsdpckpt.convert(runs / name, tmp_path / "full.pt", verify="full")
    state = torch.load(tmp_path / "full.pt")
    model, states = state["model"], state["optimizer"]["state"]
    require_modules(model, runs / f"{name}.pt")
    seen = {key: torch.zeros(value.numel(), dtype=torch.bool) for key, value in model.items() if key in states}
    for rank in torch.load(runs / f"{name}.pt"):
        place = rank.get("expert_rank", 0)
        for local, fragment in rank["fragments"].items():
            key, start = in_model(local, place), fragment["start"]
            for moment, value in fragment["values"].items():
                own = of_rank(model[key] if moment == "fp32" else states[key][moment], key, place)
                assert own.shape == tuple(fragment["shape"])
                assert identical(own.flatten()[start:][: len(value)], value), (key, moment)
                of_rank(seen[key].view(model[key].shape), key, place).flatten()[start:][: len(value)] = True
    assert {*model} - {*states} == UNTRAINED[name]
    assert all(elements.all() for elements in seen.values())
    first, second = (group["params"] for group in state["optimizer"]["param_groups"])
    assert sorted([*first, *second]) == sorted(states) == sorted(seen)
    assert name not in EXPERTS or (len(second) == EXPERTS[name] and all("experts." in key for key in second))
    assert "autoep" not in name or model["model.layers.1.mlp.experts.w2"].shape == (4, 6, 8)
    assert state["epoch"] == 3 and not NO_EXTRAS.get(name, set()) & {*state}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("experts", "2 data-parallel ranks of 2 expert-parallel ranks"),
        ("expert-pipeline", "of 2 expert-parallel ranks in each of 2 pipeline stages"),
        ("autoep-zero1", "2 data-parallel ranks of 2 expert-parallel ranks"),
        ("autoep-zero3", "2 data-parallel ranks of 2 expert-parallel ranks"),
    ],
)
def test_inspect_says_of_which_ranks_it_is(name: str, kind: str, runs: Path) -> None:
    assert any(kind in each.message for each in opened(runs / name).ledger.evidence)


def test_the_values_of_a_step_of_plain_values_alone_fit_together(tmp_path: Path) -> None:
    assert not fsdpckpt.verify(plain_step(tmp_path)).problems


def without_placement(content: Any) -> None:
    for layer in content[LAYERS]:
        del layer["expert_placement"], layer["affine_maps"]


def test_a_record_without_placement_is_read_as_older_versions_wrote_it(runs: Path, tmp_path: Path) -> None:
    autoep("zero1", edit(MODULE, without_placement))(tmp_path)
    assert fsdpckpt.diff(tmp_path / "autoep-zero1" / STEP, runs / "autoep-zero1").same


def test_what_deepspeed_itself_joins_is_the_same(runs: Path, tmp_path: Path) -> None:
    """``ds_to_universal.py`` of DeepSpeed 0.19.8 made it of the checkpoint with ZeRO 3."""
    made = packed(GOLDEN / "autoep-zero3-universal.tar.xz", "autoep-zero3-universal")(tmp_path) or tmp_path
    assert fsdpckpt.diff(runs / "autoep-zero3", made).same
    path = made / "zero" / "model.layers.0.mlp.experts.w1" / "exp_avg.pt"
    torch.save(torch.load(path)["param"][:2].clone(), path)
    with pytest.raises(SourceCorruptError, match=r"model\.layers\.0\.mlp\.experts\.w1 has \[4, 8, 6\]"):
        opened(made)


def plain_step(directory: Path) -> Path:
    """A step of 4 ranks with plain values alone: one layer of two experts, one of them on each rank."""
    whole = {"w": torch.randn(5), **{f"{PREFIX}{expert}.a": torch.randn(3) for expert in range(2)}}
    local = [{f"{PREFIX}0.a": whole[f"{PREFIX}{expert}.a"]} for expert in range(2)]
    shapes = [{"w": torch.Size([5])}, {f"{PREFIX}0.a": torch.Size([3])}]
    module = {"module": {"w": whole["w"], "mask": torch.ones(2)}, "param_shapes": shapes, "buffer_names": ["mask"]}
    made: dict[str, Any] = {MODULE: {**module, "dp_world_size": 4, "mp_world_size": 1}}
    for expert in range(2):
        made[EXPERT_FILE.format(0, expert)] = {f"{PREFIX}{expert}.a": whole[f"{PREFIX}{expert}.a"]}
    padded = torch.cat([whole["w"], torch.zeros(3)])
    for rank in range(4):
        of_expert = torch.cat([local[rank % 2][f"{PREFIX}0.a"], torch.zeros(1)])[rank // 2 * 2 :][:2]
        parts = [padded[rank * 2 : rank * 2 + 2].clone(), of_expert.clone()]
        groups = [{"params": [0], "name": "all"}, {"params": [1], "name": "ep_size_2", "moe": True}]
        base = {"state": {number: {"exp_avg": part} for number, part in enumerate(parts)}, "param_groups": groups}
        states = {"base_optimizer_state": base, "single_partition_of_fp32_groups": parts, "partition_count": [4, 2]}
        made[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = {"optimizer_state_dict": states}
    files(made)(directory / "step")
    return directory / "step"


def step_of(name: str, *changes: Change) -> Make:
    """A maker of a step that DeepSpeed saved, changed."""
    return packed(GOLDEN / f"{name}.tar.xz", f"{name}/{STEP}", *changes)


def run(*changes: Change) -> Make:
    return step_of("experts", *changes)


def staged(*changes: Change) -> Make:
    """The same of two pipeline stages."""
    return step_of("expert-pipeline", *changes)


def autoep(stage: str, *changes: Change) -> Make:
    return step_of(f"autoep-{stage}", *changes)


def without_zero_in_bf16(*changes: Change) -> Make:
    return step_of("pipeline-bf16", *changes)


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


def files_without_zero(experts: Sequence[int]) -> dict[str, Any]:
    optimizer = {"state": {0: {"exp_avg": torch.zeros(5)}}, "param_groups": [{"params": [0, 1], "lr": 0.1}]}
    module = {"module": {"w": torch.randn(5), "mask": torch.ones(2)}, "optimizer": optimizer, "num_experts": [2]}
    made: dict[str, Any] = {MODULE: {**module, "param_shapes": None, "buffer_names": ["mask"]}}
    for rank in experts:
        made[EXPERT_FILE.format(0, rank)] = {f"{PREFIX}{rank}.a": torch.randn(3)}
        made[f"expp_rank_{rank}_mp_rank_00_optim_states.pt"] = {"optimizer": optimizer}
    return made


def of_layer(change: Callable[[dict[str, Any]], object], file: str = "mp_rank_00_model_states.pt") -> Change:
    """The record of the first layer of AutoEP is another."""
    return edit(file, lambda content: change(content[LAYERS][0]))


def placement(change: Callable[[dict[str, Any]], object]) -> Change:
    return of_layer(lambda layer: change(layer["expert_placement"]))


def swapped(placed: dict[str, Any]) -> None:
    first, second = placed["ranks"]
    first["experts"], second["experts"] = second["experts"], first["experts"]


def maps(params: dict[str, Any] | None = None, **other: Any) -> Change:
    return of_layer(lambda layer: layer["affine_maps"].update(other if params is None else {"params": params}))


def another_shape(content: dict[str, torch.Tensor]) -> None:
    content["weight"] = content["weight"][:-1].clone()


MODULE, EXPERT_FILE = "mp_rank_00_model_states.pt", "layer_{}_expert_{}_mp_rank_00_model_states.pt"
PREFIX, LAYERS = "moe.deepspeed_moe.experts.deepspeed_experts.", "ds_autoep_layers"
FIRST, SECOND, EIGHTH = (EXPERT_FILE.format(0, expert) for expert in (0, 1, 7))
OF_EIGHTH = {f"{PREFIX}7.a": torch.zeros(3)}
OF_FIRST_STAGE, OF_SECOND_STAGE = (f"layer_0_expert_3_mp_rank_0{stage}_model_states.pt" for stage in range(2))
SECOND_STAGE = "2.moe.deepspeed_moe.experts.deepspeed_experts."
DEGREES, TWO_CUT = "checkpoint_parallel_dimensions", {"pp_degree": 1, "tp_degree": 2}
THIRD, FOURTH, MORE = (EXPERT_FILE.format(*place) for place in ((1, 2), (1, 3), (2, 0)))
SECOND_RANK = "zero_pp_rank_1_mp_rank_00_model_states.pt"
NO_RANKS_FILE = "has no *_optim_states.pt: DeepSpeed's ZeRO"
REFUSALS = (
    incomplete(
        "an expert is missing",
        run(lose(THIRD)),
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
    incomplete("no rank's file", run(lose("*_optim_states.pt")), NO_RANKS_FILE),
    incomplete("no rank's file without experts", copied(GOLDEN / "zero1-bf16" / STEP, lose("*_optim_states.pt")),
               NO_RANKS_FILE),
    # What AutoEP records of its layers
    unsupported("experts swapped", autoep("zero1", placement(swapped)),
            "affine_maps and expert_placement do not say the same of rank 0"),
    corrupt("the placement of one rank", autoep("zero1", placement(lambda placed: placed["ranks"].pop())),
            "expert_placement is not of 2 ranks"),
    corrupt("an expert on two ranks", autoep("zero1", placement(lambda placed: placed["ranks"][1].update(
            experts=[1, 2]))), "each of 4 experts"),
    corrupt("another placement", autoep("zero1", placement(lambda placed: placed.update(version=2))),
                "expert_placement has an unknown form"),
    corrupt("other maps", autoep("zero1", maps(version=2)), "affine_maps have version 2"),
    unsupported("maps of others", autoep("zero1", maps({"x": 1})), "it is not in affine_maps"),
    corrupt("too many experts", autoep("zero1", of_layer(lambda layer: layer.update(num_experts=1 << 40))),
            "num_experts is"),
    unsupported("another prefix", autoep("zero1", of_layer(lambda layer: layer.update(expert_key_prefix="other"))),
            "no layer of AutoEP has it"),
    corrupt("a layer that is a number", autoep("zero1", edit(MODULE, lambda content: content.update({LAYERS: [1]}))),
            f"{LAYERS} is not a dict"),
    incomplete("more ranks of the model", autoep("zero1", edit(MODULE, lambda content: content.update(
               mp_world_size=2))), "mp_rank_01"),
    incomplete("an expert of AutoEP is missing", autoep("zero1", lose(THIRD)),
               f"files of 1 expert are missing\n  - {THIRD}\n"),
    corrupt("another expert in its place", autoep("zero1", add_copy(FOURTH, THIRD)), "which is not of expert 2"),
    corrupt("an expert that no layer has", autoep("zero1", add_copy(THIRD, MORE)),
            f"an expert that is not in {LAYERS}"),
    corrupt("the file of another rank", autoep("zero3", of_layer(lambda layer: layer.update(ep_rank=1,
            expert_data_parallel_rank=0), SECOND_RANK)), "expert-parallel rank 1 and data-parallel rank 0 saved it",
            "its name is that of 0 and 1"),
    incomplete("a rank of ZeRO 3 is missing", autoep("zero3", lose(SECOND_RANK)), "pp_rank_1"),
    # Without ZeRO
    incomplete("a layer is missing", without_zero_in_bf16(lose("layer_04-*")), "that no file of a layer contains"),
    incomplete("a stage is missing", without_zero_in_bf16(lose("mp_rank_01_model_states.pt")), "mp_rank_01"),
    # Its elements would be those of its neighbours: the record of places shows it.
    corrupt("a layer of another shape", without_zero_in_bf16(edit("layer_05-*", another_shape)),
            "not where the shapes and the number of ranks put them"),
    # In float32. DeepSpeed 0.19.8 loaded such a step under ZeRO 1, and what it saved had all weights by name.
    unsupported("a pipeline whose parameters nothing names", without_zero_in_bf16(lose("*optim_states.pt")),
                "pipeline stages without the states of ZeRO", "load_optimizer_states=False", "numbers its own"),
)  # fmt: skip


@each_of(REFUSALS)
def test_it_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    refusal.require(tmp_path)


@pytest.mark.parametrize("name", ["experts", "autoep-zero1", "without ZeRO"])
def test_the_weights_are_read_where_the_optimizer_is_refused_and_verify_names_one_problem(
    name: str, runs: Path, tmp_path: Path
) -> None:
    """All experts from their files, in the dtype that the model computed with."""
    make = without_zero(0, 1) if name == "without ZeRO" else step_of(name, lose("*_optim_states.pt"))
    (tmp_path / "step").mkdir()
    step = make(tmp_path / "step") or tmp_path / "step"
    (problem,) = fsdpckpt.verify(step).problems
    assert problem.kind == "missing-section" or "ZeRO 1 saves their names" in problem.message
    report = fsdpckpt.convert(step, tmp_path / "model.pt", only="model", verify="full")
    written = torch.load(tmp_path / "model.pt")
    assert report.tensors == len(written)
    for file in step.glob("layer_*"):
        for key, value in torch.load(file).items() if name != "autoep-zero1" else ():
            assert identical(written[key].to(value.dtype), value)
    if name != "without ZeRO":
        require_modules(written, runs / f"{name}.pt")
