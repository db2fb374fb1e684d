"""Processes that run side by side, on machines of their own as far as disks go: the workers of a conversion."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from tests.oracle.forked import ROOT, Program
from tests.oracle.ranks import free_port

__all__ = ["TROUBLE", "all_ended", "on_machine", "place", "started", "trouble"]

TROUBLE = os.path.join(ROOT, "tests", "e2e", "distributed", "trouble")


def trouble(rank: int, place: str, kind: str, when: object, call: int = 1) -> dict[str, str]:
    """Variables with which worker ``rank`` gets into trouble in that call of ``place``; the file ``when`` says when."""
    path = os.pathsep.join([TROUBLE, ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "TROUBLE": f"{rank},{place},{kind},{when},{call}"}


def on_machine(disk: Mapping[str, str], *arguments: str, variables: Mapping[str, str], **streams: Any) -> Program:
    """``python ARGUMENTS``, which sees the directory ``disk[path]`` at each ``path``."""
    command = ["-m", "tests.e2e.distributed.node", json.dumps(dict(disk)), *arguments] if disk else list(arguments)
    variables = {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", **variables}
    return Program(command, kind="torch", env=variables, **{"cwd": ROOT, **streams})


def started(machines: Sequence[Mapping[str, str]], *arguments: str) -> list[Program]:
    """One worker on each of ``machines``, as a torchrun there would start it."""
    port = str(free_port())
    return [
        on_machine(disk, *arguments, variables=place(rank, len(machines), port)) for rank, disk in enumerate(machines)
    ]


def place(rank: int, workers: int, port: str) -> dict[str, str]:
    """The variables of the only worker on machine ``rank``."""
    return {
        **{"RANK": str(rank), "WORLD_SIZE": str(workers), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        **{"GROUP_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
    }


def all_ended(programs: Sequence[Program], *, seconds: float) -> list[subprocess.CompletedProcess[str]]:
    """How each ended, and what it said. None is left; raises TimeoutExpired after ``seconds`` of one."""
    try:
        said = [process.communicate(timeout=seconds) for process in programs]
    finally:
        for process in programs:
            process.kill()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *text)
        for process, text in zip(programs, said, strict=True)
    ]
