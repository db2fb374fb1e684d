"""Builds the page from its template: HTML and SVG without scripts or network access, problems first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from fsdpckpt import flags
from fsdpckpt.describe import Description, FileGrid, rank_grid, stored_files
from fsdpckpt.ir.checkpoint import Checkpoint, Layout, Section
from fsdpckpt.ir.optimizer import PARAM_NAMES, PARAMS
from fsdpckpt.ir.values import value_text, walk
from fsdpckpt.options import FLAVORS
from fsdpckpt.producers import PLAIN
from fsdpckpt.report.curves import layer_curves
from fsdpckpt.report.figures import (
    MAX_ROWS,
    FigureTable,
    Holdings,
    Module,
    figure,
    holdings,
    module_tree,
    more_text,
    percent,
)
from fsdpckpt.report.memory import memory_by_ranks
from fsdpckpt.report.optimizer_health import optimizer_health
from fsdpckpt.report.rank_rows import rank_rows
from fsdpckpt.report.render import render
from fsdpckpt.report.statistics import magnitudes, not_finite, statistics_table
from fsdpckpt.report.treemap import NARROW, WIDE, tiles, treemap
from fsdpckpt.storage.sources import relative_path
from fsdpckpt.text import count_text, fold, plural, setting_text, size_text
from fsdpckpt.transform.known_names import known_names
from fsdpckpt.verify.measures import buffer_keys

MAX_FIGURES = 24  # more states than any optimizer has
MAX_EXTRAS = 200  # rows
LONGEST_LIST = 8  # values of a list in the extras; of a longer one, the number

_TITLES = {Section.MODEL: "model", Section.OPTIM: "optimizer state"}


def page(described: Description) -> str:
    """The page for what ``inspect`` describes, with statistics if they were computed."""
    return render("page.html.jinja", {"command": "inspect", **_content(described)})


def _content(described: Description) -> dict[str, Any]:
    """The values for the template."""
    checkpoint = described.checkpoint
    optimizer = optimizer_health(checkpoint.optim, described) if checkpoint.optim is not None else None
    described = _named(described)
    buffers: list[str] = []
    sizes: list[dict[str, Any]] = []
    files = stored_files(checkpoint)
    problems = [problem.message for problem in checkpoint.problems]
    if described.stats is not None:
        lines, buffers = not_finite(described.tensors, described.stats, buffer_keys(checkpoint))
        problems += lines
        sizes = magnitudes(described.tensors, described.stats)[:MAX_FIGURES]
    problems += optimizer["problems"] if optimizer is not None else ()
    return {
        "name": checkpoint.source,
        "measured": described.stats is not None,
        "tiles": _tiles(described),
        "problems": problems,
        "sections": [part for section in _TITLES if (part := _section(described, section)) is not None],
        "treemaps": _treemaps(described),
        "memory": _memory(described),
        "curves": _curves(described),
        "grid": rank_rows(_files_of_ranks(checkpoint)),
        "extras": _extras(checkpoint),
        "commands": _commands(described),
        "parts": _parts(described),
        "dtypes": _dtypes(described),
        "optimizer": optimizer,
        "magnitudes": sizes,
        "buffers": "; ".join(buffers[:MAX_ROWS]),
        "statistics": statistics_table(described),
        "groups": _groups(checkpoint),
        "recognised": [
            *map(str, checkpoint.evidence),
            *(f"{note.kind}: {note.message!s}" for note in checkpoint.notes),
        ],
        "files": FigureTable(
            ["file", "bytes"],
            [(file.path, size_text(file.nbytes)) for file in files],
            frozenset({1}),
            more=more_text(len(files), "file"),
        ),
    }


def _named(described: Description) -> Description:
    """``described`` with the states of ids under the names of their parameters, where the checkpoint proves them."""
    names = {str(number): name for number, name in known_names(described.checkpoint).items()}
    tensors = [
        named._replace(param=names[named.param])
        if named.section is Section.OPTIM and named.of is None and named.param in names
        else named
        for named in described.tensors
    ]
    return replace(described, tensors=tuple(tensors))


def _treemaps(described: Description) -> list[dict[str, Any]]:
    """Of the weights and all states together, by module: one drawing for a wide screen and one for a phone."""
    held = [
        (named.param if named.of is None else f"{named.label}.{named.param}", named.tensor.nbytes)
        for named in described.tensors
        if named.section is not Section.EXTRA
    ]
    root = tiles(held)
    return [treemap(root, size, "bytes by module") for size in (WIDE, NARROW)] if root.nbytes else []


def _memory(described: Description) -> list[dict[str, Any]]:
    """For the template: what a rank would hold, on each number of ranks."""
    saved_on = max(described.checkpoint.world_size, 1)
    rows: list[dict[str, Any]] = []
    checkpoint = described.checkpoint
    for row in memory_by_ranks(described.tensors, buffer_keys(checkpoint), checkpoint.world_size):
        held = (("weights", row.weights), ("gradients", row.gradients), ("optimizer state", row.states))
        parts = [
            (f"part{number}", label, size_text(nbytes), 100 * nbytes / row.total)
            for number, (label, nbytes) in enumerate(held)
            if nbytes
        ]
        if row.total:
            total = size_text(row.total)
            rows.append({"ranks": row.ranks, "total": total, "saved": row.ranks == saved_on, "parts": parts})
    return rows


def _parts(described: Description) -> list[tuple[str, str, str, float]]:
    """For a bar: the style, the label, the size and the share of each section and dtype."""
    sums: Counter[str] = Counter()
    for named in described.tensors:
        sums[f"{named.label} {named.tensor.dtype.name}"] += named.tensor.nbytes
    whole = sum(sums.values())
    largest = sums.most_common()
    shown = [(label, nbytes) for label, nbytes in largest[:6] if nbytes]
    rest = sum(nbytes for _, nbytes in largest[6:])
    shown += [("all others", rest)] if rest else []
    return [
        (f"part{number}", label, size_text(nbytes), 100 * nbytes / whole)
        for number, (label, nbytes) in enumerate(shown)
    ]


def _curves(described: Description) -> list[dict[str, Any]]:
    """By layer: the weights, and each state that has its parameter's shape."""
    values = []
    for named, stats in zip(described.tensors, described.stats or (), strict=False):
        if named.section is Section.EXTRA or stats is None or stats.norm is None or not named.tensor.shape:
            continue
        kind = "weights" if named.section is Section.MODEL else str(named.state)
        largest = max(abs(stats.min or 0.0), abs(stats.max or 0.0))
        values.append((kind, named.param, stats.norm, named.tensor.numel, largest))
    return layer_curves(values)


