"""Writes the page: complete or not at all, and never over a file that is no page of this program."""

from __future__ import annotations

import os
import shlex

from fsdpckpt.describe import Description
from fsdpckpt.errors import TargetExistsError, TargetUnwritableError, UsageError
from fsdpckpt.report.page import MARK, page
from fsdpckpt.storage.protocols import is_url

__all__ = ["check_report", "write_report"]


def check_report(path: str, source: str) -> None:
    """Raises UsageError for a path in the checkpoint at ``source``, TargetExistsError when something else is there,
    TargetUnwritableError for what cannot be a file.
    """
    _refuse_source(path, source)
    _require_free(path)


def write_report(described: Description, path: str) -> int:
    """Write the page for ``described`` to ``path``; returns its length in bytes.

    Raises what ``check_report`` does.
    """
    check_report(path, described.checkpoint.source)
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


def _refuse_source(path: str, source: str) -> None:
    """Nothing is ever written into a checkpoint; ``-`` is no file, and stdout has the summary."""
    if path in ("", "-"):
        raise UsageError("--report takes the name of a file", found=repr(path), next_step="--report report.html")
    if is_url(path):
        raise UsageError(f"--report {path}: a report is a file of this machine", next_step="--report report.html")
    if not is_url(source) and os.path.isdir(source):
        real, inside = os.path.realpath(path), os.path.realpath(source)
        if os.path.commonpath([real, inside]) == inside:
            raise UsageError(
                f"--report {path} lies inside the source, which is never written to",
                file=path,
                next_step="give --report a file outside of SRC",
            )


def _require_free(path: str) -> None:
    """Raises when ``path`` is there and is not an earlier report."""
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
    try:
        with open(path, "rb") as file:
            if file.read(len(MARK)) == MARK.encode():
                return
    except FileNotFoundError:
        return
    except OSError:  # a file of somebody else's: not ours to replace
        pass
    raise TargetExistsError(
        f"{path} is there, and is no report that inspect --report made",
        file=path,
        why="an earlier report would be replaced; anything else is left alone",
        next_step=f"give --report another name, or remove it: rm {shlex.quote(path)}",
    )
