"""What a worker leaves for its launcher, which may be on another machine than the worker that failed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed import HashStore

from fsdpckpt.comm.store_monitor import STATUS_DIRECTORY, Failure, Position, StoreMonitor
from fsdpckpt.errors import TargetUnwritableError, WorkerError


@pytest.fixture
def watch() -> Iterator[Callable[[int, int], StoreMonitor]]:
    """Makes the monitors of ranks (rank, world size) of one store, and closes them."""
    store = HashStore()
    monitors: list[StoreMonitor] = []

    def make(rank: int, world_size: int) -> StoreMonitor:
        monitors.append(StoreMonitor(store, rank, world_size, limit=1))
        return monitors[-1]

    yield make
    for monitor in monitors:
        monitor.close()


def test_a_failure_on_another_node_is_left_for_the_launcher_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watch: Callable[[int, int], StoreMonitor]
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for directory in (here, there):
        directory.mkdir()
    failed, other = watch(0, 2), watch(1, 2)
    monkeypatch.setenv(STATUS_DIRECTORY, str(there))
    raised = failed.fail_with(TargetUnwritableError("the disk is full"))
    monkeypatch.setenv(STATUS_DIRECTORY, str(here))
    with pytest.raises(WorkerError, match="worker 0 failed"):
        other.check_peers()
    failure = Failure(*json.loads((here / "failure-1.json").read_text()))
    assert (failure.rank, failure.exit_code) == (0, 5)
    assert failure.error().what == raised.what


def test_a_status_file_is_whole_whenever_the_worker_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watch: Callable[[int, int], StoreMonitor]
) -> None:
    monkeypatch.setenv(STATUS_DIRECTORY, str(tmp_path))
    monitor = watch(0, 1)
    monitor.barrier("first")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(json, "dump", killed)
        monitor.barrier("second")
    assert Position(*json.loads((tmp_path / "position-0.json").read_text())).step == "first"


def test_a_worker_whose_status_cannot_be_written_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watch: Callable[[int, int], StoreMonitor]
) -> None:
    monkeypatch.setenv(STATUS_DIRECTORY, str(tmp_path / "gone"))
    monitor = watch(0, 1)
    monitor.barrier("first")
    with pytest.raises(WorkerError, match="the disk is full"):
        raise monitor.fail_with(TargetUnwritableError("the disk is full"))
