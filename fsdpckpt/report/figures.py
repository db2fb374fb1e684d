"""Computes the page's figures: modules to scale, below them what each rank holds, and small histograms.

The tensors of one section become a tree of modules along one axis of bytes (``module_tree``), and a grid shows which
ranks hold which part of that axis (``holdings``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fsdpckpt.ir.tensors import Int64Array, Tensor
from fsdpckpt.report import Spread
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
MOST_ROWS = 128  # rows of the grid: more ranks share rows


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

    def leaves(self) -> Iterator[Module]:
        """The nodes of all tensors below, in the order of the axis."""
        if self.tensor is not None:
            yield self
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


@dataclass(frozen=True, slots=True, eq=False)
class _Leaf:
    """One tensor between ``left`` and ``right`` on the axis, in columns; it touches ``first`` .. ``last``."""

    tensor: Tensor
    left: float
    right: float
    first: int
    last: int


def holdings(root: Module, world_size: int) -> Holdings:
    """The grid of everything under ``root``. A replica counts in ``share`` for each rank, and once in ``covered``."""
    leaves = list(_leaves(root))
    ranks = max([world_size, 1, *(int(leaf.tensor.chunks.rank.max()) + 1 for leaf in leaves)])
    in_row = -(-ranks // MOST_ROWS)
    share, covered = np.zeros((-(-ranks // in_row), COLUMNS)), np.zeros(COLUMNS)
    nbytes, chunks = np.zeros(ranks), np.zeros(ranks, np.int64)
    by_ndim: dict[int, list[_Leaf]] = {}
    for leaf in leaves:
        by_ndim.setdefault(leaf.tensor.ndim, []).append(leaf)
    for group in by_ndim.values():
        rank = np.concatenate([leaf.tensor.chunks.rank for leaf in group])
        counts = np.array([len(leaf.tensor.chunks) for leaf in group])
        itemsize = np.array([leaf.tensor.dtype.itemsize for leaf in group])
        held = np.concatenate([leaf.tensor.chunks.size for leaf in group]).prod(axis=1) * np.repeat(itemsize, counts)
        nbytes += np.bincount(rank, held, ranks)
        chunks += np.bincount(rank[held > 0], minlength=ranks)
        _add_narrow(group, rank // in_row, held * (COLUMNS / max(root.nbytes, 1)), counts, share, covered)
    for leaf in leaves:
        if leaf.last - leaf.first > 1:
            parts = _parts(leaf)
            np.add.at(share[:, leaf.first : leaf.last], leaf.tensor.chunks.rank // in_row, parts)
            covered[leaf.first : leaf.last] += np.minimum(parts.sum(axis=0), _overlap(leaf))
    return Holdings(np.minimum(share, 1.0), np.minimum(covered, 1.0), nbytes, chunks, in_row)


def _leaves(root: Module) -> Iterator[_Leaf]:
    scale = COLUMNS / root.nbytes if root.nbytes else 0.0
    for leaf in root.leaves():
        if leaf.tensor is not None and len(leaf.tensor.chunks):
            left, right = leaf.begin * scale, leaf.end * scale
            first = min(int(left), COLUMNS - 1)
            yield _Leaf(leaf.tensor, left, right, first, min(max(ceil(right), first + 1), COLUMNS))


def _add_narrow(
    group: list[_Leaf],
    rows: Int64Array,
    width: FloatArray,
    counts: Int64Array,
    share: FloatArray,
    covered: FloatArray,
) -> None:
    """Add the leaves that touch only one column, all at once. ``width``: of each chunk, in columns."""
    narrow = np.array([leaf.last - leaf.first == 1 for leaf in group])
    first = np.array([leaf.first for leaf in group])
    number = np.repeat(np.arange(len(group)), counts)
    of_narrow = narrow[number]
    cell = rows[of_narrow] * COLUMNS + first[number[of_narrow]]
    share += np.bincount(cell, width[of_narrow], share.size).reshape(share.shape)
    held = np.bincount(number[of_narrow], width[of_narrow], len(group))
    whole = np.array([leaf.right - leaf.left for leaf in group])
    covered += np.bincount(first, np.minimum(held, whole) * narrow, COLUMNS)


def _overlap(leaf: _Leaf) -> FloatArray:
    columns = np.arange(leaf.first, leaf.last, dtype=np.float64)
    overlap: FloatArray = np.clip(np.minimum(leaf.right, columns + 1) - np.maximum(leaf.left, columns), 0.0, None)
    return overlap


def _parts(leaf: _Leaf) -> FloatArray:
    """(chunks, columns): how much of each column each chunk fills.

    Chunks are drawn from their start to their end along the first dimension in which any of them is cut.
    """
    tensor, chunks, width = leaf.tensor, leaf.tensor.chunks, leaf.right - leaf.left
    begin, end = np.zeros(len(chunks)), np.ones(len(chunks))
    cut = next((k for k, n in enumerate(tensor.shape) if (chunks.size[:, k] != n).any()), None)
    if cut is not None:
        begin = chunks.start[:, cut] / tensor.shape[cut]
        end = begin + chunks.size[:, cut] / tensor.shape[cut]
    columns = np.arange(leaf.first, leaf.last, dtype=np.float64)
    low = np.maximum((leaf.left + begin * width)[:, None], columns)
    high = np.minimum((leaf.left + end * width)[:, None], columns + 1)
    # A chunk that is also cut along another dimension fills its stretch only in part.
    filled = chunks.size.prod(axis=1) / np.maximum((end - begin) * prod(tensor.shape), 1.0)
    parts: FloatArray = np.clip(high - low, 0.0, None) * np.minimum(filled, 1.0)[:, None]
    return parts


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


@dataclass(frozen=True, slots=True)
class Figure:
    """Modules, outermost on top, over one row for each rank (or a few of them) on the same axis of bytes.

    ``cells``: (shade, path) of what ranks hold; ``holes``: the path of what no rank holds; ``names``: (y, label).
    """

    title: str
    width: int
    height: int
    left: int
    axis: int
    top: int
    depth: int
    modules: list[Rectangle]
    cells: list[tuple[int, str]]
    holes: str
    names: list[tuple[int, str]]
    bars: list[Rectangle]


def figure(root: Module, held: Holdings, title: str) -> Figure:
    """The drawing of one section."""
    levels, modules = _icicle(root)
    top = levels * LEVEL_HEIGHT + 8
    rows = len(held.share)
    pitch = max(min(22, 420 // rows), 3)
    names, bars = _ranks(held, pitch)
    return Figure(
        title,
        LABELS + WIDTH + BARS,
        top + rows * pitch + 26,
        LABELS,
        WIDTH,
        top,
        rows * pitch,
        modules,
        _cells(held, pitch),
        _holes(held, rows * pitch),
        names,
        bars,
    )


def _icicle(root: Module) -> tuple[int, list[Rectangle]]:
    """(number of levels, their rectangles), each with its name if that fits."""
    scale = WIDTH / root.nbytes if root.nbytes else 0.0
    boxes: list[Rectangle] = []
    nodes = list(root.children.values())
    level = 0
    while nodes and level < DEPTH:
        wide = [(number, node) for number, node in enumerate(nodes) if node.nbytes * scale >= NARROWEST]
        boxes += [_block(node, level, number, scale) for number, node in wide]
        nodes = [child for _, node in wide for child in node.children.values()]
        level += 1
    return level, boxes


def _block(node: Module, level: int, number: int, scale: float) -> Rectangle:
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


def _cells(held: Holdings, pitch: int) -> list[tuple[int, str]]:
    """One path for each shade; a run of equal cells is one box in it."""
    shades = np.ceil(held.share * LEVELS - 1e-9).astype(np.int64)
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


def _holes(held: Holdings, y: int) -> str:
    """The path of marks below the ranks for columns with bytes that no rank holds; "" for none."""
    step = WIDTH / COLUMNS
    missing = (held.covered < 1 - 1e-6).astype(np.int64)
    if not held.share.any():
        return ""
    return "".join(
        f"M{a * step:g} {y + 2}h{(b - a) * step:g}v6h-{(b - a) * step:g}z" for a, b, bad in _runs(missing) if bad
    )


def _ranks(held: Holdings, pitch: int) -> tuple[list[tuple[int, str]], list[Rectangle]]:
    """The names of the ranks on the left, if there is room, and their bytes as bars on the right."""
    rows, in_row = len(held.share), held.ranks_in_row
    most = float(held.nbytes.max(initial=0.0)) or 1.0
    every = max(-(-14 // pitch), 1)
    names: list[tuple[int, str]] = []
    bars: list[Rectangle] = []
    for row in range(rows):
        first, last = row * in_row, min((row + 1) * in_row, len(held.nbytes)) - 1
        label = f"rank {first}" if in_row == 1 else f"{first}-{last}"
        if row % every == 0:
            names.append((row * pitch + min(pitch, 15), label))
        mean = float(held.nbytes[first : last + 1].mean())
        tooltip = f"{label}: {size_text(int(mean))}{' each' if in_row > 1 else ''}"
        bars.append(Rectangle(LABELS + WIDTH + 10, row * pitch, mean / most * (BARS - 20), pitch - 1, tooltip))
    return names, bars


def histogram(spread: Spread) -> list[Rectangle]:
    """Bars: numbers of tensors by the decimal exponent of their root mean square."""
    keys = range(min(spread.bins), max(spread.bins) + 1) if spread.bins else range(0)
    bars = [(f"1e{key}", spread.bins.get(key, 0)) for key in keys]
    if spread.zeros:
        bars.insert(0, ("0", spread.zeros))
    most, total = max((number for _, number in bars), default=1), sum(number for _, number in bars)
    pitch = min(44.0, 420 / max(len(bars), 1))
    boxes = []
    for place, (label, number) in enumerate(bars):
        tall = 80 * number / most
        tooltip = f"{label}: {plural(number, 'tensor')}, {percent(number, total)}"
        boxes.append(
            Rectangle(
                8 + place * pitch, 100 - tall, pitch - 3, tall, tooltip, "bar", label if pitch >= 24 else "", number
            )
        )
    return boxes


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


LONGEST = 160  # characters of one text: a key may have a megabyte


def clipped(text: object, longest: int = LONGEST) -> str:
    """``text`` without its middle if it is long."""
    shown = str(text)
    if len(shown) <= longest:
        return shown
    return f"{shown[: longest // 2]} … {shown[-longest // 2 + 3 :]}"
