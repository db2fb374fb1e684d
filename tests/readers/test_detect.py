"""Recognising what is at a path: kinds of files, rank sets, parts side by side, the one checkpoint below."""

from __future__ import annotations

import functools
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from fsdpckpt.errors import (
    NeedsInformationError,
    SourceError,
    SourceIncompleteError,
    SourceMissingError,
    SourceUnrecognisedError,
    SourceUnsafeError,
    SourceUnsupportedError,
)
from fsdpckpt.ir.checkpoint import Container, Layout, Section
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.readers.side_files import flavor_of
from fsdpckpt.readers.torch_ranks import group_ranks
from fsdpckpt.storage import UPLOADING
from tests.flat.flat_synthetic import checkpoint
from tests.readers.contents import held, opened, raw, same_values
from tests.readers.test_missing_sections import verl

GOLDEN = Path(__file__).parent.parent / "golden"
MODEL = {"l.weight": torch.randn(5, 3), "l.bias": torch.randn(5)}
OPTIM = {
    "state": {0: {"step": torch.tensor(2.0), "exp_avg": torch.randn(5, 3)}, 1: {"exp_avg": torch.randn(5)}},
    "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}],
}


def save(value: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)


def save_dcp(value: Any, path: Path) -> None:
    dcp.save(value, checkpoint_id=path, no_dist=True)


def copy(form: str, target: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / form, target, ignore=shutil.ignore_patterns("truth")))


def kinds(checkpoint: Any) -> list[str]:
    return [note.kind for note in checkpoint.notes]


# --- one file ---------------------------------------------------------------------------------------------------------


def test_a_path_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceMissingError):
        opened(tmp_path / "absent")


def test_a_torch_file_is_recognised_by_content_whatever_its_name(tmp_path: Path) -> None:
    save({"model": MODEL, "optimizer": OPTIM, "epoch": 3}, tmp_path / "checkpoint.strange")
    found = opened(tmp_path / "checkpoint.strange")
    same_values(found, model=MODEL, optim=OPTIM)
    assert found.extra == {"epoch": 3} and (found.layout, found.container) == (Layout.FULL, Container.TORCH)
    assert found.flavor == "plain" and any("torch.save" in str(line) for line in found.evidence)


def test_a_legacy_torch_file_is_refused_saying_how_to_save_it_again(tmp_path: Path) -> None:
    torch.save(MODEL, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(SourceUnsupportedError) as error:
        opened(tmp_path / "old.pt")
    assert error.value.next_step is not None


@pytest.mark.parametrize("content", [b"", b"hello, this is some text", b"PK\x03\x04 but no zip", b"\x80\x04}."])
def test_a_file_of_another_kind_is_refused_showing_what_was_seen(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(SourceError) as error:
        opened(tmp_path / "x.bin")
    assert error.value.exit_code == 3


def test_a_file_that_holds_no_state_dict_is_refused(tmp_path: Path) -> None:
    save(torch.ones(3), tmp_path / "t.pt")
    with pytest.raises(SourceUnrecognisedError, match="not a state dict"):
        opened(tmp_path / "t.pt")


def test_the_file_of_one_rank_alone_is_refused(tmp_path: Path) -> None:
    copy("torch-2.4/f1_orig_sh_dt", tmp_path / "c")
    with pytest.raises(SourceIncompleteError) as error:
        opened(tmp_path / "c" / "model_0.pt")
    assert error.value.next_step == f"give the directory with all of them: {tmp_path / 'c'}"
    assert error.value.run_again is False


def test_an_index_that_names_files_which_are_not_there_is_no_file_of_a_rank(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "model-00001-of-00001.safetensors"}}))
    with pytest.raises(SourceIncompleteError) as error:
        opened(index)
    assert "each rank" not in str(error.value.why) and "with all of them" not in str(error.value.next_step)


# --- rank sets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["{s}_{r}.pt", "{s}_world_size_2_rank_{r}.pt", "pytorch_{s}_fsdp_0_rank{r}.bin", "{s}-rank-{r}.pth"]
)
def test_rank_files_are_one_checkpoint_under_every_name(tmp_path: Path, name: str) -> None:
    for section in ("model", "optim"):
        for rank in (0, 1):
            tmp_path.joinpath(name.format(s=section, r=rank)).write_bytes(
                (GOLDEN / "torch-2.4/f1_orig_sh_dt" / f"{section}_{rank}.pt").read_bytes()
            )
    truth = torch.load(GOLDEN / "torch-2.4/f1_orig_sh_dt/truth/full.pt", weights_only=False)
    found = opened(tmp_path)
    assert held(found.model.params, found.files) == held(dict(truth["model"]), ())  # type: ignore[union-attr]
    assert held(found.optim.state, found.files) == held(truth["optim"]["state"], ())  # type: ignore[union-attr]
    assert (found.layout, found.world_size, found.problems) == (Layout.SHARDED, 2, ())


