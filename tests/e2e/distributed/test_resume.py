"""Workers that were killed: others, as many or not, or one process go on from there, to the same bytes."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import fsdpckpt
from fsdpckpt.errors import SourceError, TargetError
from fsdpckpt.progress import NoProgress
from fsdpckpt.storage.hidden import journal_paths, staging_root
from tests.e2e.distributed.cases import CASES, case, disks, unequal, write_plan
from tests.e2e.distributed.disks import can_bind
from tests.e2e.distributed.processes import trouble
from tests.oracle.forked import ROOT, run
from tests.oracle.launch import torchrun

COPY, COMMIT = "fsdpckpt.execute.run:write_window", "fsdpckpt.storage.staging:Staging.commit"
LIMIT = 200.0  # seconds; 10 on two idle cores
RANKS, FULL = "all to all", "gather"
Machines = list[dict[str, str]]


class Stop(BaseException):
    """As a signal."""


class Stopping(NoProgress):
    """Stops one process after some windows."""

    def __init__(self, windows: int) -> None:
        self.left = windows

    def advance(self, nbytes: int) -> None:
        self.left -= 1
        if self.left <= 0 and nbytes:
            raise Stop


def _kill(plan: str, workers: int, place: str, call: int) -> None:
    """Workers that do what ``plan`` says, of which the last is killed."""
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    variables = {
        **trouble(workers - 1, place, "kill soon", Path(plan).parent / "when", call),
        "SYNC_SECONDS": "0.02",
    }
    command += ["-m", "tests.e2e.distributed.work", plan]
    assert run(command, kind="torch", env=variables, cwd=ROOT, timeout=LIMIT).returncode != 0


def _killed(base: Path, folder: Path, name: str, workers: int, machines: Machines) -> Path:
    """The target of a run by ``workers`` of which the last was killed in the middle of its copying."""
    _kill(write_plan(folder / "plan.json", [case(base, folder, name)], machines), workers, COPY, 4)
    target = folder / CASES[name][1]
    assert not target.exists()
    assert len(journal_paths(staging_root(str(target)))) == workers, "each keeps one"
    return target


def _copy(target: Path, folder: Path) -> Path:
    """The same interrupted run, once more in ``folder``."""
    copy = folder / target.name
    folder.mkdir()
    shutil.copytree(staging_root(str(target)), staging_root(str(copy)))
    return copy


def _resumed(base: Path, folder: Path, name: str, targets: list[Path], workers: int, machines: Machines):
    """What ``workers`` report that go on with each of ``targets``."""
    cases = [case(base, target.parent, name, resume=True) for target in targets]
    plan = write_plan(folder / "again.json", cases, machines, reports=str(folder / "reports.json"))
    torchrun("tests.e2e.distributed.work", plan, world_size=workers, limit=LIMIT)
    return json.loads((folder / "reports.json").read_text())


def _there(notes: list[dict[str, str]]) -> int:
    """How many bytes were taken over."""
    (note,) = (each["message"] for each in notes if each["kind"] == "resumed")
    found, total = map(_nbytes, re.findall(r"[\d.]+ [KM]iB", note))
    assert found < total
    return found


def _nbytes(size: str) -> int:
    number, unit = size.split()
    return int(float(number) * {"KiB": 1 << 10, "MiB": 1 << 20}[unit])


def _alone(base: Path, name: str, target: Path, **changed: Any) -> list[str]:
    source, _, given = CASES[name]
    report = fsdpckpt.convert(base / "disk" / source, target, **given, **changed)
    return [note.message for note in report.notes if note.kind == "resumed"]


def test_what_workers_left_others_finish_and_what_one_process_left_workers_do(base: Path, tmp_path: Path) -> None:
    left = _killed(base, tmp_path, RANKS, 3, [])
    other, local = _copy(left, tmp_path / "other"), _copy(left, tmp_path / "local")
    alone = tmp_path / "alone" / left.name
    with pytest.raises(Stop):
        _alone(base, RANKS, alone, progress=Stopping(6))
    reports = _resumed(base, tmp_path, RANKS, [left, alone], 2, [])
    assert [_there(report["notes"]) > 0 for report in reports] == [True, True]
    assert len(_alone(base, RANKS, local, resume=True)) == 1
    with pytest.raises(TargetError, match="of an interrupted run of another command"):
        _alone(base, RANKS, other, resume=True, dtype="bfloat16")
    for target in (left, alone, local):
        assert unequal(base / "local" / left.name, target) == []
        assert not os.path.exists(staging_root(str(target)))
    assert journal_paths(staging_root(str(other))), "what is refused stays"


@pytest.mark.skipif(not can_bind(), reason="this machine allows no mount namespaces")
def test_what_was_sent_between_disks_is_taken_up_by_more_workers_and_refused_of_another_copy(
    base: Path, tmp_path: Path
) -> None:
    machines = disks(base, tmp_path, 3)
    left = _killed(base, tmp_path, FULL, 3, machines)
    other = _copy(left, tmp_path / "other")
    (report,) = _resumed(base, tmp_path, FULL, [left], 4, [*machines, machines[0]])
    assert _there(report["notes"]) > 0
    assert unequal(base / "local" / left.name, left) == []
    with pytest.raises(SourceError, match="the source is not what that run read"):
        _alone(base, FULL, other, resume=True)


@pytest.mark.skipif(not can_bind(), reason="this machine allows no mount namespaces")
def test_where_one_node_had_its_files_already_they_are_compared_and_the_other_goes_on(
    base: Path, tmp_path: Path
) -> None:
    machines = [{str(tmp_path / "out"): str(tmp_path / f"node-{number}")} for number in range(2)]
    for folder in ("out", "node-0", "node-1"):
        (tmp_path / folder).mkdir()
    name = CASES[RANKS][1]
    plan = write_plan(tmp_path / "plan.json", [case(base, tmp_path / "out", RANKS)], machines, nodes=True)
    _kill(plan, 2, COMMIT, 1)
    one, other = tmp_path / "node-0" / name, tmp_path / "node-1" / name
    assert (one.exists(), other.exists()) == (True, False)
    before = {path.name: path.stat().st_ctime_ns for path in one.iterdir()}
    resumed = [case(base, tmp_path / "out", RANKS, resume=True)]
    plan = write_plan(tmp_path / "again.json", resumed, machines, nodes=True)
    torchrun("tests.e2e.distributed.work", plan, world_size=2, limit=LIMIT)
    assert {path.name: path.stat().st_ctime_ns for path in one.iterdir()} == before, "written again"
    assert [path.name for path in (tmp_path / "node-1").iterdir() if path.name != name] == []
    shutil.copytree(other, one, dirs_exist_ok=True)
    assert unequal(base / "local" / name, one) == []
