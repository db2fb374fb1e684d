"""Workers write to an object store together, mostly without a disk: the bytes of one process, all or nothing."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import fsdpckpt
from fsdpckpt.converters.output.sent_journal import sent_objects
from fsdpckpt.errors import SourceIncompleteError
from fsdpckpt.execute.journal import read_records
from fsdpckpt.storage import upload
from tests.e2e.distributed.disks import can_bind
from tests.e2e.distributed.processes import all_ended, started
from tests.e2e.remote.servers import Proxy, answers
from tests.e2e.remote.stores import S3, files_below
from tests.oracle.forked import ROOT, Program

LIMIT = 150.0  # seconds; 6 on two idle cores
DCP = ("--to", "sharded", "--world-size", "5")
Ended = list[subprocess.CompletedProcess[str]]
needs_disks = pytest.mark.skipif(not can_bind(), reason="this machine allows no mount namespaces")


def _command(*arguments: object) -> list[str]:
    return ["-m", "fsdpckpt", "convert", *map(str, arguments), "--json", "--quiet"]


def _convert(*arguments: object) -> subprocess.CompletedProcess[str]:
    """By workers that it starts itself."""
    command = [sys.executable, *_command(*arguments, "--nproc-per-node", 2, "--fault-limit", 4)]
    environment = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)


def _two(*arguments: object, disks: Mapping[str, list[Path]] | None = None) -> list[Program]:
    """Two workers, each on a machine of its own: of the two directories of each path in ``disks`` each sees one."""
    machines = [{path: str(both[rank]) for path, both in (disks or {}).items()} for rank in range(2)]
    return started(machines, *_command(*arguments, "--fault-limit", "10"))


def _ended(*arguments: object, disks: Mapping[str, list[Path]] | None = None, code: int = 0) -> Ended:
    """Both end so, and the second says nothing."""
    ended = all_ended(_two(*arguments, disks=disks), seconds=LIMIT)
    assert [each.returncode for each in ended] == [code] * 2, [each.stdout[-3000:] + each.stderr for each in ended]
    assert ended[1].stdout == ""
    return ended


def _killed(s3: S3, kill: Callable[[Program, str, str, int | None], bool], *arguments: object) -> str:
    """What is advised after the second of two workers was killed when ``kill`` did so, which loses the request."""
    workers: list[Program] = []
    with s3.faulty(lambda *request: "reset" if kill(workers[1], *request) else None):
        workers += _two(*arguments)
        done = all_ended(workers, seconds=LIMIT)
    assert (done[0].returncode, done[1].returncode) == (6, -signal.SIGKILL), done[0].stdout + done[0].stderr
    return str(json.loads(done[0].stdout)["error"]["next_step"])


def _sent_files(s3: S3) -> set[str]:
    return {name for method, name in s3.changes() if method == "PUT" and name.endswith(".distcp")}


def _half_a_checkpoint(s3: S3, name: str) -> set[str]:
    """The objects of an interrupted upload, which readers refuse."""
    there = s3.objects(name).keys()
    assert "fsdpckpt.uploading" in there
    assert not {".metadata", "fsdpckpt.json"} & there
    with pytest.raises(SourceIncompleteError, match="uploaded"):
        fsdpckpt.inspect(f"s3://runs/{name}")
    return set(there)


def _data_below(path: Path) -> int:
    """Bytes of tensor data on the disk: neither lists nor journals."""
    files = [file for file in path.rglob("*") if file.is_file() and not file.name.endswith(upload.UPLOADED_LAST)]
    return sum(file.stat().st_size for file in files if not file.name.startswith("journal"))


def _await(condition: Callable[[], bool], seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def _looked_up(s3: S3, name: str) -> bool:
    """Whether an object is complete, and was looked up."""
    return any(each.method == "HEAD" and each.path.endswith(name) for each in s3.seen)


@pytest.fixture(scope="session")
def alone(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process writes to a disk."""
    path = tmp_path_factory.mktemp("alone") / "out"
    fsdpckpt.convert(files / "full.pt", path, to="sharded", world_size=5)
    return path


