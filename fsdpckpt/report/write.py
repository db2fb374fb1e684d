"""Draws a checkpoint as one self-contained HTML page (``inspect --report``).

The page is written complete or not at all, and never over anything but an earlier page.
"""

from __future__ import annotations

import os
import shlex

from fsdpckpt.describe import Description
from fsdpckpt.errors import TargetExistsError, TargetUnwritableError, UsageError
from fsdpckpt.storage import is_url
from fsdpckpt.storage.local import replace_file
from fsdpckpt.storage.places import Tree

MARK = "<!doctype html>\n<!-- fsdpckpt inspect --report -->\n"
"""The beginning of every page: a file that begins otherwise is never replaced."""

SUFFIXES = (".html", ".htm")


def check_report(path: str, source: str) -> None:
    """Check that a page may be written to ``path``.

    Raises UsageError for a path inside the checkpoint at ``source`` and for a name that is not one of an HTML page,
    TargetExistsError if something other than a page exists there, TargetUnwritableError if no file can be written
    there.
    """
    _refuse_source(path, source)
    _require_free(path)
    directory = os.path.dirname(path) or "."
    if not os.path.isdir(directory):
        raise _unwritable(path, f"{directory} is not a directory")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise _unwritable(path, f"{directory} is not writable for you")


def write_report(described: Description, path: str) -> int:
    """Write the page for ``described`` to ``path``; returns its length in bytes.

    Raises what ``check_report`` does.
    """
    check_report(path, described.checkpoint.source)
    from fsdpckpt.report.page import page  # and the template engine: only if a page is made

    content = page(described).encode("utf-8", "backslashreplace")
    try:
        replace_file(path, content)
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error)) from None
    return len(content)


def _unwritable(path: str, why: str) -> TargetUnwritableError:
    return TargetUnwritableError(
        f"the report cannot be written to {path}: {why}",
        file=path,
        next_step="give --report a file in a directory that exists and that you may write to",
    )


def _refuse_source(path: str, source: str) -> None:
    """Raises UsageError for a path inside ``source``, a URL, and ``-``: stdout has the summary."""
    if path == "-":
        raise UsageError("--report takes the name of a file", found=repr(path), next_step="--report report.html")
    if is_url(path):
        raise UsageError(f"--report {path}: a report is written to a local file", next_step="--report report.html")
    if not is_url(source) and os.path.isdir(source) and Tree(source).holds(path):
        raise UsageError(
            f"--report {path} is inside the source, which is never written to",
            file=path,
            next_step="give --report a file outside of SRC",
        )


def _require_free(path: str) -> None:
    """Raises if ``path`` does not have the name of a page, or exists and is not an earlier page."""
    if os.path.isdir(path):
        raise TargetExistsError(
            f"{path} is a directory, and the report is one file",
            file=path,
            next_step=f"--report {shlex.quote(os.path.join(path, 'report.html'))}",
        )
    if os.path.exists(path) and not os.path.isfile(path):
        raise TargetUnwritableError(
            f"{path} is a pipe or a device, and the report is a file", file=path, next_step="--report report.html"
        )
    if os.path.exists(path) and not _is_page(path):
        raise TargetExistsError(
            f"{path} exists, and is not a report that inspect --report wrote",
            file=path,
            why="an earlier report would be replaced; anything else is left alone",
            next_step="give --report another name",
        )
    if not path.lower().endswith(SUFFIXES):
        raise UsageError(
            f"--report {path}: a report is an HTML page",
            expected="a name that ends in .html",
            found=path,
            next_step=f"--report {shlex.quote(os.path.splitext(path)[0] + '.html')}",
        )


def _is_page(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(MARK)) == MARK.encode()
    except OSError:  # unreadable: not an earlier page of this user
        return False