def test_all_missing_rank_files_of_all_sets_are_named(tmp_path: Path) -> None:
    for section in ("model", "optim"):
        for rank in range(4):
            save({"x": torch.ones(2)}, tmp_path / f"{section}_world_size_4_rank_{rank}.pt")
    for name in ("model_world_size_4_rank_3", "optim_world_size_4_rank_0", "optim_world_size_4_rank_2"):
        (tmp_path / f"{name}.pt").unlink()
    with pytest.raises(SourceIncompleteError) as error:
        opened(tmp_path)
    assert error.value.details == (
        "model_world_size_4_rank_3.pt",
        "optim_world_size_4_rank_0.pt",
        "optim_world_size_4_rank_2.pt",
    )


def test_the_last_rank_of_one_set_is_missed_because_the_other_set_has_it(tmp_path: Path) -> None:
    for name in ("m_rank0.bin", "m_rank1.bin", "o_rank0.bin"):
        save({"x": torch.ones(2)}, tmp_path / name)
    with pytest.raises(SourceIncompleteError) as error:
        opened(tmp_path)
    assert error.value.details == ("o_rank1.bin",)


@pytest.mark.parametrize("content", [{"model": MODEL}, OPTIM, {"model": MODEL, "optimizer": OPTIM}])
def test_numbered_files_that_are_whole_are_not_taken_for_ranks(content: Any, tmp_path: Path) -> None:
    for number in (0, 1):
        save(content, tmp_path / f"run_{number}.pt")
    with pytest.raises(NeedsInformationError, match="each of these files contains whole tensors"):
        opened(tmp_path)


def test_numbered_files_of_slices_are_those_of_ranks(tmp_path: Path) -> None:
    for number in (0, 1):
        slices = {"state": {0: {"exp_avg": torch.full((7 - number,), number)}}, "param_groups": [{"params": [0]}]}
        save(slices, tmp_path / f"run_{number}.pt")
    assert (opened(tmp_path).layout, opened(tmp_path).world_size) == (Layout.FLATTENED, 2)


def test_one_numbered_file_is_a_single_file(tmp_path: Path) -> None:
    save({"model": MODEL}, tmp_path / "model_0.pt")
    same_values(opened(tmp_path), model=MODEL)


@pytest.mark.parametrize(
    ("names", "sets", "single"),
    [
        (["model_0.pt", "model_1.pt"], [("model", [0, 1])], []),
        (["model_0.pt", "model_1.pt", "model_3.pt"], [("model", [0, 1, 3])], []),
        (["m_0.pt", "m_1000.pt", "m_2000.pt"], [], ["m_0.pt", "m_1000.pt", "m_2000.pt"]),
        (["m_1.pt", "m_2.pt"], [], ["m_1.pt", "m_2.pt"]),
        (
            ["epoch_0.pt", "epoch_1.pt", "step-0.pt", "step-1.pt"],
            [],
            ["epoch_0.pt", "epoch_1.pt", "step-0.pt", "step-1.pt"],
        ),
        (
            ["model-00001-of-00002.bin", "model-00000-of-00002.bin"],
            [],
            ["model-00000-of-00002.bin", "model-00001-of-00002.bin"],
        ),
        (["optimizer.bin", "optimizer_1.bin"], [], ["optimizer.bin", "optimizer_1.bin"]),
        (["optimizer_0_rank10.bin", "optimizer_0_rank9.bin"], [("optimizer_0", [9, 10])], []),
        (["rng_state_0.pth", "rng_state_1.pth", "scheduler.pt"], [("rng_state", [0, 1])], ["scheduler.pt"]),
        (["a_world_size_2_rank_0.pt", "a_world_size_4_rank_0.pt"], [("a", [0]), ("a", [0])], []),
    ],
)
def test_names_are_grouped_by_rank(names: list[str], sets: Any, single: list[str]) -> None:
    found, rest = group_ranks(names, "run")
    assert [(entry.stem, sorted(entry.files)) for entry in found] == sets and rest == single


