"""Draws modules as a tree map: each is a rectangle as large as its bytes, within that of the module that holds it.

Rectangles are laid out as nearly square as possible (Bruls, Huizing and van Wijk, "Squarified Treemaps").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdpckpt.report.figures import LETTER, Rectangle, clipped
from fsdpckpt.text import plural, size_text

# For a wide screen and for a phone, whose letters would be too small in a narrowed drawing.
WIDE, NARROW = (1000, 420), (350, 460)
MAX_RECTANGLES = 500
_DEEPEST = 12  # words of a name that become levels
_HEADER = 15  # units: the name of a module above what it holds
_LEAST = 9.0  # units: what is narrower or lower is not divided
_GAP = 1.5


@dataclass(slots=True)
class Tile:
    """A module or a tensor. ``nbytes``: of all that it holds."""

    path: str
    nbytes: int = 0
    tensors: int = 0
    children: dict[str, Tile] = field(default_factory=dict)


def tiles(named: Iterable[tuple[str, int]]) -> Tile:
    """The root of the tree of all (dotted name, bytes)."""
    root = Tile("")
    for name, nbytes in named:
        node = root
        node.nbytes += nbytes
        node.tensors += 1
        for word in name.split(".", _DEEPEST - 1):
            path = f"{node.path}.{word}" if node.path else word
            node = node.children.setdefault(word, Tile(path))
            node.nbytes += nbytes
            node.tensors += 1
    return root


def treemap(root: Tile, size: tuple[int, int], title: str) -> dict[str, Any]:
    """For the template."""
    rectangles: list[Rectangle] = []
    width, height = size
    # Level by level: if there are too many modules, the outer ones are all drawn.
    level = [(root, 0.0, 0.0, float(width), float(height), 0)]
    while level:
        inner = []
        for node, x, y, wide, high, depth in level:
            for child, box in _laid_out(node, x, y, wide, high):
                if len(rectangles) == MAX_RECTANGLES:
                    break
                name = child.path[len(node.path) + 1 :] if node.path else child.path
                rectangle = _rectangle(child, name, box, depth, root.nbytes)
                rectangles.append(rectangle)
                left, top, across, down = box
                header = _HEADER if rectangle.label else 2
                if child.children and across > 3 * _LEAST and down > header + 2 * _LEAST:
                    inner.append((child, left + 2, top + header, across - 4, down - header - 2, depth + 1))
        level = inner
    return {"title": title, "width": width, "height": height, "rectangles": rectangles}


_Box = tuple[float, float, float, float]


def _laid_out(node: Tile, x: float, y: float, wide: float, high: float) -> list[tuple[Tile, _Box]]:
    """Where each child of ``node`` is within the rectangle; chains of only children are one."""
    children = sorted((_shortened(child) for child in node.children.values()), key=lambda child: -child.nbytes)
    total = sum(child.nbytes for child in children)
    if not total or wide < _LEAST or high < _LEAST:
        return []
    scale = wide * high / total
    placed: list[tuple[Tile, _Box]] = []
    rest = [child for child in children if child.nbytes]
    while rest:
        side = min(wide, high)
        row = _row(rest, side, scale)
        area = sum(child.nbytes for child in row) * scale
        thickness = area / side
        at = 0.0
        for child in row:
            length = child.nbytes * scale / thickness
            box = (x + at, y, length, thickness) if wide <= high else (x, y + at, thickness, length)
            placed.append((child, box))
            at += length
        if wide <= high:
            y, high = y + thickness, high - thickness
        else:
            x, wide = x + thickness, wide - thickness
        rest = rest[len(row) :]
        if min(wide, high) < 0.5:  # what is left cannot be seen
            break
    return placed


def _row(children: Sequence[Tile], side: float, scale: float) -> Sequence[Tile]:
    """The first of ``children`` that make the most nearly square row along ``side``."""
    best, count, total = float("inf"), 0, 0.0
    for number, child in enumerate(children, 1):
        total += child.nbytes * scale
        largest, smallest = children[0].nbytes * scale, child.nbytes * scale
        worst = max(side * side * largest / total**2, total**2 / (side * side * smallest))
        if worst > best:
            break
        best, count = worst, number
    return children[:count]


def _shortened(tile: Tile) -> Tile:
    while len(tile.children) == 1:
        (tile,) = tile.children.values()
    return tile


def _rectangle(tile: Tile, name: str, box: _Box, depth: int, whole: int) -> Rectangle:
    """``name``: of the tile within the one that holds it."""
    x, y, wide, high = box
    share = 100 * tile.nbytes / whole if whole else 0.0
    tooltip = f"{clipped(tile.path)}: {size_text(tile.nbytes)}, {share:.1f} %, {plural(tile.tensors, 'tensor')}"
    letters = int((wide - 6) / LETTER)
    label = ""
    if letters >= 3 and high >= _HEADER:
        label = name if len(name) <= letters else name[: letters - 1] + "…"
    kind = f"tile{depth % 4}" if tile.children else "tile-leaf"
    return Rectangle(x, y, max(wide - _GAP, 0.5), max(high - _GAP, 0.5), tooltip, kind, label)
