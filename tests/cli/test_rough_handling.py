"""Signals, closed or full streams, odd names, targets and options: never a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fsspec.registry import _registry, known_implementations

from fsdpckpt.cli.errors import Interruption, _interruption_error, error_json
from tests.cli.conftest import Run

PROGRAM = [sys.executable, "-m", "fsdpckpt"]


def test_an_interrupt_with_json_is_a_document(run: Run, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise Interruption

    monkeypatch.setattr("fsdpckpt.api.inspect", interrupted)
    done = run("inspect", saved, "--json")
    assert (done.code, done.err) == (130, "error: interrupted (Ctrl-C or a signal)\n")
    assert json.loads(done.out)["error"]["exit_code"] == 130


@pytest.mark.parametrize(("number", "rank"), [(signal.SIGINT, None), (signal.SIGTERM, 0), (signal.SIGHUP, 1)])
def test_a_signal_while_the_program_still_loads_is_130(number: int, rank: int | None) -> None:
    code = (
        "import os, sys, fsdpckpt.cli as program\n"
        "class Slow:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'fsdpckpt.cli.app':\n"
        f"            os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, Slow())\n"
        "sys.argv = ['fsdpckpt', 'inspect', 'x', *sys.argv[1:]]\n"
        "program.main()\n"
    )
    environment = {**os.environ, **({} if rank is None else {"RANK": str(rank), "WORLD_SIZE": "2"})}
    for options in ([], ["--json"]):
        command = [sys.executable, "-c", code, *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=environment)
        assert (done.returncode, done.stderr) == (130, "error: interrupted\n")
        if not options or rank:
            assert done.stdout == ""
        else:
            document = error_json(_interruption_error(Interruption()))
            assert json.loads(done.stdout) == {"schema": "fsdpckpt/error/1", **document}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_of_a_conversion_leaves_what_resume_needs_and_nothing_else(
    tmp_path: Path, number: int
) -> None:
    torch.save({f"layer{n}.weight": torch.randn(1 << 20) for n in range(4)}, tmp_path / "a.pt")
    code = (
        "import os, sys\n"
        "from fsdpckpt.storage.local import WritableFile\n"
        "once = []\n"
        "write = WritableFile.write\n"
        "def stop(self, *arguments):\n"
        f"    once or (once.append(1), os.kill(os.getpid(), {int(number)}))\n"
        "    write(self, *arguments)\n"
        "WritableFile.write = stop\n"
        f"sys.argv = ['fsdpckpt', 'convert', {str(tmp_path / 'a.pt')!r}, {str(tmp_path / 'out' / 'dst')!r},"
        " '--to', 'sharded']\n"
        "from fsdpckpt.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.rstrip().endswith(f"{tmp_path / 'out' / 'dst'} --to sharded")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".dst.fsdpckpt-staging"]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("inspect SRC >&-", 0),
        ("inspect SRC --json >&-", 0),
        ("inspect SRC --json >/dev/full", 5),
        ("inspect SRC >/dev/full 2>&1", 5),
        ("inspect nowhere --json >/dev/full", 3),
        ("inspect nowhere 2>/dev/full", 3),
        ("inspect nowhere 2>&-", 3),
    ],
)
def test_streams_that_are_closed_or_full_give_no_traceback(saved: Path, line: str, code: int) -> None:
    command = f"{sys.executable} -m fsdpckpt {line.replace('SRC', str(saved))}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr


def test_a_pipe_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    command = [*PROGRAM, "inspect", str(tmp_path / "pipe.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 3
    assert "is a pipe or a device" in done.stderr


@pytest.mark.parametrize(("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs"), ("abfs", "adlfs")])
def test_a_store_whose_package_is_missing_is_3_and_names_it(
    scheme: str, package: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(_registry, scheme, raising=False)  # what it imported for an earlier test
    monkeypatch.setitem(sys.modules, package, None)
    done = run("inspect", f"{scheme}://bucket/step-1")
    assert done.code == 3
    assert f"\n  pip install {package}\n" in done.err


def test_a_store_that_fsspec_knows_by_its_package_alone_names_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(_registry, "abfss", raising=False)
    monkeypatch.delitem(known_implementations, "abfss", raising=False)
    monkeypatch.setitem(sys.modules, "adlfs", None)
    assert "\n  pip install adlfs\n" in run("inspect", "abfss://runs@account.dfs.core.windows.net/step-1").err


def test_the_file_of_one_rank_points_to_its_directory_and_a_damaged_one_is_not_called_missing(
    run: Run, saved: Path, tmp_path: Path
) -> None:
    ranks = tmp_path / "ranks"
    assert run("convert", saved, ranks, "--to", "sharded", "--container", "torch", "--world-size", "2").code == 0
    one = ranks / "model_world_size_2_rank_1.pt"
    done = run("inspect", one)
    assert done.code == 3
    assert f"give the directory with all of them: {ranks}" in done.err
    one.write_bytes(b"")
    done = run("inspect", ranks)
    assert done.code == 3
    assert f"{one.name} is not a torch.save file (0 bytes)" in done.err


def test_names_cannot_write_to_the_terminal(run: Run, tmp_path: Path) -> None:
    torch.save({"a\n\x1b[2Jb": torch.randn(2, 2)}, tmp_path / "odd.pt")
    assert run("inspect", tmp_path / "odd.pt", "--names-only").out == "a\\n\\x1b[2Jb\n"
    assert "\x1b" not in run("inspect", tmp_path / "odd.pt").out
    assert json.loads(run("inspect", tmp_path / "odd.pt", "--json").out)["tensors"][0]["key"] == "a\n\x1b[2Jb"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8:strict"])
def test_a_file_name_that_is_not_utf_8_can_be_shown(saved: Path, tmp_path: Path, encoding: str) -> None:
    name = os.fsencode(tmp_path) + b"/bad\xff.pt"
    saved.rename(os.fsdecode(name))
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    command = [*map(os.fsencode, PROGRAM), b"inspect", name]
    done = subprocess.run([*command, b"--json"], capture_output=True, env=environment, check=True)
    assert json.loads(done.stdout)["source"] == os.fsdecode(name)
    subprocess.run(command, capture_output=True, env=environment, check=True)


def test_a_directory_of_many_checkpoints_lists_them(run: Run, tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"run{number}x").mkdir()
        torch.save("no state dict", tmp_path / f"run{number}x" / "model.pt")
    done = run("verify", tmp_path)
    assert done.code == 4
    assert f"{tmp_path} contains 8 checkpoints" in done.err
    shown = run("inspect", tmp_path)
    assert (shown.code, shown.out.count("  no\n")) == (3, 8), "none of them can be read"


def test_a_directory_that_may_not_be_read_is_3_and_the_next_step_shows_its_owner(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unreadable").mkdir()

    def refused(path: str) -> object:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refused)  # the mode of a directory does not keep root out
    done = run("inspect", tmp_path / "unreadable")
    assert done.code == 3
    assert f"ls -ld {tmp_path / 'unreadable'}" in done.err
