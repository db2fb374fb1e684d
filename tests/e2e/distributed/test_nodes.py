"""Two machines, each with a torchrun and disks of its own, as a user would run them."""

from __future__ import annotations

import filecmp
import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

import fsdpckpt
from tests.e2e.distributed.cases import disks, unequal
from tests.e2e.distributed.disks import can_bind
from tests.e2e.distributed.processes import all_ended, on_machine
from tests.oracle.ranks import free_port

pytestmark = pytest.mark.skipif(not can_bind(), reason="this machine allows no mount namespaces")

LIMIT = 150  # seconds
Machines = list[dict[str, str]]
Command = list[str]


@pytest.fixture
def machines(base: Path, tmp_path: Path) -> Machines:
    """Two, over which the sources are dealt out; what one writes to ``base/local`` no other sees."""
    found = disks(base, tmp_path, 2)
    for number, disk in enumerate(found):
        target = tmp_path / f"target-{number}"
        target.mkdir()
        disk[str(base / "local")] = str(target)
    return found


def _ended(commands: list[Command], machines: Machines) -> list[subprocess.CompletedProcess[str]]:
    """Each of ``commands`` on its machine, all at once."""
    started = [on_machine(disk, *command, variables={}) for command, disk in zip(commands, machines, strict=True)]
    return all_ended(started, seconds=LIMIT)


def _done(commands: list[Command], machines: Machines) -> list[str]:
    """What each says, as they succeed."""
    ended = _ended(commands, machines)
    assert [each.returncode for each in ended] == [0, 0], [each.stderr[-3000:] for each in ended]
    return [each.stdout for each in ended]


def _torchrun(*arguments: str) -> list[Command]:
    command = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    return [[*command, "--node-rank", str(node), "-m", "fsdpckpt", "convert", *arguments] for node in range(2)]


def _own_launcher(*arguments: str) -> list[Command]:
    command = ["-m", "fsdpckpt", "convert", *arguments, "--nnodes", "2", "--nproc-per-node", "2"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    return [[*command, "--node-rank", str(node)] for node in range(2)]


@pytest.mark.parametrize("start", [_torchrun, _own_launcher])
def test_each_node_gets_the_files_of_the_ranks_that_it_will_load(
    base: Path, tmp_path: Path, machines: Machines, start
) -> None:
    given = ["--to", "sharded", "--container", "torch", "--world-size", "5", "--output-visibility", "node", "--json"]
    said = _done(start(str(base / "disk" / "ranks"), str(base / "local" / "out"), *given), machines)
    report = json.loads(said[0])
    assert (report["workers"], report["world_size"]) == (4, 5)
    assert said[1] == "", "said twice"
    one, other = tmp_path / "target-0" / "out", tmp_path / "target-1" / "out"
    ranks = [sorted(int(path.stem[-1]) for path in node.glob("model_*.pt")) for node in (one, other)]
    assert ranks == [[0, 1, 2], [3, 4]]
    shutil.copytree(other, one, dirs_exist_ok=True)
    fsdpckpt.convert(base / "disk" / "ranks", tmp_path / "alone", to="sharded", container="torch", world_size=5)
    assert unequal(tmp_path / "alone", one) == []


def test_workers_that_do_not_see_the_output_send_what_they_see(base: Path, tmp_path: Path, machines: Machines) -> None:
    given = [str(base / "disk" / "ranks"), str(base / "local" / "out.pt"), "--max-memory", "1MiB", "--threads", "2"]
    said = _done(_torchrun(*given, "--resume"), machines)
    assert "there was nothing to resume: started from the beginning" in said[0]
    assert filecmp.cmp(tmp_path / "target-0" / "out.pt", base / "local" / "gathered.pt", shallow=False)
    assert list((tmp_path / "target-1").iterdir()) == []


def test_files_of_one_name_that_differ_are_refused(base: Path, tmp_path: Path, machines: Machines) -> None:
    for name, disk in zip(("full.pt", "gaps.pt"), machines, strict=True):
        shutil.copyfile(base / "disk" / name, Path(disk[str(base / "disk")]) / "full.pt")
    ended = _ended(_torchrun(str(base / "disk" / "full.pt"), str(tmp_path / "out.pt"), "--json"), machines)
    error = json.loads(ended[0].stdout)["error"]
    assert (error["exit_code"], error["what"]) == (3, "the workers do not see the same source"), error
    assert error["details"] == [f"{base / 'disk' / 'full.pt'}: workers 0, 1 and workers 2, 3 see different files"]
    assert not (tmp_path / "out.pt").exists()


def test_where_files_lie_on_another_node_the_error_names_them_and_the_command_that_finds_them(
    base: Path, tmp_path: Path, machines: Machines
) -> None:
    given = ["convert", str(base / "disk" / "ranks"), str(tmp_path / "out.pt"), "--max-memory", "1MiB", "--json"]
    (alone,) = _ended([["-m", "fsdpckpt", *given]], machines[:1])
    error = json.loads(alone.stdout)["error"]
    assert (alone.returncode, error["type"]) == (3, "SourceIncompleteError"), error
    here = {path.name for path in Path(machines[0][str(base / "disk")], "ranks").iterdir()}
    files = {path.name for path in (base / "disk" / "ranks").glob("*.pt")}
    assert set(error["details"]) == files - here
    command = shlex.split(error["next_step"].rsplit("NODES: ", 1)[1].replace("NODES", "2"))
    assert command[:3] == ["torchrun", "--nnodes", "2"]
    command[command.index("--rdzv-endpoint") + 1] = f"127.0.0.1:{free_port()}"
    _done([["-m", "torch.distributed.run", *command[1:]]] * 2, machines)
    assert filecmp.cmp(tmp_path / "out.pt", base / "local" / "gathered.pt", shallow=False)
