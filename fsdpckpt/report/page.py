"""Builds the page, HTML and SVG without scripts or network access, problems first; and writes it.

The file appears complete or not at all, and never over anything but an earlier page.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping

import numpy as np

from fsdpckpt.describe import Description, Json
from fsdpckpt.errors import TargetExistsError, TargetUnwritableError, UsageError
from fsdpckpt.ir.checkpoint import Checkpoint, Section, group_params
from fsdpckpt.report.figures import Holdings, Module, figure, histogram, holdings, module_tree
from fsdpckpt.report.health import Health, Spread, health, not_finite, spreads
from fsdpckpt.report.html import MOST_ROWS, STYLE, clipped, escaped, percent, table
from fsdpckpt.storage.protocols import is_url
from fsdpckpt.text import count_text, plural, size_text
from fsdpckpt.verify.compare import value_text
from fsdpckpt.version import __version__

__all__ = ["MARK", "check_report", "page", "write_report"]

MARK = "<!doctype html>\n<!-- fsdpckpt inspect --report -->\n"
"""The beginning of every page: a file that begins otherwise is never replaced."""

MOST_PROBLEMS = 200
LONGEST_LINE = 600  # characters of a problem or a note

# No script runs and nothing is fetched, whatever the keys of a checkpoint contain.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

_TITLES = {Section.MODEL: "model", Section.OPTIM: "optimizer state"}


def page(described: Description) -> str:
    """The page for what ``inspect`` describes, with statistics when they were computed."""
    checkpoint = described.checkpoint
    name = escaped(clipped(checkpoint.source))
    body = [
        f"<h1>{name}</h1>",
        _summary(described),
        *_problems(described),
        *(part for section in _TITLES for part in _section(described, section)),
        *_dtypes(described),
        *_optimizer_part(described),
        *_norms_part(described),
        *_groups_part(checkpoint),
        *_notes(checkpoint),
        f'<p class="quiet">Made by fsdpckpt {escaped(__version__)} inspect --report, from headers and metadata'
        f"{' and, for statistics, the data' if described.stats is not None else ' alone'}.</p>",
    ]
    head = (
        f'{MARK}<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name}</title>\n<style>{STYLE}</style></head>\n<body>\n"
    )
    return head + "\n".join(body) + "\n</body></html>\n"


def _summary(described: Description) -> str:
    checkpoint = described.checkpoint
    tiles = [
        (str(checkpoint.layout), "layout"),
        (str(checkpoint.container), "container" if checkpoint.flavor == "plain" else checkpoint.flavor),
        (count_text(checkpoint.world_size), "rank" if checkpoint.world_size == 1 else "ranks"),
        (count_text(len(checkpoint.files)), "file" if len(checkpoint.files) == 1 else "files"),
    ]
    for section, sums in described.sections.items():
        label = f"{section}: {plural(sums.tensors, 'tensor')}, {count_text(sums.elements)} elements"
        tiles.append((size_text(sums.nbytes), label))
    if described.key_type is not None:
        tiles.append((str(described.key_type), "optimizer keys"))
    items = "".join(f"<li><b>{escaped(value)}</b>{escaped(label)}</li>" for value, label in tiles)
    return f'<ul class="tiles">{items}</ul>'


def _problems(described: Description) -> Iterator[str]:
    checkpoint = described.checkpoint
    lines = [problem.message for problem in checkpoint.problems]
    if described.stats is not None:
        lines += not_finite(described.tensors, described.stats)
    if checkpoint.optim is not None:
        steps = health(checkpoint.optim, described).steps
        if len(steps) > 1:
            lines.append(f"optimizer: the steps disagree: {_steps_text(steps)}")
    if not lines:
        read = "the data" if described.stats is not None else "headers and metadata"
        yield f'<p class="whole">No problems show in {read}. <code>fsdpckpt verify</code> proves more.</p>'
        return
    yield f'<div class="problems"><h2>{plural(len(lines), "problem")}</h2><ul>'
    yield from (f"<li>{escaped(clipped(line, LONGEST_LINE))}</li>" for line in lines[:MOST_PROBLEMS])
    yield "</ul>" + (f"<p>and {count_text(len(lines) - MOST_PROBLEMS)} more</p>" if len(lines) > MOST_PROBLEMS else "")
    yield "</div>"


def _section(described: Description, section: Section) -> Iterator[str]:
    root = module_tree((named.key, named.tensor) for named in described.tensors if named.section is section)
    if not root.tensors:
        return
    title = _TITLES[section]
    held = holdings(root, described.checkpoint.world_size)
    yield f"<h2>Who holds what: {title}</h2>"
    yield (
        '<p class="quiet">Left to right: all bytes of this section, its modules on top. Below, one row '
        f"{'for each rank' if held.ranks_in_row == 1 else f'for {held.ranks_in_row} ranks'}: where it is filled, the "
        "rank holds that stretch of the tensor, from its first to its last row"
        f"{'' if held.ranks_in_row == 1 else ' (together)'}. On the right, bytes of each rank. "
        'Shade: part of the stretch that is held <span class="key s1"></span>little<span class="key s5"></span>all.</p>'
    )
    yield figure(root, held, f"who holds what of the {title}")
    yield f"<details><summary>{plural(len(held.nbytes), 'rank')} as a table</summary>"
    yield _rank_table(held, root)
    yield "</details>"
    yield f"<details open><summary>Size by module: {title}</summary>"
    yield _module_table(root)
    yield "</details>"


def _rank_table(held: Holdings, root: Module) -> str:
    """Every rank; of very many those with the most and the fewest bytes."""
    order = list(range(len(held.nbytes)))
    more = ""
    if len(order) > MOST_ROWS:
        by_size = np.argsort(held.nbytes, kind="stable").tolist()
        order = sorted(by_size[: MOST_ROWS // 2] + by_size[-MOST_ROWS // 2 :])
        left = len(held.nbytes) - len(order)
        more = f'<p class="quiet">{plural(left, "rank")} between the largest and the smallest are left out</p>'
    rows = [
        (
            rank,
            size_text(int(held.nbytes[rank])),
            percent(int(held.nbytes[rank]), root.nbytes),
            count_text(int(held.chunks[rank])),
        )
        for rank in order
    ]
    return table(["rank", "holds", "of the section", "pieces"], rows, right=frozenset({0, 1, 2, 3})) + more


def _module_table(root: Module) -> str:
    """Modules down to two levels, in the model's order; of very many the largest ones."""
    rows: list[Module] = []
    for child in root.children.values():
        rows += [child, *child.children.values()]
    left = len(rows) - MOST_ROWS
    if left > 0:
        largest = {node.path for node in sorted(rows, key=lambda node: -node.nbytes)[:MOST_ROWS]}
        rows = [node for node in rows if node.path in largest]
    cells = [
        (
            node.path,
            size_text(node.nbytes),
            percent(node.nbytes, root.nbytes),
            count_text(node.elements),
            count_text(node.tensors),
            f"{node.tensor.dtype.name} {list(node.tensor.shape)} {node.tensor.placement}" if node.tensor else "",
        )
        for node in rows
    ]
    more = f'<p class="quiet">and {plural(left, "smaller module")}</p>' if left > 0 else ""
    headings = ["module", "bytes", "share", "elements", "tensors", "tensor"]
    return table(headings, cells, right=frozenset({1, 2, 3, 4}), label="size by module") + more


