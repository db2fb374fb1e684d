"""Start workers on this node through PyTorch's elastic launch, and turn however they end into one error.

Each worker leaves its position and a failure it knows of in a directory of the launcher's, so that the error names rank
and step even of a worker that was killed. No worker is restarted, and none outlives the launcher.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fsdpckpt.comm.orphans import LAUNCHER
from fsdpckpt.comm.records import Failure, Position
from fsdpckpt.comm.store_monitor import STATUS_DIRECTORY
from fsdpckpt.errors import InterruptedRunError, UsageError, WorkerError

__all__ = ["launch"]

PATIENCE = 5  # seconds between SIGTERM and SIGKILL for the workers that are left when one failed


def launch(
    arguments: Sequence[str],
    *,
    workers: int,
    module: str = "fsdpckpt",
    nodes: int = 1,
    node_rank: int | None = None,
    endpoint: str | None = None,
) -> None:
    """Run ``python -m module *arguments`` as ``workers`` workers on this node, one of ``nodes``; return when all ended.

    One node meets at a free port of its own. Several meet at ``endpoint`` (``host:port``), which all name alike; the
    host listens on it. Raises WorkerError with rank, step and cause when a worker fails, InterruptedRunError when the
    launcher is told to stop; no worker is left then.
    """
    with tempfile.TemporaryDirectory(prefix="fsdpckpt-") as status:
        variables = {STATUS_DIRECTORY: status, LAUNCHER: str(os.getpid()), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        if workers > 1 and "OMP_NUM_THREADS" not in os.environ:
            variables["OMP_NUM_THREADS"] = "1"  # as torchrun: N workers with N threads each stand in each other's way
        config = _config(workers, nodes, node_rank, endpoint, status)
        with _environment(variables), _quiet():
            try:
                elastic_launch(config, sys.executable)("-m", module, *arguments)
            except ChildFailedError as failed:
                raise _explained(failed, status) from failed
            except SignalException as stopped:
                name = signal.Signals(stopped.sigval).name
                raise InterruptedRunError(
                    f"by {name}", why="all workers were ended", next_step="run it again"
                ) from stopped


def _config(workers: int, nodes: int, node_rank: int | None, endpoint: str | None, directory: str) -> LaunchConfig:
    if nodes > 1 and endpoint is None:
        raise UsageError(
            "several nodes need a place to meet", next_step="--rdzv-endpoint HOST:PORT, alike on every node"
        )
    settings: dict[str, object] = {
        "min_nodes": nodes,
        "max_nodes": nodes,
        "nproc_per_node": workers,
        "max_restarts": 0,
        "monitor_interval": 0.1,
        "run_id": "fsdpckpt" if nodes > 1 else uuid.uuid4().hex,
        "logs_specs": DefaultLogsSpecs(log_dir=directory),  # else it makes a directory for them that it leaves behind
    }
    if endpoint is None:
        settings |= {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0", "local_addr": "127.0.0.1"}
    elif node_rank is None:
        settings |= {"rdzv_backend": "c10d", "rdzv_endpoint": endpoint}
    else:
        settings |= {"rdzv_backend": "static", "rdzv_endpoint": endpoint, "rdzv_configs": {"rank": node_rank}}
    if "shutdown_timeout" in {field.name for field in fields(LaunchConfig)}:  # torch 2.9+; before, 30 s
        settings["shutdown_timeout"] = PATIENCE
    return LaunchConfig(**settings)  # type: ignore[arg-type]  # as collected above


def _explained(failed: ChildFailedError, status: str) -> WorkerError:
    """The error for the first worker that ended badly: what the workers said, else what its end says."""
    for name in sorted(os.listdir(status)):
        if name.startswith("failure-"):
            return Failure.parse(_text(status, name)).error()
    rank, failure = failed.get_first_failure()
    if failure.exitcode < 0:
        cause = f"killed by {signal.Signals(-failure.exitcode).name}"
        cause += " (out of memory, or by hand)" if failure.exitcode == -signal.SIGKILL else ""
    else:
        cause = f"ended with exit code {failure.exitcode}; what it said is above"
    name = f"position-{rank}.json"
    step = Position.parse(_text(status, name)).step if os.path.exists(os.path.join(status, name)) else "start"
    return Failure(rank, step, cause, max(failure.exitcode, 0) or WorkerError.exit_code).error()


def _text(directory: str, name: str) -> str:
    with open(os.path.join(directory, name), encoding="utf-8") as file:
        return file.read()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """``variables`` set for what is started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the launcher's own account of a failure: ours is shorter and names the step."""
    logger = logging.getLogger("torch.distributed.elastic")
    children = [logger, *(logging.getLogger(name) for name in logging.root.manager.loggerDict if "elastic" in name)]
    before = [each.level for each in children]
    for each in children:
        each.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for each, level in zip(children, before, strict=True):
            each.setLevel(level)
