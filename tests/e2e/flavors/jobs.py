"""The part that all workers share: save every form, or load every job's checkpoint and say what came of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch.distributed as dist

from tests.oracle.jobs import of_all_ranks, play_jobs

__all__ = ["work"]


def work(save: Callable[[str], None], losses: Callable[[str, str], list[str]]) -> None:
    """``... save DIRECTORY`` or ``... load DIRECTORY``: the whole of a worker, once its process group is there.

    Loading writes, for each {"id", "form", "path"} of DIRECTORY/jobs.json, what ``losses(form, path)`` gives on every
    rank to DIRECTORY/losses.json. Does not return.
    """
    what, directory = sys.argv[1:]
    if what == "save":
        save(directory)
    else:
        jobs, results = (os.path.join(directory, name) for name in ("jobs.json", "losses.json"))
        play_jobs(jobs, results, lambda job: losses(job["form"], job["path"]), of_all_ranks)
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)  # threads that a library leaves behind can abort an orderly end, now and then
