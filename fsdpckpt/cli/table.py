"""Lays out tables of text: as wide as they are in a pipe, at most as wide as the screen on a terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fsdpckpt.text import shorten

GAP = 2  # spaces between columns
NARROWEST = 8  # characters of a column of names, however narrow the terminal


def visible(text: str) -> str:
    """``text`` on one line, with line breaks and control sequences of the terminal escaped."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return char if "\ud800" <= char <= "\udfff" else repr(char)[1:-1]  # lone surrogates are bytes of a file name


@dataclass(frozen=True, slots=True)
class Name:
    """A cell that may lose its middle where the screen is narrow; ``suffix`` stays whole."""

    text: str
    suffix: str = ""

    def __str__(self) -> str:
        return visible(self.text) + self.suffix

    def within(self, width: int) -> str:
        return shorten(visible(self.text), max(width - len(self.suffix), 1)) + self.suffix


Cell: TypeAlias = str | Name


def table_lines(rows: Sequence[Sequence[Cell]], *, right: Collection[int], columns: int | None = None) -> list[str]:
    """The rows as lines with aligned columns. ``right``: columns of numbers; ``columns``: of the terminal, if any."""
    texts = [[visible(cell) if isinstance(cell, str) else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    if columns is not None and (narrowed := _narrowed(rows, widths, columns)) != widths:
        widths = narrowed
        for row, cells in zip(rows, texts, strict=True):
            for at, cell in enumerate(row):
                if isinstance(cell, Name):
                    cells[at] = cell.within(widths[at])
    lines = []
    for cells in texts:
        aligned = [
            text.rjust(width) if at in right else text.ljust(width)
            for at, (text, width) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append(cut((" " * GAP).join(aligned).rstrip(), columns))
    return lines


def _narrowed(rows: Sequence[Sequence[Cell]], widths: Sequence[int], columns: int) -> list[int]:
    """``widths`` with the columns of names made narrower, the widest first, until the table fits or none can be."""
    narrowed = list(widths)
    least = list(widths)
    for at, column in enumerate(zip(*rows, strict=True)):
        if any(isinstance(cell, Name) for cell in column):
            fixed = max((len(cell) for cell in column if isinstance(cell, str)), default=0)
            suffix = max(len(cell.suffix) for cell in column if isinstance(cell, Name))
            least[at] = min(widths[at], max(fixed, suffix + NARROWEST))
    while width_of(narrowed) > columns:
        at = max(range(len(narrowed)), key=lambda at: (narrowed[at] > least[at], narrowed[at]))
        if narrowed[at] <= least[at]:
            break
        narrowed[at] -= 1
    return narrowed


def width_of(widths: Sequence[int]) -> int:
    """The width of a table whose columns have these widths."""
    return sum(widths) + GAP * (len(widths) - 1)


def cut(line: str, columns: int | None) -> str:
    """``line`` in at most ``columns`` characters, an ellipsis where it goes on."""
    return line if columns is None or len(line) <= columns else line[: max(columns - 1, 0)] + "…"


def wrapped(line: str, columns: int | None) -> list[str]:
    """A sentence on as many lines as it takes: other than a row, it loses nothing on a narrow screen."""
    if columns is None or len(line) <= columns:
        return [line]
    import textwrap

    width = max(columns, 20)
    return textwrap.wrap(line, width, subsequent_indent="    ", break_on_hyphens=False) or [line]
