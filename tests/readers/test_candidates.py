"""What belongs together is never a list of candidates, and no hint leads to a part of a model or leaves one out."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import FsdpckptError, SourceUnsupportedError
from fsdpckpt.readers.counters import counted_parts
from fsdpckpt.text import natural
from tests.makers import Make, files, save, together
from tests.readers.contents import opened
from tests.refusals import Refusal, each_of, several, unclear, unsupported

MODEL = {"a.weight": torch.randn(4, 3), "b.weight": torch.randn(2, 4)}
HALF = {"a.weight": torch.randn(2, 3), "b.weight": torch.randn(2, 4)}


def weights(names: Sequence[str], content: Mapping[str, torch.Tensor] = HALF) -> Make:
    """A model, or a part of one, under each name: a file, or a DCP directory."""

    def make(directory: Path) -> None:
        for name in names:
            save(dict(content) if name.endswith(".safetensors") else {"model": dict(content)}, directory / name)

    return make


def numbered(name: str, count: int = 4) -> list[str]:
    return [name.format(number, number) for number in range(count)]


def runs_arguments(size: int, *, plain: bool) -> Make:
    """One of Megatron-LM's files, with the arguments of the run, which say how many there are."""
    arguments = {"tensor_model_parallel_size": size, "pipeline_model_parallel_size": 1, "lr": 0.1}
    content = {"model": HALF, "args": arguments if plain else argparse.Namespace(**arguments)}
    return files({MEGATRON.format(0): content}, given=MEGATRON.format(0))


MEGATRON = "mp_rank_{:02d}/model_optim_rng.pt"
NANOTRON = "10/model/{}/model_weight_pp-rank-0-of-1_tp-rank-0-of-{}.safetensors"
# How files are named that are one model in parts, and what they are called
PARTS = {
    MEGATRON: "tensor-parallel ranks",
    "mp_rank_00_{:03d}/model_optim_rng.pt": "tensor-parallel ranks or pipeline stages",
    "model_weight_pp-rank-0-of-1_tp-rank-{}-of-4.safetensors": "tensor-parallel ranks",  # nanotron
    "model/decoder/{}/w_pp-rank-{}-of-4_tp-rank-0-of-1.safetensors": "pipeline stages",
    "optimizer_pp-{}-of-4_dp-0-of-1_tp-0-of-1_exp-0-of-1.pt": "pipeline stages",
    "mp_rank_{:02d}_model_states.pt": "tensor-parallel ranks",  # DeepSpeed without ZeRO
    "expert_{}/weights.safetensors": "experts",
    "model_tp{}.pt": "tensor-parallel ranks",
    "stage_{}/model": "pipeline stages",
    "rank{}/model": "ranks",
    "model_rank_{}.safetensors": "ranks",
    "weights.part{}.pt": "shards",
    "node{}/model.safetensors": "ranks",
}
NO_HINT = ("--ignore-file", "name the one")
EXPORT = {**MODEL, "tied.weight": MODEL["a.weight"].clone()}
REFUSALS = (
    *(
        unsupported(name, weights(numbered(name)), f"DIR contains one model in parts: the files of 4 {kind}\n",
                    "  - and 1 more", omits=NO_HINT)
        for name, kind in PARTS.items()
    ),
    # nanotron has a file for each weight, all with the key data; one of two halves is no model either.
    unsupported("weight by weight", weights([NANOTRON.format(name, 1) for name in ("a/attn", "a/mlp", "b/attn")],
                {"data": torch.ones(3, 2)}), "one model in parts", "weight by weight", omits=NO_HINT),
    unsupported("one of two halves", weights([NANOTRON.format("a/attn", 2)], {"data": torch.ones(3, 2)}),
                "one model in parts", "2 tensor-parallel ranks", omits=NO_HINT),
    *(
        unsupported(f"a part by its arguments, {plain}", runs_arguments(2, plain=plain), "one part of a model",
                    "\n  - its arguments say tensor_model_parallel_size=2\n")
        for plain in (True, False)
    ),
    # consolidated.00.pth and consolidated.01.pth of Llama are halves; nothing in them says so.
    unclear("numbered whole files", weights(numbered("consolidated.{:02d}.pth", 2)),
            "if each is a checkpoint of its own", "merged"),
    # Lists of candidates
    several("natural order", weights([f"checkpoint-{100 * number}" for number in range(8, 13)]),
            "\n  - DIR/checkpoint-800\n  - DIR/checkpoint-900\n  - DIR/checkpoint-1000\n  - and 2 more\n",
            "checkpoint-1200 (inspect shows which are complete)"),
    several("the latest file", together(weights(["global_step_7/actor", "global_step_14/actor",
            "global_step_14/critic", "global_step_21/actor"]), files({"latest_checkpointed_iteration.txt": "14\n"})),
            "global_step_14 (inspect shows which are complete)"),
    several("a link to the newest", together(weights(["step-1", "step-2"]),
            lambda directory: (directory / "latest").symlink_to("step-2")), "contains 2 checkpoints"),
    # A file is left out by the hint only if the other has the same parameters.
    several("an export", together(weights(["model.pt"], MODEL), weights(["export.safetensors"], EXPORT)),
            "--ignore-file export.safetensors"),
    unclear("another model", together(weights(["model.pt"], MODEL), weights(["x.safetensors"], {"v": torch.ones(3)})),
            omits=("--ignore-file",)),
)  # fmt: skip


