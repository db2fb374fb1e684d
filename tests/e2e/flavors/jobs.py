"""The part that all workers share: load every job's checkpoint, say what came of it on every rank."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

__all__ = ["load"]


def load(directory: str, losses: Callable[[str, str], list[str]]) -> None:
    """For each {"id", "form", "path"} of DIRECTORY/jobs.json what ``losses(form, path)`` gives on every rank.

    Written to DIRECTORY/losses.json after every job; a job that fails has its traceback there.
    """
    with open(os.path.join(directory, "jobs.json")) as file:
        jobs = json.load(file)
    results = {}
    for job in jobs:
        try:
            found = losses(job["form"], job["path"])
        except (Exception, CheckpointException):  # noqa: BLE001 - reported; CheckpointException is no Exception
            found = [traceback.format_exc()]
        everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, found)
        results[job["id"]] = everyone
        if dist.get_rank() == 0:
            with open(os.path.join(directory, "losses.json"), "w") as file:
                json.dump(results, file)
