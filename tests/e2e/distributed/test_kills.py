"""A short run of ``scripts/kill_test``: conversions by one process and by workers, killed at random and resumed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.oracle.launch import ROOT, run


def test_conversions_killed_at_random_moments_are_finished_by_any_number_of_workers(tmp_path: Path) -> None:
    script = os.path.join(ROOT, "scripts", "kill_moments.py")
    options = ["--moments", "5", "--size", "8000000", "--workers", "2,3", "--directory", str(tmp_path)]
    said = run([sys.executable, script, *options], limit=280)
    assert "no promise broken" in said
    assert list(tmp_path.iterdir()) == []
