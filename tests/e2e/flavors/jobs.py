"""The part that all workers share: save every form, or load every job's checkpoint and say what came of it."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tests.oracle.jobs import of_all_ranks, play_jobs
from tests.oracle.process import quiet_worker

__all__ = ["drawn", "seed_by_rank", "step", "work"]


def work(save: Callable[[str], None], losses: Callable[[str, str], list[str]], *, group: bool = True) -> None:
    """``... save DIRECTORY`` or ``... load DIRECTORY``: the whole of a worker. ``group``: in a Gloo group.

    Loading writes, for each {"id", "form", "path"} of DIRECTORY/jobs.json, what ``losses(form, path)`` gives on every
    rank to DIRECTORY/losses.json. Does not return.
    """
    quiet_worker(limit=270)
    if group:
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.manual_seed(0)
    what, directory = sys.argv[1:]
    if what == "save":
        save(directory)
    else:
        jobs, results = (os.path.join(directory, name) for name in ("jobs.json", "losses.json"))
        play_jobs(jobs, results, lambda job: losses(job["form"], job["path"]), of_all_ranks)
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)  # threads that a library leaves behind can abort an orderly end, now and then


def step(loss: Tensor, optimizer: Any, *schedules: Any, backward: Callable[[Tensor], object] = Tensor.backward) -> str:
    """One training step; the loss before it, exactly."""
    optimizer.zero_grad()
    backward(loss)
    for each in (optimizer, *schedules):
        each.step()
    return loss.item().hex()


def seed_by_rank() -> None:
    """Each rank has random states of its own."""
    rank = dist.get_rank()
    torch.manual_seed(70 + rank)
    random.seed(7 + rank)
    np.random.seed(17 + rank)


def drawn() -> list[str]:
    """The next random numbers, exactly."""
    return [torch.rand(()).item().hex(), random.random().hex(), float(np.random.rand()).hex()]
