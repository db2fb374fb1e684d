"""Several workers send their objects to a store in parts, without a disk: the bytes of one process, all or nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import fsdpckpt
from fsdpckpt.converters.output.sent_journal import sent_objects
from fsdpckpt.errors import SourceIncompleteError
from fsdpckpt.execute.journal import read_records
from fsdpckpt.storage import upload
from tests.e2e.distributed.disks import can_bind
from tests.e2e.distributed.processes import all_ended
from tests.e2e.remote.servers import Proxy, free_port
from tests.e2e.remote.test_workers import _changes, _environment, _files, _objects
from tests.e2e.remote.test_writing import content, keys, parts_left
from tests.oracle.forked import ROOT, Program

LIMIT = 120.0  # seconds; 5 on two idle cores


def started(*arguments: object, disks: Mapping[str, list[Path]], limit: int = 10) -> list[Program]:
    """Two workers, each on a machine of its own: of the two directories of each path in ``disks`` each sees one."""
    command = ["-m", "fsdpckpt", "convert", *map(str, arguments), "--json", "--quiet", "--fault-limit", str(limit)]
    programs = []
    port = str(free_port())
    for rank in range(2):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        place |= {"GROUP_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        own = {path: str(both[rank]) for path, both in disks.items()}
        node = ["-m", "tests.e2e.distributed.node", json.dumps(own), *command] if own else command
        programs.append(Program(node, kind="torch", env={**_environment(), **place}, cwd=ROOT))
    return programs


def ended(*arguments: object, disks: Mapping[str, list[Path]]) -> list[subprocess.CompletedProcess[str]]:
    return all_ended(started(*arguments, disks=disks), seconds=LIMIT)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where everything goes that is not sent."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr("tempfile.tempdir", str(path))
    return path


def data_below(path: Path) -> int:
    """Bytes of tensor data on the disk: neither lists nor journals."""
    files = [file for file in path.rglob("*") if file.is_file() and not file.name.endswith(upload.UPLOADED_LAST)]
    return sum(file.stat().st_size for file in files if not file.name.startswith("journal"))


def await_object(s3: Proxy, name: str) -> None:
    """Wait until ``name`` is complete and was looked up."""
    end = time.monotonic() + 60
    while not any(each.method == "HEAD" and each.path.endswith(name) for each in s3.seen):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_worker_is_killed_between_two_parts_and_the_same_command_sends_what_is_missing(
    s3: Proxy, tmp_path: Path, temporary: Path
) -> None:
    torch.manual_seed(1)
    torch.save({"model": {"weight": torch.randn(1157, 4099), "bias": torch.randn(7)}}, tmp_path / "full.pt")
    fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "alone", to="sharded", world_size=3, verify="full")
    workers: list[Program] = []
    on_disk: list[int] = []

    def kill(method: str, path: str, begin: int | None) -> str | None:
        if method == "PUT" and path.endswith(".distcp"):
            on_disk.append(data_below(temporary))
            if path.endswith("__2_0.distcp") and on_disk.count(-1) < 2:
                on_disk.append(-1)
                if on_disk.count(-1) == 2:  # parts
                    await_object(s3, "__0_0.distcp")
                    workers[1].send_signal(signal.SIGKILL)
                    return "reset"
        return None

    s3.fault = kill
    given = (tmp_path / "full.pt", "s3://runs/killed", "--to", "sharded", "--world-size", "3", "--threads", "1")
    given = (*given, "--verify", "full")
    workers += started(*given, disks={})
    done = all_ended(workers, seconds=LIMIT)
    s3.fault = None
    assert (done[0].returncode, done[1].returncode) == (6, -signal.SIGKILL), done[0].stdout + done[0].stderr
    error = json.loads(done[0].stdout)["error"]
    assert "uploads what is missing" in error["next_step"], error
    assert max(on_disk) < 1 << 16
    there = _objects(s3, "killed")
    assert "fsdpckpt.uploading" in there
    assert not {".metadata", "fsdpckpt.json", "__2_0.distcp"} & there.keys()
    records = [record for path in temporary.glob("*/journal-*") for record in read_records(str(path))]
    noted = {sent.name for sent in sent_objects([{}, *(each for each in records if "sent" in each)])}
    assert "__0_0.distcp" in noted and len(parts_left(s3)) == 1
    with pytest.raises(SourceIncompleteError, match="uploaded"):
        fsdpckpt.inspect("s3://runs/killed")
    s3.seen.clear()
    done = ended(*given, "--resume", disks={})
    assert [each.returncode for each in done] == [0, 0], done[0].stdout + done[0].stderr
    assert _objects(s3, "killed") == _files(tmp_path / "alone")
    sent = {name for method, name in _changes(s3) if method == "PUT" and name.endswith(".distcp")}
    assert sent == {"__0_0.distcp", "__1_0.distcp", "__2_0.distcp"} - noted
    report = json.loads(done[0].stdout)
    assert (report["workers"], report["disk_needed"], done[1].stdout) == (2, 0, "")
    assert (parts_left(s3), list(temporary.iterdir())) == ([], [])


@pytest.fixture
def apart(files: Path, tmp_path: Path, temporary: Path) -> dict[str, list[Path]]:
    """The disks of two machines: each has the other rank's files in ``tmp_path/source``, and a directory of its own
    for temporary files.
    """
    disks: dict[str, list[Path]] = {str(tmp_path / "source"): [], str(temporary): []}
    (tmp_path / "source").mkdir()
    for rank in range(2):
        for path, both in disks.items():
            both.append(tmp_path / f"{Path(path).name}-{rank}")
            both[-1].mkdir()
    for file in (files / "ranks").glob("*.pt"):  # without fsdpckpt.json, which has a checksum of each file
        for rank in [rank for rank in range(2) if f"_rank_{rank}." not in file.name]:
            (tmp_path / f"source-{rank}" / file.name).write_bytes(file.read_bytes())
    return disks


needs_disks = pytest.mark.skipif(not can_bind(), reason="this machine allows no mount namespaces")


@needs_disks
@pytest.mark.parametrize("damaged", [False, True])
def test_machines_that_share_no_disk_send_each_others_bytes_and_check_them_again_when_they_resume(
    damaged: bool, s3: Proxy, files: Path, tmp_path: Path, temporary: Path, apart: dict[str, list[Path]]
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
            await_object(s3, "__3_0.distcp")
            return "400 ExpiredToken"
        return None

    s3.fault = expire
    given = (tmp_path / "source", "s3://runs/apart", "--to", "sharded", "--world-size", "4", "--threads", "1")
    done = ended(*given, disks=apart)
    s3.fault = None
    assert [each.returncode for each in done] == [5, 5], [each.stdout[-3000:] for each in done]
    assert {"__2_0.distcp", "__3_0.distcp"} <= _objects(s3, "apart").keys()
    s3.seen.clear()
    done = ended(*given, disks=apart)
    if damaged:
        assert [each.returncode for each in done] == [3, 3], [each.stdout[-3000:] for each in done]
        assert "model_world_size_2_rank_1.pt is damaged" in json.loads(done[0].stdout)["error"]["what"]
        assert _objects(s3, "apart") == {}
    else:
        assert [each.returncode for each in done] == [0, 0], [each.stdout[-3000:] for each in done]
        assert not {("PUT", "__2_0.distcp"), ("PUT", "__3_0.distcp")} & set(_changes(s3))
        written, expected = _objects(s3, "apart"), _files(tmp_path / "alone")
        assert written.pop("fsdpckpt.json") != expected.pop("fsdpckpt.json"), "another source"
        assert written == expected
        assert fsdpckpt.verify("s3://runs/apart").whole
    assert [list(path.iterdir()) for path in apart[str(temporary)]] == [[], []]


@needs_disks
def test_one_object_is_sent_by_one_worker_with_the_bytes_that_only_the_other_sees(
    s3: Proxy, files: Path, tmp_path: Path, temporary: Path, apart: dict[str, list[Path]]
) -> None:
    fsdpckpt.convert(files / "ranks", tmp_path / "alone.pt", to="full")
    given = (tmp_path / "source", "s3://runs/one.pt", "--to", "full", "--verify", "full")
    done = ended(*given, disks=apart)
    assert [each.returncode for each in done] == [0, 0], [each.stdout[-3000:] for each in done]
    assert content(s3, "one.pt") == (tmp_path / "alone.pt").read_bytes()
    assert not any("fsdpckpt-staging" in key for key in keys(s3, ""))
    assert [list(path.iterdir()) for path in apart[str(temporary)]] == [[], []]


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Five parts as one object. A record of it lies in what both workers send, and its checksum before it."""
    torch.manual_seed(2)
    state = {"model": {"first": torch.randn(1003), "weight": torch.randn(1157, 4099), "last": torch.randn(501, 1009)}}
    torch.save(state, tmp_path / "large.pt")
    return tmp_path / "large.pt"


