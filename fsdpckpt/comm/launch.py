"""Launches workers, and chooses the backend and the device of each.

Backend ``auto`` is NCCL if every rank has a GPU of its own, else Gloo on the CPU. All ranks vote on that, because nodes
may have different numbers of GPUs. With ``--backend nccl`` several ranks may share a GPU, where NCCL allows it.

``launch`` starts workers through PyTorch's elastic launch, and reports their failure as one error. Each worker writes
its position, and its failure if it can, to a directory of the launcher, so that the error names rank and step even for
a worker that was killed. No worker is restarted, and none outlives the launcher.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from fsdpckpt import flags
from fsdpckpt.comm.liveness import LAUNCHER
from fsdpckpt.comm.store_monitor import STATUS_DIRECTORY, Failure, Position
from fsdpckpt.errors import InterruptedRunError, UsageError, WorkerError
from fsdpckpt.process import RankInfo

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig

Backend: TypeAlias = Literal["nccl", "gloo"]
DeviceKind: TypeAlias = Literal["cuda", "cpu"]


@dataclass(frozen=True, slots=True)
class GpuVotes:
    """What all ranks said: whether each has a GPU of its ``own``, and whether each sees ``any``."""

    own: bool
    any: bool


def has_gpu() -> bool:
    """Whether this rank sees a GPU, and torch was built with NCCL."""
    return torch.cuda.is_available() and dist.is_nccl_available()


def gpu_identity(info: RankInfo) -> str:
    """An identity of this rank's GPU, the same for every rank that uses it.

    Its UUID, because a rank may see only one of its node's GPUs (``srun --gpus-per-task``) and call it number 0. Where
    torch does not know it, the node and the number.
    """
    number = device_number(info)
    uuid = getattr(torch.cuda.get_device_properties(number), "uuid", None)
    return str(uuid) if uuid is not None else f"{socket.gethostname()}/{number}"


def enlarge_buffers_for_shared_gpus() -> None:
    """Let NCCL move more at a time, unless the user has chosen. To be called before NCCL connects.

    Of the processes on one GPU only one runs at any moment, and what its buffers hold is what it moves in its turn.
    """
    for variable, nbytes in _SHARED_GPU_BUFFERS.items():
        os.environ.setdefault(variable, str(nbytes))


_SHARED_GPU_BUFFERS = {"NCCL_BUFFSIZE": 8 << 20, "NCCL_P2P_NET_CHUNKSIZE": 1 << 20}  # 4 MiB and 128 KiB by default


def device_number(info: RankInfo) -> int:
    """The number of this rank's GPU among those that it sees: its local rank, modulo their number."""
    return info.local_rank % max(torch.cuda.device_count(), 1)


def local_workers(nproc_per_node: str) -> int:
    """``--nproc-per-node`` as a number; ``gpu``: this node's GPUs, ``auto``: the same, or 1 if there are none."""
    if nproc_per_node in {"gpu", "auto"}:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0 and nproc_per_node == "gpu":
            raise UsageError(f"{flags.nproc_per_node} gpu: torch sees no GPU here", next_step="give a number")
        return max(count, 1)
    return int(nproc_per_node)


def choose_backend(backend: str, device: str, *, votes: Callable[[], GpuVotes]) -> tuple[Backend, DeviceKind]:
    """The backend and device kind for the options ``--backend`` and ``--device``; either may be ``auto``.

    ``votes`` is called only if the answer matters: all workers need equal options.
    """
    if backend not in {"auto", "nccl", "gloo"} or device not in {"auto", "cpu", "cuda"}:
        raise UsageError(f"no such backend or device: {backend}, {device}", expected="auto|nccl|gloo, auto|cpu|cuda")
    if backend == "nccl" and device == "cpu":
        raise UsageError(
            "NCCL moves data between GPUs only", next_step=f"{flags.backend('gloo')}, or {flags.device('cuda')}"
        )
    if backend == "gloo":
        # Gloo sends host memory: with tensors on a GPU everything would be copied twice more.
        return "gloo", "cpu"
    if device == "cpu":
        return "gloo", "cpu"
    voted = votes()
    if backend == "nccl" or device == "cuda":
        if not voted.any:
            raise UsageError("not every worker sees a GPU, which NCCL needs", next_step=f"{flags.backend('gloo')}")
        return "nccl", "cuda"  # workers may share a GPU: whether they can, NCCL itself says
    return ("nccl", "cuda") if voted.own else ("gloo", "cpu")


def nccl_refused(error: RuntimeError) -> UsageError | None:
    """The error for workers that share a GPU where NCCL does not allow it; None if ``error`` is about anything else."""
    said = next((line.strip() for line in str(error).splitlines() if "Duplicate GPU" in line), None)
    if said is None:
        return None
    return UsageError(
        "NCCL refused: several workers share one GPU",
        found=said,
        why="NCCL before 2.30 wants one GPU per worker, and newer versions want NCCL_MULTI_RANK_GPU_ENABLE=1 set",
        next_step=f"start one worker per GPU, or add {flags.backend('gloo')}, which exchanges between the CPUs",
    )


