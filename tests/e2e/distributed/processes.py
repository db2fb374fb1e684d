"""Processes that run side by side: the workers of a conversion, each started by hand."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from tests.oracle.forked import Program

__all__ = ["all_ended"]


def all_ended(started: Sequence[Program], *, seconds: float) -> list[subprocess.CompletedProcess[str]]:
    """How each of ``started`` ended, and what it said. None is left; raises TimeoutExpired after ``seconds`` of one."""
    try:
        said = [process.communicate(timeout=seconds) for process in started]
    finally:
        for process in started:
            process.kill()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *text)
        for process, text in zip(started, said, strict=True)
    ]
