"""``verify --for``: what is printed, the exit code, the JSON, and that the command it names does what it says."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

from fsdpckpt.producers.recognition import all_flavors
from tests.cli.conftest import Run, training_state
from tests.cli.test_schemas import checked


def test_it_says_what_stops_a_framework_and_its_command_mends_it(
    run: Run, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("verify", saved, "--for", "accelerate", "--world-size", "2")
    assert done.code == 1
    assert "problem: resume: accelerate expects other file names or keys" in done.out
    assert f"accelerate does not resume from {saved} on 2 ranks" in done.err
    (line,) = (line for line in done.err.splitlines() if line.startswith("next: fsdpckpt "))
    command = shlex.split(line.removeprefix("next: fsdpckpt "))
    assert run(*command).code == 0
    done = run("verify", command[2], "--for", "accelerate", "--world-size", "2")
    assert (done.code, done.out) == (0, "")
    assert f"accelerate resumes from {command[2]} on 2 ranks" in done.err


def test_its_json_follows_the_schema(run: Run, saved: Path) -> None:
    done = run("verify", saved, "--for", "trainer", "--json", "-q")
    found = checked(done.out)["resumption"]
    assert done.code == 1 and isinstance(found, dict)
    assert (found["flavor"], found["resumes"], found["world_size"]) == ("trainer", False, 1)
    assert any("trainer_state.json" in reason for reason in found["still_missing"])
    assert "resumption" not in json.loads(run("verify", saved, "--json", "-q").out)


def test_one_file_of_fabrics_is_as_anyone_saves_it(run: Run, saved: Path, tmp_path: Path) -> None:
    assert run("convert", saved, tmp_path / "file", "--flavor", "fabric", "--to", "full", "--buffers", "none").code == 0
    assert run("verify", tmp_path / "file", "--for", "fabric").code == 0


def test_what_torchtitan_opens_and_the_target_lacks_is_said(run: Run, saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "titan"
    done = run("convert", saved, target, "--flavor", "torchtitan", "--world-size", "2")
    assert done.code == 0 and "warning: the target has no train_state: without it torchtitan stops, unless" in done.err
    done = run("verify", target, "--for", "torchtitan")
    assert done.code == 1 and "resume: no lr_scheduler" in done.out
    assert "no conversion can add what is missing" in done.err and "next:" not in done.err
    done = run("verify", saved, "--for", "torchtitan", "--world-size", "2")
    assert "this conversion alone does not fix: no train_state" in done.err and "next: fsdpckpt convert" in done.err


def test_what_a_conversion_leaves_as_it_is_is_not_proposed(run: Run, saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "accelerate"
    assert run("convert", saved, target, "--flavor", "accelerate", "--world-size", "2", "--only", "model").code == 0
    done = run("verify", target, "--for", "accelerate", "--json")
    found = checked(done.out)["resumption"]
    assert done.code == 1 and isinstance(found, dict)
    assert found["missing"] == found["still_missing"] == ["the optimizer is missing"] and found["command"] is None
    done = run("verify", target, "--for", "accelerate", "--world-size", "3", "--json")  # a DCP directory loads on any
    again = checked(done.out)["resumption"]
    assert isinstance(again, dict) and again["command"] is None


@pytest.mark.parametrize(
    ("flavor", "only"),
    [
        *((flavor.name, "model") for flavor in all_flavors() if flavor.forms),
        *((name, None) for name in ("trainer", "verl", "fabric", "torchtitan")),
    ],
)
def test_what_is_said_to_be_missing_still_is_what_the_next_verify_finds(
    run: Run, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flavor: str, only: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    source: Path | str = saved
    if only is not None:
        source = "weights.pt"
        assert run("convert", saved, source, "--only", only).code == 0
    found: Any = checked(run("verify", source, "--for", flavor, "--world-size", "2", "--json").out)["resumption"]
    if found["command"] is None:
        assert found["resumes"] or found["still_missing"]
        return
    command = shlex.split(found["command"])
    assert run(*command[1:]).code == 0
    left: Any = checked(run("verify", command[3], "--for", flavor, "--world-size", "2", "--json").out)["resumption"]
    assert set(left["missing"]) == set(found["still_missing"])
    assert left["command"] is None, "the same again"


def rank_copies(path: Path) -> Path:
    """Files by rank with a buffer of which each rank has its own, as LocalRunningStatistics keep it."""
    path.mkdir()
    for rank in range(2):
        weights = {"w": torch.ones(3, 2), "drift": torch.full((2,), float(rank))}
        torch.save(weights, path / f"model_world_size_2_rank_{rank}.pt")
    return path


def test_buffers_that_are_named_settle_what_verify_cannot_know(run: Run, tmp_path: Path) -> None:
    path = rank_copies(tmp_path / "ranks")
    assert run("verify", path).code == 1
    done = run("verify", path, "--buffers", "drift")
    assert (done.code, done.out) == (0, "") and "1 buffer differs between ranks" in done.err
    assert "had no effect" not in done.err


@pytest.mark.parametrize("command", ["verify", "inspect", "diff"])
def test_an_option_that_says_nothing_new_is_noted_by_every_command(run: Run, saved: Path, command: str) -> None:
    sides = [saved, saved] if command == "diff" else [saved]
    for options in (["--buffers", "zzz"], ["--strategy", "full-shard", "--unit", "0"]):
        done = run(command, *sides, *options)
        assert done.code == 0
        (line,) = (line for line in (done.out + done.err).splitlines() if "had no effect" in line)
        assert all(option in line for option in options if option.startswith("--"))


def test_the_proposal_of_a_framework_takes_what_the_source_does_not_record(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content: dict[str, Any] = training_state()
    content["model"] = {"scale": torch.ones(7, 5), **content["model"]}  # a buffer, and as large as a parameter
    saved = tmp_path / "own.pt"
    torch.save(content, saved)
    asked = run("verify", saved, "--for", "lightning")
    assert "next:" not in asked.err and "--parameters FILE" in asked.err
    names = [f"{module}.{kind}" for module in "012" for kind in ("weight", "bias")]
    (tmp_path / "my names.txt").write_text("\n".join(names))
    done = run("verify", saved, "--for", "lightning", "--parameters", "my names.txt", "--ignore-file", "step-2.json")
    assert done.code == 2, "a file that does not exist is left out by a typing error"
    done = run("verify", saved, "--for", "lightning", "--parameters", "my names.txt")
    (line,) = (line for line in done.err.splitlines() if line.startswith("next: fsdpckpt "))
    command = shlex.split(line.removeprefix("next: fsdpckpt "))
    assert command[-2:] == ["--parameters", "my names.txt"] and "had no effect" not in done.err
    assert run(*command).code == 0
    assert run("verify", command[2], "--for", "lightning").code == 0


def test_weights_in_torch_files_are_hugging_faces_too(run: Run, tmp_path: Path) -> None:
    torch.save(training_state()["model"], tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    done = run("verify", tmp_path, "--for", "huggingface")
    assert (done.code, done.out) == (0, "")
    (tmp_path / "config.json").rename(tmp_path / "settings.json")
    assert run("verify", tmp_path, "--for", "huggingface").code == 1


def test_the_position_in_the_data_is_that_of_the_ranks_that_saved(run: Run, saved: Path, tmp_path: Path) -> None:
    run("convert", saved, tmp_path / "titan", "--flavor", "torchtitan", "--world-size", "2")
    content: dict[str, object] = {}
    dcp_to_torch_save(tmp_path / "titan", tmp_path / "whole.pt")
    content |= torch.load(tmp_path / "whole.pt", weights_only=False)
    own = {"lr_scheduler": {"last_epoch": 2}, "train_state": {"step": 2}}
    position = {"dp_rank_0": b"at 7", "dp_rank_1": b"at 8", "world_size": 2}
    torch.save({**content, **own, "dataloader": position}, tmp_path / "all.pt")
    torch_save_to_dcp(tmp_path / "all.pt", tmp_path / "step-2")
    without = run("verify", tmp_path / "titan", "--for", "torchtitan")
    assert "warning: no dataloader: without it torchtitan stops, unless checkpoint.exclude_from_loading" in without.err
    # One rank saved the whole again, so it does not say how many ranks read the data: two did.
    done = run("verify", tmp_path / "step-2", "--for", "torchtitan", "--world-size", "3")
    assert done.code == 0 and "dataloader was saved on 2 data-parallel ranks" in done.err
    done = run("convert", tmp_path / "step-2", tmp_path / "on-3", "--world-size", "3")
    assert done.code == 0 and "warning: dataloader was saved on 2 data-parallel ranks" in done.err
