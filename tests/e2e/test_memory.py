"""``--max-memory`` holds for whole processes as the kernel counts their memory; ``scripts/memory_test`` measures on."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "scripts" / "memory_rows.py"
CGROUPS = Path("/sys/fs/cgroup")
LIMIT = 160 << 20  # bytes: what any run takes, --max-memory, and what the kernel counts for the page cache


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
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| yes |" in done.stdout
    return done.stdout


@pytest.mark.parametrize("case", ["dcp of 4 -> full", "one tensor -> flattened", "-> bfloat16"])
def test_a_tensor_many_times_the_limit_is_converted_within_it_by_1_4_and_16_threads(tmp_path: Path, case: str) -> None:
    measured(tmp_path, "--cases", case)


def test_a_conversion_that_is_verified_runs_with_little_address_space(tmp_path: Path) -> None:
    assert "under ulimit -v 1024 MiB | done" in measured(
        tmp_path, "--cases", "one tensor, --verify full", "--address-space", "1024"
    )


def test_a_conversion_runs_in_a_cgroup_that_is_smaller_than_its_checkpoint(tmp_path: Path) -> None:
    group = CGROUPS / f"fsdpckpt-{uuid.uuid4().hex[:8]}"
    if not (CGROUPS / "cgroup.subtree_control").exists():
        pytest.skip("no cgroup v2 here: its limit of memory is not tested")
    try:
        group.mkdir()
        (group / "memory.max").write_text(str(LIMIT))
    except OSError:
        pytest.skip("no cgroup can be made or limited here: its limit of memory is not tested")
    try:
        script = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        words = ["--size", "600", "--max-memory", "32", "--cases", "one tensor -> full", "--directory", str(tmp_path)]
        done = subprocess.run(
            ["sh", "-c", script, str(group), sys.executable, str(ROWS), *words],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        group.rmdir()
