"""The recipes in docs/recipes: each command in them runs, on a tiny checkpoint, as it stands there."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from tests.cli.conftest import saved, trained_file
from tests.recipes.runner import filled, run_action

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: the recipes were not tested")
__all__ = ["saved", "trained_file"]

RECIPES = Path(__file__).parents[2] / "docs" / "recipes"
ACTION = yaml.safe_load((RECIPES / "action.yml").read_text())
SIZES = (8, 16, 64)


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """An environment whose ``fsdpckpt`` is this tree's."""
    program = tmp_path / "bin" / "fsdpckpt"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m fsdpckpt "$@"\n')
    program.chmod(0o755)
    root = str(RECIPES.parents[1])
    path = os.pathsep.join([str(program.parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": root}


@pytest.fixture
def saved_by_ranks(tmp_path: Path) -> Path:
    """One file a rank, with random states that differ: what new ranks get is copied, and what is left over is lost."""
    directory = tmp_path / "step-2"
    directory.mkdir()
    for rank in range(3):
        torch.save({"w": torch.full((5, 2), 3.0)}, directory / f"model_world_size_3_rank_{rank}.pt")
        extra = {"rng": {"cpu": torch.full((16,), rank, dtype=torch.uint8)}, "epoch": 2}
        torch.save(extra, directory / f"extra_state_world_size_3_rank_{rank}.pt")
    return directory


@pytest.fixture
def workflow() -> dict[Any, Any]:
    return yaml.safe_load((RECIPES / "github-actions.yml").read_text())  # type: ignore[no-any-return]


@pytest.fixture
def runner(shell: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """The environment of a job, with a pip that only notes what it was asked for."""
    (tmp_path / "bin" / "pip").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/installed\n')
    (tmp_path / "bin" / "pip").chmod(0o755)
    (tmp_path / "temp").mkdir()
    (tmp_path / "work").mkdir()
    return {**shell, "RUNNER_TEMP": str(tmp_path / "temp"), "RETRY_SECONDS": "0"}


def call_of(workflow: Mapping[Any, Any], checkpoint: Path, targets: Path, world_size: int = SIZES[0]) -> dict[str, str]:
    """What the workflow gives the action for ``checkpoint``, which somebody entered by hand."""
    contexts = {"inputs.checkpoint": str(checkpoint), "matrix.world-size": str(world_size), "github.run_id": "17"}
    contexts |= {"vars.FSDPCKPT_PACKAGE": "fsdpckpt[s3]", "env.TARGETS": str(targets)}
    contexts["env.CHECKPOINT"] = filled(workflow["env"]["CHECKPOINT"], contexts)
    (job,) = workflow["jobs"].values()
    (call,) = (step for step in job["steps"] if step["uses"].startswith("./"))
    return {name: filled(str(value), contexts) for name, value in call["with"].items()}


def test_the_workflow_reshards_the_newest_every_night(workflow: dict[Any, Any]) -> None:
    assert workflow[True]["schedule"]  # YAML 1.1 takes the key "on" for a truth value
    assert tuple(workflow["jobs"]["reshard"]["strategy"]["matrix"]["world-size"]) == SIZES
    assert "AWS_DEFAULT_REGION" in workflow["env"]
    nobody = {"inputs.checkpoint": ""}
    assert filled(workflow["env"]["CHECKPOINT"], nobody) == "s3://my-runs/nightly/latest"


def test_the_action_reshards_compares_and_reports(
    saved_by_ranks: Path, tmp_path: Path, runner: dict[str, str], workflow: dict[Any, Any]
) -> None:
    given = call_of(workflow, saved_by_ranks, tmp_path / "resharded")
    target = tmp_path / "resharded" / "17" / f"on-{SIZES[0]}"
    job = run_action(ACTION, given, runner, tmp_path / "work")
    assert job.failed is None, job.failed
    assert (tmp_path / "installed").read_text() == "install fsdpckpt[s3]\n"
    assert job.names[2:4] == ["Verify", "Draw"] and job.skipped == ["Ask whether the framework resumes from it"]
    artifact = job.steps[-1]
    assert artifact.uses.startswith("actions/upload-artifact@")
    report = tmp_path / "work" / artifact.inputs["path"]
    assert artifact.inputs["name"] == "reshard-report-on-8"
    assert sorted(path.name for path in report.iterdir()) == [
        "checkpoint.html", "convert.json", "convert.txt", "diff.txt", "inspect.json", "plan.txt", "verify.txt",
        "verify.xml",
    ]  # fmt: skip
    assert json.loads((report / "convert.json").read_text())["world_size"] == SIZES[0]
    assert f"{saved_by_ranks} for 8 ranks" in job.summary and "is whole" in job.summary and "0 differ" in job.summary
    assert job.outputs == {"target": str(target), "warnings": "0"}
    assert fsdpckpt.diff(saved_by_ranks, target).same
    # The job is run again: what is there is compared, and taken.
    again = run_action(ACTION, given, runner, tmp_path / "work", only=["Verify", "Convert"])
    assert again.failed is None and json.loads((report / "convert.json").read_text())["was_complete"]


def test_the_action_asks_whether_the_framework_resumes(
    saved_by_ranks: Path, tmp_path: Path, runner: dict[str, str], workflow: dict[Any, Any]
) -> None:
    given = {**call_of(workflow, saved_by_ranks, tmp_path / "resharded", 2), "framework": "torchtitan"}
    asks = "Ask whether the framework resumes from it"
    uploads = "Keep the report, that of a step that failed above all"
    job = run_action(ACTION, given, runner, tmp_path / "work", only=["Verify", "Convert", asks, "Summary", uploads])
    assert job.failed is not None and job.failed.name == asks
    assert job.failed.code == 1 and "**resumes**" in job.summary and "torchtitan does not resume" in job.summary
    assert job.names[-2:] == ["Summary", uploads]


def test_what_is_damaged_is_not_resharded_and_the_summary_says_what_it_is(
    saved_by_ranks: Path, tmp_path: Path, runner: dict[str, str], workflow: dict[Any, Any]
) -> None:
    damaged = saved_by_ranks / "model_world_size_3_rank_1.pt"
    content = bytearray(damaged.read_bytes())
    content[content.index(struct.pack("<f", 3.0))] ^= 1
    damaged.write_bytes(content)
    job = run_action(ACTION, call_of(workflow, saved_by_ranks, tmp_path / "resharded"), runner, tmp_path / "work")
    assert job.failed is not None and (job.failed.name, job.failed.code) == ("Verify", 1)
    assert job.names[3:] == ["Summary", "Keep the report, that of a step that failed above all"]
    assert "checksum mismatch" in job.summary and damaged.name in job.summary
    results = (tmp_path / "work" / "reshard-report" / "verify.xml").read_text()
    assert "<failure" in results and "checksum mismatch" in results
    assert not (tmp_path / "resharded").exists()


@pytest.mark.parametrize(("retryable", "tries"), [(True, 3), (False, 1)])
def test_the_action_tries_again_what_may_succeed_later(
    retryable: bool, tries: int, tmp_path: Path, runner: dict[str, str], workflow: dict[Any, Any]
) -> None:
    document = json.dumps({"error": {"retryable": retryable}})
    (tmp_path / "bin" / "fsdpckpt").write_text(
        f"#!/bin/sh\necho try >> {tmp_path}/tries\necho '{document}'\necho 'error: the store is down' >&2\nexit 3\n"
    )
    (tmp_path / "work" / "reshard-report").mkdir()
    given = call_of(workflow, Path("a"), Path("b"))
    job = run_action(ACTION, given, runner, tmp_path / "work", only=["Convert", "Summary"])
    assert job.failed is not None and job.failed.code == 3
    assert (tmp_path / "tries").read_text().count("try") == tries
    assert "**convert**" in job.summary and "the store is down" in job.summary


def test_the_batch_script_reshards_to_the_world_size_of_its_task_and_may_be_run_again(
    saved: Path, tmp_path: Path, shell: dict[str, str]
) -> None:
    script = RECIPES / "reshard.sbatch"
    assert "world_sizes=(8 16 64)" in script.read_text()
    slurm = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}
    for _ in range(2):
        done = subprocess.run(
            ["bash", str(script), str(saved), str(tmp_path / "resharded")],
            env={**shell, **slurm},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith(f"on-16 is {saved} for 16 ranks\n")
    assert fsdpckpt.diff(saved, tmp_path / "resharded" / "on-16").same
