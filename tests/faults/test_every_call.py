"""A sample of ``scripts/fault_test`` and ``scripts/kill_test --inside``, which try every call and many moments."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.conftest import DCP
from tests.faults.runs import convert, faulty, hidden, same
from tests.oracle.forked import run
from tests.oracle.session import Oracle

Whole = Callable[..., Path]
SCRIPTS = Path(__file__).parents[2] / "scripts"
JOBS = ["full torch", "dcp", "safetensors", "dcp over an older one, two renames"]
WRITE = "import sys; sys.path.insert(0, sys.argv[1]); from fault_calls import write_source; write_source(sys.argv[2])"


def _write_source(directory: Path) -> None:
    done = run(["-c", WRITE, str(SCRIPTS), str(directory)], kind="torch", timeout=60)
    assert done.returncode == 0, done.stderr


def test_any_call_that_fails_leaves_nothing_or_everything_and_the_right_exit_code(
    tmp_path: Path, oracle: Oracle
) -> None:
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        pytest.skip("no C compiler: faults in system calls are not tested")
    source = oracle.once("failing-calls-source", _write_source)
    chosen = [word for name in JOBS for word in ("--job", name)]
    words = [sys.executable, str(SCRIPTS / "fault_calls.py"), "--sample", "20", "--source", str(source), *chosen]
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else str(tmp_path)  # hundreds of syncs wait for no disk there
    done = subprocess.run([*words, "--directory", memory], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 failing calls, no promise broken" in done.stdout


def test_kills_inside_copy_read_back_verify_and_publish_are_resumed(tmp_path: Path) -> None:
    words = [str(SCRIPTS / "kill_moments.py"), "--inside", "1", "--size", "8000000", "--directory", str(tmp_path)]
    done = run([*words, "--target", "dcp"], kind="torch", timeout=280, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"\| dcp \| (copy|read-back|verify|publish) \| 1 \| 1 \| \d \| (\d) \| (\d) \| 0 \|", done.stdout)
    assert [phase for phase, _, _ in rows] == ["copy", "read-back", "verify", "publish"], done.stdout
    assert all((complete, resumed) in (("1", "0"), ("0", "1")) for _, complete, resumed in rows)
    assert ("copy", "0", "1") in rows


@pytest.mark.parametrize(
    ("calls", "path", "number", "warning"),
    [
        ("rmdir", "target.fsdpckpt-staging", errno.EIO, "could not be removed"),
        ("unlink", "target.fsdpckpt-lock", errno.EACCES, "could not be removed"),
        ("fsyncdir", "", errno.EINVAL, "does not make file names durable"),
        ("fsyncdir", "", errno.EOPNOTSUPP, "does not make file names durable"),
        ("flock", "target.fsdpckpt-lock", errno.ENOSYS, "has no locks"),
        ("flock", "target.fsdpckpt-lock", errno.ENOLCK, "has no locks"),
        ("flock", "target.fsdpckpt-lock", errno.EOPNOTSUPP, "has no locks"),
    ],
)
def test_what_dst_does_not_need_is_a_warning_and_the_run_succeeds(
    source: Path, tmp_path: Path, whole: Whole, shim: str, calls: str, path: str, number: int, warning: str
) -> None:
    target = tmp_path / "target"
    whole(*DCP)
    faults = faulty(shim, calls, path or tmp_path, 1, number, FAULT_EVERY="1")
    done = convert(source, target, *DCP, **faults)
    assert done.code == 0, done.err
    assert "warning:" in done.err and warning in " ".join(done.err.split())
    assert same(whole(*DCP), target)
    again = convert(source, target, *DCP, "--resume")
    assert again.code == 0 and not hidden(target).exists() and not hidden(target, "lock").exists()
