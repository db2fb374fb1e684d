"""``--max-memory`` holds for whole processes as the kernel counts their memory; ``scripts/memory_test`` measures on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "scripts" / "memory_rows.py"
NO_GROUP = 3  # the exit code of the script where no cgroup can be made or limited


def measured(tmp_path: Path, *options: str) -> str:
    """A small run of the script, which fails where a peak is too high or the number of threads changes a byte."""
    words = ["--size", "48", "--max-memory", "2", "--many", "2000", "--directory", str(tmp_path), *options]
    done = subprocess.run(
        [sys.executable, str(ROWS), *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    if done.returncode == NO_GROUP and "--cgroup" in options:
        pytest.skip(f"its limit of memory is not tested: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| yes |" in done.stdout
    return done.stdout


@pytest.mark.parametrize("case", ["one tensor -> flattened", "-> bfloat16"])
def test_a_tensor_many_times_the_limit_is_converted_within_it_by_1_4_and_16_threads(tmp_path: Path, case: str) -> None:
    measured(tmp_path, "--cases", case)


def test_a_conversion_that_is_verified_runs_with_little_address_space(tmp_path: Path) -> None:
    assert "under ulimit -v 1024 MiB | done" in measured(
        tmp_path, "--cases", "one tensor, --verify full", "--address-space", "1024"
    )


@pytest.mark.parametrize("case", ["one tensor -> 3 rank files", "dcp of 4 -> dcp of 3, --verify full"])
def test_a_conversion_runs_in_a_cgroup_of_what_is_promised_page_cache_and_all(tmp_path: Path, case: str) -> None:
    shown = measured(tmp_path, "--size", "96", "--max-memory", "12", "--cases", case, "--cgroup")
    assert "MiB | done" in shown
