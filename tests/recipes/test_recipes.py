"""The recipes in docs/recipes: each command in them runs, on a tiny checkpoint, as it stands there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
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


def test_the_workflow_reshards_to_every_world_size_of_its_matrix(
    saved_by_ranks: Path, tmp_path: Path, shell: dict[str, str]
) -> None:
    saved = saved_by_ranks
    workflow = yaml.safe_load((RECIPES / "github-actions.yml").read_text())
    assert workflow[True]["schedule"]  # YAML 1.1 takes the key "on" for a truth value
    jobs = workflow["jobs"]
    assert tuple(jobs["reshard"]["strategy"]["matrix"]["world-size"]) == SIZES
    place = {"CHECKPOINT": str(saved), "TARGETS": str(tmp_path / "resharded"), "RUNNER_TEMP": str(tmp_path)}
    assert place.keys() - {"RUNNER_TEMP"} <= workflow["env"].keys()
    commands = 0
    for name, sizes in (("check", [0]), ("reshard", [SIZES[0]])):  # one of the matrix: a process takes a second
        for size in sizes:
            for step in jobs[name]["steps"]:
                if "run" not in step or step["run"].startswith("pip install"):
                    continue
                command = filled(step["run"], {"matrix.world-size": str(size), "github.run_id": "17"})
                done = subprocess.run(
                    ["bash", "-e", "-c", command],
                    cwd=tmp_path,
                    env={**shell, **place},
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=120,
                )
                assert done.returncode == 0, f"{command}\n{done.stderr}"
                commands += 1
    assert commands == 4
    assert json.loads((tmp_path / "diff.json").read_text())["same"] is True
    assert json.loads((tmp_path / "verify.json").read_text())["whole"] is True
    for job in jobs.values():  # the report of a step that failed is the one that is wanted
        assert [step["if"] for step in job["steps"] if "upload-artifact" in step.get("uses", "")] == ["always()"]
    assert json.loads((tmp_path / "convert.json").read_text())["world_size"] == SIZES[0]
    assert fsdpckpt.diff(saved, tmp_path / "resharded" / "17" / f"on-{SIZES[0]}").same


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
