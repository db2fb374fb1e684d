"""Draws the grid of files and ranks: a strip for each file name, with a stretch for each run of ranks in one state."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from fsdpckpt.describe import FileGrid, FilesOfRanks

FEWEST_RANKS = 2
MAX_STRIPS = 60
MAX_STRETCHES = 1024


def rank_rows(grid: FileGrid) -> list[dict[str, Any]]:
    """For the template; empty if the files are not those of ranks."""
    if grid.ranks < FEWEST_RANKS:
        return []
    return [{"name": row.pattern, "stretches": _stretches(row)} for row in grid.rows[:MAX_STRIPS]]


def _stretches(row: FilesOfRanks) -> list[tuple[str, int, str]]:
    """The state, the number of ranks and the words of each run."""
    stretches = []
    for state, run in groupby(enumerate(row.states), key=lambda each: each[1]):
        ranks = [rank for rank, _ in run]
        which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        stretches.append((str(state), len(ranks), f"{which}: {state}"))
    return stretches[:MAX_STRETCHES]
