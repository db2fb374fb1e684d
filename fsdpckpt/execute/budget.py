"""Turns ``--max-memory`` and ``--threads`` into a number of threads and the size of their buffers."""

from __future__ import annotations

import os
from dataclasses import dataclass

from fsdpckpt.errors import UsageError

__all__ = ["MOST_THREADS", "Budget", "make_budget"]

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
