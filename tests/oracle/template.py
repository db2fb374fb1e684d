"""A process that has imported torch and forks every program it is asked for: a worker starts in moments, not seconds.

``python -m tests.oracle.template`` reads one job a line from stdin, ``{"module", "arguments", "world_size", "limit",
"environment", "output"}``, and answers each on stdout with ``{"code", "late"}``.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
import warnings
from typing import Any

GRACE = 10.0  # seconds that the other workers of a group have once one has failed, to say what they saw
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Be killed when the parent process ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port(attempts: int = 200) -> int:
    """A port below those that the system deals out, so that no other connection takes it before the workers do."""
    for attempt in range(attempts):
        port = 10_000 + (os.getpid() * 131 + time.monotonic_ns() // 1000 + attempt * 17) % 20_000
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port")


def play(module: str, arguments: list[str]) -> int:
    """``python -m module arguments`` in this process; its exit code."""
    sys.argv = [module, *arguments]
    warnings.filterwarnings("ignore", "'tests.* found in sys.modules", RuntimeWarning)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def forked(body: Any, *arguments: Any) -> int:
    """The process id of a child that ends with the exit code of ``body(*arguments)``."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        end_with_parent()
        code = body(*arguments)
    except BaseException:  # noqa: BLE001 - a forked process must never return into its parent's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def worker(job: dict[str, Any], rank: int | None, port: int) -> int:
    if rank is not None:
        world_size = str(job["world_size"])
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "GROUP_RANK": "0"}
        os.environ |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        os.environ |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
    return play(job["module"], job["arguments"])


def lead(job: dict[str, Any]) -> int:
    """Start the job's workers and wait for them; as with torchrun, one that fails ends the others."""
    os.setsid()
    null, output = os.open(os.devnull, os.O_RDONLY), os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for source, number in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, number)
    os.environ.clear()
    os.environ.update(job["environment"])
    importlib.import_module(job["module"])  # so that what it imports is imported once, not by every rank
    ranks = range(job["world_size"]) if job["world_size"] else [None]
    port = free_port()
    running = {forked(worker, job, rank, port): rank for rank in ranks}
    failed, deadline = 0, 0.0
    while running:
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            if failed and time.monotonic() > deadline:
                for left in running:
                    os.kill(left, signal.SIGKILL)
            time.sleep(0.01)
            continue
        rank = running.pop(child)
        code = os.waitstatus_to_exitcode(status)
        if code:
            print(f"rank {rank} of {job['module']} ended with {code}", file=sys.stderr)
            if not failed:
                failed, deadline = code, time.monotonic() + GRACE
    return 0 if not failed else 1


def answer(job: dict[str, Any]) -> dict[str, Any]:
    leader = forked(lead, job)
    deadline = time.monotonic() + job["limit"]
    late = False
    while True:
        ended, status = os.waitpid(leader, os.WNOHANG)
        if ended:
            break
        if not late and time.monotonic() > deadline:
            late = True
            os.killpg(leader, signal.SIGKILL)
        time.sleep(0.005)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)  # nothing outlives its job
    return {"code": os.waitstatus_to_exitcode(status), "late": late}


def main() -> None:
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in (
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
    ):
        importlib.import_module(name)
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
