"""Limits the size of a loaded value, with its shared parts counted everywhere they occur."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.ir.values import Object, Value

MAX_DEPTH = 200  # deeper nesting than any state dict, shallow enough for Python's stack
_SHARING = 10  # how many times larger than the stored value the expanded one may be ...
_FREE_ENTRIES = 1_000_000  # ... above this many entries, which every walk can handle
_CONTAINERS = (dict, list, tuple, set, Object)


def check_expansion(root: Value, file: str) -> None:
    """Raises SourceCorruptError if ``root`` is too deep or too large, with shared parts counted wherever they occur."""
    measure = _Measure(file)
    entries, _ = measure.of(root)
    if entries > _FREE_ENTRIES + _SHARING * measure.stored:
        raise SourceCorruptError(
            f"{file} repeats values so often that reading them would never end",
            file=file,
            expected=f"at most {_FREE_ENTRIES + _SHARING * measure.stored} entries",
            found=f"{entries:.3g}" if entries < 1e300 else "too many to count",
            why="training code does not save this: the file was made to exhaust whoever reads it",
        )


def too_deep(file: str, key: str | None = None) -> SourceCorruptError:
    """The error for a value in ``file`` that is too deep for Python's stack."""
    what = f"{file} nests values more than {MAX_DEPTH} deep, or a value contains itself"
    return SourceCorruptError(what, file=file, key=key)


class _Measure:
    def __init__(self, file: str) -> None:
        self._file = file
        self._known: dict[int, tuple[int, int] | None] = {}  # None: being measured right now
        self.stored = 0

    def of(self, value: Value) -> tuple[int, int]:
        """Entries and depth of a value with all its parts expanded; 1 and 0 for a value that is not a container."""
        if not isinstance(value, _CONTAINERS) or (not isinstance(value, Object) and not value):
            return 1, 0
        if id(value) in self._known:
            known = self._known[id(value)]
            if known is None:
                raise too_deep(self._file)
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
            raise too_deep(self._file)
        self._known[id(value)] = entries, depth + 1
        return entries, depth + 1


def _children(value: Value) -> Collection[Value]:
    """The content of a container; a key that is a container counts too."""
    if isinstance(value, dict):
        keys = [key for key in value if isinstance(key, (tuple, Object))]
        attributes = getattr(value, "__dict__", None)  # an OrderedDict has some
        return [*value.values(), *keys, *(attributes or {}).values()] if keys or attributes else value.values()
    if isinstance(value, Object):
        return [value.args, value.state, *value.items, *(part for entry in value.entries for part in entry)]
    return cast("Collection[Value]", value)