def test_names_of_missing_ranks_keep_the_pattern() -> None:
    (found,), _ = group_ranks(["o_0_rank0.bin", "o_0_rank3.bin"], "run")
    assert found.missing() == ["o_0_rank1.bin", "o_0_rank2.bin"]


def test_the_rank_of_an_adapter_is_not_the_rank_of_a_process(tmp_path: Path) -> None:
    save({"model": MODEL}, tmp_path / "model.pt")
    save({"r": 16, "alpha": 32}, tmp_path / "lora_rank16.pt")
    found = opened(tmp_path)
    same_values(found, model=MODEL)
    assert found.extra == {"lora_rank16": {"r": 16, "alpha": 32}}


@pytest.mark.parametrize("beside", [{}, {"model.pt": {"model": MODEL}}])
def test_the_slices_of_one_rank_in_a_directory_are_a_problem(beside: dict[str, Any], tmp_path: Path) -> None:
    slices = {"state": {0: {"exp_avg": torch.ones(7)}}, "param_groups": [{"params": [0]}]}
    for name, content in {**beside, "optim_rank3.pt": slices}.items():
        save(content, tmp_path / name)
    assert [problem.kind for problem in opened(tmp_path).problems if problem.fatal] == ["missing-rank"]


def test_ranks_of_which_one_has_no_dict_at_the_top_are_a_problem(tmp_path: Path) -> None:
    for first in ({"a.w": torch.ones(2), "epoch": 1, "d": {}}, {"model": {"a.w": torch.ones(2)}}):
        for rank, content in enumerate((first, [1])):
            save(content, tmp_path / f"model_rank{rank}.pt")
        found = opened(tmp_path)
        assert [(problem.kind, problem.fatal) for problem in found.problems] == [("replica", True)]
        assert found.rank_extra == ()


def test_extras_that_differ_between_ranks_are_kept_for_each(tmp_path: Path) -> None:
    for section in ("model", "optim"):
        for rank in (0, 1):
            source = GOLDEN / "torch-2.4/f1_orig_sh_dt" / f"{section}_{rank}.pt"
            shutil.copy(source, tmp_path / f"{section}_world_size_2_rank_{rank}.pt")
    states = [
        {"lr_scheduler": {"last_epoch": 4}, "rng": {"cpu": torch.randint(0, 9, (64,), dtype=torch.uint8), "n": rank}}
        for rank in (0, 1)
    ]
    for rank in (0, 1):
        save(states[rank], tmp_path / f"extra_state_world_size_2_rank_{rank}.pt")
    found = opened(tmp_path)
    assert held(found.extra, found.files) == held(states[0], ())
    assert [held(extra, found.files) for extra in found.rank_extra] == [held(state, ()) for state in states]


