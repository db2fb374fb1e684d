"""What every oracle worker does with its jobs: run each one on all ranks, and write the results to rank 0's file."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

__all__ = ["by_rank", "of_all_ranks", "play_jobs"]

MOST = 20
"""How many problems of one rank are reported."""


def of_all_ranks(mine: list[str]) -> list[list[str]]:
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    return everyone


def by_rank(problems: list[str]) -> list[str]:
    """Every rank's ``problems``, each with its rank in front."""
    return [f"rank {rank}: {problem}" for rank, some in enumerate(of_all_ranks(problems[:MOST])) for problem in some]


def play_jobs(jobs_file: str, results_file: str, play: Callable[[dict[str, Any]], list[str]], together: Any) -> None:
    """Write ``{job["id"]: together(play(job))}`` for the list of jobs in ``jobs_file`` to ``results_file``.

    ``together`` is one of the two functions above: what a job gave on all ranks. A job that fails gives its traceback.
    """
    with open(jobs_file) as file:
        jobs = json.load(file)
    results = {}
    for job in jobs:
        try:
            found = play(job)
        except (Exception, CheckpointException):  # noqa: BLE001 - reported; CheckpointException is no Exception
            found = [traceback.format_exc()]
        results[job["id"]] = together(found)
        if dist.get_rank() == 0:  # after every job, so that a hang later still tells how far it came
            with open(results_file, "w") as file:
                json.dump(results, file)
