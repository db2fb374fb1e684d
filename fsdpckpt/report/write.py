"""Draws a checkpoint as one self-contained HTML page (``inspect --report``)."""

from __future__ import annotations

from fsdpckpt import flags
from fsdpckpt.describe import Description
from fsdpckpt.storage.documents import Document

MARK = "<!doctype html>\n<!-- fsdpckpt inspect --report -->\n"
"""The beginning of every page: a file that begins otherwise is never replaced."""

_PAGE = Document(flags.report, "report", MARK, (".html", ".htm"), "an HTML page")


def check_report(path: str, source: str) -> None:
    """Check that a page may be written to ``path``. Raises what ``Document.check`` does."""
    _PAGE.check(path, source)


def write_report(described: Description, path: str) -> int:
    """Write the page for ``described`` to ``path``; returns its length in bytes.

    Raises what ``check_report`` does.
    """
    check_report(path, described.checkpoint.source)
    from fsdpckpt.report.page import page  # and the template engine: only if a page is made

    return _PAGE.write(path, described.checkpoint.source, page(described))
