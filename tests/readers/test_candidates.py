"""What belongs together is never a list of candidates, no hint leads to a part of a model, or leaves one out.

What ``--ignore-file`` leaves out, and checkpoints beside directories of steps.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import fsdpckpt
from fsdpckpt.api import inspect_incomplete
from fsdpckpt.cli.app import app
from fsdpckpt.errors import (
    FsdpckptError,
    NeedsInformationError,
    SeveralCheckpointsError,
    SourceIncompleteError,
    SourceUnrecognisedError,
    SourceUnsupportedError,
    UsageError,
)
from fsdpckpt.readers.candidates import glob_of
from fsdpckpt.readers.counters import counted_parts
from fsdpckpt.readers.protocol import Part, PartContents
from fsdpckpt.text import natural
from tests.makers import GOLDEN, Make, dcp_of, files, save, together
from tests.oracle.compare import identical
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
TIED = {**MODEL, "tied.weight": MODEL["a.weight"].clone()}
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
    several("an export", together(weights(["model.pt"], MODEL), weights(["export.safetensors"], TIED)),
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


OPTIM = {"state": {0: {"exp_avg": torch.randn(4, 3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
BOTH = {"model": MODEL, "optimizer": OPTIM}


def inspected(run: Path, *options: str) -> str:
    shown = CliRunner().invoke(app, ["inspect", str(run), *options])
    assert shown.exit_code == 0
    return shown.stdout


def rows(run: Path) -> dict[str, Any]:
    return {row["name"]: row for row in json.loads(inspected(run, "--json"))["checkpoints"]}


@pytest.mark.parametrize("content", [BOTH, MODEL, OPTIM, {"opt_d": OPTIM, "opt_g": OPTIM}])
@pytest.mark.parametrize("above", ["", "checkpoints/"])
def test_a_file_beside_steps_is_asked_for_wherever_they_are(tmp_path: Path, content: Any, above: str) -> None:
    file = save(content, tmp_path / "best.pt")
    step = save(BOTH, tmp_path / f"{above}step_10" / "all.pt").parent
    with pytest.raises(SeveralCheckpointsError) as error:
        fsdpckpt.convert(tmp_path, tmp_path.with_suffix(".pt"), to="full")
    assert error.value.exit_code == 4 and error.value.details == (str(file), str(step))
    assert error.value.next_step == f"name the one to read, for example {step}; or {file}"
    assert list(rows(tmp_path)) == sorted(["best.pt", f"{above}step_10"])


@pytest.mark.parametrize("names", [("model.pt", "optimizer.pt"), ("dcp",)])
def test_several_files_beside_steps_are_read_without_them(tmp_path: Path, names: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    if names == ("dcp",):
        save(BOTH, run)
    else:
        for name, content in zip(names, (MODEL, OPTIM), strict=True):
            save(content, run / name)
    save(BOTH, run / "step_9" / "all.pt")
    save(BOTH, run / "step_10" / "all.pt")
    with pytest.raises(SeveralCheckpointsError) as error:
        fsdpckpt.verify(run)
    assert error.value.next_step is not None and "--ignore-file 'step_*'" in f"{error.value.next_step}"
    assert fsdpckpt.inspect(run, ignore_file=["step_*"]).sections["model"].tensors == 2
    found = rows(run)
    assert list(found) == [".", "step_9", "step_10"] and found["."]["sections"] == ["model", "optim"]


def test_a_damaged_step_is_one_too_and_an_empty_directory_is_none(tmp_path: Path) -> None:
    save(BOTH, tmp_path / "final.pt")
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_2").mkdir()
    (tmp_path / "step_2" / "notes.txt").write_text("x")
    assert fsdpckpt.verify(tmp_path).whole
    data = save(BOTH, tmp_path / "step_3") / "__0_0.distcp"
    data.unlink()
    with pytest.raises(SeveralCheckpointsError):
        fsdpckpt.verify(tmp_path)
    assert rows(tmp_path)["step_3"]["complete"] is False
    assert "newest complete: final.pt" in inspected(tmp_path)


def test_the_final_model_of_the_trainer_is_read_and_is_a_row_of_its_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(MODEL, run / "model.safetensors")
    save({"lr": 0.1}, run / "training_args.bin")
    for number in (500, 1000):
        save(MODEL, run / f"checkpoint-{number}" / "model.safetensors")
        save(OPTIM, run / f"checkpoint-{number}" / "optimizer.pt")
    assert list(rows(run)) == [".", "checkpoint-500", "checkpoint-1000"]
    assert fsdpckpt.inspect(run).sections["model"].tensors == 2
    fsdpckpt.convert(run, tmp_path / "out.pt", to="full", flavor="plain")
    assert torch.load(tmp_path / "out.pt", weights_only=True)["model"]["b.weight"].equal(MODEL["b.weight"])
    save(OPTIM, run / "optimizer.pt")  # which the Trainer never writes there
    with pytest.raises(SeveralCheckpointsError):
        fsdpckpt.inspect(run)


def test_the_newest_complete_step_is_said_although_an_earlier_epoch_has_a_higher_number(tmp_path: Path) -> None:
    for name in ("epoch=1-step=500", "epoch=2-step=100", "epoch=3-step=50"):
        save(BOTH, tmp_path / name)
    (tmp_path / "epoch=3-step=50" / ".metadata").unlink()
    assert "newest complete: epoch=2-step=100" in inspected(tmp_path)


EXPORT = {name: tensor + 1 for name, tensor in MODEL.items()}
BY_NAME = {
    "state": {name: {"exp_avg": torch.randn_like(tensor)} for name, tensor in MODEL.items()},
    "param_groups": [{"lr": 0.1, "params": list(MODEL)}],
}


def accelerate(path: Path, export: str) -> None:
    """State with an export in it, as a training script leaves it that ends with ``save_model``."""
    dcp_of({"model": MODEL})(path / "pytorch_model_fsdp_0")
    dcp_of({"optimizer": BY_NAME})(path / "optimizer_0")
    (path / export).parent.mkdir(exist_ok=True)
    save_file(EXPORT, path / export)


def typed(error: NeedsInformationError) -> list[str]:
    """The globs that the message tells to type."""
    words = shlex.split(re.sub(r"[,:;]", " ", str(error.next_step)))
    return [words[at + 1] for at, word in enumerate(words) if word == "--ignore-file"]


def weight_of(path: Path, **options: Any) -> torch.Tensor:
    with fsdpckpt.open(path, **options) as checkpoint:
        found: torch.Tensor = checkpoint["a.weight"].torch()
    return found


@pytest.mark.parametrize("export", ["final/model.safetensors", "consolidated.safetensors"])
def test_an_export_beside_the_state_is_left_out(export: str, tmp_path: Path) -> None:
    accelerate(source := tmp_path / "state", export)
    with pytest.raises(NeedsInformationError, match="2 candidates for the model") as caught:
        fsdpckpt.inspect(source)
    assert typed(caught.value) == [export]
    assert str(caught.value.next_step).endswith(f"; or give {source / export} as SRC")
    ignored: dict[str, Any] = {"ignore_file": typed(caught.value)}
    assert identical(weight_of(source, **ignored), MODEL["a.weight"])
    assert len(fsdpckpt.inspect(source, **ignored).to_json()["sections"]) >= 2
    assert fsdpckpt.verify(source, **ignored).whole
    report = fsdpckpt.convert(source, tmp_path / "out", world_size=2, **ignored)
    assert report.flavor == "accelerate" and not (tmp_path / "out" / export).exists()
    assert any(export in note.keys for note in report.notes if note.kind == "ignored")
    assert fsdpckpt.diff(source, tmp_path / "out", **ignored).same
    assert identical(weight_of(source, ignore_file=["pytorch_model_fsdp_0", "optimizer_0"]), EXPORT["a.weight"])
    fsdpckpt.convert(source, tmp_path / "dir", world_size=2, ignore_file=[export.partition("/")[0] + "/"])


def test_a_file_in_a_dcp_directory_is_left_out(tmp_path: Path) -> None:
    dcp_of({"model": MODEL, "optimizer": BY_NAME})(tmp_path / "dcp")
    torch.save(EXPORT, tmp_path / "dcp" / "model.pt")
    with pytest.raises(NeedsInformationError) as caught:
        fsdpckpt.convert(tmp_path / "dcp", tmp_path / "full.pt")
    assert typed(caught.value) == ["model.pt"]
    assert str(caught.value.next_step).endswith(" --ignore-file model.pt")
    fsdpckpt.convert(tmp_path / "dcp", tmp_path / "full.pt", ignore_file="model.pt")
    assert identical(torch.load(tmp_path / "full.pt")["model"]["a.weight"], MODEL["a.weight"])


def test_files_that_another_file_names_are_left_out_too(tmp_path: Path) -> None:
    dcp_of({"model": MODEL})(tmp_path / "dcp")
    with pytest.raises(SourceIncompleteError, match="1 of 1 data files is missing"):
        fsdpckpt.inspect(tmp_path / "dcp", ignore_file="__0_0.distcp")
    (tmp_path / "shards").mkdir()
    for number, (name, tensor) in enumerate(MODEL.items()):
        save_file({name: tensor}, tmp_path / "shards" / f"part{number}.safetensors")
    index = {"weight_map": {name: f"part{number}.safetensors" for number, name in enumerate(MODEL)}}
    (tmp_path / "shards" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SourceIncompleteError, match="1 of them cannot be found"):
        fsdpckpt.inspect(tmp_path / "shards", ignore_file="part1.safetensors")
    zero = GOLDEN / "deepspeed" / "zero2-fp32"
    assert fsdpckpt.inspect(zero, ignore_file="truth.pt")
    with pytest.raises(SourceUnrecognisedError, match="no checkpoint was found"):
        fsdpckpt.inspect(zero, ignore_file=["truth.pt", "global_step3"])


def test_a_units_file_is_left_out_below_the_source_and_not_above(tmp_path: Path) -> None:
    units = {"w": torch.zeros(3)}
    (source := tmp_path / "run" / "step-1").mkdir(parents=True)
    torch.save(units, source / "model.pt")
    (source / "units.json").write_text("x")
    (source.parent / "units.json").write_text("y")
    assert fsdpckpt.inspect(source, ignore_file="units.json")
    (source / "units.json").unlink()
    with pytest.raises(UsageError, match="matches no file"):
        fsdpckpt.inspect(source, ignore_file="units.json")


def test_a_file_that_the_manifest_lists_is_left_out_and_not_missing(tmp_path: Path) -> None:
    torch.save({"model": MODEL, "optimizer": BY_NAME}, tmp_path / "full.pt")
    fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "out", to="sharded", container="torch", world_size=2)
    ignored = "optim_world_size_2_rank_*.pt"
    assert fsdpckpt.verify(tmp_path / "out", ignore_file=ignored).whole
    assert fsdpckpt.inspect(tmp_path / "out", ignore_file=ignored).to_json()["problems"] == []


def test_a_name_with_brackets_is_left_out_of_the_copies(tmp_path: Path) -> None:
    accelerate(source := tmp_path / "state", "model.safetensors")
    (source / "scheduler[1].bin").write_bytes(b"x")
    ignored = ["model.safetensors", "scheduler*"]
    fsdpckpt.convert(source, tmp_path / "out", world_size=2, ignore_file=ignored)
    assert not (tmp_path / "out" / "scheduler[1].bin").exists()


def test_sets_of_files_are_left_out_by_one_glob(tmp_path: Path) -> None:
    (source := tmp_path / "both").mkdir()
    for rank in range(3):
        torch.save({**MODEL, "own": torch.tensor([rank])}, source / f"model_world_size_3_rank_{rank}.pt")
    for number in (1, 2):
        name = list(EXPORT)[number - 1]
        save_file({name: EXPORT[name]}, source / f"model-0000{number}-of-00002.safetensors")
    with pytest.raises(NeedsInformationError) as caught:
        fsdpckpt.inspect(source)
    assert typed(caught.value) == ["model-*.safetensors"]  # what the job itself wrote is kept
    assert fsdpckpt.inspect(source, ignore_file=["model-*.safetensors"])


def test_what_the_ranks_wrote_is_kept_and_not_what_was_gathered_from_it(tmp_path: Path) -> None:
    for rank in range(2):
        shutil.copy(
            GOLDEN / "torch-2.4/f2_plain_t" / f"model_{rank}.pt", tmp_path / f"model_world_size_2_rank_{rank}.pt"
        )
    truth = torch.load(GOLDEN / "torch-2.4/f2_plain_t/truth/full.pt", weights_only=False)["model"]
    torch.save(dict(truth), tmp_path / "full.pt")
    with pytest.raises(NeedsInformationError) as caught:
        fsdpckpt.inspect(tmp_path)
    assert typed(caught.value) == ["full.pt"]
    torch.save({f"head.{name}": tensor for name, tensor in truth.items()}, tmp_path / "full.pt")
    with pytest.raises(NeedsInformationError, match="they hold different parameters") as caught:
        fsdpckpt.inspect(tmp_path)
    assert typed(caught.value) == [], "it may be the rest of the model"


@pytest.mark.parametrize(
    ("label", "names", "glob"),
    [
        ("/run/final/model.safetensors", "", "final/model.safetensors"),
        ("/run/m_world_size_12_rank_0.pt .. m_world_size_12_rank_11.pt", "m_world_size_12_rank_*.pt", None),
        ("/run/x/rank0-of-2-model.bin .. rank1-of-2-model.bin", "rank*-of-2-model.bin", "x/rank*-of-2-model.bin"),
        ("/run/model-*.safetensors", "model-*.safetensors", None),
        ("/run/model.safetensors.index.json", "", "model*.safetensors*"),
        ("/run", "", ""),
    ],
)
def test_a_part_is_named_by_the_glob_that_leaves_it_out(label: str, names: str, glob: str | None) -> None:
    def read(*_: object) -> PartContents:
        raise AssertionError("not to be read")

    assert glob_of(Part(label, "stem", read, names), "/run/") == (names if glob is None else glob)


def test_a_glob_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    accelerate(source := tmp_path / "state", "model.safetensors")
    shutil.rmtree(source / "optimizer_0")
    with pytest.raises(UsageError, match="matches no file"):
        fsdpckpt.inspect(source, ignore_file=["model.safetensors", "nowhere.pt"])
    torch.save(MODEL, tmp_path / "model.pt")
    with pytest.raises(UsageError, match="matches no file"):
        fsdpckpt.verify(tmp_path / "model.pt", ignore_file=["model.pt"])


def test_what_is_left_out_is_no_part_of_what_can_be_read_alone(tmp_path: Path) -> None:
    """And the command that converts it leaves the same out."""
    (source := tmp_path / "both").mkdir()
    for rank in range(2):
        torch.save(MODEL, source / f"model_world_size_2_rank_{rank}.pt")
        torch.save(BY_NAME, source / f"optim_world_size_2_rank_{rank}.pt")
    (source / "optim_world_size_2_rank_1.pt").unlink()
    save_file(EXPORT, source / "export.safetensors")
    for command, words in (
        (fsdpckpt.verify, "--only model --ignore-file 'export.*'"),
        (fsdpckpt.inspect, "--only model --ignore-file 'export.*'"),
        (lambda path, **ignored: fsdpckpt.convert(path, tmp_path / "out", **ignored), "add --only model"),
    ):
        with pytest.raises(SourceIncompleteError) as caught:
            command(source, ignore_file=["export.*"])
        text = caught.value.text
        if command is fsdpckpt.inspect:
            left = inspect_incomplete(source, caught.value, ignore_file=("export.*",))
            assert left is not None and list(left.readable) == ["model"]
            (text,) = left.commands
        assert words in text
        with pytest.raises(SourceIncompleteError) as caught:
            command(source, ignore_file=["export.*", "model_*_rank_0.pt"])
        assert "--only model" not in caught.value.text
