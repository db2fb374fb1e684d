"""Start programs and groups of ranks so that they always end: a hard time limit, all their processes killed."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

__all__ = ["ROOT", "ProcessFailed", "python", "run", "torchrun"]

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


@functools.cache
def _template() -> subprocess.Popen[str]:
    """This test process's own ``tests.oracle.template``, which ends with it."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.oracle.template"]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=variables,
        cwd=ROOT,
        start_new_session=True,
    )


def torchrun(module: str, *arguments: str, world_size: int, limit: float) -> str:
    """Run ``python -m module`` as torchrun would on ``world_size`` ranks of this machine (0: as one plain process).

    Returns stdout and stderr of all together. Raises ProcessFailed when a rank fails or all take longer than ``limit``
    seconds. The ranks are forked from a process that has imported torch and ``module``; nothing outlives this call.
    """
    template = _template()
    assert template.stdin is not None and template.stdout is not None
    with tempfile.NamedTemporaryFile("r", prefix="ranks-", errors="replace") as said:
        job = {"module": module, "arguments": arguments, "world_size": world_size, "limit": limit}
        job |= {"environment": {**os.environ, "OMP_NUM_THREADS": "1"}, "output": said.name}
        template.stdin.write(json.dumps(job) + "\n")
        template.stdin.flush()
        answer = template.stdout.readline()
        output = said.read()
    name = f"{module} {' '.join(arguments)} on {world_size} ranks"
    if not answer:
        raise ProcessFailed(f"{name}\nthe process that forks them ended:\n{output[-6000:]}")
    ended = json.loads(answer)
    if ended["late"]:
        raise ProcessFailed(f"{name}\nran past {limit} s:\n{output[-6000:]}")
    if ended["code"]:
        raise ProcessFailed(f"{name}\nended with {ended['code']}:\n{output[-6000:]}")
    return output


def python(module: str, *arguments: str, limit: float) -> str:
    """Run ``python -m module``, at most ``limit`` seconds, forked from a process that has imported torch."""
    return torchrun(module, *arguments, world_size=0, limit=limit)
