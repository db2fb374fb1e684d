"""The nightly job of docs/recipes on an S3 store: the action's own step, and what it leaves on the runner's disk."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import fsdpckpt
from tests.e2e.remote.stores import S3
from tests.recipes.runner import run_action

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: the recipes were not tested")

ROOT = Path(__file__).parents[3]
ACTION = yaml.safe_load((ROOT / "docs" / "recipes" / "action.yml").read_text())


def test_the_action_needs_no_disk_for_s3(s3: S3, files: Path, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "fsdpckpt"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m fsdpckpt "$@"\n')
    program.chmod(0o755)
    report, temp = tmp_path / "reshard-report", tmp_path / "temp"
    for directory in (report, temp):
        directory.mkdir()
    path = os.pathsep.join([str(program.parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "RUNNER_TEMP": str(temp)}
    given = {"package": "-", "checkpoint": "s3://runs/dcp", "target": "s3://runs/nightly/on-5", "world-size": "5"}
    job = run_action(ACTION, given, environment, tmp_path, only=["Convert"])
    assert job.failed is None, job.failed
    assert json.loads((report / "convert.json").read_text())["streamed"]
    left = [found for found in temp.rglob("*") if not found.name.startswith(("github_", "step-"))]
    assert not [found for found in left if found.is_file()], left
    assert fsdpckpt.diff("s3://runs/dcp", "s3://runs/nightly/on-5").same
