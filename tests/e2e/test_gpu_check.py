"""The check of a GPU: its parts play on Gloo where there is none, and whatever differs is exit code 1."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from tests.oracle.forked import run

LIMIT = 400  # seconds; 15 on two idle cores
SCRIPTS = Path(__file__).parents[2] / "scripts"
PROGRAM = """
import runpy, sys
sys.path.insert(0, {scripts!r})
{change}
sys.argv = ["gpu_check", *sys.argv[1:]]
runpy.run_path({scripts!r} + "/gpu_check", run_name="__main__")
"""


def _run(*arguments: str, change: str = "") -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(scripts=str(SCRIPTS), change=change)
    return run(["-c", program, *arguments], kind="torch", timeout=LIMIT)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_checks_nothing() -> None:
    ended = _run()
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "no NVIDIA GPU" in ended.stderr
    assert "--device cpu" in ended.stderr


@pytest.mark.timeout(LIMIT + 20)
def test_its_parts_play_on_gloo_and_it_says_what_was_not_run() -> None:
    ended = _run("--device", "cpu", "--megabytes", "16", "--only", "nodes,loading", "--json")
    found = json.loads(ended.stdout)
    assert ended.returncode == found["wrong"] == 0, found
    assert "no GPU" in found["about"]
    assert any("any GPU" in what for what in found["not_run"])
    nodes = [row["found"] for row in found["rows"] if row["part"] == "nodes"]
    assert all(text.startswith("the same bytes") for text in nodes), nodes
    assert [row["what"] for row in found["rows"] if row["part"] == "loading"] == [
        "pread to cpu",
        "open to cpu",
        "StorageReader to cpu",
    ]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("import gpu_check_parts; gpu_check_parts.same = lambda *_: False", "values differ"),
        ("import gpu_check_parts; gpu_check_parts.convert = None", "TypeError"),
    ],
)
def test_what_differs_and_a_part_that_fails_are_exit_code_1(change: str, says: str) -> None:
    ended = _run("--device", "cpu", "--megabytes", "16", "--only", "loading", change=change)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert says in ended.stdout
    assert "0 wrong" not in ended.stdout