def _files_of_ranks(checkpoint: Checkpoint) -> FileGrid:
    names = [relative_path(file.path, checkpoint.source) for file in stored_files(checkpoint)]
    return rank_grid(names, (), ())


def _extras(checkpoint: Checkpoint) -> FigureTable:
    """Everything beside the model and the optimizer; of a long list, how many values it has."""
    lists: dict[tuple[int | None, str], list[str]] = {}
    for rank, extra in ((None, checkpoint.extra), *enumerate(checkpoint.rank_extra)):
        for path, value in walk(extra) if extra else ():
            key, last = ".".join(map(str, path[:-1])), path[-1]
            name = key if isinstance(last, int) and key else ".".join(map(str, path))
            lists.setdefault((rank, name), []).append(value_text(value))
    rows = []
    for (rank, name), values in lists.items():
        text = ", ".join(values) if len(values) <= LONGEST_LIST else f"{plural(len(values), 'value')}, {values[0]} ..."
        rows.append(("all" if rank is None else str(rank), name, text))
    rows.sort(key=lambda row: row[0] != "all")  # those of single ranks are many and alike
    left = len(rows) - MAX_EXTRAS
    more = f"and {plural(left, 'extra')} more: inspect {flags.json!s} lists them all" if left > 0 else ""
    return FigureTable(["rank", "extra", "value"], rows[:MAX_EXTRAS], more=more)


def _commands(described: Description) -> list[tuple[str, str]]:
    """What one may do next: the purpose and the command."""
    checkpoint = described.checkpoint
    source, command = checkpoint.source, flags.command
    resumes = checkpoint.flavor != PLAIN and checkpoint.flavor in FLAVORS
    framework = (flags.for_(checkpoint.flavor),) if resumes else ()
    commands = [("check every byte", command("verify", source, *framework))]
    if described.stats is None:
        measuring = command("inspect", source, flags.stats, flags.report("report.html"))
        commands.append(("add curves by layer and search for NaN", measuring))
    if checkpoint.layout is not Layout.FULL:
        ranks = command("convert", source, "DST", flags.world_size("N"))
        commands.append(("resume on another number of ranks", ranks))
        commands.append(("make one file of it", command("convert", source, "full.pt")))
    else:
        cut = command("convert", source, "DST", flags.to("sharded"), flags.world_size("N"))
        commands.append(("cut it for N ranks", cut))
    commands.append(("compare it with another step", command("diff", source, "OTHER", flags.report("diff.html"))))
    return commands


def _tiles(described: Description) -> list[tuple[str, str]]:
    checkpoint = described.checkpoint
    files = stored_files(checkpoint)
    sections = described.sections.values()
    tensors, elements = sum(each.tensors for each in sections), sum(each.elements for each in sections)
    tiles = [
        (
            size_text(sum(each.nbytes for each in sections)),
            f"in all: {plural(tensors, 'tensor')}, {count_text(elements)} elements",
        ),
        (str(checkpoint.layout), "layout"),
        (str(checkpoint.container), "container" if checkpoint.flavor == "plain" else checkpoint.flavor),
        (count_text(checkpoint.world_size), "rank" if checkpoint.world_size == 1 else "ranks"),
        (
            size_text(sum(file.nbytes for file in files)),
            f"on disk, in {plural(len(files), 'file')}",
        ),
    ]
    for section, totals in described.sections.items():
        label = f"{section}: {plural(totals.tensors, 'tensor')}, {count_text(totals.elements)} elements"
        tiles.append((size_text(totals.nbytes), label))
    if described.key_type is not None:
        tiles.append((str(described.key_type), "optimizer keys"))
    return tiles


