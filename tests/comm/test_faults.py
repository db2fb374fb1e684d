"""One worker of several goes wrong: all end soon, with one error that names rank, step and cause."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.comm.faults import LIMIT
from tests.oracle.forked import ROOT, processes_in, run


@pytest.mark.parametrize(
    ("scenario", "step", "cause"),
    [
        ("absent-nothing", "start", "no progress for"),
        ("inside-fail", "outer / inner", "OSError: the disk is gone"),
        ("moving-fail", "move", "OSError: the disk is gone"),
        ("spreading-fail", "move", "OSError: the disk is gone"),
        ("between-kill", "after first", "no progress for"),
        ("moving-kill", "move", "closed: it may have ended"),
        ("spreading-kill", "move", "closed: it may have ended"),
        ("between-hang", "after first", "no progress for"),
        ("moving-hang", "move", "no progress for"),
        ("spreading-stop", "move", "no progress for"),
    ],
)
def test_all_others_end_within_the_limit_and_name_rank_step_and_cause(
    faults: dict[str, Any], scenario: str, step: str, cause: str
) -> None:
    ended = faults[scenario]
    errors = set()
    for rank in (0, 2):
        assert ended["codes"][rank] == 6, ended
        who, seconds, failed, where, why = ended["said"][rank].split("|")
        assert who == str(rank)
        assert float(seconds) < LIMIT + 1.5, ended
        assert (failed, where) == ("1", step), ended
        assert cause in why
        errors.add((failed, where, why))
    assert len(errors) == 1, "not one error"


def test_workers_that_are_in_different_steps_say_so(faults: dict[str, Any]) -> None:
    ended = faults["elsewhere-fail"]
    assert ended["codes"] == [6, 6, 6]
    for said in ended["said"]:
        assert "the workers are out of step" in said
        assert float(said.split("|")[1]) < LIMIT / 2, "waited for a limit instead"


def test_a_slow_worker_that_gives_signs_is_waited_for(faults: dict[str, Any]) -> None:
    assert faults["slowly-fail"] == {"codes": [0, 0, 0], "said": ["", "", ""]}


LAUNCHER = """
import sys
from fsdpckpt.comm.launch import launch
from fsdpckpt.errors import WorkerError
if sys.argv[2] == "fail":
    launch(['inside', 'nothing'], workers=2, module='tests.comm.faults')
    print('FINE')
try:
    launch(sys.argv[1:], workers=2, module='tests.comm.faults')
except WorkerError as error:
    print('ERROR', error.rank, error.step, error.cause, sep='|')
"""


@pytest.mark.parametrize(
    ("trouble", "error"),
    [
        ("fail", "ERROR|1|outer / inner|OSError: the disk is gone"),
        ("kill", "ERROR|1|outer / inner|killed by SIGKILL (out of memory, or by hand)"),
    ],
)
def test_the_launcher_raises_one_error_and_leaves_no_worker(tmp_path: Path, trouble: str, error: str) -> None:
    environment = {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    ended = run(["-c", LAUNCHER, "inside", trouble], kind="torch", env=environment, cwd=str(tmp_path), timeout=90)
    assert ended.returncode == 0, ended.stderr
    output = ended.stdout
    fine = ["FINE"] if trouble == "fail" else []
    assert [line for line in output.splitlines() if line.startswith(("ERROR", "FINE"))] == [*fine, error], output
    assert processes_in(tmp_path) == []


def test_workers_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LAUNCHER, "between", "hang"]
    launcher = subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        assert _patiently(lambda: len(processes_in(tmp_path)) == 3), "the launcher started no workers"
        launcher.kill()
        launcher.wait()
        # A worker that is still importing torch asks about its launcher only then, and ends by itself.
        assert _patiently(lambda: processes_in(tmp_path) == [])
    finally:
        launcher.kill()
        launcher.wait()


def _patiently(look: Any) -> Any:
    """The first truthy answer within a minute, else the last."""
    deadline = time.monotonic() + 60
    while not (answer := look()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return answer
