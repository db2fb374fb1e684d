"""The error for a checkpoint that lacks the files of some ranks."""

from __future__ import annotations

from collections.abc import Sequence

from fsdpckpt.errors import SourceIncompleteError


def ranks_missing(
    what: str,
    details: Sequence[str],
    *,
    file: str,
    files: Sequence[str] = (),
    most_shown: int | None = None,
    alternative: str | None = None,
) -> SourceIncompleteError:
    """``details``: what is missing. The other arguments are fields of the error."""
    return SourceIncompleteError(
        what,
        details=details,
        most_shown=most_shown,
        files=files,
        file=file,
        why="the save or the copy did not finish, or these ranks wrote to the disks of other machines",
        next_step="copy the files of all ranks into one directory",
        alternative=alternative,
    )