def _section(described: Description, section: Section) -> dict[str, Any] | None:
    root = module_tree((named.key, named.tensor) for named in described.tensors if named.section is section)
    if not root.tensors:
        return None
    grid = holdings(root, described.checkpoint.world_size)
    title = _TITLES[section]
    return {
        "title": title,
        "ranks": len(grid.nbytes),
        "ranks_in_row": grid.ranks_in_row,
        "figure": figure(root, grid, f"who holds what of the {title}"),
        "rank_table": _rank_table(grid, root),
        "module_table": _module_table(root),
    }


def _rank_table(grid: Holdings, root: Module) -> FigureTable:
    """Every rank; if there are very many, those with the most and the fewest bytes."""
    order = list(range(len(grid.nbytes)))
    more = ""
    if len(order) > MAX_ROWS:
        by_size = np.argsort(grid.nbytes, kind="stable").tolist()
        order = sorted(by_size[: MAX_ROWS // 2] + by_size[-MAX_ROWS // 2 :])
        left = len(grid.nbytes) - len(order)
        more = f"{plural(left, 'rank')} between the largest and the smallest are left out"
    rows = [
        (
            rank,
            size_text(int(grid.nbytes[rank])),
            percent(int(grid.nbytes[rank]), root.nbytes),
            count_text(int(grid.chunks[rank])),
        )
        for rank in order
    ]
    return FigureTable(
        ["rank", "holds", "share", "chunks"], rows, frozenset({0, 1, 2, 3}), more=more, shares=frozenset({2})
    )


def _module_table(root: Module) -> FigureTable:
    """Modules down to the layers and their parts, in the model's order, layers of equal size in one row."""
    modules = list(_modules(root, 2))
    sized = [(module, module.nbytes, module.elements, module.tensors, _tensor_text(module)) for module in modules]
    folded = fold((module.path, tuple(rest)) for module, *rest in sized)
    left = len(folded) - MAX_ROWS
    if left > 0:
        by_size = sorted(folded, key=lambda row: -modules[row.members[0]].nbytes * len(row.members))
        largest = by_size[:MAX_ROWS]
        folded = sorted(largest, key=lambda row: row.members[0])
    rows = []
    for row in folded:
        _, nbytes, elements, tensors, tensor = sized[row.members[0]]
        times = len(row.members)
        rows.append(
            (
                f"{row.key}  x{count_text(times)}" if times > 1 else row.key,
                size_text(nbytes),
                size_text(nbytes * times) if times > 1 else "",
                percent(nbytes * times, root.nbytes),
                count_text(elements),
                count_text(tensors),
                tensor,
            )
        )
    headings = ["module", "bytes", "in all", "share", "elements", "tensors", "tensor"]
    more = f"and {plural(left, 'smaller module')}" if left > 0 else ""
    return FigureTable(headings, rows, frozenset({1, 2, 3, 4, 5}), "size by module", more, shares=frozenset({3}))


def _modules(node: Module, depth: int) -> Iterator[Module]:
    """The modules below ``node``: ``depth`` levels of them, all layers, and one level below these.

    A layer is a module with a number for its name. A module with only one child is replaced by it.
    """
    for first in node.children.values():
        child = first
        while len(child.children) == 1 and child.tensor is None:
            (child,) = child.children.values()
        numbered = child.name.isdecimal()
        if depth > 0 or numbered:
            yield child
            yield from _modules(child, 1 if numbered else depth - 1)


def _tensor_text(module: Module) -> str:
    tensor = module.tensor
    return f"{tensor.dtype.name} {list(tensor.shape)} {tensor.placement}" if tensor is not None else ""


def _dtypes(described: Description) -> FigureTable:
    sums: dict[tuple[str, str], list[int]] = {}
    for named in described.tensors:
        row = sums.setdefault((str(named.section), named.tensor.dtype.name), [0, 0, 0])
        for at, value in enumerate((1, named.tensor.numel, named.tensor.nbytes)):
            row[at] += value
    whole = sum(row[2] for row in sums.values())
    rows = [
        (section, dtype, count_text(number), count_text(elements), size_text(nbytes), percent(nbytes, whole))
        for (section, dtype), (number, elements, nbytes) in sums.items()
    ]
    headings = ["section", "dtype", "tensors", "elements", "bytes", "share"]
    return FigureTable(headings, rows, frozenset({2, 3, 4, 5}), shares=frozenset({5}))


def _groups(checkpoint: Checkpoint) -> FigureTable:
    """The settings of each param group."""
    groups = checkpoint.groups
    rows = []
    for number, group in enumerate(groups):
        settings = [(key, value) for key, value in group.settings.items() if key not in (PARAMS, PARAM_NAMES)]
        hyper = [f"{key!s}={setting_text(key, value_text(value))}" for key, value in settings]
        rows.append((number, count_text(len(group.members or ())), ", ".join(hyper)))
    headings = ["group", "parameters", "settings"]
    return FigureTable(headings, rows, frozenset({0, 1}), more=more_text(len(rows), "group"), longest=2000)
