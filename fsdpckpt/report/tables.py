"""Holds the tables of the page, and the texts in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdpckpt.text import plural

MOST_ROWS = 300  # rows of a table; the page says how many more there are
LONGEST = 160  # characters of one text: a key may have a megabyte


@dataclass(frozen=True, slots=True)
class Table:
    """Texts, which the template escapes. ``right``: columns of numbers; ``label``: for screen readers.

    ``more``: what the rows leave out. ``longest``: the largest number of characters shown of a cell.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[object]]
    right: frozenset[int] = frozenset()
    label: str = ""
    more: str = ""
    longest: int = LONGEST


def more_text(rows: int, word: str, hint: str = "") -> str:
    """The note on the rows that a table of this length leaves out."""
    return f"and {plural(rows - MOST_ROWS, word)} more{hint}" if rows > MOST_ROWS else ""


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def clipped(text: object, longest: int = LONGEST) -> str:
    """``text`` without its middle if it is long."""
    shown = str(text)
    if len(shown) <= longest:
        return shown
    return f"{shown[: longest // 2]} … {shown[-longest // 2 + 3 :]}"
