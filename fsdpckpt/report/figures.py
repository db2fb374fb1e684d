"""The drawings of the page as SVG: modules to scale over who holds them, and small histograms."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fsdpckpt.report.health import Spread
from fsdpckpt.report.holdings import COLUMNS, Holdings
from fsdpckpt.report.modules import Module
from fsdpckpt.report.text import clipped, escaped, percent
from fsdpckpt.text import count_text, plural, size_text

__all__ = ["figure", "histogram"]

WIDTH = 900  # of the axis of bytes, in units of the drawing
LABELS = 76  # left of it: ranks
BARS = 140  # right of it: bytes of each rank
LEVELS = 5  # shades of a cell: any share above nothing is visible
DEPTH = 5  # levels of modules that are drawn
NARROWEST = 1.5  # units: what is narrower is not drawn on its own
LEVEL_HEIGHT = 20
LETTER = 6.6  # units of one letter, about


def figure(root: Module, held: Holdings, title: str) -> str:
    """Modules, outermost on top, over one row for each rank (or a few of them) on the same axis of bytes."""
    levels, bars = _icicle(root)
    top = levels * LEVEL_HEIGHT + 8
    rows = len(held.share)
    pitch = max(min(22, 420 // rows), 3)
    height = top + rows * pitch + 26
    parts = [
        f'<svg viewBox="0 0 {LABELS + WIDTH + BARS} {height}" role="img" aria-label="{escaped(title)}">',
        f"<title>{escaped(title)}</title>",
        f'<g transform="translate({LABELS} 0)">',
        *bars,
        f'<g transform="translate(0 {top})">',
        f'<rect class="ground" width="{WIDTH}" height="{rows * pitch}"/>',
        *_cells(held, pitch),
        *_holes(held, rows * pitch),
        "</g></g>",
        f'<g transform="translate(0 {top})">',
        *_ranks(held, pitch),
        "</g></svg>",
    ]
    return "\n".join(parts) + "\n"


def _icicle(root: Module) -> tuple[int, list[str]]:
    """(levels drawn, their rectangles), a text where one fits."""
    scale = WIDTH / root.nbytes if root.nbytes else 0.0
    parts: list[str] = []
    nodes = list(root.children.values())
    level = 0
    while nodes and level < DEPTH:
        parts += [part for number, node in enumerate(nodes) for part in _block(node, level, number, scale)]
        wide = [node for node in nodes if node.nbytes * scale >= NARROWEST]
        nodes = [child for node in wide for child in node.children.values()]
        level += 1
    return level, parts


def _block(node: Module, level: int, number: int, scale: float) -> list[str]:
    width = node.nbytes * scale
    if width < NARROWEST:
        return []
    x, y = node.begin * scale, level * LEVEL_HEIGHT
    size, elements = size_text(node.nbytes), count_text(node.elements)
    told = f"{clipped(node.path)}: {size}, {elements} elements, {plural(node.tensors, 'tensor')}"
    kind = "tensor" if node.tensor is not None and not node.children else f"module{number % 2}"
    parts = [
        f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{max(width - 0.6, 0.6):.1f}" height="{LEVEL_HEIGHT - 1}">'
        f"<title>{escaped(told)}</title></rect>"
    ]
    letters = int((width - 6) / LETTER)
    name = node.name
    if letters >= 2:
        shown = name if len(name) <= letters else name[: letters - 1] + "…"
        parts.append(f'<text x="{x + 3:.1f}" y="{y + 14}">{escaped(shown)}</text>')
    return parts


def _cells(held: Holdings, pitch: int) -> list[str]:
    """One path for each shade; runs of equal cells are one box of it."""
    shades = np.ceil(held.share * LEVELS - 1e-9).astype(np.int64)
    step = WIDTH / COLUMNS
    paths: list[list[str]] = [[] for _ in range(LEVELS + 1)]
    for row, cells in enumerate(shades):
        for first, last, shade in _runs(cells):
            if shade:
                x, width = first * step, (last - first) * step
                paths[shade].append(f"M{x:g} {row * pitch}h{width:g}v{pitch - 1}h-{width:g}z")
    return [f'<path class="s{shade}" d="{"".join(boxes)}"/>' for shade, boxes in enumerate(paths) if boxes]


def _runs(cells: npt.NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """(first, behind the last, value) of each run of equal cells."""
    edges = np.flatnonzero(np.diff(cells)) + 1
    bounds = [0, *edges.tolist(), len(cells)]
    return [(a, b, int(cells[a])) for a, b in pairwise(bounds)]


def _holes(held: Holdings, y: int) -> list[str]:
    """Columns of which some bytes are nowhere, marked below the ranks."""
    step = WIDTH / COLUMNS
    missing = (held.together < 1 - 1e-6).astype(np.int64)
    if not held.share.any():
        return []
    boxes = [f"M{a * step:g} {y + 2}h{(b - a) * step:g}v6h-{(b - a) * step:g}z" for a, b, bad in _runs(missing) if bad]
    return [f'<path class="bad" d="{"".join(boxes)}"><title>held by no rank</title></path>'] if boxes else []


def _ranks(held: Holdings, pitch: int) -> list[str]:
    """The numbers of the ranks on the left, where there is room, and their bytes as bars on the right."""
    rows, in_row = len(held.share), held.ranks_in_row
    most = float(held.nbytes.max(initial=0.0)) or 1.0
    every = max(-(-14 // pitch), 1)
    parts: list[str] = []
    for row in range(rows):
        first, last = row * in_row, min((row + 1) * in_row, len(held.nbytes)) - 1
        label = f"rank {first}" if in_row == 1 else f"{first}-{last}"
        if row % every == 0:
            parts.append(f'<text x="{LABELS - 8}" y="{row * pitch + min(pitch, 15)}" class="end">{label}</text>')
        mean = float(held.nbytes[first : last + 1].mean())
        told = f"{label}: {size_text(int(mean))}{' each' if in_row > 1 else ''}"
        width = mean / most * (BARS - 20)
        parts.append(
            f'<rect class="bar" x="{LABELS + WIDTH + 10}" y="{row * pitch}" width="{width:.1f}" height="{pitch - 1}">'
            f"<title>{escaped(told)}</title></rect>"
        )
    return parts


def histogram(spread: Spread) -> str:
    """Tensors by the decimal exponent of their root mean square, with the numbers as text below."""
    keys = range(min(spread.bins), max(spread.bins) + 1) if spread.bins else range(0)
    bars = [(f"1e{key}", spread.bins.get(key, 0)) for key in keys]
    if spread.zeros:
        bars.insert(0, ("0", spread.zeros))
    most, total = max((number for _, number in bars), default=1), sum(number for _, number in bars)
    pitch = min(44.0, 420 / max(len(bars), 1))
    parts = [f'<svg class="small" viewBox="0 0 440 130" role="img" aria-label="{escaped(spread.title)}">']
    for place, (label, number) in enumerate(bars):
        x, tall = 8 + place * pitch, 80 * number / most
        told = f"{label}: {plural(number, 'tensor')}, {percent(number, total)}"
        parts.append(
            f'<rect class="bar" x="{x:.1f}" y="{100 - tall:.1f}" width="{pitch - 3:.1f}" height="{tall:.1f}">'
            f"<title>{escaped(told)}</title></rect>"
        )
        if pitch >= 24:
            parts.append(f'<text class="mid" x="{x + pitch / 2 - 1.5:.1f}" y="{96 - tall:.1f}">{number}</text>')
            parts.append(f'<text class="mid" x="{x + pitch / 2 - 1.5:.1f}" y="116">{escaped(label)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
