"""Tasks that srun would have started: its variables, no launcher, nobody who ends the others when one is lost."""

from __future__ import annotations

import filecmp
import json
import subprocess
import time
from pathlib import Path

from tests.e2e.distributed.processes import all_ended, on_machine, trouble
from tests.oracle.ranks import free_port

LIMIT = 4.0  # seconds until a lost worker is noticed
TASKS = 3


def _srun(*arguments: str, **variables: str) -> list[subprocess.CompletedProcess[str]]:
    """``fsdpckpt convert`` as the tasks of one step on this machine."""
    step = {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(TASKS),
        "SLURM_STEP_TASKS_PER_NODE": str(TASKS),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NODEID": "0",
        "MASTER_PORT": str(free_port()),
        **variables,
    }
    command = ["-m", "fsdpckpt", "convert", *arguments, "--max-memory", "1MiB", "--json"]
    started = [
        on_machine({}, *command, variables={**step, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)})
        for task in range(TASKS)
    ]
    return all_ended(started, seconds=150)


def test_tasks_of_srun_write_what_one_process_writes_and_report_once(base: Path, tmp_path: Path) -> None:
    ended = _srun(str(base / "disk" / "ranks"), str(tmp_path / "out.pt"))
    assert [each.returncode for each in ended] == [0] * TASKS, [each.stderr[-3000:] for each in ended]
    assert json.loads(ended[0].stdout)["workers"] == TASKS
    assert [each.stdout + each.stderr for each in ended[1:]] == [""] * (TASKS - 1)
    assert filecmp.cmp(tmp_path / "out.pt", base / "local" / "gathered.pt", shallow=False)


def test_a_task_that_is_lost_ends_the_others_without_help_and_one_says_which(base: Path, tmp_path: Path) -> None:
    when = tmp_path / "when"
    ended = _srun(
        *(str(base / "disk" / "ranks"), str(tmp_path / "out.pt")),
        *("--fault-limit", str(LIMIT)),
        **trouble(1, "fsdpckpt.execute.run:write_window", "kill", when),
    )
    seconds = time.time() - float(when.read_text())
    assert [each.returncode for each in ended] == [6, -9, 6], [each.stderr[-3000:] for each in ended]
    error = json.loads(ended[0].stdout)["error"]
    assert error["what"].startswith("worker 1 failed in step 'copy': "), error
    assert ended[2].stdout + ended[2].stderr == ""
    assert seconds < LIMIT + 8, "they ended too late"
    assert not (tmp_path / "out.pt").exists()
