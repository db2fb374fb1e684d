"""The parts of the page about the optimizer and about the values: states, steps, norms, settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fsdpckpt.describe import Description, Json
from fsdpckpt.ir.checkpoint import Checkpoint, group_params
from fsdpckpt.report.figures import histogram
from fsdpckpt.report.health import Health, Spread, health, not_finite, spreads
from fsdpckpt.report.text import MOST_ROWS, clipped, escaped, table
from fsdpckpt.text import count_text, plural
from fsdpckpt.verify.values import value_text

__all__ = ["groups_part", "norms_part", "optimizer_part", "steps_text"]

MOST_FIGURES = 24  # no optimizer has more states than these


def optimizer_part(described: Description) -> Iterator[str]:
    """Which states there are, for how many parameters, and whether their steps agree."""
    optim = described.checkpoint.optim
    if optim is None:
        return
    found = health(optim, described)
    yield "<h2>Optimizer state</h2>"
    yield f"<p>{escaped(_steps_told(found))}</p>"
    rows = [
        (
            state,
            count_text(number),
            "all" if number == found.parameters else f"{count_text(found.parameters - number)} without",
            ", ".join(f"{dtype} {times:,}" for dtype, times in dtypes.items()),
        )
        for state, (number, dtypes) in found.states.items()
    ]
    yield table(["state", "parameters", "of all", "dtypes"], rows[:MOST_ROWS], right=frozenset({1}))
    if found.without:
        shown = ", ".join(map(clipped, found.without[:50]))
        more = f" and {count_text(len(found.without) - 50)} more" if len(found.without) > 50 else ""
        yield f"<p>Without state: {escaped(shown)}{more}</p>"


def _steps_told(found: Health) -> str:
    told = plural(found.parameters, "parameter")
    if found.unread and not found.steps:
        return f"{told}; the values of step were not read (--stats reads them)"
    if not found.steps:
        return f"{told}; no step is kept"
    agree = "agree" if len(found.steps) == 1 else "disagree"
    return f"{told}; the steps {agree}: {steps_text(found.steps)}"


def steps_text(steps: Mapping[float, int]) -> str:
    """Which step how many parameters are at, the most common one first."""
    several = sorted(steps.items(), key=lambda item: -item[1])
    told = ", ".join(f"{value:g} for {plural(times, 'parameter')}" for value, times in several[:8])
    return told + (f" and {len(several) - 8} more values" if len(several) > 8 else "")


def norms_part(described: Description) -> Iterator[str]:
    """How large the values are; nothing without statistics."""
    if described.stats is None:
        return
    found = spreads(described.tensors, described.stats)
    if not found:
        return
    yield "<h2>Norms</h2>"
    yield '<p class="quiet">How many tensors have a root mean square of this order of magnitude.</p><div class="row">'
    yield from (_spread(one) for one in found[:MOST_FIGURES])
    yield "</div>"
    buffers = not_finite(described.tensors, described.stats, buffers=True)
    if buffers:
        shown = "; ".join(buffers[:MOST_ROWS])
        yield f'<p class="quiet">Buffers that are not finite, as masks are: {escaped(clipped(shown, 1000))}</p>'
    rows = [
        (named.section, named.key, *(_number(stats, name) for name in ("min", "max", "mean", "std", "norm")))
        for named, stats in zip(described.tensors, described.stats, strict=True)
        if named.tensor.shape and stats is not None
    ]
    yield f"<details><summary>Statistics of {plural(min(len(rows), MOST_ROWS), 'tensor')}</summary>"
    headings = ["section", "key", "min", "max", "mean", "std", "norm"]
    yield table(headings, rows[:MOST_ROWS], right=frozenset(range(2, 7)))
    if len(rows) > MOST_ROWS:
        more = count_text(len(rows) - MOST_ROWS)
        yield f'<p class="quiet">and {more} more: inspect --stats --json lists them all</p>'
    yield "</details>"


def _spread(spread: Spread) -> str:
    lines = [f"<div><h3>{escaped(clipped(spread.title))}</h3>", histogram(spread)]
    for word, extreme in (("smallest", spread.smallest), ("largest", spread.largest)):
        if extreme is not None:
            lines.append(f'<p class="quiet">{word} {extreme[0]:.3g}: {escaped(clipped(extreme[1]))}</p>')
    if spread.zeros:
        lines.append(f"<p>{plural(spread.zeros, 'tensor')} all zero</p>")
    return "\n".join([*lines, "</div>"])


def _number(stats: Mapping[str, Json], name: str) -> str:
    value = stats[name]
    return f"{value:.4g}" if isinstance(value, (int, float)) else "-"


def groups_part(checkpoint: Checkpoint) -> Iterator[str]:
    """The settings of each param group."""
    groups = checkpoint.optim.param_groups if checkpoint.optim is not None else None
    if not groups:
        return
    rows = []
    for number, group in enumerate(groups[:MOST_ROWS]):
        hyper = [f"{key!s}={value_text(value)}" for key, value in group.items() if key not in ("params", "param_names")]
        rows.append((number, count_text(len(group_params(group) or ())), ", ".join(hyper)))
    yield f"<h2>{plural(len(groups), 'param group')}</h2>"
    yield table(["group", "parameters", "settings"], rows, right=frozenset({0, 1}), longest=2000)
