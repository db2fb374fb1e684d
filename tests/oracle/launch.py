"""Start torchrun (or any program) so that it always ends: a hard time limit, and its whole process group killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

__all__ = ["ROOT", "ProcessFailed", "run", "torchrun"]

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class ProcessFailed(AssertionError):
    """A subprocess ended with an error or ran past its limit; the text holds the end of its output."""


def _end(process: subprocess.Popen[str]) -> None:
    """Stop the process's whole session: politely first, so that torchrun can reap its workers, then for good."""
    for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue


def run(command: Sequence[str], *, limit: float, environment: Mapping[str, str] | None = None) -> str:
    """Run ``command``, at most ``limit`` seconds, in a session of its own; return stdout and stderr together.

    Raises ProcessFailed when it fails or runs too long. Nothing it started outlives this call.
    """
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": ROOT,
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **(environment or {}),
    }
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=variables,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired as expired:
        _end(process)
        output, _ = process.communicate()
        raise ProcessFailed(f"{' '.join(command)}\nran past {limit} s:\n{output[-6000:]}") from expired
    finally:
        _end(process)
    if process.returncode:
        raise ProcessFailed(f"{' '.join(command)}\nended with {process.returncode}:\n{output[-6000:]}")
    return output


def torchrun(module: str, *arguments: str, world_size: int, limit: float) -> str:
    """Run ``python -m module`` on ``world_size`` ranks of this machine; see ``run``."""
    # A free port each time (standalone), so that two workers of one test run never meet.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1"]
    command += [f"--nproc-per-node={world_size}", "--max-restarts=0", "-m", module, *arguments]
    return run(command, limit=limit)