# --- put together on a disk -------------------------------------------------------------------------------------------


def test_a_worker_that_is_killed_while_files_go_up_leaves_no_checkpoint_and_the_rest_goes_up_later(
    s3: S3, files: Path, alone: Path, staging: Path
) -> None:
    begun: set[str] = set()
    killed: list[int] = []

    def kill(method: str, path: str, begin: int | None) -> str | None:
        if method == "PUT" and path.endswith(".distcp"):
            begun.add(path)
            if len(begun) == 4 and not killed:  # one file after the other, so that two have come by now
                killed.append(_worker(1, str(staging)))
                os.kill(killed[0], signal.SIGKILL)
        return "reset" if killed and path.endswith(".metadata") else None

    with s3.faulty(kill):
        done = _convert(files / "full.pt", "s3://runs/killed", *DCP, "--max-memory", "32MiB", "--staging", staging)
    assert done.returncode == 6, done.stdout + done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["what"].startswith("worker 1 failed in step 'upload': "), error
    assert "uploads what is missing" in error["next_step"], error
    _half_a_checkpoint(s3, "killed")
    noted = _noted(staging)
    assert len(noted) >= 2
    s3.seen.clear()
    fsdpckpt.convert(files / "full.pt", "s3://runs/killed", to="sharded", world_size=5, staging=staging)
    assert s3.objects("killed") == files_below(alone)
    assert _sent_files(s3) == {f"__{rank}_0.distcp" for rank in range(5)} - noted
    assert list(staging.iterdir()) == []


def _noted(staging: Path) -> set[str]:
    """The files that were sent, as the staging directory says."""
    return {json.loads(line)[1] for path in staging.glob("*/sent-*") for line in path.read_text().splitlines()}