@each_of(REFUSALS)
def test_it_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    refusal.require(tmp_path)


@pytest.mark.parametrize("plain", [True, False])
def test_a_file_whose_arguments_say_that_it_is_whole_is_a_model(plain: bool, tmp_path: Path) -> None:
    source = runs_arguments(1, plain=plain)(tmp_path)
    assert source is not None and opened(source).model is not None


@pytest.mark.parametrize("count", [2, 9])
def test_parts_that_cannot_be_read_are_parts_all_the_same(count: int, tmp_path: Path) -> None:
    """With many directories side by side, an error in one means that each is a checkpoint, unless they are ranks."""
    for number in range(count):
        save({"model": HALF}, tmp_path / f"mp_rank_{number:02d}" / "model_optim_rng.pt")
    file = tmp_path / "mp_rank_01" / "model_optim_rng.pt"
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(FsdpckptError) as error:
        opened(tmp_path)
    assert error.value.exit_code == 3 and "--ignore-file" not in error.value.text


def test_numbers_that_count_something_else_are_none_of_a_rank() -> None:
    for names in (
        ["step-1/model.pt", "step-2/model.pt"],
        ["model_v1.pt", "model_v2.pt"],
        ["lora_r8.pt", "lora_r16.pt"],
        ["a_tp-rank-0-of-1.pt", "b_tp-rank-0-of-1.pt"],
        ["ckpt_world_size_2_rank_*.pt", "ckpt_world_size_4_rank_*.pt"],
        ["step1.pt", "group2.pt"],
    ):
        assert counted_parts(names) is None, names


def test_names_are_in_natural_order() -> None:
    names = ["a10b2", "a10b10", "a9", "b", "a", "10", "9", "a09"]
    assert sorted(names, key=natural) == ["9", "10", "a", "a09", "a9", "a10b2", "a10b10", "b"]


def test_the_files_of_ranks_in_directories_of_their_own_are_read_after_the_command_that_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 6)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "whole.pt")
    fsdpckpt.convert("whole.pt", "shards", to="sharded", container="torch", world_size=2, buffers="none")
    for rank in range(2):
        folder = tmp_path / "one directory" / f"rank_{rank}"
        folder.mkdir(parents=True)
        for name in ("model", "optim"):
            (tmp_path / "shards" / f"{name}_world_size_2_rank_{rank}.pt").rename(folder / f"{name}.pt")
    with pytest.raises(SourceUnsupportedError, match="files of 2 ranks, each in a directory of its own") as error:
        fsdpckpt.convert("one directory", "back.pt")
    command = str(error.value.next_step).splitlines()[-1].strip()
    subprocess.run(command, shell=True, check=True)  # as a user pastes it
    fsdpckpt.convert("ranks", "back.pt", to="full")
    assert fsdpckpt.diff("whole.pt", "back.pt").same
