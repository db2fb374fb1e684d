"""Tables for notebooks: what ``_repr_html_`` of the results returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

MAX_ROWS = 100  # a notebook draws every row, and a checkpoint has thousands


def table(heading: str, columns: Sequence[str], rows: Iterable[Sequence[object]], total: int) -> str:
    """``heading``, and the first of ``total`` rows under ``columns``. All text is escaped."""
    from html import escape  # its table of entities takes time, and every command imports this module

    cells = "".join(f"<tr>{_cells('td', row, escape)}</tr>" for row in islice(rows, MAX_ROWS))
    more = f"<p>and {total - MAX_ROWS:,} more</p>" if total > MAX_ROWS else ""
    drawn = f"<table><tr>{_cells('th', columns, escape)}</tr>{cells}</table>{more}" if total else ""
    return f"<p>{escape(heading)}</p>{drawn}"


def _cells(tag: str, texts: Iterable[object], escape: Callable[[str], str]) -> str:
    return "".join(f"<{tag}>{escape(str(text))}</{tag}>" for text in texts)
