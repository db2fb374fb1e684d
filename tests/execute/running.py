"""Runs a plan in a world of one, as a local conversion does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fsdpckpt.comm.protocol import Solo
from fsdpckpt.execute.executor import execute
from fsdpckpt.execute.job import Budget, Job
from fsdpckpt.execute.journal import Recorder
from fsdpckpt.ir.checkpoint import Checksums, SourceFile
from fsdpckpt.plan.plan import Plan
from fsdpckpt.progress import NoProgress, Progress
from fsdpckpt.storage.sources import Sources

__all__ = ["run_plan"]


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
        Job.of_one(plan, files, checksums, budget, finished),
        sources=sources,
        locate=locate,
        threads=budget.threads,
        progress=progress or NoProgress(),
        recorder=recorder,
        finished=finished,
    )
