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


# Kills itself at an import, by name or by number; before the program runs, Python itself takes some 20 ms.
KILLED = """
import os, sys
class Finder:
    left = {at!r}
    def find_spec(self, name, *_):
        if isinstance(self.left, int):
            self.left -= 1
        if self.left in (0, name):
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Finder())
sys.argv = ['fsdpckpt', 'inspect', 'x', *sys.argv[1:]]
from fsdpckpt.cli import main
main()
"""
LATE = "fsdpckpt.cli.app"


@pytest.mark.parametrize(
    ("number", "at", "rank"),
    [
        (signal.SIGINT, LATE, None),
        (signal.SIGTERM, LATE, 0),
        (signal.SIGHUP, LATE, 1),
        *((signal.SIGINT, imports, None) for imports in (6, 20, 60, 120, 200)),
    ],
)
def test_a_signal_while_the_program_still_loads_is_130(number: int, at: str | int, rank: int | None) -> None:
    environment = {**os.environ, **({} if rank is None else {"RANK": str(rank), "WORLD_SIZE": "2"})}
    for options in ([], ["--json"]) if at == LATE else ([],):
        command = [sys.executable, "-c", KILLED.format(number=int(number), at=at), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
        assert (done.returncode, done.stderr) == (130, "error: interrupted\n")
        if not options or rank:
            assert done.stdout == ""
        else:
            document = error_json(_interruption_error(Interruption()))
            assert json.loads(done.stdout) == {"schema": "fsdpckpt/error/1", **document}


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


@pytest.mark.parametrize(
    ("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs"), ("abfs", "adlfs"), ("abfss", "adlfs")]
)
def test_a_store_whose_package_is_missing_is_3_and_names_it(
    scheme: str, package: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(_registry, scheme, raising=False)  # what it imported for an earlier test
    if scheme == "abfss":  # fsspec may know it by its package alone
        monkeypatch.delitem(known_implementations, scheme, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    done = run("inspect", f"{scheme}://runs@account.dfs.core.windows.net/step-1")
    assert done.code == 3
    assert f"\n  pip install {package}\n" in done.err


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
