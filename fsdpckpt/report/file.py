"""Writes the page: complete or not at all, and never over a file that is no page of this program."""

from __future__ import annotations

import os
import shlex

from fsdpckpt.describe import Description
from fsdpckpt.errors import TargetExistsError, TargetUnwritableError
from fsdpckpt.report.page import MARK, page

__all__ = ["write_report"]


def write_report(described: Description, path: str) -> int:
    """Write the page for ``described`` to ``path``; returns its length in bytes.

    Raises TargetExistsError when something else is there, TargetUnwritableError.
    """
    _require_free(path)
    content = page(described).encode("utf-8", "backslashreplace")
    beside = f"{path}.{os.getpid()}.tmp"
    try:
        with open(beside, "wb") as file:
            file.write(content)
        os.replace(beside, path)
    except OSError as error:
        if os.path.lexists(beside):
            os.unlink(beside)
        raise TargetUnwritableError(
            f"the report cannot be written to {path}: {error.strerror}",
            file=path,
            next_step="give --report a file in a directory that exists and is yours",
        ) from None
    return len(content)


def _require_free(path: str) -> None:
    """Raises when ``path`` is there and is not an earlier report."""
    try:
        with open(path, "rb") as file:
            if file.read(len(MARK)) == MARK.encode():
                return
    except FileNotFoundError:
        return
    except OSError:  # a directory, or a file of somebody else's: neither is ours to replace
        pass
    raise TargetExistsError(
        f"{path} is there, and is no report that inspect --report made",
        file=path,
        why="an earlier report would be replaced; anything else is left alone",
        next_step=f"give --report another name, or remove it: rm {shlex.quote(path)}",
    )
