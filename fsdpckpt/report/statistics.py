"""What the page says of measured values: the statistics of each tensor, NaN and Inf, and magnitudes as bars."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fsdpckpt import flags
from fsdpckpt.describe import Description
from fsdpckpt.ir.checkpoint import NamedTensor, Section
from fsdpckpt.ir.tensors import Stats
from fsdpckpt.report.figures import FigureTable, histogram, more_text


def statistics_table(described: Description) -> FigureTable:
    rows = []
    for named, stats in zip(described.tensors, described.stats or (), strict=False):
        if named.tensor.shape and stats is not None:
            numbers = ["-" if number is None else f"{number:.4g}" for number in stats.numbers]
            rows.append((named.section, named.key, *numbers))
    headings = ["section", "key", "min", "max", "mean", "std", "norm"]
    more = more_text(len(rows), "tensor", f": inspect {flags.stats!s} {flags.json!s} lists them all")
    return FigureTable(headings, rows, frozenset(range(2, 7)), more=more)


def not_finite(
    tensors: Sequence[NamedTensor], stats: Sequence[Stats | None], buffers: frozenset[str]
) -> tuple[list[str], list[str]]:
    """A line for each tensor that contains NaN or Inf, and one for each of ``buffers`` with only Inf, as masks have."""
    lines: tuple[list[str], list[str]] = [], []
    for named, values in zip(tensors, stats, strict=True):
        if values is not None and (values.nan or values.inf):
            elements = f"{values.nan:,} NaN and {values.inf:,} Inf of {named.tensor.numel:,} elements"
            is_mask = named.section is Section.MODEL and named.key in buffers and not values.nan
            lines[is_mask].append(f"{named.section} {named.key}: {elements}")
    return lines


def magnitudes(tensors: Sequence[NamedTensor], stats: Sequence[Stats | None]) -> list[dict[str, Any]]:
    """For the template: the root mean squares of the model's parameters, and of each optimizer state in the shape of
    its parameter.
    """
    groups: dict[str, list[tuple[float, str]]] = {}
    for named, values in zip(tensors, stats, strict=True):
        if named.section is Section.EXTRA or not named.tensor.numel or values is None or values.norm is None:
            continue
        if named.section is Section.MODEL and named.state is not None:  # inside a value
            continue
        if named.section is Section.OPTIM and (named.state is None or not named.tensor.shape):
            continue
        title = "weights" if named.section is Section.MODEL else str(named.state)
        groups.setdefault(title, []).append((values.norm / math.sqrt(named.tensor.numel), named.key))
    return [_magnitude(title, values) for title, values in groups.items()]


def _magnitude(title: str, values: Sequence[tuple[float, str]]) -> dict[str, Any]:
    """``smallest``, ``largest``: (root mean square, key) of those above 0."""
    nonzero = [(value, key) for value, key in values if value > 0]
    exponents = Counter(math.floor(math.log10(min(value, sys.float_info.max))) for value, _ in nonzero)
    zeros = len(values) - len(nonzero)
    return {
        "title": title,
        "bars": histogram(exponents, zeros),
        "smallest": min(nonzero, default=None),
        "largest": max(nonzero, default=None),
        "zeros": zeros,
    }
