"""Two machines, each with a torchrun and disks of its own, as a user would run them."""

from __future__ import annotations

import filecmp
import json
import shlex
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.e2e.distributed.cases import disks, options, unequal
from tests.e2e.distributed.disks import can_bind
from tests.e2e.distributed.processes import all_ended
from tests.oracle.forked import ROOT, Program

pytestmark = pytest.mark.skipif(not can_bind(), reason="this machine allows no mount namespaces")

LIMIT = 150  # seconds


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _machines(commands: list[list[str]], machines: list[dict[str, str]]) -> list[subprocess.CompletedProcess[str]]:
    """Each of ``commands`` on its machine, all at once."""
    started = [
        Program(
            ["-m", "tests.e2e.distributed.node", json.dumps(disk), *command],
            kind="torch",
            env={"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
        )
        for command, disk in zip(commands, machines, strict=True)
    ]
    return all_ended(started, seconds=LIMIT)


def _torchrun(*arguments: str) -> list[list[str]]:
    port = _free_port()
    command = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    return [[*command, "--node-rank", str(node), "-m", "fsdpckpt", *arguments] for node in range(2)]


def _own_launcher(*arguments: str) -> list[list[str]]:
    endpoint = f"127.0.0.1:{_free_port()}"
    command = ["-m", "fsdpckpt", *arguments, "--nnodes", "2", "--nproc-per-node", "2"]
    return [[*command, "--rdzv-endpoint", endpoint, "--node-rank", str(node)] for node in range(2)]


@pytest.mark.parametrize("start", [_torchrun, _own_launcher])
def test_each_node_gets_the_files_of_the_ranks_that_it_will_load(base: Path, tmp_path: Path, start) -> None:
    machines = [{str(base / "disk"): own for own in disk.values()} for disk in disks_from(base, tmp_path)]
    for number, disk in enumerate(machines):
        target = tmp_path / f"target-{number}"
        target.mkdir()
        disk[str(base / "local")] = str(target)  # what one machine writes no other sees
    target = str(base / "local" / "out")
    given = ["--to", "sharded", "--container", "torch", "--world-size", "5", "--output-visibility", "node"]
    ended = _machines(start("convert", str(base / "disk" / "ranks"), target, *given, "--json"), machines)
    assert [each.returncode for each in ended] == [0, 0], [each.stderr[-3000:] for each in ended]
    report = json.loads(ended[0].stdout)
    assert (report["workers"], report["world_size"]) == (4, 5)
    assert ended[1].stdout == "", "said twice"
    one, other = tmp_path / "target-0" / "out", tmp_path / "target-1" / "out"
    ranks = [sorted(int(path.stem[-1]) for path in node.glob("model_*.pt")) for node in (one, other)]
    assert ranks == [[0, 1, 2], [3, 4]]
    shutil.copytree(other, one, dirs_exist_ok=True)
    from fsdpckpt.comm.protocol import Solo
    from fsdpckpt.converters.pipeline import convert
    from fsdpckpt.progress import NoProgress

    alone = options({"to": "sharded", "container": "torch", "world_size": 5})
    convert(Solo(), str(base / "disk" / "ranks"), str(tmp_path / "alone"), alone, NoProgress())
    assert unequal(tmp_path / "alone", one) == []


def test_workers_that_do_not_see_the_output_send_what_they_see(base: Path, tmp_path: Path) -> None:
    machines = [{str(base / "disk"): own for own in disk.values()} for disk in disks_from(base, tmp_path)]
    for number, disk in enumerate(machines):
        target = tmp_path / f"target-{number}"
        target.mkdir()
        disk[str(base / "local")] = str(target)
    given = ["--max-memory", "1MiB", "--threads", "2"]
    command = _torchrun("convert", str(base / "disk" / "ranks"), str(base / "local" / "out.pt"), *given, "--resume")
    ended = _machines(command, machines)
    assert [each.returncode for each in ended] == [0, 0], [each.stderr[-3000:] for each in ended]
    assert "there was nothing to resume: started from the beginning" in ended[0].stdout
    assert filecmp.cmp(tmp_path / "target-0" / "out.pt", base / "local" / "gathered.pt", shallow=False)
    assert list((tmp_path / "target-1").iterdir()) == []


def test_files_of_one_name_that_differ_are_refused(base: Path, tmp_path: Path) -> None:
    machines = [{str(base / "disk"): own for own in disk.values()} for disk in disks_from(base, tmp_path)]
    for name, disk in zip(("full.pt", "gaps.pt"), machines, strict=True):
        shutil.copyfile(base / "disk" / name, Path(disk[str(base / "disk")]) / "full.pt")
    command = _torchrun("convert", str(base / "disk" / "full.pt"), str(tmp_path / "out.pt"), "--json")
    ended = _machines(command, machines)
    error = json.loads(ended[0].stdout)["error"]
    assert (error["exit_code"], error["what"]) == (3, "the workers do not see the same source"), error
    assert error["details"] == [f"{base / 'disk' / 'full.pt'}: workers 0, 1 and workers 2, 3 see different files"]
    assert not (tmp_path / "out.pt").exists()


def test_where_files_lie_on_another_node_the_error_names_them_and_the_command_that_finds_them(
    base: Path, tmp_path: Path
) -> None:
    machines = [{str(base / "disk"): own for own in disk.values()} for disk in disks_from(base, tmp_path)]
    arguments = ["convert", str(base / "disk" / "ranks"), str(tmp_path / "out.pt"), "--max-memory", "1MiB"]
    (alone,) = _machines([["-m", "fsdpckpt", *arguments, "--json"]], machines[:1])
    error = json.loads(alone.stdout)["error"]
    assert (alone.returncode, error["type"]) == (3, "SourceIncompleteError"), error
    here = {path.name for path in Path(machines[0][str(base / "disk")], "ranks").iterdir()}
    files = {path.name for path in (base / "disk" / "ranks").glob("*.pt")}
    assert set(error["details"]) == files - here
    command = shlex.split(error["next_step"].rsplit("NODES: ", 1)[1].replace("NODES", "2"))
    assert command[:3] == ["torchrun", "--nnodes", "2"]
    command[command.index("--rdzv-endpoint") + 1] = f"127.0.0.1:{_free_port()}"
    together = _machines([["-m", "torch.distributed.run", *command[1:]]] * 2, machines)
    assert [each.returncode for each in together] == [0, 0], [each.stderr[-3000:] for each in together]
    assert filecmp.cmp(tmp_path / "out.pt", base / "local" / "gathered.pt", shallow=False)


def disks_from(base: Path, tmp_path: Path) -> list[dict[str, str]]:
    """Two disks, over which the sources are dealt out."""
    (tmp_path / "disk").symlink_to(base / "disk")
    return disks(tmp_path, 2)
