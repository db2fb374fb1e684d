"""Builds the page of a checkpoint that is incomplete: which rank has which file, and what can be read."""

from __future__ import annotations

from fsdpckpt.describe import Incomplete
from fsdpckpt.report.figures import FigureTable
from fsdpckpt.report.rank_rows import rank_rows
from fsdpckpt.report.render import render
from fsdpckpt.text import count_text, dtypes_text, size_text


def incomplete_page(left: Incomplete) -> str:
    """The page for what is left of a checkpoint."""
    error = left.error
    readable = [
        (
            section,
            count_text(totals.tensors),
            count_text(totals.elements),
            size_text(totals.nbytes),
            dtypes_text(totals.dtypes),
        )
        for section, totals in left.summaries.items()
    ]
    values = {
        "command": "inspect",
        "name": left.source,
        "what": error.what,
        "findings": list(error.findings),
        "why": error.why,
        "grid": rank_rows(left.grid),
        "files": FigureTable(
            ["file", "state"],
            [*((name, "missing") for name in left.missing), *((name, "damaged") for name in left.damaged)],
        ),
        "readable": FigureTable(["section", "tensors", "elements", "bytes", "dtypes"], readable, frozenset({1, 2, 3})),
        "commands": [("convert what can be read", command) for command in left.commands],
    }
    return render("incomplete.html.jinja", values)
