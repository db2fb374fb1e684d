"""``python -m tests.oracle.ranks N PROGRAM``: ``python PROGRAM`` as torchrun would run it on N ranks of this machine.

PROGRAM is ``-m MODULE ARGUMENTS`` or ``FILE ARGUMENTS``.
The ranks are forked, which takes moments where torch is imported already. As with torchrun, one that fails ends the
others.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import time

from tests.oracle.fork_server import end_with_parent, forked, play

GRACE = 10.0  # seconds that the other workers of a group have once one has failed, to say what they saw


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


def rank_of(program: list[str], world_size: int, rank: int, port: int) -> int:
    end_with_parent()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "GROUP_RANK": "0"}
    os.environ |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
    return play(program)


def main(count: str, *program: str) -> int:
    """0, or 1 when a rank failed."""
    if program[0] == "-m":
        importlib.import_module(program[1])  # so that what it imports is imported once, not by every rank
    port, world_size = free_port(), int(count)
    running = {forked(rank_of, list(program), world_size, rank, port): rank for rank in range(world_size)}
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
            print(f"rank {rank} of {' '.join(program)} ended with {code}", file=sys.stderr)
            if not failed:
                failed, deadline = code, time.monotonic() + GRACE
    return 0 if not failed else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
