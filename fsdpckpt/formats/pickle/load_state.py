"""What one call of ``load`` has made so far, and how much it may still make.

The unpickler calls stubs (``stubs``) without saying for whom. They find the load in ``THREAD``, and record there what
they make: until the load ends, the unpickler still writes to it.
"""

from __future__ import annotations

import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from fsdpckpt.ir.values import Global, Object, Value

_COMPARED = 16  # what comparing two keys counts as: keys whose hashes are equal are compared in pairs


class TensorResolver(Protocol):
    """Resolves the additions of a torch file to a pickle: storages by persistent id, and tensors on them."""

    def storage(self, persistent_id: object) -> object:
        """The storage that a persistent id names."""
        ...

    def rebuild(self, function: str, arguments: tuple[object, ...]) -> object:
        """The result of ``torch``'s rebuild function of that name."""
        ...


@dataclass(slots=True, eq=False)
class Load:
    """One call of ``load``, and what it has made so far: ``finish`` makes ir values of that.

    ``hashed``: keys of dicts and items of sets, with the hash that was used. ``copied``: items and bytes that calls
    took over from their arguments, and keys compared.
    """

    tensors: TensorResolver | None
    stubs: Callable[[str, str], object | None]
    max_copied: int
    copied: int = 0
    objects: list[Object] = field(default_factory=list)
    hashed: list[tuple[Object, int]] = field(default_factory=list)
    names: list[Global] = field(default_factory=list)
    dicts: list[OrderedDict[object, object]] = field(default_factory=list)
    refused: dict[str, None] = field(default_factory=dict)
    complexes: dict[int, set[complex]] = field(default_factory=dict)  # by hash: they may become keys

    def finish(self) -> None:
        """Turn what was made into plain ir values.

        Raises UnpicklingError for a key that was changed after hashing, or a dict that hides its own methods.
        """
        for made in self.objects:
            made.__class__ = Object
        if any(hash(key) != used for key, used in self.hashed):
            raise pickle.UnpicklingError("a key was changed after it was used")
        for name in self.names:
            object.__setattr__(name, "__class__", Global)
        for mapping in self.dicts:
            attributes = vars(mapping)
            if attributes and any(hasattr(OrderedDict, attribute) for attribute in attributes):
                raise pickle.UnpicklingError("an attribute hides a method of a dictionary")


class _OpenObject(Object):
    """An Object to which the unpickler still writes; becomes a plain Object when the load ends."""

    __slots__ = ()

    def __setstate__(self, state: Value) -> None:
        self.state = state
        self.has_state = True

    def append(self, item: Value) -> None:
        self.items.append(item)

    def extend(self, items: list[Value]) -> None:
        self.items.extend(items)

    def __setitem__(self, key: Value, value: Value) -> None:
        self.entries.append((key, value))  # type: ignore[arg-type]

    def __eq__(self, other: object) -> bool:
        charge(_COMPARED)
        return Object.__eq__(self, other)

    def __hash__(self) -> int:
        used = Object.__hash__(self)
        THREAD.load.hashed.append((self, used))
        return used


_NEW = object.__new__


def open_object(function: Global, arguments: tuple[object, ...], new: bool) -> Object:  # noqa: FBT001 (hot path)
    made = _NEW(_OpenObject)
    made.function = function
    made.args = arguments  # type: ignore[assignment]
    made.new = new
    made.state = None
    made.has_state = False
    made.items = []
    made.entries = []
    THREAD.load.objects.append(made)
    return made


def charge(items: int) -> None:
    load = THREAD.load
    load.copied += items
    if load.copied > load.max_copied:
        raise pickle.UnpicklingError("the same data is copied again and again")


class Swallow:
    """A refused name: ignores whatever the pickle does with it, so that parsing reaches the other names."""

    __slots__ = ()

    def __new__(cls, *_: object, **__: object) -> Swallow:
        return object.__new__(cls)

    def __call__(self, *_: object) -> Swallow:
        return self

    def __setstate__(self, _state: object) -> None: ...

    def append(self, _item: object) -> None: ...

    def extend(self, _items: object) -> None: ...

    def add(self, _item: object) -> None: ...

    def __setitem__(self, _key: object, _value: object) -> None: ...


def refuse(name: str) -> object:
    THREAD.load.refused[name] = None
    return Swallow()


def _no_stub(_module: str, _name: str) -> None:
    """Outside of a load no name has a stub."""


class _Thread(threading.local):
    """``load``: the call of ``load`` that runs in this thread, the innermost if several do."""

    load = Load(None, _no_stub, 0)


THREAD = _Thread()
