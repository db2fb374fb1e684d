"""Shares ``--max-memory`` of one worker out among what holds bytes while workers run a plan together."""

from __future__ import annotations

from dataclasses import dataclass

from fsdpckpt.execute.budget import BUFFERS_PER_THREAD, Budget, make_budget
from fsdpckpt.plan.plan import Plan

__all__ = ["Settings", "for_worker", "settle", "threads_for"]

PAGE = 4096
WINDOWS_A_ROUND = 4  # what several small windows need comes together
WINDOWS_HELD = 2 * WINDOWS_A_ROUND  # at least: two rounds


@dataclass(frozen=True, slots=True)
class Settings:
    """Bytes, alike on all workers. ``window``: assembled and written at once; ``windows``: of all threads together.
    ``round_bytes``: received in one round, of which ``rounds`` are held. ``exchange_bytes``: buffers of the process
    group.

    The last three are 0 where every worker sees all that it needs.
    """

    window: int
    windows: int
    round_bytes: int
    rounds: int
    exchange_bytes: int


def settle(plan: Plan, budget: Budget, max_memory: int, *, exchanging: bool) -> Settings:
    """The settings for ``max_memory`` bytes a worker; ``budget`` has its number of threads.

    Where bytes are exchanged: an eighth of it for the exchange, half as much to read what is sent; at most half for
    windows, each no more than a sixteenth; rounds of four windows take what is left. Raises UsageError when that is too
    little.
    """
    if not exchanging:
        return Settings(budget.window, max_memory, 0, 0, 0)
    growth = max(1.0, max((source.itemsize / target.itemsize for source, target in plan.casts), default=1.0))
    most = make_budget(max_memory=max_memory // 2, threads=budget.threads)
    window = max(min(most.window, max_memory // 32) // PAGE, 1) * PAGE
    windows = most.threads * BUFFERS_PER_THREAD * window
    left = max_memory - max_memory // 8 - max_memory // 16 - windows
    window = min(window, max(int(left / WINDOWS_HELD / growth) // PAGE, 1) * PAGE)
    round_bytes = int(WINDOWS_A_ROUND * window * growth)
    return Settings(window, windows, round_bytes, max(left // round_bytes, 2), max_memory // 8)


def threads_for(settings: Settings, budget: Budget) -> int:
    """How many of the threads of ``budget`` this worker has memory for."""
    return max(min(budget.threads, settings.windows // (BUFFERS_PER_THREAD * settings.window)), 1)


def for_worker(budget: Budget, workers_here: int, *, max_memory: int, chosen: bool) -> Budget:
    """``budget`` for one of ``workers_here`` workers that share a machine. ``chosen``: threads are as the user said.

    At least two threads: one assembles while the other one waits for the disk.
    """
    if chosen or workers_here == 1:
        return budget
    return make_budget(max_memory=max_memory, threads=max(budget.threads // workers_here, 2))
