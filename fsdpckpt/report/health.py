"""Summarises the optimizer's state and the values of tensors: steps, missing states, magnitudes, NaN and Inf."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fsdpckpt.describe import Description
from fsdpckpt.ir.checkpoint import BARE_VALUE, NamedTensor, OptimState, Section
from fsdpckpt.ir.tensors import Stats, Tensor
from fsdpckpt.report.figures import histogram
from fsdpckpt.report.tables import Table, clipped, more_text
from fsdpckpt.text import count_text, plural


def optimizer_health(optim: OptimState, described: Description) -> dict[str, Any]:
    """For the template: the states, how many parameters have each, and whether the steps agree.

    Steps that are tensors have values only if ``described`` has statistics.
    """
    listed = optim.grouped_keys()
    parameters = len(dict.fromkeys([*listed, *optim.state]))
    without_state = [str(key) for key in listed if not optim.state.get(key)]
    dtypes: dict[str, Counter[str]] = {}  # of each state
    steps: Counter[float] = Counter()
    steps_not_read = 0
    measured = _measured_steps(described)
    for key, states in optim.state.items():
        for state, value in states.items():
            if state == BARE_VALUE:
                continue
            dtype = value.dtype.name if isinstance(value, Tensor) else type(value).__name__
            dtypes.setdefault(state, Counter())[dtype] += 1
            if state == "step":
                step = float(value) if isinstance(value, (int, float)) else measured.get(str(key))
                if step is None:
                    steps_not_read += 1
                else:
                    steps[step] += 1
    rows = [
        (
            state,
            count_text(counts.total()),
            "all" if counts.total() == parameters else f"{count_text(parameters - counts.total())} without",
            ", ".join(f"{dtype} {count_text(count)}" for dtype, count in counts.items()),
        )
        for state, counts in dtypes.items()
    ]
    if steps:
        text = f"the steps {'agree' if len(steps) == 1 else 'disagree'}: {_steps_text(steps)}"
    else:
        text = "the values of step were not read (--stats reads them)" if steps_not_read else "no step is stored"
    more = f" and {count_text(len(without_state) - 50)} more" if len(without_state) > 50 else ""
    headings = ["state", "parameters", "of all", "dtypes"]
    return {
        "steps": f"{plural(parameters, 'parameter')}; {text}",
        "problems": [f"optimizer: {text}"] if len(steps) > 1 else [],
        "states": Table(headings, rows, frozenset({1}), more=more_text(len(rows), "state")),
        "without": ", ".join(map(clipped, without_state[:50])) + more,
    }


def _measured_steps(described: Description) -> dict[str, float]:
    """The values of steps that are one-element tensors, by parameter."""
    steps: dict[str, float] = {}
    for named, stats in zip(described.tensors, described.stats or (), strict=False):
        is_step = named.section is Section.OPTIM and named.state == "step" and named.tensor.numel == 1
        if is_step and stats is not None and stats.min is not None:
            steps[named.param] = stats.min
    return steps


def _steps_text(steps: Mapping[float, int]) -> str:
    """Each step and how many parameters are at it, the most common one first."""
    by_count = sorted(steps.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{value:g} for {plural(count, 'parameter')}" for value, count in by_count[:8])
    return shown + (f" and {len(by_count) - 8} more values" if len(by_count) > 8 else "")


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
