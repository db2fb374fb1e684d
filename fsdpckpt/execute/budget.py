"""Turns ``--max-memory`` and ``--threads`` into threads and the sizes of their buffers, alone and among ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass

from fsdpckpt.errors import UsageError
from fsdpckpt.plan.plan import Plan

__all__ = ["Budget", "MOST_THREADS", "Settings", "for_worker", "make_budget", "settle", "threads_for"]

LARGEST_WINDOW = 8 * 1024 * 1024  # bytes: past this a request's cost is lost in its transfer on every disk measured
MOST_THREADS = 8  # by default: a disk is busy long before
SMALLEST_WINDOW = 64 * 1024  # bytes: below this the work per request dominates
BUFFERS_PER_THREAD = 2  # the window being assembled, and scratch for what must be cast or gathered


@dataclass(frozen=True, slots=True)
class Budget:
    """``threads`` threads, each with two buffers of ``window`` bytes."""

    threads: int
    window: int

    @property
    def nbytes(self) -> int:
        return self.threads * BUFFERS_PER_THREAD * self.window


def make_budget(*, max_memory: int, threads: int | None) -> Budget:
    """The largest windows that fit ``max_memory`` bytes. Raises UsageError when not even the smallest do."""
    wanted = threads if threads is not None else min(MOST_THREADS, max(2, os.cpu_count() or 1))
    if wanted < 1:
        raise UsageError("--threads must be at least 1", expected="1 or more", found=str(wanted))
    most = max_memory // (BUFFERS_PER_THREAD * SMALLEST_WINDOW)
    if most < 1:
        raise UsageError(
            "--max-memory is too small for a single copy buffer",
            expected=f"at least {BUFFERS_PER_THREAD * SMALLEST_WINDOW} bytes",
            found=f"{max_memory} bytes",
            next_step="give --max-memory 1MiB or more",
        )
    count = min(wanted, most)
    window = min(LARGEST_WINDOW, max_memory // (BUFFERS_PER_THREAD * count))
    return Budget(count, window // SMALLEST_WINDOW * SMALLEST_WINDOW)


PAGE = 4096
WINDOWS_A_ROUND = 4  # what several small windows need comes together
WINDOWS_HELD = 2 * WINDOWS_A_ROUND  # at least: two rounds


@dataclass(frozen=True, slots=True)
class Settings:
    """Bytes, the same on all ranks. ``window``: assembled and written at once; ``windows``: of all threads together.
    ``round_bytes``: received in one round, of which ``rounds`` are held. ``exchange_bytes``: buffers of the process
    group.

    The last three are 0 where every rank sees all of its sources.
    """

    window: int
    windows: int
    round_bytes: int
    rounds: int
    exchange_bytes: int


def settle(plan: Plan, budget: Budget, max_memory: int, *, exchanging: bool) -> Settings:
    """The settings for ``max_memory`` bytes per rank; ``budget`` has its number of threads.

    Where bytes are exchanged: an eighth of it for the exchange, half as much to read what is sent; at most half for
    windows, each no more than a sixteenth; rounds of four windows take what is left. Raises UsageError when that is not
    enough.
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
    """How many of the threads of ``budget`` this rank has memory for."""
    return max(min(budget.threads, settings.windows // (BUFFERS_PER_THREAD * settings.window)), 1)


def for_worker(budget: Budget, local_workers: int, *, max_memory: int, chosen: bool) -> Budget:
    """``budget`` for one of ``local_workers`` workers that share a machine. ``chosen``: by the user, with --threads.

    At least two threads: one assembles while the other one waits for the disk.
    """
    if chosen or local_workers == 1:
        return budget
    return make_budget(max_memory=max_memory, threads=max(budget.threads // local_workers, 2))
