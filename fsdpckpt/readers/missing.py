"""What is said of a source that is not there: where its path stops to exist, and what may have been meant."""

from __future__ import annotations

import os
import shlex
from difflib import get_close_matches

from fsdpckpt.errors import SourceMissingError
from fsdpckpt.storage.sources import is_url

__all__ = ["missing"]


def missing(source: str) -> SourceMissingError:
    """Where the path stops to exist, for most misspellings are in one word of it."""
    if not source:
        why, next_step = "SRC is empty: a shell variable without a value, most likely", "name a file or a directory"
    elif is_url(source):
        why, next_step = "the URL is misspelt, or this account may not see it", "check the URL and the credentials"
    elif source.startswith("~"):
        why, next_step = "the shell replaces ~ only where it is not quoted", "write the path without quotes around ~"
    else:
        above, file = source.rstrip("/"), False
        while above and not (file := os.path.isfile(above)) and not os.path.isdir(above):
            above = os.path.dirname(above.rstrip("/"))
        if file:
            why, next_step = f"{above} is a file: nothing lies below it", f"give {shlex.quote(above)} itself"
        else:
            why = "the path is misspelt, or the disk is not mounted here"
            above = above or ("/" if source.startswith("/") else ".")
            next_step = f"ls {shlex.quote(above)}  # shows what is there"
            names = os.listdir(above) if os.access(above, os.R_OK) else []
            meant = get_close_matches(source.removeprefix(above).strip("/").partition("/")[0], names, n=1)
            why += f"; {os.path.normpath(os.path.join(above, meant[0]))} is there" if meant else ""
    return SourceMissingError(
        f"{source} does not exist" if source else "no source was named", file=source, why=why, next_step=next_step
    )
