"""``fsdpckpt convert --nproc-per-node N``: what it says, once, and with which exit code."""

from __future__ import annotations

import filecmp
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run, run
from tests.oracle.forked import ROOT
from tests.oracle.forked import run as run_forked

__all__ = ["run"]

ENVIRONMENT = {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}


def _by_workers(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = ["-m", "fsdpckpt", "convert", *map(str, arguments), "--nproc-per-node", "2"]
    return run_forked(command, kind="torch", env=ENVIRONMENT, timeout=150)


def test_workers_that_it_starts_itself_write_the_same_file_and_report_once(base: Path, tmp_path: Path) -> None:
    given = [base / "disk" / "ranks", tmp_path / "out.pt", "--nproc-per-node", "2", "--json"]
    command = [sys.executable, "-m", "fsdpckpt", "convert", *map(str, given)]  # nothing here is forked
    environment = {**os.environ, **ENVIRONMENT}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert (report["workers"], report["verified"]) == (2, "structure")
    assert filecmp.cmp(tmp_path / "out.pt", base / "local" / "gathered.pt", shallow=False)


def test_a_dry_run_says_how_many_workers_there_would_be_and_writes_nothing(base: Path, tmp_path: Path) -> None:
    ended = _by_workers(base / "disk" / "ranks", tmp_path / "out.pt", "--dry-run")
    assert ended.returncode == 0, ended.stderr
    assert "workers 2 processes" in ended.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        (["{disk}/nothing", "{out}/a.pt"], 3, "does not exist"),
        (["{disk}/ranks", "{disk}/full.pt"], 5, "exists"),
        (["{disk}/full.pt", "{out}/b", "--to", "flattened", "--world-size", "2"], 4, ""),
        (["{disk}/ranks", "{out}/c.pt", "--to", "full", "--world-size", "3"], 2, "--world-size"),
    ],
)
def test_errors_are_those_of_one_process(
    base: Path, tmp_path: Path, run: Run, arguments: list[str], code: int, what: str
) -> None:
    given = [text.format(disk=base / "disk", out=tmp_path) for text in arguments]
    ended, alone = _by_workers(*given), run("convert", *given)
    assert (ended.returncode, alone.code) == (code, code), ended.stderr
    assert what in ended.stderr
    assert ended.stderr == alone.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--launcher", "local", "--nproc-per-node", "2"], "--nproc-per-node has no effect: --launcher local"),
        (["--nproc-per-node", "none"], "takes a number"),
        (["--nproc-per-node", "1", "--nnodes", "2"], "several nodes need a place to meet"),
        (["--backend", "gloo"], "--backend has no effect: there are no workers"),
        (["--nproc-per-node", "1", "--backend", "nccl", "--device", "cpu"], "NCCL moves data between GPUs only"),
    ],
)
def test_contradictory_options_are_refused(
    base: Path, tmp_path: Path, run: Run, arguments: list[str], what: str
) -> None:
    ended = run("convert", base / "disk" / "ranks", tmp_path / "out.pt", *arguments)
    assert ended.code == 2, ended.err
    assert what in ended.err
    assert list(tmp_path.iterdir()) == []
