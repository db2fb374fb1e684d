"""Which processes the other workers are, so that one that was stopped does not outlive the run it made fail.

A stopped process (SIGSTOP, a debugger) notices nothing, SIGTERM included, and its launcher would wait for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from typing import TypeAlias

__all__ = ["Peer", "end_stopped", "this_process"]

Peer: TypeAlias = "list[object]"
"""[machine, process id, when it started]; the machine is empty where processes cannot be told apart."""


def this_process() -> Peer:
    """This worker, as ``end_stopped`` on another one has to know it."""
    _, started = _status(os.getpid())
    return [_machine() if started else "", os.getpid(), started]


def end_stopped(peers: Sequence[Peer]) -> None:
    """Kill those of ``peers`` that run on this machine and are stopped."""
    here = _machine()
    for machine, process, started in peers:
        if machine != here or not isinstance(process, int) or process == os.getpid():
            continue
        if _status(process) == ("T", started):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)


def _machine() -> str:
    """The running system and its process ids' namespace; empty where the system does not say."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _status(process: int) -> tuple[str, str]:
    """State and start time of a process, as Linux counts them: no two processes of one id have the same."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]
