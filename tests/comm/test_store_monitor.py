"""What a worker leaves for its launcher, which may be on another machine than the worker that failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.distributed import HashStore

from fsdpckpt.comm.store_monitor import STATUS_DIRECTORY, Failure, Position, StoreMonitor
from fsdpckpt.errors import TargetUnwritableError, WorkerError


def test_a_failure_on_another_node_is_left_for_the_launcher_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HashStore()
    here, there = tmp_path / "here", tmp_path / "there"
    for directory in (here, there):
        directory.mkdir()
    failed, other = StoreMonitor(store, 0, 2, limit=1), StoreMonitor(store, 1, 2, limit=1)
    monkeypatch.setenv(STATUS_DIRECTORY, str(there))
    raised = failed.fail_with(TargetUnwritableError("the disk is full"))
    monkeypatch.setenv(STATUS_DIRECTORY, str(here))
    with pytest.raises(WorkerError, match="worker 0 failed"):
        other.check_peers()
    failure = Failure(*json.loads((here / "failure-1.json").read_text()))
    assert (failure.rank, failure.exit_code) == (0, 5)
    assert failure.error().what == raised.what


def test_a_status_file_is_whole_whenever_the_worker_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATUS_DIRECTORY, str(tmp_path))
    monitor = StoreMonitor(HashStore(), 0, 1, limit=1)
    monitor.barrier("first")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(json, "dump", killed)
    with pytest.raises(KeyboardInterrupt):
        monitor.barrier("second")
    assert Position(*json.loads((tmp_path / "position-0.json").read_text())).step == "first"


def test_a_worker_whose_status_cannot_be_written_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATUS_DIRECTORY, str(tmp_path / "gone"))
    monitor = StoreMonitor(HashStore(), 0, 1, limit=1)
    monitor.barrier("first")
    with pytest.raises(WorkerError, match="the disk is full"):
        raise monitor.fail_with(TargetUnwritableError("the disk is full"))