@pytest.mark.parametrize("name", ["large.pt", "large.safetensors"])
def test_two_workers_send_parts_of_one_object_at_the_same_time(
    name: str, s3: Proxy, tmp_path: Path, temporary: Path, large: Path
) -> None:
    fsdpckpt.convert(large, tmp_path / "alone" / name, to="full")
    came: list[int] = []
    on_disk: list[int] = []
    met: list[bool] = []

    def meet(method: str, path: str, number: int | None) -> None:
        """The first part waits for the fourth, which another worker has to send."""
        if method == "PUT" and number is not None:
            on_disk.append(data_below(temporary))
            came.append(number)
            end = time.monotonic() + 20
            while number == 1 and 4 not in came and time.monotonic() < end:
                time.sleep(0.02)
            met.append(number == 1 and 4 in came)

    s3.fault = meet
    done = ended(large, f"s3://runs/{name}", "--to", "full", "--threads", "1", "--verify", "full", disks={})
    s3.fault = None
    assert [each.returncode for each in done] == [0, 0], [each.stdout[-3000:] for each in done]
    assert content(s3, name) == (tmp_path / "alone" / name).read_bytes()
    assert sorted(set(came)) == [1, 2, 3, 4, 5] and any(met) and max(on_disk) < 100
    assert (parts_left(s3), list(temporary.iterdir())) == ([], [])
    assert not any("fsdpckpt-staging" in key for key in keys(s3, ""))


