"""The recipes in docs/recipes: each command in them runs, on a tiny checkpoint, as it stands there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

import fsdpckpt
from tests.cli.conftest import saved

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: the recipes were not tested")
__all__ = ["saved"]

RECIPES = Path(__file__).parents[2] / "docs" / "recipes"
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


def filled(text: str, values: Mapping[str, str]) -> str:
    """``text`` with GitHub's expressions replaced."""
    return re.sub(r"\$\{\{\s*([\w.-]+)\s*\}\}", lambda found: values[found[1]], text)


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


def action_steps(place: Mapping[str, str], world_size: int) -> Iterator[tuple[str, str, dict[str, str]]]:
    """The name, the commands and the environment of each step of the composite action, as the workflow calls it."""
    (job,) = yaml.safe_load((RECIPES / "github-actions.yml").read_text())["jobs"].values()
    action = yaml.safe_load((RECIPES / "action.yml").read_text())
    (call,) = (step for step in job["steps"] if step["uses"].startswith("./"))
    values = {f"env.{name}": value for name, value in place.items()}
    values |= {"matrix.world-size": str(world_size), "github.run_id": "17", "vars.FSDPCKPT_PACKAGE": "fsdpckpt"}
    given = {name: filled(str(value), values) for name, value in call["with"].items()}
    declared = action["inputs"]
    assert {name for name, each in declared.items() if each.get("required")} <= given.keys() <= declared.keys()
    inputs = {f"inputs.{name}": given.get(name, each.get("default", "")) for name, each in declared.items()}
    for step in action["runs"]["steps"]:
        if "run" in step and step["name"] != "Install":
            assert step["shell"] == "bash"
            yield step["name"], step["run"], {name: filled(text, inputs) for name, text in step["env"].items()}


def run_step(command: str, environment: Mapping[str, str], directory: Path) -> subprocess.CompletedProcess[str]:
    """As GitHub runs a step whose shell is bash."""
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", command],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_the_action_reshards_compares_and_reports(saved_by_ranks: Path, tmp_path: Path, shell: dict[str, str]) -> None:
    workflow = yaml.safe_load((RECIPES / "github-actions.yml").read_text())
    assert workflow[True]["schedule"]  # YAML 1.1 takes the key "on" for a truth value
    assert tuple(workflow["jobs"]["reshard"]["strategy"]["matrix"]["world-size"]) == SIZES
    assert "AWS_DEFAULT_REGION" in workflow["env"]
    place = {"CHECKPOINT": str(saved_by_ranks), "TARGETS": str(tmp_path / "resharded")}
    assert place.keys() <= workflow["env"].keys()
    runner = {"RUNNER_TEMP": str(tmp_path), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
    names = []
    for name, command, environment in action_steps(place, SIZES[0]):
        done = run_step(command, {**shell, **runner, **environment}, tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        names.append(name)
    assert names[:2] == ["Verify", "Draw"] and names[-1] == "Summary"
    report = tmp_path / "reshard-report"
    assert sorted(path.name for path in report.iterdir()) == [
        "checkpoint.html", "convert.json", "diff.txt", "inspect.json", "plan.txt", "verify.txt", "verify.xml",
    ]  # fmt: skip
    assert json.loads((report / "convert.json").read_text())["world_size"] == SIZES[0]
    assert "0 differ" in (report / "diff.txt").read_text() and "is whole" in (report / "verify.txt").read_text()
    summary = (tmp_path / "summary.md").read_text()
    assert f"{saved_by_ranks} for 8 ranks" in summary and "is whole" in summary and "0 differ" in summary
    assert fsdpckpt.diff(saved_by_ranks, tmp_path / "resharded" / "17" / f"on-{SIZES[0]}").same
    steps = yaml.safe_load((RECIPES / "action.yml").read_text())["runs"]["steps"]
    always = [step for step in steps if step.get("if") == "always()"]  # a step that failed is the one to read about
    assert ["Summary", "upload" in str(always[1].get("uses"))] == [always[0]["name"], True] and len(always) == 2


@pytest.mark.parametrize(("retryable", "tries"), [(True, 3), (False, 1)])
def test_the_action_tries_again_what_may_succeed_later(
    retryable: bool, tries: int, tmp_path: Path, shell: dict[str, str]
) -> None:
    program = Path(shell["PATH"].split(os.pathsep)[0]) / "fsdpckpt"
    document = json.dumps({"error": {"retryable": retryable}})
    program.write_text(f"#!/bin/sh\necho try >> {tmp_path}/tries\necho '{document}'\nexit 3\n")
    (tmp_path / "reshard-report").mkdir()
    place = {"CHECKPOINT": "a", "TARGETS": "b"}
    (convert,) = (each for each in action_steps(place, 8) if each[0] == "Convert")
    environment = {**shell, **convert[2], "RUNNER_TEMP": str(tmp_path), "RETRY_SECONDS": "0"}
    assert run_step(convert[1], environment, tmp_path).returncode == 3
    assert (tmp_path / "tries").read_text().count("try") == tries


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