def _dtypes(described: Description) -> Iterator[str]:
    sums: dict[tuple[str, str], list[int]] = {}
    for named in described.tensors:
        row = sums.setdefault((str(named.section), named.tensor.dtype.name), [0, 0, 0])
        for at, value in enumerate((1, named.tensor.numel, named.tensor.nbytes)):
            row[at] += value
    if not sums:
        return
    whole = sum(row[2] for row in sums.values())
    rows = [
        (section, dtype, count_text(number), count_text(elements), size_text(nbytes), percent(nbytes, whole))
        for (section, dtype), (number, elements, nbytes) in sums.items()
    ]
    yield "<h2>Dtypes</h2>"
    yield table(["section", "dtype", "tensors", "elements", "bytes", "share"], rows, right=frozenset({2, 3, 4, 5}))


def _notes(checkpoint: Checkpoint) -> Iterator[str]:
    lines = [*map(str, checkpoint.evidence), *(f"{note.kind}: {note.message}" for note in checkpoint.notes)]
    if lines:
        items = "".join(f"<li>{escaped(clipped(line, LONGEST_LINE))}</li>" for line in lines[:MOST_ROWS])
        yield f"<h2>How it was recognised</h2><ul>{items}</ul>"
    files = [(file.path, size_text(file.nbytes)) for file in checkpoint.files[:MOST_ROWS]]
    yield f"<details><summary>{plural(len(checkpoint.files), 'file')}</summary>"
    yield table(["file", "bytes"], files, right=frozenset({1}))
    yield "</details>"


