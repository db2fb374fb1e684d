"""Workers write to an object store together: the same objects as one process, and never half a checkpoint."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fsdpckpt
from fsdpckpt.errors import SourceIncompleteError
from tests.e2e.distributed.disks import can_bind
from tests.e2e.distributed.processes import all_ended
from tests.e2e.remote.servers import Proxy, free_port
from tests.oracle.forked import ROOT, Program

LIMIT = 150.0  # seconds; 6 on two idle cores


def _command(*arguments: object) -> list[str]:
    return ["-m", "fsdpckpt", "convert", *map(str, arguments), "--json", "--quiet"]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}


def _convert(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *_command(*arguments)]
    return subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=LIMIT, check=False)


def _objects(s3: Proxy, prefix: str) -> dict[str, bytes]:
    import boto3

    client = boto3.client("s3", endpoint_url=s3.backend)
    found = client.list_objects_v2(Bucket="runs", Prefix=f"{prefix}/").get("Contents", [])
    keys = [each["Key"] for each in found]
    return {key[len(prefix) + 1 :]: client.get_object(Bucket="runs", Key=key)["Body"].read() for key in keys}


def _files(path: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in path.iterdir()}


def _changes(s3: Proxy) -> list[tuple[str, str]]:
    return [(each.method, each.path.rpartition("/")[2]) for each in s3.seen if each.method in ("PUT", "DELETE")]


DCP = ("--to", "sharded", "--world-size", "5")


@pytest.fixture(scope="session")
def alone(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process writes to a disk."""
    path = tmp_path_factory.mktemp("alone") / "out"
    fsdpckpt.convert(files / "full.pt", path, to="sharded", world_size=5)
    return path


def test_a_worker_that_is_killed_while_files_go_up_leaves_no_checkpoint_and_the_rest_goes_up_later(
    s3: Proxy, files: Path, alone: Path, tmp_path: Path
) -> None:
    staging = tmp_path / "staging"
    begun: set[str] = set()
    killed: list[int] = []

    def kill(method: str, path: str, begin: int | None) -> str | None:
        if method == "PUT" and path.endswith(".distcp"):
            begun.add(path)
            if len(begun) == 4 and not killed:  # one file after the other, so that two have come by now
                killed.append(_worker(1, str(tmp_path)))
                os.kill(killed[0], signal.SIGKILL)
        return "reset" if killed and path.endswith(".metadata") else None

    s3.fault = kill
    given = (files / "full.pt", "s3://runs/killed", *DCP, "--max-memory", "32MiB", "--staging", staging)
    done = _convert(*given, "--nproc-per-node", 2, "--fault-limit", 4)
    s3.fault = None
    assert done.returncode == 6, done.stdout + done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["what"].startswith("worker 1 failed in step 'upload': "), error
    assert "uploads what is missing" in error["next_step"], error
    there = _objects(s3, "killed")
    assert "fsdpckpt.uploading" in there
    assert not {".metadata", "fsdpckpt.json"} & there.keys()
    with pytest.raises(SourceIncompleteError, match="uploaded"):
        fsdpckpt.inspect("s3://runs/killed")
    (root,) = staging.iterdir()
    noted = {json.loads(line)[1] for path in root.glob("sent-*") for line in path.read_text().splitlines()}
    assert len(noted) >= 2
    s3.seen.clear()
    fsdpckpt.convert(files / "full.pt", "s3://runs/killed", to="sharded", world_size=5, staging=staging)
    assert _objects(s3, "killed") == _files(alone)
    sent = {name for method, name in _changes(s3) if method == "PUT" and name.endswith(".distcp")}
    assert sent == {name for name in _files(alone) if name.endswith(".distcp")} - noted
    assert list(staging.iterdir()) == []


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


@pytest.mark.skipif(not can_bind(), reason="this machine allows no mount namespaces")
def test_nodes_that_share_no_disk_each_put_together_and_upload_their_own_files(
    s3: Proxy, files: Path, alone: Path, tmp_path: Path
) -> None:
    machines = []
    for number in range(2):
        disk = tmp_path / f"disk-{number}"
        disk.mkdir()
        machines.append({str(tmp_path / "staging"): str(disk)})
    (tmp_path / "staging").mkdir()
    s3.fault = lambda method, path, begin: (
        "400 ExpiredToken" if method == "PUT" and path.endswith(".metadata") else None
    )
    given = (files / "full.pt", "s3://runs/nodes", *DCP, "--staging", tmp_path / "staging")
    ended = _on(machines, *given)
    s3.fault = None
    assert [each.returncode for each in ended] == [5, 5], [each.stdout[-3000:] for each in ended]
    error = json.loads(ended[0].stdout)["error"]
    assert error["file"] == "s3://runs/nodes/.metadata", error
    assert "uploads what is missing" in error["next_step"], error
    noted = [
        {json.loads(line)[1] for path in (tmp_path / f"disk-{number}").glob("*/sent-*") for line in path.open()}
        for number in range(2)
    ]
    ranks = [sorted(name for name in names if name.endswith(".distcp")) for names in noted]
    assert ranks == [["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"], ["__3_0.distcp", "__4_0.distcp"]]
    assert ".metadata" not in _objects(s3, "nodes")
    s3.seen.clear()
    ended = _on(machines, *given)
    assert [each.returncode for each in ended] == [0, 0], [each.stderr[-3000:] for each in ended]
    assert _objects(s3, "nodes") == _files(alone)
    assert _changes(s3) == [
        ("PUT", "fsdpckpt.uploading"),
        ("DELETE", "fsdpckpt.json"),  # that of the first run, which names what is not all there
        ("PUT", "fsdpckpt.json"),
        ("PUT", ".metadata"),
        ("DELETE", "fsdpckpt.uploading"),
    ]
    report = json.loads(ended[0].stdout)
    assert (report["workers"], report["target"]) == (2, "s3://runs/nodes")
    assert ended[1].stdout == ""
    assert [list((tmp_path / f"disk-{number}").iterdir()) for number in range(2)] == [[], []]


def _on(machines: list[dict[str, str]], *arguments: object) -> list[subprocess.CompletedProcess[str]]:
    """One worker on each of ``machines``, as a torchrun there would start it."""
    port = str(free_port())
    started = []
    for number, disks in enumerate(machines):
        place = {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        place |= {"GROUP_RANK": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        started.append(
            Program(
                ["-m", "tests.e2e.distributed.node", json.dumps(disks), *_command(*arguments)],
                kind="torch",
                env={**_environment(), **place},
                cwd=ROOT,
            )
        )
    return all_ended(started, seconds=LIMIT)


def test_a_store_that_answers_late_does_not_make_a_worker_a_lost_one(web: Proxy, alone: Path, tmp_path: Path) -> None:
    """Later than the fault limit: when rank 0 plans, when workers look at the sources, copy, and look once more."""
    number = itertools.count(1)

    def answer_late(method: str, path: str, begin: int | None) -> str | None:
        if next(number) in {3, 7, 12, 24}:
            time.sleep(5)
        return None

    web.fault = answer_late
    done = _convert(f"{web.url}/full.pt", tmp_path / "out", *DCP, "--nproc-per-node", 2, "--fault-limit", 4)
    assert done.returncode == 0, done.stdout + done.stderr
    assert next(number) > 24
    written, expected = _files(tmp_path / "out"), _files(alone)
    assert written.pop("fsdpckpt.json") != expected.pop("fsdpckpt.json"), "another source"
    assert written == expected
