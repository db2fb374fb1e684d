"""Runs a plan in a world of one, as a local conversion does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fsdpckpt.comm.protocol import Solo
from fsdpckpt.execute import execute
from fsdpckpt.execute.job import Budget, Job, JobSettings
from fsdpckpt.execute.journal import JournaledWindows, Recorder
from fsdpckpt.ir.checkpoint import Checksums, SourceFile
from fsdpckpt.plan import Plan
from fsdpckpt.plan.transfer import FILES_AT_ONCE, Segment
from fsdpckpt.progress import NoProgress, Progress
from fsdpckpt.storage.sources import Sources

__all__ = ["job_of_one_rank", "run_plan"]


def job_of_one_rank(
    plan: Plan,
    files: Sequence[SourceFile],
    checksums: Checksums,
    budget: Budget,
    journaled: JournaledWindows | None = None,
) -> Job:
    """The job of a rank that writes everything. ``journaled``: what an interrupted run has written."""
    segments = tuple(Segment(number, 0, 0, file.nbytes, 0) for number, file in enumerate(plan.files))
    written = (journaled or JournaledWindows()).written()[:, :4]  # segment number n is file number n
    settings = JobSettings(budget.window, budget.nbytes, 0, 0, 0, FILES_AT_ONCE)
    return Job(plan, tuple(files), checksums, segments, settings, written)


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
    compare: bool = False,
    reread: bool = False,
) -> dict[str, int]:
    """Write every file of ``plan``, or compare it; returns their CRC-32."""
    journaled = recorder.journaled if recorder is not None else JournaledWindows()
    return execute(
        Solo(),
        job_of_one_rank(plan, files, checksums, budget, journaled),
        np.ones((len(files), 1), bool),
        sources=sources,
        locate=locate,
        threads=budget.threads,
        progress=progress or NoProgress(),
        recorder=recorder,
        journaled=journaled,
        compare=compare,
        reread=reread,
    )