MOST_FIGURES = 24  # no optimizer has more states than these


def _optimizer_part(described: Description) -> Iterator[str]:
    """The states, for how many parameters each exists, and whether the steps agree."""
    optim = described.checkpoint.optim
    if optim is None:
        return
    summary = health(optim, described)
    yield "<h2>Optimizer state</h2>"
    yield f"<p>{escaped(_steps_line(summary))}</p>"
    rows = [
        (
            state,
            count_text(number),
            "all" if number == summary.parameters else f"{count_text(summary.parameters - number)} without",
            ", ".join(f"{dtype} {times:,}" for dtype, times in dtypes.items()),
        )
        for state, (number, dtypes) in summary.states.items()
    ]
    yield table(["state", "parameters", "of all", "dtypes"], rows[:MOST_ROWS], right=frozenset({1}))
    if summary.without:
        shown = ", ".join(map(clipped, summary.without[:50]))
        more = f" and {count_text(len(summary.without) - 50)} more" if len(summary.without) > 50 else ""
        yield f"<p>Without state: {escaped(shown)}{more}</p>"


def _steps_line(summary: Health) -> str:
    count = plural(summary.parameters, "parameter")
    if summary.unread and not summary.steps:
        return f"{count}; the values of step were not read (--stats reads them)"
    if not summary.steps:
        return f"{count}; no step is kept"
    agree = "agree" if len(summary.steps) == 1 else "disagree"
    return f"{count}; the steps {agree}: {_steps_text(summary.steps)}"


def _steps_text(steps: Mapping[float, int]) -> str:
    """Each step and how many parameters are at it, the most common one first."""
    several = sorted(steps.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{value:g} for {plural(times, 'parameter')}" for value, times in several[:8])
    return shown + (f" and {len(several) - 8} more values" if len(several) > 8 else "")


def _norms_part(described: Description) -> Iterator[str]:
    """How large the values are; empty without statistics."""
    if described.stats is None:
        return
    distributions = spreads(described.tensors, described.stats)
    if not distributions:
        return
    yield "<h2>Norms</h2>"
    yield '<p class="quiet">How many tensors have a root mean square of this order of magnitude.</p><div class="row">'
    yield from (_spread(one) for one in distributions[:MOST_FIGURES])
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


def _groups_part(checkpoint: Checkpoint) -> Iterator[str]:
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


def check_report(path: str, source: str) -> None:
    """Check that a page may be written to ``path``.

    Raises UsageError for a path inside the checkpoint at ``source``, TargetExistsError when something other than a page
    exists there, TargetUnwritableError for what cannot be a file.
    """
    _refuse_source(path, source)
    _require_free(path)


def write_report(described: Description, path: str) -> int:
    """Write the page for ``described`` to ``path``; returns its length in bytes.

    Raises what ``check_report`` does.
    """
    check_report(path, described.checkpoint.source)
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
            next_step="give --report a file in a directory that exists and is yours",
        ) from None
    return len(content)


def _refuse_source(path: str, source: str) -> None:
    """Raises for a path inside ``source``, a URL, and ``-``: stdout has the summary."""
    if path in ("", "-"):
        raise UsageError("--report takes the name of a file", found=repr(path), next_step="--report report.html")
    if is_url(path):
        raise UsageError(f"--report {path}: a report is a file of this machine", next_step="--report report.html")
    if not is_url(source) and os.path.isdir(source):
        real, inside = os.path.realpath(path), os.path.realpath(source)
        if os.path.commonpath([real, inside]) == inside:
            raise UsageError(
                f"--report {path} lies inside the source, which is never written to",
                file=path,
                next_step="give --report a file outside of SRC",
            )


def _require_free(path: str) -> None:
    """Raises when ``path`` exists and is not an earlier page."""
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
    try:
        with open(path, "rb") as file:
            if file.read(len(MARK)) == MARK.encode():
                return
    except FileNotFoundError:
        return
    except OSError:  # unreadable: not an earlier page of this user
        pass
    raise TargetExistsError(
        f"{path} is there, and is no report that inspect --report made",
        file=path,
        why="an earlier report would be replaced; anything else is left alone",
        next_step=f"give --report another name, or remove it: rm {shlex.quote(path)}",
    )
