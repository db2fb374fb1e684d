"""What the page says of the optimizer: its states, and whether all parameters are at one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from fsdpckpt import flags
from fsdpckpt.describe import Description
from fsdpckpt.ir.checkpoint import Section
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import as_float
from fsdpckpt.report.figures import FigureTable, clipped, more_text
from fsdpckpt.text import count_text, plural, step_text


def optimizer_health(optim: Optimizer, described: Description) -> dict[str, Any]:
    """For the template: the states, how many parameters have each, and whether the steps agree.

    Steps that are tensors have values only if ``described`` has statistics. As for ``verify``, only those of one param
    group must agree: a group may have been added later.
    """
    listed = optim.grouped_keys()
    group_of = optim.group_of()
    steps_of_group: dict[int | None, set[float]] = {}
    parameters = len(dict.fromkeys([*listed, *optim.state]))
    without_state = [str(key) for key in listed if not optim.state.get(key)]
    dtypes: dict[str, Counter[str]] = {}  # of each state
    steps: Counter[float] = Counter()
    steps_not_read = 0
    measured = _measured_steps(described)
    for key, states in optim.state.items():
        for state, value in states.items():
            dtype = value.dtype.name if isinstance(value, Tensor) else type(value).__name__
            dtypes.setdefault(state, Counter())[dtype] += 1
            if state == "step":
                step = as_float(value) if isinstance(value, (int, float)) else measured.get(str(key))
                if step is None:
                    steps_not_read += 1
                else:
                    steps[step] += 1
                    steps_of_group.setdefault(group_of.get(key), set()).add(step)
    rows = []
    for state, counts in dtypes.items():
        total = counts.total()
        complete = "all" if total == parameters else f"{count_text(parameters - total)} without"
        of_dtypes = ", ".join(f"{dtype} {count_text(count)}" for dtype, count in counts.items())
        rows.append((state, count_text(total), complete, of_dtypes))
    disagree = any(len(of_group) > 1 for of_group in steps_of_group.values())
    if steps:
        if len(steps) == 1 and not disagree:
            ((step, count),) = steps.items()
            which = "all" if count == parameters else f"{count_text(count)} of"
            text = f"{which} {plural(parameters, 'parameter', 'are')} at step {step_text(step)}"
        else:
            verdict = "disagree" if disagree else "agree within each param group"
            text = f"the steps {verdict}: {_steps_text(steps)}"
    else:
        text = (
            f"the values of step were not read ({flags.stats!s} reads them)" if steps_not_read else "no step is stored"
        )
    more = f" and {count_text(len(without_state) - 50)} more" if len(without_state) > 50 else ""
    headings = ["state", "parameters", "of all", "dtypes"]
    return {
        "steps": f"{text[:1].upper()}{text[1:]}." if steps else f"{plural(parameters, 'parameter')}; {text}",
        "problems": [f"optimizer: {text}"] if disagree else [],
        "states": FigureTable(headings, rows, frozenset({1}), more=more_text(len(rows), "state")),
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
    shown = ", ".join(f"{step_text(value)} for {plural(count, 'parameter')}" for value, count in by_count[:8])
    return shown + (f" and {len(by_count) - 8} more values" if len(by_count) > 8 else "")
