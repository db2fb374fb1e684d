"""Which backend and which device: decided here and nowhere else.

``auto``: NCCL when every worker has a GPU of its own, else Gloo on the CPU. Whether every worker has one is a vote of
all workers, because one node may have less than another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist

from fsdpckpt.comm.environment import Place
from fsdpckpt.errors import UsageError

__all__ = ["Backend", "DeviceKind", "choose", "device_of", "has_own_gpu", "workers_here"]

Backend: TypeAlias = Literal["nccl", "gloo"]
DeviceKind: TypeAlias = Literal["cuda", "cpu"]


def has_own_gpu(local_world_size: int) -> bool:
    """True when this node has a GPU for each of its workers, and torch was built with NCCL."""
    return torch.cuda.is_available() and dist.is_nccl_available() and torch.cuda.device_count() >= local_world_size


def workers_here(nproc_per_node: str) -> int:
    """``--nproc-per-node`` as a number: itself, ``gpu`` (this node's GPUs), ``auto`` (GPUs, one where none is)."""
    if nproc_per_node in {"gpu", "auto"}:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0 and nproc_per_node == "gpu":
            raise UsageError("--nproc-per-node gpu: torch sees no GPU here", next_step="give a number")
        return max(count, 1)
    if not nproc_per_node.isdigit() or int(nproc_per_node) == 0:
        raise UsageError("--nproc-per-node takes a number, gpu or auto", found=nproc_per_node)
    return int(nproc_per_node)


def choose(backend: str, device: str, *, all_have_gpu: Callable[[], bool]) -> tuple[Backend, DeviceKind]:
    """The backend and kind of device for what the user asked: names, or ``auto`` for either.

    ``all_have_gpu`` is asked only where the answer matters; every worker has to be asked the same.
    """
    if backend not in {"auto", "nccl", "gloo"} or device not in {"auto", "cpu", "cuda"}:
        raise UsageError(f"no such backend or device: {backend}, {device}", expected="auto|nccl|gloo, auto|cpu|cuda")
    if backend == "nccl" and device == "cpu":
        raise UsageError("NCCL moves data between GPUs only", next_step="--backend gloo, or --device cuda")
    if backend == "gloo":
        # Gloo moves host memory; a GPU would only be a detour of two copies.
        return "gloo", "cpu"
    if device == "cpu":
        return "gloo", "cpu"
    if all_have_gpu():
        return "nccl", "cuda"
    if backend == "nccl" or device == "cuda":
        raise UsageError(
            "not every worker has a GPU of its own, which NCCL needs",
            next_step="--backend gloo, or fewer workers a node",
        )
    return "gloo", "cpu"


def device_of(kind: DeviceKind, place: Place | None) -> torch.device:
    """This worker's device."""
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", 0 if place is None else place.local_rank)
