"""Joins the statistics of several tensors into those of all their elements."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fsdpckpt.ir.tensors import Stats


def joined_stats(each: Sequence[tuple[Stats | None, int]]) -> Stats | None:
    """``each``: the statistics of a tensor, and its number of elements. None if one has none."""
    known = [(stats, numel) for stats, numel in each if stats is not None]
    if len(known) < len(each) or not known:
        return None
    if len(known) == 1:
        return known[0][0]
    nan, inf = sum(stats.nan for stats, _ in known), sum(stats.inf for stats, _ in known)
    total, mean, low, high = 0, 0.0, math.inf, -math.inf
    squares = norm = 0.0
    for stats, numel in known:
        if stats.min is None or stats.max is None or stats.mean is None or stats.std is None or stats.norm is None:
            continue  # no finite element
        count = numel - stats.nan - stats.inf
        low, high = min(low, stats.min), max(high, stats.max)
        norm = math.hypot(norm, stats.norm)
        # Chan's update, as in ``verify.measures``.
        delta, total = stats.mean - mean, total + count
        squares += count * stats.std * stats.std + delta * delta * (total - count) * count / total
        mean += delta * count / total
    if not total:
        return Stats(None, None, None, None, None, nan, inf)
    return Stats(low, high, mean, math.sqrt(squares / total), norm, nan, inf)
