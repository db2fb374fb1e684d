"""Writes the pages (``inspect --report``, ``diff --report``): each is one self-contained file."""

from __future__ import annotations

from fsdpckpt import flags
from fsdpckpt.describe import Description, Incomplete
from fsdpckpt.storage.documents import Document
from fsdpckpt.verify.difference import Difference

MARK = "<!doctype html>\n<!-- fsdpckpt "
"""The beginning of every page, whichever command writes it: a file that begins otherwise is never replaced by one."""

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


def write_incomplete_report(left: Incomplete, path: str) -> int:
    """The same for what is left of a checkpoint."""
    check_report(path, left.source)
    from fsdpckpt.report.incomplete import incomplete_page

    return _PAGE.write(path, left.source, incomplete_page(left))


def check_diff_report(path: str, sources: tuple[str, str]) -> None:
    """Check that a page on ``sources`` may be written to ``path``. Raises what ``Document.check`` does."""
    for source in sources:
        _PAGE.check(path, source)


def write_diff_report(result: Difference, path: str, sources: tuple[str, str]) -> int:
    """Write the page for ``result``, the comparison of ``sources``, to ``path``; returns its length in bytes.

    Raises what ``check_diff_report`` does.
    """
    check_diff_report(path, sources)
    from fsdpckpt.report.compared import compared_page

    return _PAGE.write(path, sources[0], compared_page(result))
