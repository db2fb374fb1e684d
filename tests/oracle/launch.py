"""Start programs and groups of ranks so that they always end: a hard time limit, all their processes killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile

from tests.oracle.forked import ROOT, Program

__all__ = ["ROOT", "ProcessFailed", "python", "torchrun"]


class ProcessFailed(AssertionError):
    """A subprocess ended with an error or ran past its limit; the text holds the end of its output."""


def torchrun(module: str, *arguments: str, world_size: int, limit: float) -> str:
    """Run ``python -m module`` (or a file) as torchrun would on ``world_size`` ranks here (0: as one plain process).

    Returns stdout and stderr of all together. Raises ProcessFailed when a rank fails or all take longer than ``limit``
    seconds. The ranks are forked from a process that has imported torch; nothing outlives this call.
    """
    ranks = ["-m", "tests.oracle.ranks", str(world_size)] if world_size else []
    program = [module] if module.endswith(".py") else ["-m", module]
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = Program(
            [*ranks, *program, *arguments],
            kind="torch",
            env={"OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT},
            cwd=ROOT,
            stdout=said.fileno(),
            stderr=said.fileno(),
            start_new_session=True,
        )
        late = False
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # nothing outlives its job
            process.wait()
        said.seek(0)
        output = said.read()
    name = f"{module} {' '.join(arguments)} on {world_size} ranks"
    if late:
        raise ProcessFailed(f"{name}\nran past {limit} s:\n{output[-6000:]}")
    if process.returncode:
        raise ProcessFailed(f"{name}\nended with {process.returncode}:\n{output[-6000:]}")
    return output


def python(module: str, *arguments: str, limit: float) -> str:
    """Run ``python -m module``, at most ``limit`` seconds, forked from a process that has imported torch."""
    return torchrun(module, *arguments, world_size=0, limit=limit)
