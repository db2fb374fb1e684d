"""What belongs together is never a list of candidates, and no hint leads to a part of a model or leaves one out."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import fsdpckpt
from fsdpckpt.errors import FsdpckptError, NeedsInformationError, SourceUnsupportedError
from fsdpckpt.readers.counters import counted_parts
from fsdpckpt.text import natural
from tests.readers.contents import opened

MODEL = {"a.weight": torch.randn(4, 3), "b.weight": torch.randn(2, 4)}
HALF = {"a.weight": torch.randn(2, 3), "b.weight": torch.randn(2, 4)}


def put(content: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_file(content, path)
    elif path.suffix:
        torch.save({"model": content}, path)
    else:
        dcp.save({"model": content}, checkpoint_id=path, no_dist=True)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mp_rank_{:02d}/model_optim_rng.pt", "tensor-parallel ranks"),  # Megatron-LM
        ("mp_rank_00_{:03d}/model_optim_rng.pt", "tensor-parallel ranks or pipeline stages"),
        ("model_weight_pp-rank-0-of-1_tp-rank-{}-of-4.safetensors", "tensor-parallel ranks"),  # nanotron
        ("model/decoder/{}/w_pp-rank-{}-of-4_tp-rank-0-of-1.safetensors", "pipeline stages"),
        ("optimizer_pp-{}-of-4_dp-0-of-1_tp-0-of-1_exp-0-of-1.pt", "pipeline stages"),
        ("mp_rank_{:02d}_model_states.pt", "tensor-parallel ranks"),  # DeepSpeed without ZeRO
        ("expert_{}/weights.safetensors", "experts"),
        ("model_tp{}.pt", "tensor-parallel ranks"),
        ("stage_{}/model", "pipeline stages"),
        ("rank{}/model", "ranks"),
        ("model_rank_{}.safetensors", "ranks"),
        ("weights.part{}.pt", "shards"),
        ("node{}/model.safetensors", "ranks"),
    ],
)
def test_files_by_rank_stage_expert_or_shard_are_one_model(name: str, kind: str, tmp_path: Path) -> None:
    for number in range(4):
        put(HALF, tmp_path / name.format(number, number))
    with pytest.raises(SourceUnsupportedError) as error:
        opened(tmp_path)
    assert error.value.what == f"{tmp_path} contains one model in parts: the files of 4 {kind}"
    assert error.value.exit_code == 3 and "--ignore-file" not in error.value.text
    assert len(error.value.details) == 4 and "and 1 more" in error.value.text


@pytest.mark.parametrize("count", [2, 9])
def test_parts_that_cannot_be_read_are_parts_all_the_same(count: int, tmp_path: Path) -> None:
    """With many directories side by side, an error in one means that each is a checkpoint, unless they are ranks."""
    for number in range(count):
        put(HALF, tmp_path / f"mp_rank_{number:02d}" / "model_optim_rng.pt")
    file = tmp_path / "mp_rank_01" / "model_optim_rng.pt"
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(FsdpckptError) as error:
        opened(tmp_path)
    assert error.value.exit_code == 3 and "--ignore-file" not in error.value.text


@pytest.mark.parametrize("alone", [False, True])
def test_names_with_counters_are_parts_even_if_nothing_varies(alone: bool, tmp_path: Path) -> None:
    """nanotron has a file for each weight, all with the key ``data``; one of two halves is no model either."""
    name = f"model_weight_pp-rank-0-of-1_tp-rank-0-of-{2 if alone else 1}.safetensors"
    for module in ("a/attn",) if alone else ("a/attn", "a/mlp", "b/attn"):
        put({"data": torch.randn(3, 2)}, tmp_path / "10" / "model" / module / name)
    with pytest.raises(SourceUnsupportedError, match="one model in parts") as error:
        opened(tmp_path)
    assert ("2 tensor-parallel ranks" if alone else "weight by weight") in error.value.what
    assert "--ignore-file" not in error.value.text and "name the one" not in error.value.text


def test_one_of_several_parts_is_no_model_if_it_says_so_itself(tmp_path: Path) -> None:
    """Of Megatron-LM's ``mp_rank_00`` and ``mp_rank_01`` one was copied; the arguments of the run are in the file."""
    file = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    file.parent.mkdir()
    arguments = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "lr": 0.1}
    for given in (argparse.Namespace(**arguments), arguments):
        torch.save({"model": MODEL, "args": given}, file)
        assert opened(tmp_path).model is not None
    arguments["tensor_model_parallel_size"] = 2
    for given in (argparse.Namespace(**arguments), arguments):
        torch.save({"model": HALF, "args": given}, file)
        with pytest.raises(SourceUnsupportedError, match="one part of a model") as error:
            opened(file)
        assert error.value.details == ("its arguments say tensor_model_parallel_size=2",)


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


