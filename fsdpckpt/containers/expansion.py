"""Refuse values that a pickle's back references make endless: inside themselves, or shared until they fill the world.

A pickle of a kilobyte can hold a dict that holds one other dict ten times, which holds a third ten times, and so on:
every walk over it by path would take for ever.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.ir.values import Object, Value

__all__ = ["MAX_DEPTH", "check_expansion"]

MAX_DEPTH = 200  # deeper nesting than any state dict, shallow enough for Python's stack
_SHARING = 10  # how many times larger than what is stored the expanded value may be ...
_FREE = 1_000_000  # ... past this many entries, which every walk gets through
_CONTAINERS = (dict, list, tuple, set, Object)


def check_expansion(root: Value, file: str) -> None:
    """Raises SourceCorruptError when ``root``, its shared parts counted wherever they are, is too deep or too big."""
    measure = _Measure(file)
    entries, _ = measure.of(root)
    if entries > _FREE + _SHARING * measure.stored:
        raise SourceCorruptError(
            f"{file} shares values so often that they never end",
            file=file,
            expected=f"at most {_FREE + _SHARING * measure.stored} entries",
            found=f"{entries:.3g}" if entries < 1e300 else "more than a number can say",
            why="the file was made to keep a reader busy; training code does not do this",
        )


class _Measure:
    def __init__(self, file: str) -> None:
        self._file = file
        self._known: dict[int, tuple[int, int] | None] = {}  # None: being measured right now
        self.stored = 0

    def of(self, value: Value) -> tuple[int, int]:
        """Entries and depth of a value, all its parts expanded; a value that is no container has 1 and 0."""
        if not isinstance(value, _CONTAINERS) or (not isinstance(value, Object) and not value):
            return 1, 0
        if id(value) in self._known:
            known = self._known[id(value)]
            if known is None:
                raise self._too_deep()
            return known
        self._known[id(value)] = None
        children = _children(value)
        self.stored += len(children)
        entries, depth = len(children), 0
        for child in children:
            if isinstance(child, _CONTAINERS):
                inner, below = self.of(child)
                entries += inner
                depth = max(depth, below)
        if depth >= MAX_DEPTH:
            raise self._too_deep()
        self._known[id(value)] = entries, depth + 1
        return entries, depth + 1

    def _too_deep(self) -> SourceCorruptError:
        return SourceCorruptError(
            f"{self._file} nests values more than {MAX_DEPTH} deep, or a value contains itself", file=self._file
        )


def _children(value: Value) -> Collection[Value]:
    """What a container holds; a key that is a container is held too."""
    if isinstance(value, dict):
        keys = [key for key in value if isinstance(key, (tuple, Object))]
        attributes = getattr(value, "__dict__", None)  # an OrderedDict has some
        return [*value.values(), *keys, *(attributes or {}).values()] if keys or attributes else value.values()
    if isinstance(value, Object):
        return [value.args, value.state, *value.items, *(part for entry in value.entries for part in entry)]
    return cast("Collection[Value]", value)