def test_a_key_that_two_parts_have_is_under_the_name_of_the_second_on_every_rank(tmp_path: Path) -> None:
    for rank in (0, 1):
        save({"model": MODEL, "epoch": 1, "seed": rank}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
        save({"optimizer": OPTIM, "epoch": 2, "seed": rank + 7}, tmp_path / f"optim_world_size_2_rank_{rank}.pt")
        save({"seed": rank + 9, "optim": "AdamW"}, tmp_path / f"extra_state_world_size_2_rank_{rank}.pt")
    found = opened(tmp_path)
    assert list(found.rank_extra) == [
        {
            "seed": rank + 9,
            "optim": "AdamW",
            "model": {"epoch": 1, "seed": rank},
            "optim_": {"epoch": 2, "seed": rank + 7},
        }
        for rank in (0, 1)
    ]
    assert found.extra == found.rank_extra[0]


def test_extras_of_more_ranks_than_the_model_has_are_kept_for_each(tmp_path: Path) -> None:
    for rank in (0, 1):
        save({"model": MODEL, "seed": rank}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    for rank in (0, 1, 2):
        save({"cpu": rank}, tmp_path / f"random_states_{rank}.pkl")
    states = [{"random_states": {"cpu": rank}, **({"seed": rank} if rank < 2 else {})} for rank in (0, 1, 2)]
    assert list(opened(tmp_path).rank_extra) == states


@pytest.mark.parametrize("more", [{"cpu": 7}, {}])
def test_what_a_rank_lacks_is_not_on_ranks_that_only_other_files_have(tmp_path: Path, more: dict[str, Any]) -> None:
    for rank in (0, 1):
        extras = {"model": MODEL, **({"path": "/a"} if rank == 0 else {})}
        save(extras, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    for rank in (0, 1, 2):
        save({"seed": 7, **({} if rank == 1 else more)}, tmp_path / f"random_states_{rank}.pkl")
    found = opened(tmp_path)
    assert found.extra == {"random_states": {"seed": 7}}
    others = {0: {"path": "/a"}, 1: {}, 2: {}}
    states = [{"seed": 7, **({} if rank == 1 else more)} for rank in others]
    assert list(found.rank_extra) == [
        {**others[rank], "random_states": states[rank]} for rank in (range(3) if more else range(2))
    ]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([0.5, 0.25, 0.5], ": 0.5 on ranks 0, 2; 0.25 on rank 1"),
        (["x" * 100 + end for end in "abc"], ""),
        ([*range(5)], ": 0 on rank 0; 1 on rank 1; 2 on rank 2; 3 on rank 3; ..."),
        ([0.5, torch.ones(2, 3)], ": 0.5 on rank 0; a tensor float32 [2, 3] on rank 1"),
    ],
)
def test_a_problem_says_which_ranks_have_which_value(values: list[Any], text: str, tmp_path: Path) -> None:
    for rank, value in enumerate(values):
        save(
            {"model": {"w": torch.ones(2)}, "optimizer": {**OPTIM, "param_groups": [{"lr": value, "params": [0, 1]}]}},
            tmp_path / f"model_rank{rank}.pt",
        )
    problems = [problem for problem in opened(tmp_path).problems if problem.kind == "replica"]
    assert [problem.message for problem in problems] == [
        f"optimizer.param_groups.0.lr is not the same on every rank{text}"
    ]
    assert problems[0].section is Section.OPTIM


def test_a_value_of_the_model_that_differs_between_ranks_is_a_problem_of_the_model(tmp_path: Path) -> None:
    for rank in (0, 1):
        save({"model": {**MODEL, "version": rank}, "optimizer": OPTIM}, tmp_path / f"model_rank{rank}.pt")
    found = [(problem.kind, problem.key, problem.section) for problem in opened(tmp_path).problems]
    assert found == [("replica", "model.version", Section.MODEL)]


# --- parts side by side -----------------------------------------------------------------------------------------------


def test_the_directories_model_and_optim_are_one_checkpoint(tmp_path: Path) -> None:
    truth = torch.load(GOLDEN / "torch-2.4/f1_orig_sh_dt_dcp/truth/full.pt", weights_only=False)
    found = opened(copy("torch-2.4/f1_orig_sh_dt_dcp", tmp_path / "c"))
    assert held(found.model.params, found.files) == held(dict(truth["model"]), ())  # type: ignore[union-attr]
    assert held(found.optim.state, found.files) == held(truth["optim"]["state"], ())  # type: ignore[union-attr]
    assert (found.container, found.world_size, found.problems) == (Container.DCP, 2, ())


def test_accelerates_files_are_one_checkpoint(tmp_path: Path) -> None:
    save(MODEL, tmp_path / "pytorch_model_fsdp.bin")
    save(OPTIM, tmp_path / "optimizer.bin")
    save({"last_epoch": 5}, tmp_path / "scheduler.bin")
    for rank in (0, 1):
        save({"step": 7, "cpu": torch.full((8,), rank, dtype=torch.uint8)}, tmp_path / f"random_states_{rank}.pkl")
    (tmp_path / "config.json").write_text("{}")
    found = opened(tmp_path)
    same_values(found, model=MODEL, optim=OPTIM)
    assert found.flavor == "accelerate" and found.world_size == 1
    assert found.extra["scheduler"] == {"last_epoch": 5}
    assert [held(extra["random_states"], found.files)["cpu"] for extra in found.rank_extra] == [  # type: ignore[index,call-overload]
        raw(torch.full((8,), rank, dtype=torch.uint8)) for rank in (0, 1)
    ]
    assert any("config.json" in note.message for note in found.notes if note.kind == "not-carried")


def test_accelerates_directories_are_one_checkpoint(tmp_path: Path) -> None:
    save_dcp({"model": MODEL}, tmp_path / "pytorch_model_fsdp_0")
    save_dcp({"optimizer": OPTIM}, tmp_path / "optimizer_0")
    save({"last_epoch": 5}, tmp_path / "scheduler.bin")
    found = opened(tmp_path)
    same_values(found, model=MODEL, optim=OPTIM)
    assert found.extra == {"scheduler": {"last_epoch": 5}} and found.container is Container.DCP


def test_lightnings_meta_file_is_the_rest_of_its_dcp_directory(tmp_path: Path) -> None:
    save_dcp({"model": MODEL, "optimizer_0": OPTIM}, tmp_path)
    own = {"epoch": 2, "loops": {"fit": [1]}, "average": {name: tensor + 1 for name, tensor in MODEL.items()}}
    save(own, tmp_path / "meta.pt")
    found = opened(tmp_path)
    same_values(found, model=MODEL, optim=OPTIM)
    assert held(found.extra, found.files) == held(own, ()) and found.flavor == "lightning"
    said = {each.message for each in found.evidence if each.kind == "sections"}
    assert said == {f"{tmp_path}: model and optimizer", f"{tmp_path}/meta.pt: extra entries"}
    assert opened(tmp_path / "meta.pt").model is not None, "alone, it may be read as any file"


def test_a_neighbour_that_is_refused_is_not_carried_but_named(tmp_path: Path) -> None:
    save(MODEL, tmp_path / "model.pt")
    save(functools.partial(print), tmp_path / "callbacks.pt")
    found = opened(tmp_path)
    same_values(found, model=MODEL)
    assert any("callbacks" in note.message and "partial" in note.message for note in found.notes)
    assert [Path(file.path).name for file in found.files] == ["model.pt"]


def test_extras_of_the_ranks_that_are_refused_are_never_left_out(tmp_path: Path) -> None:
    for rank in range(2):
        save({"a": torch.randn(5)}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
        save({"rng": functools.partial(print)}, tmp_path / f"extra_state_world_size_2_rank_{rank}.pt")
    with pytest.raises(SourceUnsafeError, match="extra_state"):
        opened(tmp_path)


def test_a_dcp_directory_that_is_refused_is_never_left_out(tmp_path: Path) -> None:
    save(MODEL, tmp_path / "model.pt")
    save_dcp({"optimizer": OPTIM}, tmp_path / "optim")
    (tmp_path / "optim" / ".metadata").write_bytes(pickle.dumps(functools.partial(print)))
    with pytest.raises(SourceUnsafeError):
        opened(tmp_path)


def test_a_model_that_is_refused_is_never_left_out(tmp_path: Path) -> None:
    save({**MODEL, "x": functools.partial(print)}, tmp_path / "model.pt")
    save(OPTIM, tmp_path / "optim.pt")
    with pytest.raises(SourceUnsafeError):
        opened(tmp_path)
    shutil.move(tmp_path / "model.pt", tmp_path / "a.pt")
    (tmp_path / "optim.pt").unlink()
    with pytest.raises(SourceUnsafeError):
        opened(tmp_path)


def test_two_candidates_for_one_section_are_listed_not_chosen_between(tmp_path: Path) -> None:
    save(MODEL, tmp_path / "pytorch_model_fsdp.bin")
    save_file(MODEL, tmp_path / "merged.safetensors")
    save(OPTIM, tmp_path / "optimizer.bin")
    with pytest.raises(NeedsInformationError) as error:
        opened(tmp_path)
    assert {Path(detail).name for detail in error.value.details} == {"pytorch_model_fsdp.bin", "merged.safetensors"}
    assert error.value.exit_code == 4


def test_consolidated_weights_beside_their_shards_are_listed(tmp_path: Path) -> None:
    save_file(MODEL, tmp_path / "model-00001-of-00001.safetensors")
    (tmp_path / "sharded").mkdir()
    save_file(MODEL, tmp_path / "sharded" / "shard-00001-model-00001-of-00001.safetensors")
    with pytest.raises(NeedsInformationError):
        opened(tmp_path)


def test_verls_exported_weights_are_no_part(tmp_path: Path) -> None:
    for section in ("model", "optim"):
        for rank in (0, 1):
            source = GOLDEN / "torch-2.4/f1_orig_sh_dt" / f"{section}_{rank}.pt"
            shutil.copy(source, tmp_path / f"{section}_world_size_2_rank_{rank}.pt")
    (tmp_path / "huggingface").mkdir()
    save_file(MODEL, tmp_path / "huggingface" / "model.safetensors")
    found = opened(tmp_path)
    assert found.flavor == "verl" and found.layout is Layout.SHARDED
    assert any("huggingface" in note.message for note in found.notes)


# --- checkpoints below ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("below", ["checkpoint-500", "step-10", "a/b", "run/global_step_7/actor"])
def test_the_only_checkpoint_below_is_opened_with_a_note(tmp_path: Path, below: str) -> None:
    save({"model": MODEL}, tmp_path / below / "pytorch_model.pt")
    (tmp_path / "log.txt").write_text("x")
    found = opened(tmp_path)
    same_values(found, model=MODEL)
    assert any(below in note.message for note in found.notes if note.kind == "found-below")


def test_several_checkpoints_below_are_listed(tmp_path: Path) -> None:
    for step in (10, 20):
        save_dcp({"model": MODEL, "optimizer": OPTIM}, tmp_path / f"step-{step}")
    with pytest.raises(NeedsInformationError) as error:
        opened(tmp_path)
    assert {Path(detail).name for detail in error.value.details} == {"step-10", "step-20"}


def test_one_of_several_checkpoints_that_cannot_be_read_is_listed_with_them(tmp_path: Path) -> None:
    for name in "abcd":
        save({"model": MODEL}, tmp_path / name / "model.pt")
    damaged = tmp_path / "d" / "model.pt"
    damaged.write_bytes(damaged.read_bytes()[:200])
    save({"model": MODEL, "hook": os.getcwd}, tmp_path / "c" / "model.pt")
    with pytest.raises(NeedsInformationError, match="contains 4 checkpoints, and 2 of them cannot be read") as error:
        opened(tmp_path)
    assert set(error.value.details) == {
        *(str(tmp_path / name / "model.pt") for name in "ab"),
        *(str(tmp_path / name) for name in "cd"),
    }
    (tmp_path / "a" / "model.pt").unlink()
    with pytest.raises(SourceError):
        opened(tmp_path)


def test_a_directory_that_is_being_uploaded_is_refused(tmp_path: Path) -> None:
    save({"model": MODEL}, tmp_path / "model.pt")
    (tmp_path / UPLOADING).touch()
    with pytest.raises(SourceIncompleteError, match="still being uploaded") as error:
        opened(tmp_path)
    assert error.value.file == f"{tmp_path}/{UPLOADING}"


def test_a_model_and_an_optimizer_of_two_steps_are_never_joined(tmp_path: Path) -> None:
    save(MODEL, tmp_path / "step-10" / "model.pt")
    save(OPTIM, tmp_path / "step-20" / "optimizer.pt")
    with pytest.raises(NeedsInformationError, match="contains 2 checkpoints"):
        opened(tmp_path)


def test_the_checkpoints_of_two_roles_are_listed(tmp_path: Path) -> None:
    for role in ("actor", "critic"):
        save({"model": MODEL}, tmp_path / role / "model.pt")
    with pytest.raises(NeedsInformationError) as error:
        opened(tmp_path)
    assert len(error.value.details) == 2
    assert error.value.next_step.endswith("model.pt")


def test_of_two_roles_with_several_files_each_the_directory_is_named(tmp_path: Path) -> None:
    for role in ("actor", "critic"):
        for section, value in (("model", MODEL), ("optim", OPTIM)):
            save(value, tmp_path / role / f"{section}_world_size_1_rank_0.pt")
    with pytest.raises(NeedsInformationError) as error:
        opened(tmp_path)
    assert error.value.next_step.endswith(str(tmp_path / "actor"))


def test_what_a_trainer_keeps_above_the_folder_of_a_role_is_not_mixed_with_it(tmp_path: Path) -> None:
    (step := tmp_path / "global_step_7").mkdir()
    save({"loader": {"at": 3}}, step / "data.pt")
    verl(step / "actor")
    found = opened(step)
    assert found.flavor == "verl" and found.optim is not None and "data" not in found.extra
    (note,) = [note.message for note in found.notes if note.kind == "found-below"]
    assert note == f"the checkpoint was found in {step}/actor; not copied from {step}: data.pt"
    verl(step / "critic")
    with pytest.raises(NeedsInformationError, match="contains 2 checkpoints") as error:
        opened(step)
    assert set(error.value.details) == {f"{step}/actor", f"{step}/critic"}


def test_older_checkpoints_below_a_whole_one_are_no_parts(tmp_path: Path) -> None:
    save(MODEL, tmp_path / "pytorch_model.bin")
    save(OPTIM, tmp_path / "checkpoint-500" / "optimizer.bin")
    found = opened(tmp_path)
    same_values(found, model=MODEL)
    assert any("checkpoint-500" in note.message for note in found.notes)


SETTINGS = {"lr": 0.1, "names": ["a", "b"]}


@pytest.mark.parametrize(
    "settings",
    [SETTINGS, {**SETTINGS, "class_weights": torch.randn(3)}, {"a": {"b": torch.randn(3)}}, functools.partial(print)],
)
@pytest.mark.parametrize("below", ["step_10", "a/runs/step_10"])
def test_settings_beside_the_steps_do_not_hide_the_checkpoint(tmp_path: Path, settings: Any, below: str) -> None:
    save(settings, tmp_path / "args.pt")
    save(SETTINGS, tmp_path / "logs" / "settings.pt")
    save_dcp({"model": MODEL, "optimizer": OPTIM}, tmp_path / below)
    found = opened(tmp_path)
    assert (found.model is not None, found.optim is not None, found.extra) == (True, True, {})
    (note,) = (note.message for note in found.notes if note.kind == "found-below")
    assert note == f"the checkpoint was found in {tmp_path / below}; not copied from {tmp_path}: args.pt"


def test_settings_above_several_steps_are_none_of_the_candidates(tmp_path: Path) -> None:
    save(SETTINGS, tmp_path / "args.pt")
    for step in (1, 10):
        save_dcp({"model": MODEL}, tmp_path / f"step_{step}")
    with pytest.raises(NeedsInformationError) as error:
        opened(tmp_path)
    assert [Path(detail).name for detail in error.value.details] == ["step_1", "step_10"]


def test_tensors_above_a_step_that_may_be_a_model_are_a_candidate(tmp_path: Path) -> None:
    save({"weight": torch.randn(3)}, tmp_path / "best.pt")
    save_dcp({"model": MODEL}, tmp_path / "step_10")
    with pytest.raises(NeedsInformationError) as error:
        opened(tmp_path)
    assert [Path(detail).name for detail in error.value.details] == ["best.pt", "step_10"]
    assert error.value.why == f"{tmp_path}/best.pt may be a model, or only settings"


def test_settings_of_the_checkpoint_beside_them_are_read_with_it(tmp_path: Path) -> None:
    save(SETTINGS, tmp_path / "args.pt")
    save(MODEL, tmp_path / "model" / "model.pt")
    (tmp_path / "step_10").mkdir()
    found = opened(tmp_path)
    same_values(found, model=MODEL)
    assert found.extra == {"args": SETTINGS}
    assert any("not treated as parts of this checkpoint: step_10" in note.message for note in found.notes)


def test_an_empty_step_whose_name_begins_another_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "step_1").mkdir()
    save(OPTIM, tmp_path / "step_10" / "optimizer.pt")
    save(MODEL, tmp_path / "weights" / "model.pt")
    same_values(opened(tmp_path), model=MODEL, optim=OPTIM)


def test_a_directory_without_a_checkpoint_says_what_was_looked_for_and_seen(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "sub").mkdir()
    with pytest.raises(SourceUnrecognisedError) as error:
        opened(tmp_path)
    assert ".metadata" in str(error.value) and "notes.txt" in str(error.value)


def test_an_interrupted_save_among_others_is_reported(tmp_path: Path) -> None:
    save_dcp({"model": MODEL}, tmp_path / "model")
    (tmp_path / "model" / ".metadata").unlink()
    with pytest.raises(SourceIncompleteError):
        opened(tmp_path)


# --- what fsdpckpt wrote itself ---------------------------------------------------------------------------------------


def test_the_manifest_tells_key_types_and_what_was_undetermined(tmp_path: Path) -> None:
    optim = {"state": OPTIM["state"]}
    save_dcp({"model": MODEL, "optimizer": optim}, tmp_path)
    assert list(opened(tmp_path).optim.state) == ["0", "1"]  # type: ignore[union-attr]
    manifest = {"program": "fsdpckpt", "version": "9", "key_type": "id", "undetermined": ["l.bias", "gone"]}
    (tmp_path / "fsdpckpt.json").write_text(json.dumps(manifest))
    found = opened(tmp_path)
    assert list(found.optim.state) == [0, 1] and found.flavor == "plain"  # type: ignore[union-attr]
    assert any("fsdpckpt" in str(line) and "9" in str(line) for line in found.evidence)
    leaf = found.model.params["l.bias"]  # type: ignore[union-attr]
    assert isinstance(leaf, Tensor) and leaf.sharded is None
    assert not {"not-carried", "units-unreadable"} & set(kinds(found))


def test_a_manifest_that_was_damaged_is_noted(tmp_path: Path) -> None:
    save_dcp({"model": MODEL}, tmp_path)
    (tmp_path / "fsdpckpt.json").write_text("{")
    assert "manifest" in kinds(opened(tmp_path))


@pytest.mark.parametrize(
    ("names", "directory", "flavor"),
    [
        ([".metadata", "__0_0.distcp"], "/a/step-10", "plain"),
        ([".metadata", "__0_0.distcp", "fsdpckpt.json"], "/a/step-10", "plain"),
        ([".metadata", "meta.pt"], "/a/x", "fabric"),
        (["model_world_size_2_rank_0.pt"], "/a", "plain"),
        (["model_world_size_2_rank_0.pt", "fsdp_config.json"], "/a/actor", "verl"),
        (["pytorch_model_fsdp_0", "optimizer_0"], "/a", "accelerate"),
        (["model.safetensors"], "/a/step-10", "plain"),
    ],
)
def test_flavors_are_recognised_by_names_alone(names: list[str], directory: str, flavor: str) -> None:
    assert flavor_of(checkpoint(1), names, directory) == flavor


def test_a_url_is_opened_like_a_directory() -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(GOLDEN / "torch-2.4/f1_orig_sh_dt_dcp") + "/", "/detect-url/run", recursive=True)
    memory.rm("/detect-url/run/truth", recursive=True)
    truth = torch.load(GOLDEN / "torch-2.4/f1_orig_sh_dt_dcp/truth/full.pt", weights_only=False)
    found = opened("memory://detect-url")
    assert found.model is not None and found.problems == ()
    assert {name: leaf.shape for name, leaf in found.model.params.items() if isinstance(leaf, Tensor)} == {
        name: tuple(value.shape) for name, value in truth["model"].items()
    }
    assert all(file.path.startswith("memory://") for file in found.files)


