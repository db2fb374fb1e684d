"""Defines the inert Python values a checkpoint is made of: what a pickle said, with nothing of it executed.

Plain scalars, lists, tuples and dicts stay themselves (``collections.OrderedDict`` too, its attributes such
as ``_metadata`` kept in ``vars()``). Everything else a checkpoint may hold from the closed set of
``formats.pickle.allowlist`` is kept as a record of what was written: ``Global`` for a name, ``Object`` for a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, Union

if TYPE_CHECKING:
    from fsdpckpt.ir.tensors import Tensor

Scalar: TypeAlias = bool | int | float | complex | str | bytes | bytearray | None
Key: TypeAlias = Union[Scalar, "Global", "Object", tuple["Key", ...]]
Value: TypeAlias = Union[
    Scalar,
    "Tensor",
    "Global",
    "Object",
    list["Value"],
    tuple["Value", ...],
    set["Key"],
    dict["Key", "Value"],
]


@dataclass(frozen=True, slots=True)
class Global:
    """An allow-listed importable name, e.g. ``torch.float32``: never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=True)
class Object:
    """An allow-listed call ``function(*args)``, and the state, items and entries set on its result.

    ``new`` tells pickle's NEWOBJ (``cls.__new__``) from REDUCE. ``state`` is BUILD's argument and ``has_state``
    says whether there was one (None is a state too). ``items`` and ``entries`` are APPENDS' and SETITEMS'.
    """

    function: Global
    args: tuple[Value, ...] = ()
    new: bool = False
    state: Value = None
    has_state: bool = False
    items: list[Value] = field(default_factory=list)
    entries: list[tuple[Key, Value]] = field(default_factory=list)

    __hash__ = object.__hash__


def walk(value: Value, path: tuple[Key, ...] = ()) -> Iterator[tuple[tuple[Key, ...], Value]]:
    """Every leaf under ``value`` with its path: dict keys, list and tuple indexes. An empty container is a leaf."""
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from walk(child, (*path, key))
    elif isinstance(value, (list, tuple)) and value:
        for index, child in enumerate(value):
            yield from walk(child, (*path, index))
    else:
        yield path, value


def leaf_tensors(value: Value) -> Iterator[tuple[tuple[Key, ...], Tensor]]:
    """Every tensor under ``value`` with its path."""
    from fsdpckpt.ir.tensors import Tensor

    for path, leaf in walk(value):
        if isinstance(leaf, Tensor):
            yield path, leaf
