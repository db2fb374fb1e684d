"""Keep Python's cyclic garbage collector from walking very many objects of which none is garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """While many objects are made: the collector would walk them over and over, and parsing take three times as long.

    Afterwards they count as old: as young ones they would all be walked by the very next collection.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            with set_aside():
                gc.enable()


_entered: list[object] = []
"""One entry for each ``set_aside`` that has begun: counting frozen objects walks them all, so only the first counts."""


@contextmanager
def set_aside() -> Iterator[None]:
    """Inside, the collector walks only what is made inside: for long work beside the many objects that exist."""
    unfreeze = not _entered and not gc.get_freeze_count()  # else whoever froze objects before us wants them to stay so
    _entered.append(None)
    gc.freeze()
    try:
        yield
    finally:
        _entered.pop()
        if unfreeze:
            gc.unfreeze()
