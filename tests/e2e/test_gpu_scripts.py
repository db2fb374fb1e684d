"""The check and the benchmark of a GPU: their parts play on Gloo where there is none, and they say that it is so."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracle.forked import run

LIMIT = 560  # seconds; 20 on two idle cores
SCRIPTS = str(Path(__file__).parents[2] / "scripts")
CHECK = f"""
import runpy, sys
sys.path.insert(0, {SCRIPTS!r})
{{change}}
sys.argv = ["gpu_check", *sys.argv[1:]]
runpy.run_path({SCRIPTS!r} + "/gpu_check", run_name="__main__")
"""
BENCH = "from tests.oracle.fork_server import run_forking; run_forking()"

pytestmark = pytest.mark.timeout(LIMIT + 20)


def _check(*arguments: str, change: str = "") -> subprocess.CompletedProcess[str]:
    return run(["-c", CHECK.format(change=change), *arguments], kind="torch", timeout=LIMIT)


def _bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run(["-c", BENCH, f"{SCRIPTS}/bench_gpu", *arguments], kind="torch", timeout=LIMIT)


def _found(ended: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What it found without a GPU."""
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    assert any("any GPU" in what for what in found["not_run"])
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("script", [_check, _bench])
def test_without_a_gpu_it_says_so_and_does_nothing(script) -> None:
    ended = script()
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "no NVIDIA GPU" in ended.stderr
    assert "--device cpu" in ended.stderr


def test_the_parts_of_the_check_play_on_gloo() -> None:
    found = _found(_check("--device", "cpu", "--megabytes", "16", "--only", "nodes,loading", "--json"))
    assert found["wrong"] == 0 and "no GPU" in found["about"]
    nodes = [row["found"] for row in found["rows"] if row["part"] == "nodes"]
    assert all(text.startswith("the same bytes") for text in nodes), nodes
    loading = [row["what"] for row in found["rows"] if row["part"] == "loading"]
    assert loading == ["pread to cpu", "open to cpu", "StorageReader to cpu"]


@pytest.mark.parametrize(
    ("change", "says"), [("same = lambda *_: False", "values differ"), ("convert = None", "TypeError")]
)
def test_what_differs_and_a_part_that_fails_are_exit_code_1(change: str, says: str) -> None:
    change = f"import gpu_check_parts; gpu_check_parts.{change}"
    ended = _check("--device", "cpu", "--megabytes", "16", "--only", "loading", change=change)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert says in ended.stdout
    assert "0 wrong" not in ended.stdout


def test_the_steps_of_the_benchmark_run_on_gloo(tmp_path: Path) -> None:
    given = ("--device", "cpu", "--workers", "2", "--megabytes", "16", "--runs", "1", "--json")
    found = _found(_bench(str(tmp_path / "bench"), *given))
    assert (found["backend"], found["workers"], found["devices"]) == ("gloo", 2, "2 x no GPU")
    assert [row["what"].split(",")[0] for row in found["rows"]] == [
        "whole conversion",
        "staging",
        "staging",
        "gather to rank 0",
        "scatter from rank 0",
        "exchange from host to host",
        "conversion",
    ]
    assert all(row["value"] > 0 for row in found["rows"])
    assert "several nodes" in found["not_run"]
