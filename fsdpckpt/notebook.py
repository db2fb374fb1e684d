"""Tables for notebooks: what ``_repr_html_`` of the results returns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice

MAX_ROWS = 100  # a notebook draws every row, and a checkpoint has thousands


def table(heading: str, columns: Sequence[str], rows: Iterable[Sequence[object]], total: int) -> str:
    """``heading``, and the first of ``total`` rows under ``columns``. All text is escaped."""
    cells = "".join(f"<tr>{_cells('td', row)}</tr>" for row in islice(rows, MAX_ROWS))
    more = f"<p>and {total - MAX_ROWS:,} more</p>" if total > MAX_ROWS else ""
    drawn = f"<table><tr>{_cells('th', columns)}</tr>{cells}</table>{more}" if total else ""
    return f"<p>{escape(heading)}</p>{drawn}"


def _cells(tag: str, texts: Iterable[object]) -> str:
    return "".join(f"<{tag}>{escape(str(text))}</{tag}>" for text in texts)
