"""Workers forked from one process that has imported torch already: a group of them starts in moments."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable

from tests.oracle.process import quiet_worker

__all__ = ["forked_workers", "on_gloo"]


def forked_workers(
    world_size: int, body: Callable[[int], int], *, limit: float, unattended: Iterable[int] = ()
) -> list[int | None]:
    """``body(rank)`` in ``world_size`` processes with torchrun's variables set; their exit codes (negative: a signal).

    Nothing outlives this call: after ``limit`` seconds, or once all but the ``unattended`` have ended, the rest is
    killed, and has no exit code.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sys.stdout.flush()
    sys.stderr.flush()
    children = [_start(rank, world_size, port, body, limit) for rank in range(world_size)]
    codes: list[int | None] = [None] * world_size
    deadline = time.monotonic() + limit
    try:
        while time.monotonic() < deadline and any(
            code is None and rank not in unattended for rank, code in enumerate(codes)
        ):
            time.sleep(0.02)
            for rank, pid in enumerate(children):
                if codes[rank] is None:
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    codes[rank] = os.waitstatus_to_exitcode(status) if ended else None
    finally:
        for rank, pid in enumerate(children):
            if codes[rank] is None:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    return codes


def on_gloo(world_size: int, body: Callable[[int], object], *, limit: float) -> None:
    """``body(rank)`` on each rank of a Gloo group; fails when one of them does."""
    import torch.distributed as dist

    def with_group(rank: int) -> int:
        dist.init_process_group("gloo")
        try:
            body(rank)
        finally:
            dist.destroy_process_group()
        return 0

    assert forked_workers(world_size, with_group, limit=limit) == [0] * world_size


def _start(rank: int, world_size: int, port: int, body: Callable[[int], int], limit: float) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    gc.freeze()  # what the parent has is never looked at again, and its pages stay shared
    gc.get_freeze_count = lambda: 1  # which walks them all for 0.1 s; programs ask whether there are any
    try:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
        os.environ |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        quiet_worker(limit=limit)
        code = body(rank)
    except BaseException:  # noqa: BLE001 - a forked process must never return into its parent's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