def test_one_object_whose_worker_is_killed_is_not_there_and_leaves_nothing_after_the_next_run(
    s3: Proxy, tmp_path: Path, temporary: Path, large: Path
) -> None:
    fsdpckpt.convert(large, tmp_path / "alone.pt", to="full")
    workers: list[Program] = []
    killed: list[int] = []

    def kill(method: str, path: str, number: int | None) -> str | None:
        if method == "PUT" and number == 4 and not killed:
            killed.append(4)
            workers[1].send_signal(signal.SIGKILL)
            return "reset"
        return None

    s3.fault = kill
    given = (large, "s3://runs/killed.pt", "--to", "full", "--threads", "1")
    workers += started(*given, disks={})
    done = all_ended(workers, seconds=LIMIT)
    s3.fault = None
    assert (done[0].returncode, done[1].returncode) == (6, -signal.SIGKILL), done[0].stdout + done[0].stderr
    assert not {key for key in keys(s3, "") if "killed.pt" in key}
    done = ended(*given, disks={})
    assert [each.returncode for each in done] == [0, 0], [each.stdout[-3000:] for each in done]
    assert content(s3, "killed.pt") == (tmp_path / "alone.pt").read_bytes()
    assert (parts_left(s3), list(temporary.iterdir())) == ([], [])
