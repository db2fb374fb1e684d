"""Refuses keys that were chosen to have one hash: a dict compares all of these in pairs.

Strings and bytes are hashed with a secret of the process, numbers and tuples of them are not: -1 and -2 have one hash,
and so have all tuples of the two. ``OpcodeWalk`` counts the keys that can be chosen so. Few of them do no harm. A
pickle with more is loaded by Python's own unpickler, slowly, which asks a ``CollisionCounter`` before each insertion.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import ClassVar

FREE_KEYS = 64  # keys whose hash can be chosen, in any pickle
_MAX_COLLISIONS = 64  # keys of one hash in one dict or set


class CollisionCounter:
    """Counts the keys of each hash that are put into a dict or a set, by the container's identity."""

    def __init__(self) -> None:
        self._by_container: dict[int, tuple[object, dict[int, int]]] = {}  # keeps them: an identity is used again

    def count(self, container: object, keys: Iterable[object]) -> None:
        """Raises UnpicklingError if ``container``, a dict or a set, would get too many keys of one hash."""
        if not isinstance(container, (dict, set, CollisionCounter)):
            return  # a record, which keeps its entries in a list
        _, counts = self._by_container.setdefault(id(container), (container, {}))
        for key in keys:
            used = hash(key)
            counts[used] = counts.get(used, 0) + 1
            if counts[used] > _MAX_COLLISIONS:
                raise pickle.UnpicklingError("many keys with one hash, chosen to exhaust whoever reads them")


def count_new(keys: Iterable[object]) -> None:
    """``CollisionCounter.count`` for the keys of a new container."""
    counter = CollisionCounter()
    counter.count(counter, keys)


class CountingUnpickler(pickle._Unpickler):  # the only unpickler whose opcodes can be extended
    """Python's own unpickler, which does what the C unpickler does, with every key counted first."""

    stack: list[object]
    metastack: list[list[object]]
    dispatch: ClassVar = dict(pickle._Unpickler.dispatch)

    def __init__(self, stream: object, *, encoding: str) -> None:
        super().__init__(stream, encoding=encoding)  # type: ignore[arg-type]
        self._collisions = CollisionCounter()

    def _set_item(self) -> None:
        self._collisions.count(self.stack[-3], (self.stack[-2],))
        pickle._Unpickler.dispatch[pickle.SETITEM[0]](self)  # type: ignore[arg-type]

    def _set_items(self) -> None:
        self._collisions.count(self.metastack[-1][-1], self.stack[::2])
        pickle._Unpickler.dispatch[pickle.SETITEMS[0]](self)  # type: ignore[arg-type]

    def _add_items(self) -> None:
        self._collisions.count(self.metastack[-1][-1], self.stack)
        pickle._Unpickler.dispatch[pickle.ADDITEMS[0]](self)  # type: ignore[arg-type]

    def _make_dict(self) -> None:
        count_new(self.stack[::2])
        pickle._Unpickler.dispatch[pickle.DICT[0]](self)  # type: ignore[arg-type]

    def _make_frozen_set(self) -> None:
        count_new(self.stack)
        pickle._Unpickler.dispatch[pickle.FROZENSET[0]](self)  # type: ignore[arg-type]

    dispatch[pickle.SETITEM[0]] = _set_item  # type: ignore[assignment]
    dispatch[pickle.SETITEMS[0]] = _set_items  # type: ignore[assignment]
    dispatch[pickle.ADDITEMS[0]] = _add_items  # type: ignore[assignment]
    dispatch[pickle.DICT[0]] = _make_dict  # type: ignore[assignment]
    dispatch[pickle.FROZENSET[0]] = _make_frozen_set  # type: ignore[assignment]
