"""Takes sections out of a state dict and puts them back.

``remainder`` and ``placed`` undo each other, as both go by one thing: the *frame* of a state dict, which is its
containers on the way to sections. A frame has the keys and positions of those containers and is of their types; it is
None where no section is below; in the place of a section it may have an empty OrderedDict, which that is then. It tells
a position in a list from a number that is the key of a dict.

Items of lists and tuples never move: an empty dict is in the place of a section that others follow. A container in
which nothing is left is taken out with its sections, and the frame has it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Any, TypeAlias, cast

from fsdpckpt.ir.values import Key, Value, like

Frame: TypeAlias = Value
"""A dict, list or tuple of frames, or None."""
Path: TypeAlias = tuple[Key, ...]


def frame_of(value: Value, paths: Iterable[Path]) -> Frame:
    """The frame of ``value`` with sections at ``paths``."""
    paths = list(paths)
    below = _by_first_key(paths)
    if () in paths and isinstance(value, OrderedDict) and not vars(value):
        return OrderedDict()
    if not below:
        return None
    if isinstance(value, dict):
        frames: dict[Key, Frame] = {key: frame_of(item, below.get(key, ())) for key, item in value.items()}
        return like(value, frames)
    if isinstance(value, (list, tuple)):
        return type(value)(frame_of(item, below.get(number, ())) for number, item in enumerate(value))
    return None


def remainder(value: dict[Key, Value], paths: Collection[Path]) -> dict[Key, Value]:
    """``value`` without what is at ``paths``. A container that becomes empty is removed; one that was empty stays."""
    rest = _remainder(value, paths)
    return {} if rest is _NOTHING else cast("dict[Key, Value]", rest)


_NOTHING: Any = object()


def _remainder(value: Value, paths: Collection[Path]) -> Any:
    if () in paths:
        return _NOTHING
    below = _by_first_key(paths)
    if not below:
        return value
    if isinstance(value, dict):
        entries = {key: _remainder(item, below.get(key, ())) for key, item in value.items()}
        kept = {key: item for key, item in entries.items() if item is not _NOTHING}
        return like(value, kept) if kept else _NOTHING
    if isinstance(value, (list, tuple)):
        items = [_remainder(item, below.get(number, ())) for number, item in enumerate(value)]
        while items and items[-1] is _NOTHING:  # the frame has the length
            items.pop()
        if not items:
            return _NOTHING
        return type(value)({} if item is _NOTHING else item for item in items)
    return value


def _by_first_key(paths: Iterable[Path]) -> dict[Key, list[Path]]:
    below: dict[Key, list[Path]] = {}
    for path in paths:
        if path:
            below.setdefault(path[0], []).append(path[1:])
    return below


def placed(value: Value, path: Path, new: Value, frame: Frame = None) -> Value:
    """A copy of ``value`` with ``new`` at ``path``, merged with a dict that is there already.

    Containers that are missing are made as ``frame`` has them. Where that has none, the container is a list for a
    number and a dict for any other key.
    """
    if not path:
        if isinstance(frame, OrderedDict) and isinstance(new, dict) and not isinstance(new, OrderedDict):
            new = OrderedDict(new)
        return _merged(value, new) if isinstance(value, dict) and isinstance(new, dict) else new
    key, rest = path[0], path[1:]
    like_it = _container(value, frame, key)
    if isinstance(like_it, (list, tuple)) and isinstance(key, int):
        frames: list[Frame] = list(frame) if isinstance(frame, (list, tuple)) else []
        items: list[Value] = list(value) if isinstance(value, (list, tuple)) else []
        items += [{} for _ in range(max(key + 1, len(frames)) - len(items))]
        items[key] = placed(items[key], rest, new, frames[key] if key < len(frames) else None)
        return type(like_it)(items)
    shape = frame if isinstance(frame, dict) else {}
    entries = dict(value) if isinstance(value, dict) else {}
    entries[key] = placed(entries.get(key), rest, new, shape.get(key))
    if isinstance(shape, OrderedDict):  # of which the order is a part
        entries = {each: entries[each] for each in (*shape, *entries) if each in entries}
    return like(like_it if isinstance(like_it, dict) else {}, entries)


def _container(value: Value, frame: Frame, key: Key) -> dict[Key, Value] | list[Value] | tuple[Value, ...]:
    """A container of the type that the one of ``key`` has: that of ``value`` if it has anything, else of ``frame``."""
    for each in (value or None, frame, value):
        if isinstance(each, (dict, list, tuple)):
            return each
    return [] if type(key) is int else {}


def _merged(first: dict[Key, Value], second: dict[Key, Value]) -> dict[Key, Value]:
    merged = like(first or second, first)
    for key, value in second.items():
        merged[key] = placed(merged[key], (), value) if key in merged else value
    return merged


def joined(first: Frame, second: Frame) -> Frame:
    """The frame of a state dict whose sections are those of two."""
    if not isinstance(first, dict) or not isinstance(second, dict):
        return first if second is None else second
    both = {key: joined(first.get(key), second.get(key)) for key in (*first, *second)}
    return like(first, both)
