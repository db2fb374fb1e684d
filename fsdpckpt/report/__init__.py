"""Draws a checkpoint as one self-contained HTML page (``inspect --report``).

The page is written complete or not at all, and never over anything but an earlier page. ``health`` summarises the
optimizer's state and the values of tensors: steps, missing states, norms, NaN and Inf.
"""

from __future__ import annotations

import math
import os
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fsdpckpt.describe import Description, Json
from fsdpckpt.errors import TargetExistsError, TargetUnwritableError, UsageError
from fsdpckpt.ir.checkpoint import BARE_VALUE, NamedTensor, OptimState, Section
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.storage import is_url

MARK = "<!doctype html>\n<!-- fsdpckpt inspect --report -->\n"
"""The beginning of every page: a file that begins otherwise is never replaced."""

SUFFIXES = (".html", ".htm")


def check_report(path: str, source: str) -> None:
    """Check that a page may be written to ``path``.

    Raises UsageError for a path inside the checkpoint at ``source`` and for a name that is not one of an HTML page,
    TargetExistsError if something other than a page exists there, TargetUnwritableError for a path that cannot be a
    file.
    """
    _refuse_source(path, source)
    _require_free(path)


def write_report(described: Description, path: str) -> int:
    """Write the page for ``described`` to ``path``; returns its length in bytes.

    Raises what ``check_report`` does.
    """
    check_report(path, described.checkpoint.source)
    from fsdpckpt.report.page import page  # and the template engine: only if a page is made

    content = page(described).encode("utf-8", "backslashreplace")
    beside = f"{path}.{os.getpid()}.tmp"
    try:
        with open(beside, "wb") as file:
            file.write(content)
        os.replace(beside, path)
    except OSError as error:
        if os.path.lexists(beside):
            os.unlink(beside)
        raise TargetUnwritableError(
            f"the report cannot be written to {path}: {error.strerror}",
            file=path,
            next_step="give --report a file in a directory that exists and that you may write to",
        ) from None
    return len(content)


def _refuse_source(path: str, source: str) -> None:
    """Raises UsageError for a path inside ``source``, a URL, and ``-``: stdout has the summary."""
    if path in ("", "-"):
        raise UsageError("--report takes the name of a file", found=repr(path), next_step="--report report.html")
    if is_url(path):
        raise UsageError(f"--report {path}: a report is written to a local file", next_step="--report report.html")
    if not is_url(source) and os.path.isdir(source):
        real, inside = os.path.realpath(path), os.path.realpath(source)
        if os.path.commonpath([real, inside]) == inside:
            raise UsageError(
                f"--report {path} is inside the source, which is never written to",
                file=path,
                next_step="give --report a file outside of SRC",
            )


def _require_free(path: str) -> None:
    """Raises if ``path`` does not have the name of a page, or exists and is not an earlier page."""
    if os.path.isdir(path):
        raise TargetExistsError(
            f"{path} is a directory, and the report is one file",
            file=path,
            next_step=f"--report {shlex.quote(os.path.join(path, 'report.html'))}",
        )
    if os.path.exists(path) and not os.path.isfile(path):
        raise TargetUnwritableError(
            f"{path} is a pipe or a device, and the report is a file", file=path, next_step="--report report.html"
        )
    if os.path.exists(path) and not _is_page(path):
        raise TargetExistsError(
            f"{path} exists, and is not a report that inspect --report wrote",
            file=path,
            why="an earlier report would be replaced; anything else is left alone",
            next_step="give --report another name",
        )
    if not path.lower().endswith(SUFFIXES):
        raise UsageError(
            f"--report {path}: a report is an HTML page",
            expected="a name that ends in .html",
            found=path,
            next_step=f"--report {shlex.quote(os.path.splitext(path)[0] + '.html')}",
        )


def _is_page(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(MARK)) == MARK.encode()
    except OSError:  # unreadable: not an earlier page of this user
        return False


@dataclass(frozen=True, slots=True)
class Spread:
    """Root mean squares of tensors. ``bins``: how many have each decimal exponent; ``zeros``: how many are all 0.

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
    """The summary of ``optim``; steps that are tensors have values only if ``described`` has statistics."""
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
    """A line for each tensor that contains NaN or Inf, and one for each of ``buffers`` with only Inf, as masks have."""
    lines: tuple[list[str], list[str]] = [], []
    for named, values in zip(tensors, stats, strict=True):
        nan, inf = (_integer(values, name) for name in ("nan", "inf"))
        if nan or inf:
            line = f"{named.section} {named.key}: {nan:,} NaN and {inf:,} Inf of {named.tensor.numel:,} elements"
            lines[named.section is Section.MODEL and named.key in buffers and not nan].append(line)
    return lines


def _integer(values: dict[str, Json] | None, name: str) -> int:
    value = values.get(name) if values is not None else 0
    return value if isinstance(value, int) else 0


def spreads(tensors: Sequence[NamedTensor], stats: Sequence[dict[str, Json] | None]) -> list[Spread]:
    """One for the model's parameters, and one for each optimizer state in the shape of its parameter."""
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