def rank_device(kind: DeviceKind, info: RankInfo | None) -> torch.device:
    """This worker's device."""
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", 0 if info is None else device_number(info))


KILL_AFTER = 5  # seconds between SIGTERM and SIGKILL for the remaining workers when one has failed


def launch(
    arguments: Sequence[str],
    *,
    workers: int,
    module: str,
    nodes: int = 1,
    node_rank: int | None = None,
    endpoint: str | None = None,
) -> None:
    """Run ``python -m module *arguments`` as ``workers`` workers on this node; return when all have ended.

    With one of ``nodes``, the workers meet at a free local port. With several, they meet at ``endpoint``
    (``host:port``), the same on every node; that host listens on it. Raises WorkerError with rank, step and cause when
    a worker fails, InterruptedRunError when the launcher gets a signal; all workers have ended by then.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException  # slow to import; workers never need it
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    with tempfile.TemporaryDirectory(prefix="fsdpckpt-") as status:
        variables = {STATUS_DIRECTORY: status, LAUNCHER: str(os.getpid()), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        if workers > 1 and "OMP_NUM_THREADS" not in os.environ:
            variables["OMP_NUM_THREADS"] = "1"  # as torchrun does: N workers with N threads each slow each other down
        config = _config(workers, nodes, node_rank, endpoint, status)
        with _environment(variables), _silence_launcher():
            try:
                elastic_launch(config, sys.executable)("-m", module, *arguments)
            except ChildFailedError as failed:
                raise _explain(failed, status) from failed
            except SignalException as stopped:
                name = signal.Signals(stopped.sigval).name
                raise InterruptedRunError(
                    f"interrupted by {name}", why="all workers were ended", next_step="run it again", retryable=True
                ) from stopped


def _config(workers: int, nodes: int, node_rank: int | None, endpoint: str | None, directory: str) -> LaunchConfig:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    if nodes > 1 and endpoint is None:
        raise UsageError(
            "several nodes need a place to meet",
            next_step=f"{flags.rdzv_endpoint('HOST:PORT')}, the same on every node",
        )
    settings: dict[str, object] = {
        "min_nodes": nodes,
        "max_nodes": nodes,
        "nproc_per_node": workers,
        "max_restarts": 0,
        "monitor_interval": 0.1,
        "run_id": "fsdpckpt" if nodes > 1 else uuid.uuid4().hex,
        "logs_specs": DefaultLogsSpecs(log_dir=directory),  # by default it leaves a directory behind in /tmp
    }
    if endpoint is None:
        settings |= {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0", "local_addr": "127.0.0.1"}
    elif node_rank is None:
        settings |= {"rdzv_backend": "c10d", "rdzv_endpoint": endpoint}
    else:
        settings |= {"rdzv_backend": "static", "rdzv_endpoint": endpoint, "rdzv_configs": {"rank": node_rank}}
    if "shutdown_timeout" in {field.name for field in fields(LaunchConfig)}:  # torch 2.9+; before, 30 s
        settings["shutdown_timeout"] = KILL_AFTER
    return LaunchConfig(**settings)  # type: ignore[arg-type]  # as collected above


def _explain(failed: ChildFailedError, status: str) -> WorkerError:
    """The error for the first worker that failed: as the workers reported it, else from its exit code or signal."""
    for name in sorted(os.listdir(status)):
        if name.startswith("failure-"):
            return Failure(*_read_status(status, name)).error()
    rank, failure = failed.get_first_failure()
    if failure.exitcode < 0:
        cause = f"killed by {signal.Signals(-failure.exitcode).name}"
        cause += " (out of memory, or by hand)" if failure.exitcode == -signal.SIGKILL else ""
    else:
        cause = f"exited with code {failure.exitcode}; its output is above"
    name = f"position-{rank}.json"
    has_begun = os.path.exists(os.path.join(status, name))
    step = Position(*_read_status(status, name)).step if has_begun else "start"
    return Failure(rank, step, cause, max(failure.exitcode, 0) or WorkerError.exit_code).error()


def _read_status(directory: str, name: str) -> list[Any]:
    with open(os.path.join(directory, name), encoding="utf-8") as file:
        fields: list[Any] = json.load(file)
    return fields


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment ``variables`` for the processes that are started in the body."""
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
def _silence_launcher() -> Iterator[None]:
    """Silence the elastic launcher's own report of a failure: ours is shorter and names the step."""
    logger = logging.getLogger("torch.distributed.elastic")
    names = [name for name in logging.root.manager.loggerDict if "elastic" in name]
    children = [logger, *map(logging.getLogger, names)]
    before = [child.level for child in children]
    for child in children:
        child.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for child, level in zip(children, before, strict=True):
            child.setLevel(level)
