"""A short run of ``scripts/kill_test``: conversions by one process and by workers, killed at random and resumed."""

from __future__ import annotations

import os
from pathlib import Path

from tests.oracle.forked import ROOT, run


def test_conversions_killed_at_random_moments_are_finished_by_any_number_of_workers(tmp_path: Path) -> None:
    script = os.path.join(ROOT, "scripts", "kill_moments.py")
    options = ["--moments", "5", "--size", "8000000", "--workers", "2,3", "--directory", str(tmp_path)]
    done = run([script, *options], kind="torch", env={"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no promise broken" in done.stdout
    assert list(tmp_path.iterdir()) == []
