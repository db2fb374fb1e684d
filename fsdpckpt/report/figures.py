"""Makes the page's figures and tables: modules to scale, below them what each rank holds, and small histograms.

The tensors of one section become a tree of modules along one axis of bytes (``module_tree``), and a grid shows which
ranks hold which part of that axis (``holdings``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fsdpckpt.ir.coverage import flaws
from fsdpckpt.ir.tensors import Boxes, Int64Array, Tensor
from fsdpckpt.text import count_text, plural, size_text

WIDTH = 900  # units of the drawing: the axis of bytes
LABELS = 76  # left of the axis: names of ranks
BARS = 140  # right of the axis: bytes of each rank
LEVELS = 5  # shades of a cell: any share above zero is visible
DEPTH = 5  # levels of modules that are drawn
NARROWEST = 1.5  # units: narrower modules are not drawn
LEVEL_HEIGHT = 20
LETTER = 6.6  # units: the width of one letter, roughly
DEEPEST = 12  # path segments that become levels; the rest of a key stays one name
COLUMNS = 600  # columns of the grid: the axis of bytes of a section
GRID_ROWS = 128  # rows of the grid: more ranks share rows
MAX_ROWS = 300  # rows of a table; the page says how many more there are
LONGEST = 160  # characters of one text: a key may have a megabyte


@dataclass(slots=True)
class Module:
    """A module, or one of its tensors (``tensor``). ``begin``, ``end``: its bytes on the section's axis."""

    path: str
    tensor: Tensor | None = None
    begin: int = 0
    end: int = 0
    tensors: int = 0
    elements: int = 0
    children: dict[str, Module] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def leaves(self) -> Iterator[tuple[int, Tensor]]:
        """Each tensor, and where its bytes begin on the axis."""
        if self.tensor is not None:
            yield self.begin, self.tensor
        for child in self.children.values():
            yield from child.leaves()


def module_tree(named: Iterable[tuple[str, Tensor]]) -> Module:
    """The root of the tree of all (dotted name, tensor), in the order in which they first appear."""
    root = Module("")
    for name, tensor in named:
        node, path = root, ""
        for word in name.split(".", DEEPEST - 1):
            path = f"{path}.{word}" if path else word
            node = node.children.setdefault(word, Module(path))
        node.tensor = tensor
    _lay_out(root, 0)
    return root


def _lay_out(node: Module, at: int) -> int:
    node.begin = at
    if node.tensor is not None:
        at += node.tensor.nbytes
        node.tensors, node.elements = 1, node.tensor.numel
    for child in node.children.values():
        at = _lay_out(child, at)
        node.tensors += child.tensors
        node.elements += child.elements
    node.end = at
    return at


FloatArray: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Holdings:
    """``share`` (rows, COLUMNS): the fraction, 0 to 1, of each column's bytes that the ranks of a row hold.

    ``covered`` (COLUMNS,): the fraction that all ranks hold together. ``nbytes``, ``chunks`` (ranks,): what each rank
    holds. ``ranks_in_row``: how many ranks share a row, 1 if there are few.
    """

    share: FloatArray
    covered: FloatArray
    nbytes: FloatArray
    chunks: Int64Array
    ranks_in_row: int


