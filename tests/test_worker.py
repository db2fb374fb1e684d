"""What a process is among workers, and what crosses between it and its launcher as files."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from fsdpckpt import worker
from fsdpckpt.converters import PlannedFile, Report
from fsdpckpt.errors import UsageError
from fsdpckpt.ir.checkpoint import Container, Layout, Note, Section
from fsdpckpt.ir.units import Strategy
from fsdpckpt.options import ConvertOptions, Launcher, LaunchOptions, MissingState, OutputScope, VerifyLevel
from fsdpckpt.process import ProcessRole, RankInfo, first_host, own_rank, rank_from_environment, started_as_worker
from fsdpckpt.progress import ProgressPipe, follow_progress

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
TORCHRUN |= {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
SRUN = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "2", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "7"}
SRUN |= {"SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2),3"}
SRUN |= {"SLURM_STEP_NODELIST": "gpu[03-04,7]"}
BATCH = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, None),
        ({"RANK": "1"}, None),
        (TORCHRUN, 5),
        (SRUN, 5),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, None),
        (BATCH, None),
    ],
)
def test_a_worker_knows_its_rank(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], rank: int | None
) -> None:
    """A batch script that srun does not start, and a step of one task, are one process."""
    for name in {*TORCHRUN, *SRUN}:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    info = rank_from_environment()
    assert started_as_worker() is (info is not None) is (rank is not None)
    assert own_rank() == (info.rank if info is not None else 0) == (rank or 0)


def rank_info(environment: dict[str, str], **changed: str) -> RankInfo:
    info = rank_from_environment(environment | changed)
    assert info is not None
    return info


def test_torchrun_says_rank_and_where_to_meet() -> None:
    info = rank_info(TORCHRUN)
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (5, 8, 1, 4)
    assert (info.address, info.port, info.started_by) == ("node1", 29500, "torchrun")


def test_srun_says_rank_and_all_tasks_of_a_step_find_one_port() -> None:
    info, other = rank_info(SRUN), rank_info(SRUN, SLURM_PROCID="0", SLURM_NODEID="0", SLURM_LOCALID="0")
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (5, 7, 1, 3)
    assert (info.address, info.started_by, other.local_world_size) == ("gpu03", "srun", 2)
    assert info.port == other.port != rank_info(SRUN, SLURM_STEP_ID="3").port


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("gpu[03-07,9],login", "gpu03"), ("login,gpu[1-2]", "login"), ("a1", "a1"), ("r[1-2]-eth", "r1-eth")],
)
def test_the_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize("change", [{"RANK": "8"}, {"LOCAL_RANK": "4"}, {"RANK": "x"}, {"LOCAL_WORLD_SIZE": "9"}])
def test_variables_that_contradict_are_a_usage_error(change: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        rank_from_environment({**TORCHRUN, **change})


def test_one_of_all_workers_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    silent = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        silent.append(
            [ProcessRole(worker=True).silent, ProcessRole(worker=True, speaker=1).silent, ProcessRole().silent]
        )
    assert silent == [[False, True, False], [True, False, False], [True, True, False]]


def test_options_cross_as_json_and_are_the_same() -> None:
    of_target = {"to": Layout.FLATTENED, "container": Container.TORCH, "unit": ("a.*", "b"), "only": Section.OPTIM}
    changes = {"missing_state": MissingState.ZEROS, "rename": (("a", "b"), ("c", "")), "strategy": Strategy.NO_SHARD}
    given = ConvertOptions(**of_target, **changes, verify=VerifyLevel.FULL, max_memory=5)  # type: ignore[arg-type]
    for options in (given, ConvertOptions()):
        received = ConvertOptions(**_through_json(asdict(options)))
        assert received == options
        kinds = [type(getattr(received, field.name)) for field in dataclasses.fields(received)]
        assert kinds == [type(getattr(options, field.name)) for field in dataclasses.fields(options)]
    launch = LaunchOptions(launcher=Launcher.TORCHRUN, nproc_per_node="gpu", output_visibility=OutputScope.NODE)
    assert LaunchOptions(**_through_json(asdict(launch))) == launch


def _through_json(document: dict[str, object]) -> dict[str, object]:
    found: dict[str, object] = json.loads(json.dumps(document))
    return found


def test_a_report_crosses_as_json_and_is_the_same() -> None:
    words = {
        "source": "s",
        "target": "t",
        "layout": "full",
        "container": "torch",
        "flavor": "plain",
        "verified": "full",
    }
    counts = {
        "tensors": 1,
        "parameters": 2,
        "bytes_read": 3,
        "bytes_written": 4,
        "peak_memory_planned": 5,
        "threads": 6,
    }
    made = {"notes": (Note("cast", "m", "k", ("a", "b")),), "files": (PlannedFile("p", 9),), "evidence": ("e",)}
    run = {"world_size": None, "seconds": 0.5, "dry_run": False, "source_files": 1, "workers": 4}
    report = Report(**words, **counts, **made, **run)  # type: ignore[arg-type]
    assert Report.from_json(_through_json(report.to_json())) == report
    (note,) = report.to_json()["notes"]  # type: ignore[misc]
    assert note.keys() == {"kind", "message", "key", "keys", "warning", "damage"}


class Heard:
    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def begin(self, stage: str, total_bytes: int) -> None:
        self.events.append(("begin", stage, total_bytes))

    def advance(self, nbytes: int) -> None:
        self.events.append(("advance", nbytes))

    def end(self) -> None:
        self.events.append(("end",))


def test_progress_of_a_worker_reaches_whoever_started_it(tmp_path) -> None:
    heard = Heard()
    path = str(tmp_path / "progress")
    with follow_progress(path, heard):
        assert heard.events == [], "nothing is heard of a worker that says nothing"
    assert heard.events == []
    with follow_progress(path, heard), ProgressPipe(path) as progress:
        progress.begin("copy \N{SNOWMAN}", 1000)
        for _ in range(100):
            progress.advance(10)
        progress.end()
    assert heard.events[0] == ("begin", "copy \N{SNOWMAN}", 1000)
    assert heard.events[-1] == ("end",)
    assert sum(int(event[1]) for event in heard.events if event[0] == "advance") == 1000  # type: ignore[call-overload]


def test_the_requests_of_launchers_that_were_killed_are_removed_and_those_of_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have URLs as they were given, with passwords."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed, new = tmp_path / "fsdpckpt-request-killed", tmp_path / "fsdpckpt-request-new"
    for path in (killed, new):
        path.mkdir()
    (killed / "request.json").write_text("s3://KEY:secret@bucket")
    long_ago = time.time() - 3600
    with worker._request_directory() as running:
        for path in (Path(running), killed):
            os.utime(path, (long_ago, long_ago))
        (tmp_path / "fsdpckpt-request-file").write_text("")
        with worker._request_directory() as second:
            left = {path for path in tmp_path.iterdir() if path.is_dir()}
            assert left == {Path(running), Path(second), new}
    assert {path for path in tmp_path.iterdir() if path.is_dir()} == {new}
