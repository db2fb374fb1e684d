"""Summarises an optimizer's state and the values of tensors: steps, missing states, norms, NaN and Inf."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fsdpckpt.describe import Description, Json
from fsdpckpt.ir.checkpoint import BARE_VALUE, NamedTensor, OptimState, Section
from fsdpckpt.ir.tensors import Tensor


@dataclass(frozen=True, slots=True)
class Spread:
    """Root mean squares of tensors. ``bins``: how many have which decimal exponent; ``zeros``: how many are all 0.

    ``smallest``, ``largest``: (root mean square, key).
    """

    title: str
    bins: Mapping[int, int]
    zeros: int
    smallest: tuple[float, str] | None
    largest: tuple[float, str] | None


@dataclass(slots=True)
class Health:
    """``states``: name -> (number of parameters that have it, its dtypes). ``steps``: value -> number of parameters.

    ``unread``: number of steps whose values only ``--stats`` reads. ``without``: listed parameters without state.
    """

    parameters: int
    states: dict[str, tuple[int, Counter[str]]] = field(default_factory=dict)
    steps: Counter[float] = field(default_factory=Counter)
    unread: int = 0
    without: list[str] = field(default_factory=list)


def health(optim: OptimState, described: Description) -> Health:
    """The summary of ``optim``; steps that are tensors have values only when ``described`` has statistics."""
    listed = optim.grouped_keys()
    summary = Health(len(dict.fromkeys([*listed, *optim.state])))
    summary.without = [str(key) for key in listed if not optim.state.get(key)]
    measured = _measured_steps(described)
    for key, states in optim.state.items():
        for state, leaf in states.items():
            if state == BARE_VALUE:
                continue
            number, dtypes = summary.states.setdefault(state, (0, Counter()))
            dtypes[leaf.dtype.name if isinstance(leaf, Tensor) else type(leaf).__name__] += 1
            summary.states[state] = number + 1, dtypes
            if state != "step":
                continue
            if isinstance(leaf, (int, float)):
                summary.steps[float(leaf)] += 1
            elif (value := measured.get(str(key))) is not None:
                summary.steps[value] += 1
            else:
                summary.unread += 1
    return summary


def _measured_steps(described: Description) -> dict[str, float]:
    """The values of steps that are one-element tensors, by parameter."""
    steps: dict[str, float] = {}
    for named, stats in zip(described.tensors, described.stats or (), strict=False):
        if named.section is Section.OPTIM and named.state == "step" and named.tensor.numel == 1 and stats is not None:
            value = stats["min"]
            if isinstance(value, (int, float)):
                steps[named.param] = float(value)
    return steps


def not_finite(
    tensors: Sequence[NamedTensor], stats: Sequence[dict[str, Json] | None], buffers: frozenset[str]
) -> tuple[list[str], list[str]]:
    """A line for each tensor that contains NaN or Inf, and one for each of ``buffers`` with Inf alone, as masks."""
    found: tuple[list[str], list[str]] = [], []
    for named, values in zip(tensors, stats, strict=True):
        nan, inf = (_integer(values, name) for name in ("nan", "inf"))
        if nan or inf:
            line = f"{named.section} {named.key}: {nan:,} NaN and {inf:,} Inf of {named.tensor.numel:,} elements"
            found[named.section is Section.MODEL and named.key in buffers and not nan].append(line)
    return found


def _integer(values: dict[str, Json] | None, name: str) -> int:
    value = values.get(name) if values is not None else 0
    return value if isinstance(value, int) else 0


def spreads(tensors: Sequence[NamedTensor], stats: Sequence[dict[str, Json] | None]) -> list[Spread]:
    """One for the model's parameters, and one for each optimizer state that has the shape of its parameter."""
    groups: dict[str, list[tuple[float, str]]] = {}
    for named, values in zip(tensors, stats, strict=True):
        norm = values.get("norm") if values is not None else None
        if named.section is Section.EXTRA or not named.tensor.numel or not isinstance(norm, (int, float)):
            continue
        if named.section is Section.OPTIM and (named.state is None or not named.tensor.shape):
            continue
        title = "weights" if named.section is Section.MODEL else str(named.state)
        groups.setdefault(title, []).append((float(norm) / math.sqrt(named.tensor.numel), named.key))
    return [_spread(title, values) for title, values in groups.items()]


def _spread(title: str, values: list[tuple[float, str]]) -> Spread:
    some = [(value, key) for value, key in values if value > 0]
    bins = Counter(math.floor(math.log10(value)) for value, _ in some)
    zeros = len(values) - len(some)
    return Spread(title, bins, zeros, min(some, default=None), max(some, default=None))