def holdings(root: Module, world_size: int) -> Holdings:
    """The grid of everything under ``root``. A replica counts in ``share`` for each rank, and once in ``covered``."""
    scale = COLUMNS / root.nbytes if root.nbytes else 0.0
    by_layout: dict[tuple[tuple[int, ...], Boxes], _Fractions] = {}
    stretches = []
    covered = np.ones(COLUMNS)
    for begin, tensor in root.leaves():
        chunks = tensor.chunks
        layout = tensor.shape, chunks.boxes
        if layout not in by_layout:
            by_layout[layout] = _fractions(tensor)
        fractions = by_layout[layout]
        left, width = begin * scale, tensor.nbytes * scale
        low, high = left + fractions.low * width, left + fractions.high * width
        stretches.append((chunks.rank, low, high, fractions.filled, fractions.elements * tensor.dtype.itemsize))
        if fractions.has_flaws:
            whole = _fill(np.zeros(1, np.int64), np.array([left]), np.array([left + width]), np.ones(1), 1)
            filled = _fill(np.zeros(len(chunks), np.int64), low, high, fractions.filled, 1)
            covered -= (whole - np.minimum(filled, whole))[0]
    rank, low, high, filled, nbytes = (np.concatenate(column) for column in zip(*stretches, strict=True))
    ranks = max(world_size, int(rank.max(initial=0)) + 1)
    in_row = -(-ranks // GRID_ROWS)
    share = _fill(rank // in_row, low, high, filled, -(-ranks // in_row)).clip(0.0, 1.0)
    rank_chunks = np.bincount(rank[nbytes > 0], minlength=ranks)
    rank_nbytes = np.zeros(ranks) + np.bincount(rank, nbytes, ranks)
    return Holdings(share, covered, rank_nbytes, rank_chunks, in_row)


@dataclass(frozen=True, slots=True, eq=False)
class _Fractions:
    """Where the chunks of a tensor begin and end in it, from 0 to 1 along the first dimension in which any is cut.

    ``filled``: the part of that stretch that a chunk holds: less than 1 if it is cut along another dimension as well.
    """

    low: FloatArray
    high: FloatArray
    filled: FloatArray
    elements: Int64Array
    has_flaws: bool


def _fractions(tensor: Tensor) -> _Fractions:
    chunks = tensor.chunks
    low, high = np.zeros(len(chunks)), np.ones(len(chunks))
    cut = next((k for k, n in enumerate(tensor.shape) if (chunks.size[:, k] != n).any()), None)
    if cut is not None and tensor.shape[cut]:
        low = (chunks.start[:, cut] / tensor.shape[cut]).clip(0.0, 1.0)
        high = ((chunks.start[:, cut] + chunks.size[:, cut]) / tensor.shape[cut]).clip(0.0, 1.0)
    elements: Int64Array = chunks.size.prod(axis=1)
    filled = np.minimum(elements / np.maximum((high - low) * prod(tensor.shape), 1.0), 1.0)
    return _Fractions(low, high, filled, elements, bool(flaws(tensor)))


def _fill(row: Int64Array, low: FloatArray, high: FloatArray, filled: FloatArray, rows: int) -> FloatArray:
    """(rows, COLUMNS): the sum, in each column, of stretches from ``low`` to ``high`` of which ``filled`` is held.

    The running sum of a row rises at each ``low`` and falls at each ``high``. An edge at 3.4 is 0.6 of a step in column
    3 and 0.4 of one in column 4.
    """
    steps = np.zeros(rows * (COLUMNS + 2))
    for edge, height in ((low, filled), (high, -filled)):
        column = edge.astype(np.int64)
        later = (edge - column) * height
        cell = row * (COLUMNS + 2) + column
        steps += np.bincount(cell, height - later, len(steps)) + np.bincount(cell + 1, later, len(steps))
    sums: FloatArray = steps.reshape(rows, COLUMNS + 2).cumsum(axis=1)
    return sums[:, :COLUMNS]


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A rectangle. ``kind``: its class in the style sheet; ``label``: text in it, or below it in a histogram."""

    x: float
    y: float
    width: float
    height: float
    tooltip: str
    kind: str = "bar"
    label: str = ""
    count: int = 0


def figure(root: Module, grid: Holdings, title: str) -> dict[str, Any]:
    """For the template, the drawing of one section: its modules, outermost on top, over one row for each rank (or a few
    of them) on the same axis of bytes.

    ``cells``: (shade, path) of what ranks hold; ``holes``: the path of what no rank holds; ``names``: (y, label).
    """
    levels, modules = _module_rectangles(root)
    grid_top = levels * LEVEL_HEIGHT + 8
    rows = len(grid.share)
    pitch = max(min(22, 420 // rows), 3)
    names, bars = _ranks(grid, pitch)
    return {
        "title": title,
        "width": LABELS + WIDTH + BARS,
        "height": grid_top + rows * pitch + 26,
        "margin": LABELS,
        "axis_width": WIDTH,
        "grid_top": grid_top,
        "grid_height": rows * pitch,
        "modules": modules,
        "cells": _cells(grid, pitch),
        "holes": _holes(grid, rows * pitch),
        "names": names,
        "bars": bars,
    }


def _module_rectangles(root: Module) -> tuple[int, list[Rectangle]]:
    """(number of levels, their rectangles), each with its name if that fits."""
    scale = WIDTH / root.nbytes if root.nbytes else 0.0
    rectangles: list[Rectangle] = []
    nodes = list(root.children.values())
    level = 0
    while nodes and level < DEPTH:
        wide = [(number, node) for number, node in enumerate(nodes) if node.nbytes * scale >= NARROWEST]
        rectangles += [_rectangle(node, level, number, scale) for number, node in wide]
        nodes = [child for _, node in wide for child in node.children.values()]
        level += 1
    return level, rectangles


def _rectangle(node: Module, level: int, number: int, scale: float) -> Rectangle:
    width = node.nbytes * scale
    size, elements = size_text(node.nbytes), count_text(node.elements)
    tooltip = f"{clipped(node.path)}: {size}, {elements} elements, {plural(node.tensors, 'tensor')}"
    kind = "tensor" if node.tensor is not None and not node.children else f"module{number % 2}"
    letters = int((width - 6) / LETTER)
    label = ""
    if letters >= 2:
        label = node.name if len(node.name) <= letters else node.name[: letters - 1] + "…"
    shown = max(width - 0.6, 0.6)
    return Rectangle(node.begin * scale, level * LEVEL_HEIGHT, shown, LEVEL_HEIGHT - 1, tooltip, kind, label)


def _cells(grid: Holdings, pitch: int) -> list[tuple[int, str]]:
    """One path for each shade; a run of equal cells is one box in it."""
    shades = np.ceil(grid.share * LEVELS - 1e-9).astype(np.int64)
    step = WIDTH / COLUMNS
    paths: list[list[str]] = [[] for _ in range(LEVELS + 1)]
    for row, cells in enumerate(shades):
        for first, last, shade in _runs(cells):
            if shade:
                x, width = first * step, (last - first) * step
                paths[shade].append(f"M{x:g} {row * pitch}h{width:g}v{pitch - 1}h-{width:g}z")
    return [(shade, "".join(boxes)) for shade, boxes in enumerate(paths) if boxes]


def _runs(cells: npt.NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """(first, last + 1, value) of each run of equal cells."""
    edges = np.flatnonzero(np.diff(cells)) + 1
    bounds = [0, *edges.tolist(), len(cells)]
    return [(a, b, int(cells[a])) for a, b in pairwise(bounds)]


def _holes(grid: Holdings, y: int) -> str:
    """The path of marks below the ranks for columns with bytes that no rank holds; "" for none."""
    step = WIDTH / COLUMNS
    missing = (grid.covered < 1 - 1e-6).astype(np.int64)
    if not grid.share.any():
        return ""
    return "".join(
        f"M{a * step:g} {y + 2}h{(b - a) * step:g}v6h-{(b - a) * step:g}z" for a, b, bad in _runs(missing) if bad
    )


def _ranks(grid: Holdings, pitch: int) -> tuple[list[tuple[int, str]], list[Rectangle]]:
    """The names of the ranks on the left, if there is room, and their bytes as bars on the right."""
    rows, in_row = len(grid.share), grid.ranks_in_row
    most = float(grid.nbytes.max(initial=0.0)) or 1.0
    every = max(-(-14 // pitch), 1)
    names: list[tuple[int, str]] = []
    bars: list[Rectangle] = []
    for row in range(rows):
        first, last = row * in_row, min((row + 1) * in_row, len(grid.nbytes)) - 1
        label = f"rank {first}" if in_row == 1 else f"{first}-{last}"
        if row % every == 0:
            names.append((row * pitch + min(pitch, 15), label))
        mean = float(grid.nbytes[first : last + 1].mean())
        tooltip = f"{label}: {size_text(int(mean))}{' each' if in_row > 1 else ''}"
        bars.append(Rectangle(LABELS + WIDTH + 10, row * pitch, mean / most * (BARS - 20), pitch - 1, tooltip))
    return names, bars


def histogram(exponents: Mapping[int, int], zeros: int) -> list[Rectangle]:
    """Bars: numbers of tensors by the decimal exponent of their root mean square, after those that are all 0."""
    keys = range(min(exponents), max(exponents) + 1) if exponents else range(0)
    counts = [("0", zeros)] * bool(zeros) + [(f"1e{key}", exponents.get(key, 0)) for key in keys]
    most, total = max((count for _, count in counts), default=1), sum(count for _, count in counts)
    pitch = min(44.0, 420 / max(len(counts), 1))
    bars = []
    for place, (label, count) in enumerate(counts):
        height = 80 * count / most
        tooltip = f"{label}: {plural(count, 'tensor')}, {percent(count, total)}"
        shown = label if pitch >= 24 else ""
        bars.append(Rectangle(8 + place * pitch, 100 - height, pitch - 3, height, tooltip, "bar", shown, count))
    return bars


@dataclass(frozen=True, slots=True)
class FigureTable:
    """Texts, which the template escapes. ``right``: columns of numbers; ``label``: for screen readers.

    ``more``: what the rows leave out. ``longest``: the largest number of characters shown of a cell.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[object]]
    right: frozenset[int] = frozenset()
    label: str = ""
    more: str = ""
    longest: int = LONGEST
    shares: frozenset[int] = frozenset()  # columns of percentages, drawn as bars behind them


def more_text(rows: int, word: str, hint: str = "") -> str:
    """The note on the rows that a table of this length leaves out."""
    return f"and {plural(rows - MAX_ROWS, word)} more{hint}" if rows > MAX_ROWS else ""


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def clipped(text: object, longest: int = LONGEST) -> str:
    """``text`` without its middle if it is long."""
    shown = str(text)
    if len(shown) <= longest:
        return shown
    return f"{shown[: longest // 2]} … {shown[-longest // 2 + 3 :]}"
