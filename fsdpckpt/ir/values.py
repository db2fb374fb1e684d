"""Defines the inert Python values a checkpoint is made of: what a pickle said, with nothing of it executed.

Plain scalars, lists, tuples and dicts stay themselves (``collections.OrderedDict`` too, its attributes such
as ``_metadata`` kept in ``vars()``). Everything else a checkpoint may hold from the closed set of
``formats.pickle.allowlist`` is kept as a record of what was written: ``Global`` for a name, ``Object`` for a call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isnan
from typing import Any, TypeAlias, Union

import numpy as np

from fsdpckpt.ir.tensors import Tensor

Scalar: TypeAlias = bool | int | float | complex | str | bytes | bytearray | None
Key: TypeAlias = Union[Scalar, "Global", "Object", tuple["Key", ...]]
Value: TypeAlias = Union[
    Scalar, Tensor, "Global", "Object", list["Value"], tuple["Value", ...], set["Key"], dict["Key", "Value"]
]


@dataclass(frozen=True, slots=True)
class Global:
    """An allow-listed importable name, e.g. ``torch.float32``: never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False, repr=False)
class Object:
    """An allow-listed call ``function(*args)``, and the state, items and entries set on its result.

    ``new`` tells pickle's NEWOBJ (``cls.__new__``) from REDUCE. ``state`` is BUILD's argument and ``has_state``
    says whether there was one (None is a state too). ``items`` and ``entries`` are APPENDS' and SETITEMS'.

    Objects are equal when they say the same; as keys and in sets, a NumPy number is the Python number that it equals.
    """

    function: Global
    args: tuple[Value, ...] = ()
    new: bool = False
    state: Value = None
    has_state: bool = False
    items: list[Value] = field(default_factory=list)
    entries: list[tuple[Key, Value]] = field(default_factory=list)

    @property
    def number(self) -> np.generic | None:
        """The NumPy number that it makes; None of anything else, and of one that is no Python number (longdouble)."""
        if self.function.name != "scalar" or len(self.args) != 2:
            return None
        data, code = self.args[1], numpy_code(self.args[0])
        if code is None or not isinstance(data, bytes) or len(data) != np.dtype(code).itemsize:
            return None
        number: np.generic = np.frombuffer(data, code)[0]
        return number

    def _parts(self) -> tuple[object, ...]:
        return self.function, self.args, self.new, self.state, self.has_state, self.items, self.entries

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Object):
            return self._parts() == other._parts()
        number = self.number if isinstance(other, (bool, int, float, complex)) else None
        return number is not None and bool(number.item() == other)

    def __hash__(self) -> int:
        number = self.number
        if number is not None and number == number:  # noqa: PLR0124 (NaN equals nothing)
            return hash(number.item())
        return hash((self.function, _outline(self.args)))

    def __str__(self) -> str:
        return f"{self.function}(...)" if self.number is None else str(self.number)

    def __repr__(self) -> str:
        return str(self) if self.number is None else repr(self.number.item())


def _outline(values: tuple[Value, ...] | list[Value]) -> tuple[object, ...]:
    """What a hash takes of ``values``: equal for equal ones, at a bounded cost."""
    first = (tuple(value[:_OUTLINED]) if isinstance(value, list) else value for value in values[:_OUTLINED])
    return tuple(
        tuple(item for item in value if isinstance(item, _OUTLINES)) if isinstance(value, tuple) else value
        for value in first
        if isinstance(value, (tuple, *_OUTLINES))
    )


_OUTLINED = 16
_OUTLINES = (str, int, float, bytes, type(None))
_NUMPY_CODES = frozenset(["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"])


def numpy_code(dtype: Value) -> str | None:
    """``f4`` of what NumPy pickles as ``dtype('f4', False, True)``; None where no dtype of torch is the same."""
    if not isinstance(dtype, Object) or dtype.function.name != "dtype" or not dtype.args:
        return None
    order = dtype.state[1] if isinstance(dtype.state, tuple) and len(dtype.state) > 1 else None
    code = dtype.args[0]
    return code if isinstance(code, str) and code in _NUMPY_CODES and order in ("<", "|") else None


def like(mapping: Mapping[Any, object], items: Mapping[Key, Any]) -> dict[Key, Any]:
    """``items`` as the dict that ``mapping`` is: an ``OrderedDict`` with its attributes, or a plain one."""
    if not isinstance(mapping, OrderedDict):
        return dict(items)
    made = OrderedDict(items)
    vars(made).update(vars(mapping))
    return made


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
    yield from ((path, leaf) for path, leaf in walk(value) if isinstance(leaf, Tensor))


def equal(one: Value, other: Value) -> bool:
    """Equal and of the same type; two NaN are equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (isnan(one) and isnan(other))
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other
