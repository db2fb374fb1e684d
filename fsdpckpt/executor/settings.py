"""Shares ``--max-memory`` of one worker out among what holds bytes while workers run a plan together."""

from __future__ import annotations

from dataclasses import dataclass

from fsdpckpt.executor.budget import BUFFERS_PER_THREAD, Budget, make_budget
from fsdpckpt.planner.plan import Plan

__all__ = ["Settings", "settle", "threads_for"]

PAGE = 4096


@dataclass(frozen=True, slots=True)
class Settings:
    """Bytes, alike on all workers. ``window``: assembled and written at once. ``round_bytes``: received in one round,
    of which two are held. ``exchange_bytes``: buffers between the process group and memory.

    The last two are 0 where every worker sees all that it needs.
    """

    window: int
    round_bytes: int
    exchange_bytes: int


def settle(plan: Plan, budget: Budget, max_memory: int, *, exchanging: bool) -> Settings:
    """The settings for ``max_memory`` bytes a worker.

    Half of it for windows, a quarter for two rounds, an eighth for the exchange, a sixteenth to read what is sent.
    Raises UsageError when that is too little.
    """
    if not exchanging:
        return Settings(budget.window, 0, 0)
    growth = max((source.itemsize / target.itemsize for source, target in plan.casts), default=1.0)
    round_bytes = max_memory // 8
    half = make_budget(max_memory=max_memory // 2, threads=budget.threads)
    window = min(half.window, int(round_bytes / 2 / max(growth, 1.0)))
    return Settings(max(window // PAGE, 1) * PAGE, round_bytes, max_memory // 8)


def threads_for(settings: Settings, budget: Budget, max_memory: int, workers_here: int, *, chosen: bool) -> int:
    """Threads of one of ``workers_here`` workers that share a machine. ``chosen``: the user said how many each has."""
    wanted = budget.threads if chosen else max(budget.threads // workers_here, 1)
    memory = max_memory // 2 if settings.round_bytes else max_memory
    return max(min(wanted, memory // (BUFFERS_PER_THREAD * settings.window)), 1)
