"""Pipes whose reader is gone: the work goes on, its exit code is true, and no error of a store is hidden."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.conftest import FULL
from tests.faults.runs import CODE, SMALL, same
from tests.oracle.forked import run

Whole = Callable[..., Path]
# A line of progress at every write, as a long run has them.
TALKATIVE = "from fsdpckpt.cli import output; output.SECONDS_BETWEEN_LINES = 0"


def unread(*words: str, stream: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``fsdpckpt`` whose ``stream`` goes into a pipe that nobody reads any more."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        return run(["-c", CODE, *words], kind="plain", timeout=60, env=environment, **{stream: writing})
    finally:
        os.close(writing)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_conversion_goes_on_when_nobody_reads_what_it_says(
    source: Path, tmp_path: Path, whole: Whole, stream: str
) -> None:
    target = tmp_path / "target"
    done = unread("convert", str(source), str(target), *FULL, *SMALL, stream=stream, HOOK_AT="1", HOOK=TALKATIVE)
    assert done.returncode == 0, done.stderr
    assert same(whole(*FULL), target)


def test_problems_and_differences_are_in_the_exit_code_also_when_nobody_reads_them(
    source: Path, tmp_path: Path, whole: Whole
) -> None:
    target = whole(*FULL)
    data = bytearray(target.read_bytes())
    data[len(data) // 2] ^= 1
    target.write_bytes(data)
    assert unread("verify", str(target), stream="stdout").returncode == 1
    assert unread("diff", str(source), str(target), stream="stdout").returncode == 1
    assert unread("inspect", str(source), stream="stdout").returncode == 0


def test_a_pipe_that_breaks_elsewhere_is_an_error(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    broken = "raise BrokenPipeError(32, 'Broken pipe')"  # as of a connection
    done = unread("convert", str(source), str(target), *FULL, *SMALL, stream="stdout", HOOK_AT="8", HOOK=broken)
    assert done.returncode not in (0, 1)
    assert "error: " in done.stderr
    assert not target.exists()
