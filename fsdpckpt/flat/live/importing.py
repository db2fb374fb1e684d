"""Objects by ``package.module:name``, imported from the user's own code on the user's own request."""

from __future__ import annotations

import os
import sys
from importlib import import_module

from fsdpckpt.errors import UsageError

__all__ = ["imported"]


def imported(reference: str, option: str) -> object:
    """The object that ``package.module:name`` (or ``:Outer.name``) refers to. ``option`` is named in errors.

    The current directory counts as a place for modules, as it does for ``python -m``. Raises UsageError.
    """
    module_name, _, name = reference.partition(":")
    if not module_name or not name:
        raise UsageError(
            f"{option} takes package.module:name, and {reference!r} is none", next_step=f"{option} package.module:name"
        )
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: object = import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's own code, which may raise anything, or be a script
        raise UsageError(
            f"{option} {reference}: {module_name} could not be imported: {type(error).__name__}: {error}",
            why="it is imported as `python -m` would do from the current directory",
            next_step=f"python -c 'import {module_name}'  # shows where it fails",
        ) from error
    for word in name.split("."):
        if not hasattr(found, word):
            raise UsageError(f"{option} {reference}: there is no {word!r}", next_step=f"{option} package.module:name")
        found = getattr(found, word)
    return found