def _worker(rank: int, mark: str) -> int:
    """The process that is worker ``rank`` of the run with ``mark`` in its launcher's command line."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            variables = (folder / "environ").read_bytes().split(b"\0")
            parent = (folder / "status").read_text().partition("PPid:")[2].split()[0]
            launcher = Path("/proc", parent, "cmdline").read_bytes()
        except OSError:  # it ended meanwhile
            continue
        if b"fsdpckpt.worker" in command and b"RANK=%d" % rank in variables and mark.encode() in launcher:
            return int(folder.name)
    raise AssertionError("there is no such worker")


@needs_disks
def test_nodes_that_share_no_disk_each_put_together_and_upload_their_own_files(
    s3: S3, files: Path, alone: Path, staging: Path, apart: dict[str, list[Path]]
) -> None:
    given = (files / "full.pt", "s3://runs/nodes", *DCP, "--staging", staging)
    with s3.faulty(answers("400 ExpiredToken", "PUT", ".metadata")):
        ended = _ended(*given, disks=apart, code=5)
    error = json.loads(ended[0].stdout)["error"]
    assert error["file"] == "s3://runs/nodes/.metadata", error
    assert "uploads what is missing" in error["next_step"], error
    ranks = [sorted(name for name in _noted(disk) if name.endswith(".distcp")) for disk in apart[str(staging)]]
    assert ranks == [["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"], ["__3_0.distcp", "__4_0.distcp"]]
    assert ".metadata" not in s3.objects("nodes")
    s3.seen.clear()
    ended = _ended(*given, disks=apart)
    assert s3.objects("nodes") == files_below(alone)
    assert s3.changes() == [
        ("PUT", "fsdpckpt.uploading"),
        ("DELETE", "fsdpckpt.json"),  # that of the first run, which names what is not all there
        ("PUT", "fsdpckpt.json"),
        ("PUT", ".metadata"),
        ("DELETE", "fsdpckpt.uploading"),
    ]
    report = json.loads(ended[0].stdout)
    assert (report["workers"], report["target"]) == (2, "s3://runs/nodes")
    assert [list(disk.iterdir()) for disk in apart[str(staging)]] == [[], []]


def test_a_store_that_answers_late_does_not_make_a_worker_a_lost_one(web: Proxy, alone: Path, tmp_path: Path) -> None:
    """Later than the fault limit: when rank 0 plans, when workers look at the sources, copy, and look once more."""
    number = itertools.count(1)

    def answer_late(method: str, path: str, begin: int | None) -> str | None:
        if next(number) in {3, 7, 12, 24}:
            time.sleep(5)
        return None

    web.fault = answer_late
    done = _convert(f"{web.url}/full.pt", tmp_path / "out", *DCP)
    assert done.returncode == 0, done.stdout + done.stderr
    assert next(number) > 24
    written, expected = files_below(tmp_path / "out"), files_below(alone)
    assert written.pop("fsdpckpt.json") != expected.pop("fsdpckpt.json"), "another source"
    assert written == expected


# --- sent in parts while it is assembled ------------------------------------------------------------------------------


def test_a_worker_is_killed_between_two_parts_and_the_same_command_sends_what_is_missing(
    s3: S3, large: Path, tmp_path: Path, staging: Path
) -> None:
    fsdpckpt.convert(large, tmp_path / "alone", to="sharded", world_size=3, verify="full")
    on_disk: list[int] = []
    parts = itertools.count(1)

    def kill(worker: Program, method: str, path: str, begin: int | None) -> bool:
        if method != "PUT" or not path.endswith(".distcp"):
            return False
        on_disk.append(_data_below(staging))
        if not path.endswith("__2_0.distcp") or next(parts) != 2:
            return False
        assert _await(lambda: _looked_up(s3, "__0_0.distcp"))
        worker.send_signal(signal.SIGKILL)
        return True

    given = (large, "s3://runs/killed", "--to", "sharded", "--world-size", "3", "--threads", "1", "--verify", "full")
    assert "uploads what is missing" in _killed(s3, kill, *given)
    assert max(on_disk) < 1 << 16
    assert "__2_0.distcp" not in _half_a_checkpoint(s3, "killed")
    records = [record for path in staging.glob("*/journal-*") for record in read_records(str(path))]
    noted = {sent.name for sent in sent_objects([{}, *(each for each in records if "sent" in each)])}
    assert "__0_0.distcp" in noted and len(s3.unfinished()) == 1
    s3.seen.clear()
    done = _ended(*given, "--resume")
    assert s3.objects("killed") == files_below(tmp_path / "alone")
    assert _sent_files(s3) == {"__0_0.distcp", "__1_0.distcp", "__2_0.distcp"} - noted
    report = json.loads(done[0].stdout)
    assert (report["workers"], report["disk_needed"]) == (2, 0)
    assert (s3.unfinished(), list(staging.iterdir())) == ([], [])


@pytest.fixture
def apart(files: Path, tmp_path: Path, staging: Path) -> dict[str, list[Path]]:
    """The disks of two machines: each has the other rank's files in ``tmp_path/source``, and a directory of its own
    for temporary files.
    """
    disks: dict[str, list[Path]] = {str(tmp_path / "source"): [], str(staging): []}
    (tmp_path / "source").mkdir()
    for rank in range(2):
        for path, both in disks.items():
            both.append(tmp_path / f"{Path(path).name}-{rank}")
            both[-1].mkdir()
    for file in (files / "ranks").glob("*.pt"):  # without fsdpckpt.json, which has a checksum of each file
        for rank in [rank for rank in range(2) if f"_rank_{rank}." not in file.name]:
            (tmp_path / f"source-{rank}" / file.name).write_bytes(file.read_bytes())
    return disks


@needs_disks
@pytest.mark.parametrize("damaged", [False, True])
def test_machines_that_share_no_disk_send_each_others_bytes_and_check_them_again_when_they_resume(
    damaged: bool, s3: S3, files: Path, tmp_path: Path, staging: Path, apart: dict[str, list[Path]]
) -> None:
    """Whether a record is whole is known when all are read: an interrupted run has not checked what it sent."""
    fsdpckpt.convert(files / "ranks", tmp_path / "alone", to="sharded", world_size=4)
    if damaged:
        victim = tmp_path / "source-0" / "model_world_size_2_rank_1.pt"
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(bytes(data))

    def expire(method: str, path: str, begin: int | None) -> str | None:
        if method == "PUT" and path.endswith("__0_0.distcp"):  # the first of worker 0, which has then journaled nothing
            assert _await(lambda: _looked_up(s3, "__3_0.distcp"))
            return "400 ExpiredToken"
        return None

    given = (tmp_path / "source", "s3://runs/apart", "--to", "sharded", "--world-size", "4", "--threads", "1")
    with s3.faulty(expire):
        _ended(*given, disks=apart, code=5)
    assert {"__2_0.distcp", "__3_0.distcp"} <= s3.objects("apart").keys()
    s3.seen.clear()
    done = _ended(*given, disks=apart, code=3 if damaged else 0)
    if damaged:
        assert "model_world_size_2_rank_1.pt is damaged" in json.loads(done[0].stdout)["error"]["what"]
        assert s3.objects("apart") == {}
    else:
        assert not {"__2_0.distcp", "__3_0.distcp"} & _sent_files(s3)
        written, expected = s3.objects("apart"), files_below(tmp_path / "alone")
        assert written.pop("fsdpckpt.json") != expected.pop("fsdpckpt.json"), "another source"
        assert written == expected
        assert fsdpckpt.verify("s3://runs/apart").whole
    assert [list(path.iterdir()) for path in apart[str(staging)]] == [[], []]


@needs_disks
def test_one_object_is_sent_by_one_worker_with_the_bytes_that_only_the_other_sees(
    s3: S3, files: Path, tmp_path: Path, staging: Path, apart: dict[str, list[Path]]
) -> None:
    fsdpckpt.convert(files / "ranks", tmp_path / "alone.pt", to="full")
    _ended(tmp_path / "source", "s3://runs/one.pt", "--to", "full", "--verify", "full", disks=apart)
    assert s3.content("one.pt") == (tmp_path / "alone.pt").read_bytes()
    assert not any("fsdpckpt-staging" in key for key in s3.names())
    assert [list(path.iterdir()) for path in apart[str(staging)]] == [[], []]


@pytest.mark.parametrize("name", ["large.pt", "large.safetensors"])
def test_two_workers_send_parts_of_one_object_at_the_same_time(
    name: str, s3: S3, tmp_path: Path, staging: Path, large: Path
) -> None:
    fsdpckpt.convert(large, tmp_path / "alone" / name, to="full")
    came: list[int] = []
    on_disk: list[int] = []
    met: list[bool] = []

    def meet(method: str, path: str, number: int | None) -> None:
        """The first part waits for the fourth, which another worker has to send."""
        if method == "PUT" and number is not None:
            on_disk.append(_data_below(staging))
            came.append(number)
            met.append(number == 1 and _await(lambda: 4 in came, seconds=20))

    with s3.faulty(meet):
        _ended(large, f"s3://runs/{name}", "--to", "full", "--threads", "1", "--verify", "full")
    assert s3.content(name) == (tmp_path / "alone" / name).read_bytes()
    assert sorted(set(came)) == [1, 2, 3, 4, 5] and any(met) and max(on_disk) < 100
    assert (s3.unfinished(), list(staging.iterdir())) == ([], [])
    assert not any("fsdpckpt-staging" in key for key in s3.names())


def test_one_object_whose_worker_is_killed_is_not_there_and_leaves_nothing_after_the_next_run(
    s3: S3, tmp_path: Path, staging: Path, large: Path
) -> None:
    fsdpckpt.convert(large, tmp_path / "alone.pt", to="full")
    fourths = itertools.count(1)

    def kill(worker: Program, method: str, path: str, number: int | None) -> bool:
        if method != "PUT" or number != 4 or next(fourths) > 1:
            return False
        worker.send_signal(signal.SIGKILL)
        return True

    given = (large, "s3://runs/killed.pt", "--to", "full", "--threads", "1")
    _killed(s3, kill, *given)
    assert not {key for key in s3.names() if "killed.pt" in key}
    _ended(*given)
    assert s3.content("killed.pt") == (tmp_path / "alone.pt").read_bytes()
    assert (s3.unfinished(), list(staging.iterdir())) == ([], [])