def test_a_link_to_itself_beside_a_checkpoint_does_not_hide_it(tmp_path: Path) -> None:
    torch.save({"a": torch.randn(3)}, tmp_path / "model.pt")
    (tmp_path / "loop").symlink_to("loop")
    assert opened(tmp_path / "model.pt").model is not None


def test_slices_numbered_from_1_miss_rank_0_and_epochs_do_not(tmp_path: Path) -> None:
    states = {"exp_avg": torch.randn(7), "step": torch.tensor(2.0), "seen": 3}
    sliced = {"state": {0: states}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    whole = {"state": {0: {"exp_avg": torch.randn(7, 2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    for folder, optimizer in (("sliced", sliced), ("whole", whole)):
        (tmp_path / folder).mkdir()
        for number in (1, 2, 3):
            torch.save(optimizer, tmp_path / folder / f"optim_{number}.pt")
    with pytest.raises(SourceIncompleteError, match="but those of rank 0 are missing") as missing:
        opened(tmp_path / "sliced")
    assert (missing.value.file, missing.value.rank) == (f"{tmp_path / 'sliced'}/optim_0.pt", 0)
    with pytest.raises(NeedsInformationError, match="3 candidates"):
        opened(tmp_path / "whole")


@pytest.mark.parametrize("names", [("optim_1", "adam_2"), ("optim_1", "optim_3"), ("optim_2", "optim_3")])
def test_slices_under_other_numbers_are_only_two_optimizers(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        save({"state": {0: {"exp_avg": torch.randn(7)}}, "param_groups": [{"params": [0]}]}, tmp_path / f"{name}.pt")
    with pytest.raises(NeedsInformationError, match="2 candidates for the optimizer"):
        opened(tmp_path)


def test_models_numbered_from_1_of_which_one_has_an_optimizer_are_only_two_models(tmp_path: Path) -> None:
    sliced = {"state": {0: {"exp_avg": torch.randn(7)}}, "param_groups": [{"params": [0]}]}
    save({"model": MODEL}, tmp_path / "model_1.pt")
    save({"model": MODEL, "optimizer": sliced}, tmp_path / "model_2.pt")
    with pytest.raises(NeedsInformationError, match="2 candidates for the model"):
        opened(tmp_path)
