"""Says values that ``torch.load`` refuses by default in ones that it takes, and back: equal, and of the same types.

With ``weights_only=True``, the default since torch 2.6, it takes tensors, plain values and a few classes
(``torch._weights_only_unpickler._get_allowed_globals``), and one random state of NumPy makes it refuse the whole file.
In a file that people load, therefore,

    a NumPy array or number          is a tensor of the same elements, with the attribute ``ARRAY``: the call that makes
    of a dtype that torch has        the array, as text, without its bytes
    a dict with a key that would     is ``{ENCODED: [[key, value], ...]}``, and ``"ordered": True`` of an OrderedDict
    be refused
    any other value                  is ``{ENCODED: text}``
    that would be refused

Text is ``ir.codec``'s JSON.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

from fsdpckpt.errors import SourceUnsafeError, damaged
from fsdpckpt.formats.pickle.allowlist import kind_of
from fsdpckpt.ir.codec import Json, decode, encode
from fsdpckpt.ir.dtypes import DTYPES, DType
from fsdpckpt.ir.values import Global, Key, Object, Value

ARRAY = "_fsdpckpt_array"
ENCODED = "fsdpckpt.value"
_ORDERED = "ordered"

_CLASSES = frozenset({("torch", "Size"), ("torch", "device"), ("collections", "Counter")})
# NumPy's names of dtypes: kind and bytes of an element.
_DTYPES = {
    **{"b1": "bool", "f2": "float16", "f4": "float32", "f8": "float64", "c8": "complex64", "c16": "complex128"},
    **{f"{kind[0]}{nbytes}": f"{kind}{8 * nbytes}" for kind in ("int", "uint") for nbytes in (1, 2, 4, 8)},
}
_WHY = "the file was edited, or a newer fsdpckpt wrote it"

_Data: TypeAlias = bytes | bytearray


@dataclass(frozen=True, slots=True)
class Array:
    """A NumPy array or number: its elements, little-endian and row-major, and the call that makes it, as text."""

    dtype: DType
    shape: tuple[int, ...]
    data: bytes
    call: str


def is_class(function: Global) -> bool:
    """Whether ``torch.load`` makes instances of it by default."""
    return (function.module, function.name) in _CLASSES


def is_loadable(value: Value) -> bool:
    """Whether ``torch.load`` takes ``value`` by default, with all that is in it."""
    if isinstance(value, Object):
        return is_class(value.function)
    if isinstance(value, Global):
        return value.module == "torch" and value.name in DTYPES
    if isinstance(value, dict):
        return all(map(is_loadable, value)) and all(map(is_loadable, value.values()))
    return not isinstance(value, (list, tuple, set)) or all(map(is_loadable, value))


def encoded(value: Value) -> dict[Key, Value]:
    """What stands for ``value``, which is not loadable and no NumPy array."""
    if isinstance(value, dict):
        pairs: list[Value] = [[key, item] for key, item in value.items()]
        return {ENCODED: pairs, _ORDERED: True} if isinstance(value, OrderedDict) else {ENCODED: pairs}
    return {ENCODED: _text(value)}


def restored(stand_in: Mapping[Key, Value], file: str) -> Value:
    """The value of which ``encoded`` made ``stand_in``. Raises SourceCorruptError, SourceUnsafeError."""
    held = stand_in[ENCODED]
    if isinstance(held, str):
        return _value(held, file)
    if not isinstance(held, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in held):
        raise damaged(file, f"{ENCODED} is neither a text nor a list of pairs", why=_WHY)
    try:
        pairs: dict[Key, Value] = dict(held)  # type: ignore[arg-type]  # pairs, as was checked
    except TypeError:
        raise damaged(file, f"{ENCODED} has a key that cannot be one", why=_WHY) from None
    return OrderedDict(pairs) if stand_in.get(_ORDERED) is True else pairs


def array_of(value: Object) -> Array | None:
    """The NumPy array or number that ``value`` makes; None when it is something else, or torch has no such dtype."""
    parts = _parts(value)
    dtype = _dtype(parts[1]) if parts is not None else None
    if parts is None or dtype is None:
        return None
    shape, _, data = parts
    if not data or len(data) != prod(shape) * dtype.itemsize:
        return None
    return Array(dtype, shape, bytes(data), _text(_with_data(value, type(data)())))


def array_object(call: str, data: bytes, file: str) -> Object:
    """The array that ``call``, which ``array_of`` made, gives of ``data``. Raises as ``restored``."""
    value = _value(call, file)
    parts = _parts(value) if isinstance(value, Object) else None
    if not isinstance(value, Object) or parts is None:
        raise damaged(file, f"{ARRAY} does not make an array", why=_WHY)
    return _with_data(value, type(parts[2])(data))


def _parts(value: Object) -> tuple[tuple[int, ...], Value, _Data] | None:
    """Shape, dtype and elements of what NumPy's functions make."""
    shape: Value = ()
    kind: Value = None
    data: Value = None
    fortran: Value = False
    if value.function.name == "_reconstruct" and isinstance(value.state, tuple) and len(value.state) == 5:
        _, shape, kind, fortran, data = value.state
    elif value.function.name == "_frombuffer" and len(value.args) == 4:
        data, kind, shape, order = value.args
        fortran = order != "C"
    elif value.function.name == "scalar" and len(value.args) == 2:
        kind, data = value.args
    sizes = isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)
    if not sizes or not isinstance(shape, tuple) or not isinstance(data, (bytes, bytearray)):
        return None
    return None if fortran and len(shape) > 1 else (shape, kind, data)  # type: ignore[return-value]


def _with_data(value: Object, data: _Data) -> Object:
    if value.function.name == "_reconstruct" and isinstance(value.state, tuple):
        return replace(value, state=(*value.state[:4], data))
    if value.function.name == "_frombuffer":
        return replace(value, args=(data, *value.args[1:]))
    return replace(value, args=(value.args[0], data))


def _dtype(kind: Value) -> DType | None:
    """That of torch for what NumPy pickles as ``dtype('u4', False, True)``, with its byte order in the state."""
    if not isinstance(kind, Object) or kind.function.name != "dtype" or not kind.args:
        return None
    order = kind.state[1] if isinstance(kind.state, tuple) and len(kind.state) > 1 else None
    name = _DTYPES.get(kind.args[0]) if isinstance(kind.args[0], str) and order in ("<", "|") else None
    return DTYPES[name] if name is not None else None


def _text(value: Value) -> str:
    return json.dumps(encode(value), separators=(",", ":"))


def _value(text: str, file: str) -> Value:
    try:
        data: Json = json.loads(text)
    except (ValueError, RecursionError):
        raise damaged(file, "a value kept as text is not JSON", why=_WHY) from None
    unknown = sorted({f"{module}.{name}" for module, name in _names(data) if kind_of(module, name) is None})
    if unknown:
        raise SourceUnsafeError(f"{file} names classes that a checkpoint has no use for", details=unknown, file=file)
    return decode(data, file=file)


def _names(data: Json) -> list[tuple[str, str]]:
    """Every importable name in what ``encode`` made."""
    names: list[tuple[str, str]] = []
    stack: list[Json] = [data]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            pairs = [item.get(tag) for tag in ("$global", "function")]
            names += [(str(pair[0]), str(pair[1])) for pair in pairs if isinstance(pair, list) and len(pair) == 2]
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
    return names
