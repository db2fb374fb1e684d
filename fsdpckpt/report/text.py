"""Text for a page: every word that came from a checkpoint goes through ``escaped``, and none reaches the page raw."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["MOST_ROWS", "clipped", "escaped", "percent", "table"]

MOST_ROWS = 300  # of a table; the page says how many more there are
LONGEST = 160  # characters of one cell: a key of a megabyte must not become the page


def escaped(text: object) -> str:
    """HTML that shows ``text``, control characters and half surrogates in Python's notation."""
    shown = str(text)
    if not shown.isprintable():
        shown = "".join(char if char.isprintable() else repr(char)[1:-1] for char in shown)
    return escape(shown, quote=True)


def clipped(text: object, longest: int = LONGEST) -> str:
    """``text`` with its middle left out when it is long; to be escaped."""
    shown = str(text)
    if len(shown) <= longest:
        return shown
    return f"{shown[: longest // 2]} … {shown[-longest // 2 + 3 :]}"


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: frozenset[int] = frozenset(),
    label: str = "",
    longest: int = LONGEST,
) -> str:
    """A table of plain texts. ``right``: numbers of the columns to align right; ``label``: what it is, for a reader.

    ``longest``: characters of a cell that are shown.
    """

    def cells(row: Sequence[object], tag: str) -> str:
        return "".join(
            f'<{tag} class="n">{escaped(clipped(cell, longest))}</{tag}>'
            if number in right
            else f"<{tag}>{escaped(clipped(cell, longest))}</{tag}>"
            for number, cell in enumerate(row)
        )

    body = "\n".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    named = f' aria-label="{escaped(label)}"' if label else ""
    return (
        f'<div class="wide"><table{named}><thead><tr>{cells(headings, "th")}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>\n"
    )
