"""Runs a plan in a world of one, as a local conversion does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fsdpckpt.comm.protocol import Solo
from fsdpckpt.execute import execute
from fsdpckpt.execute.job import Budget, Job, Settings
from fsdpckpt.execute.journal import Finished, Recorder
from fsdpckpt.ir.checkpoint import Checksums, SourceFile
from fsdpckpt.plan import Plan
from fsdpckpt.plan.transfer import Segment
from fsdpckpt.progress import NoProgress, Progress
from fsdpckpt.storage.sources import Sources

__all__ = ["job_of_one_rank", "run_plan"]


def job_of_one_rank(
    plan: Plan, files: Sequence[SourceFile], checksums: Checksums, budget: Budget, finished: Finished | None = None
) -> Job:
    """The job of a rank that writes everything. ``finished``: what an interrupted run has written."""
    segments = tuple(Segment(number, 0, 0, file.nbytes, 0) for number, file in enumerate(plan.files))
    claims = [(0, file, *claim) for file, rows in (finished or Finished()).claims().items() for claim in rows]
    settings = Settings(budget.window, budget.nbytes, 0, 0, 0)
    return Job(plan, tuple(files), checksums, segments, settings, np.asarray(claims, np.int64).reshape(-1, 5))


def run_plan(
    plan: Plan,
    *,
    files: Sequence[SourceFile],
    checksums: Checksums,
    sources: Sources,
    locate: Callable[[str], str],
    budget: Budget,
    progress: Progress | None = None,
    recorder: Recorder | None = None,
) -> dict[str, int]:
    """Write every file of ``plan``; returns their CRC-32."""
    finished = recorder.finished if recorder is not None else None
    return execute(
        Solo(),
        job_of_one_rank(plan, files, checksums, budget, finished),
        sources=sources,
        locate=locate,
        threads=budget.threads,
        progress=progress or NoProgress(),
        recorder=recorder,
        finished=finished,
    )
