"""The GPU benchmark: it says plainly that it has no GPU, and its steps run on Gloo where there is none."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from tests.oracle.forked import run

LIMIT = 560  # seconds; 20 on two idle cores
PROGRAM = "from tests.oracle.fork_server import run_forking; run_forking()"
SCRIPT = str(Path(__file__).parents[2] / "scripts" / "bench_gpu")


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run(["-c", PROGRAM, SCRIPT, *arguments], kind="torch", timeout=LIMIT)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_measures_nothing() -> None:
    ended = _run()
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert "no NVIDIA GPU" in ended.stderr
    assert "--device cpu" in ended.stderr


@pytest.mark.timeout(LIMIT + 20)
def test_its_steps_run_on_gloo_and_it_says_that_the_figures_mean_nothing(tmp_path: Path) -> None:
    ended = _run(
        str(tmp_path / "bench"), "--device", "cpu", "--workers", "2", "--megabytes", "16", "--runs", "1", "--json"
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["backend"], found["workers"], found["devices"]) == ("gloo", 2, "2 x no GPU")
    measured = [row["what"].split(",")[0] for row in found["rows"]]
    assert measured == [
        "whole conversion",
        "staging",
        "staging",
        "gather to rank 0",
        "scatter from rank 0",
        "exchange from host to host",
        "conversion",
    ]
    assert all(row["value"] > 0 for row in found["rows"])
    assert any("any GPU" in what for what in found["not_run"])
    assert "several nodes" in found["not_run"]