def test_numbered_whole_files_may_be_tensor_parallel_ranks(tmp_path: Path) -> None:
    """``consolidated.00.pth`` and ``consolidated.01.pth`` of Llama are halves; nothing in them says so."""
    for number in range(2):
        put(HALF, tmp_path / f"consolidated.{number:02d}.pth")
    with pytest.raises(NeedsInformationError) as error:
        opened(tmp_path)
    assert "if each is a checkpoint of its own" in str(error.value.next_step)
    assert "merged" in str(error.value.next_step)


# --- lists of candidates ----------------------------------------------------------------------------------------------


def steps(run: Path, *names: str) -> None:
    for name in names:
        put(MODEL, run / name)


def test_checkpoints_are_listed_in_natural_order_and_the_newest_is_named(tmp_path: Path) -> None:
    steps(tmp_path, *(f"checkpoint-{100 * number}" for number in range(8, 13)))
    with pytest.raises(NeedsInformationError) as error:
        opened(tmp_path)
    assert [Path(each).name for each in error.value.details][:3] == [
        "checkpoint-800",
        "checkpoint-900",
        "checkpoint-1000",
    ]
    assert str(error.value.next_step).endswith("checkpoint-1200 (inspect shows which are complete)")
    lines = error.value.text.split("\n")
    assert [line for line in lines if "checkpoint-1000" in line] and "  - and 2 more" in lines
    assert len(error.value.details) == 5, "machines see all"


def test_what_the_latest_file_names_is_proposed(tmp_path: Path) -> None:
    steps(tmp_path, "global_step_7/actor", "global_step_14/actor", "global_step_14/critic", "global_step_21/actor")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("14\n")
    with pytest.raises(NeedsInformationError) as error:
        opened(tmp_path)
    assert str(error.value.next_step).endswith("global_step_14 (inspect shows which are complete)")


def test_a_link_to_the_newest_is_no_candidate(tmp_path: Path) -> None:
    steps(tmp_path, "step-1", "step-2")
    (tmp_path / "latest").symlink_to("step-2")
    with pytest.raises(NeedsInformationError, match="contains 2 checkpoints"):
        opened(tmp_path)
    assert opened(tmp_path / "latest").model is not None


def test_a_file_is_left_out_by_the_hint_only_if_the_other_has_the_same_parameters(tmp_path: Path) -> None:
    put(MODEL, tmp_path / "model.pt")
    put({**MODEL, "tied.weight": MODEL["a.weight"].clone()}, tmp_path / "export.safetensors")
    with pytest.raises(NeedsInformationError) as error:
        opened(tmp_path)
    assert "--ignore-file export.safetensors" in str(error.value.next_step)
    assert fsdpckpt.inspect(tmp_path, ignore_file="export.safetensors")
    put({"vision.weight": torch.randn(3)}, tmp_path / "export.safetensors")
    with pytest.raises(NeedsInformationError) as error:
        opened(tmp_path)
    assert "--ignore-file" not in str(error.value.next_step)


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
