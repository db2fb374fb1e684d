"""Encodes values that ``torch.load`` refuses by default as values that it accepts, and decodes them.

With ``weights_only=True``, the default since torch 2.6, it takes tensors, plain values and a few classes
(``torch._weights_only_unpickler._get_allowed_globals``), and one random state of NumPy makes it refuse the whole file.
In a file that people load, therefore,

    a NumPy number                   is the Python number of the same value, which optimizers take as a learning rate
    a NumPy array of a dtype         is a tensor of the same elements, with the attribute ``ARRAY``: the call that makes
    that torch has                   the array, without its bytes
    a dict with a key that would     is ``{ENCODED: its keys, VALUES: its values}``
    be refused
    any other value                  is ``{ENCODED: value}``
    that would be refused

All but numbers come back equal, and of the same types. What stands for a value is ``ir.values``'s JSON, and begins with
its own digest: a user's key or attribute of the same name is left as it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

from fsdpckpt.errors import damaged
from fsdpckpt.formats.pickle.allowlist import decode_allowed
from fsdpckpt.ir.dtypes import DTYPES, DType
from fsdpckpt.ir.torchao import blocks_of
from fsdpckpt.ir.values import Global, Json, Key, Object, Value, encode, like, numpy_code

ARRAY = "_fsdpckpt_array"
ENCODED = "fsdpckpt.value"
VALUES = "values"
_DIGEST = 16  # hexadecimal digits

_CLASSES = frozenset({("torch", "Size"), ("torch", "device"), ("collections", "Counter")})
_DTYPES = {
    **{"b1": "bool", "f2": "float16", "f4": "float32", "f8": "float64", "c8": "complex64", "c16": "complex128"},
    **{f"{kind[0]}{nbytes}": f"{kind}{8 * nbytes}" for kind in ("int", "uint") for nbytes in (1, 2, 4, 8)},
}
_WHY = "the file was edited, or a newer fsdpckpt wrote it"

_Data: TypeAlias = bytes | bytearray


@dataclass(frozen=True, slots=True)
class Array:
    """A NumPy array: its elements, little-endian and row-major, and the call that makes it, as text."""

    dtype: DType
    shape: tuple[int, ...]
    data: bytes
    call: str


def is_class(function: Global) -> bool:
    """Whether ``torch.load`` makes instances of it by default."""
    return (function.module, function.name) in _CLASSES


def is_loadable(value: Value) -> bool:
    """Whether ``torch.load`` accepts ``value`` by default, with everything in it."""
    if isinstance(value, Object):
        return is_class(value.function) or value.number is not None or blocks_of(value) is not None
    if isinstance(value, Global):
        return value.module == "torch" and value.name in DTYPES
    if isinstance(value, dict):
        return all(map(is_loadable, value)) and all(map(is_loadable, value.values()))
    return not isinstance(value, (list, tuple, set)) or all(map(is_loadable, value))


def encode_stand_in(value: Value) -> dict[Key, Value]:
    """The replacement for ``value``, which is neither loadable nor a NumPy array."""
    if isinstance(value, dict):
        return {ENCODED: _text(like(value, dict.fromkeys(value))), VALUES: list(value.values())}
    return {ENCODED: _text(value)}


def is_stand_in(mapping: Mapping[Key, Value]) -> bool:
    """Whether ``encode_stand_in`` made it."""
    return mapping.keys() - {VALUES} == {ENCODED} and has_valid_digest(mapping[ENCODED])


def decode_stand_in(stand_in: Mapping[Key, Value], file: str) -> Value:
    """The inverse of ``encode_stand_in``. Raises SourceCorruptError, SourceUnsafeError."""
    value = _value(str(stand_in[ENCODED]), file)
    if VALUES not in stand_in:
        return value
    values = stand_in[VALUES]
    if not isinstance(value, dict) or not isinstance(values, list) or len(values) != len(value):
        raise damaged(file, f"{ENCODED} has not one key for each value", why=_WHY)
    return like(value, dict(zip(value, values, strict=True)))


def array_of(value: Object) -> Array | None:
    """The NumPy array that ``value`` makes; None if it is something else, or torch has no such dtype."""
    parts = _parts(value)
    code = numpy_code(parts[1]) if parts is not None else None
    if parts is None or code is None:
        return None
    shape, _, data = parts
    dtype = DTYPES[_DTYPES[code]]
    if not data or len(data) != prod(shape) * dtype.itemsize:
        return None
    return Array(dtype, shape, bytes(data), _text(_with_data(value, type(data)())))


def array_object(call: str, data: bytes, file: str) -> Object:
    """The array that ``call``, a result of ``array_of``, makes of ``data``. Raises as ``decode_stand_in``."""
    value = _value(call, file)
    parts = _parts(value) if isinstance(value, Object) else None
    if not isinstance(value, Object) or parts is None:
        raise damaged(file, f"{ARRAY} does not make an array", why=_WHY)
    return _with_data(value, type(parts[2])(data))


def _parts(value: Object) -> tuple[tuple[int, ...], Value, _Data] | None:
    """Shape, dtype and elements of an array made by NumPy's functions."""
    shape: Value = ()
    kind: Value = None
    data: Value = None
    fortran: Value = False
    if value.function.name == "_reconstruct" and isinstance(value.state, tuple) and len(value.state) == 5:
        _, shape, kind, fortran, data = value.state
    elif value.function.name == "_frombuffer" and len(value.args) == 4:
        data, kind, shape, order = value.args
        fortran = order != "C"
    sizes = isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)
    if not sizes or not isinstance(shape, tuple) or not isinstance(data, (bytes, bytearray)):
        return None
    return None if fortran and len(shape) > 1 else (shape, kind, data)  # type: ignore[return-value]


def _with_data(value: Object, data: _Data) -> Object:
    if value.function.name == "_reconstruct" and isinstance(value.state, tuple):
        return replace(value, state=(*value.state[:4], data))
    return replace(value, args=(data, *value.args[1:]))


def _text(value: Value) -> str:
    text = json.dumps(encode(value), separators=(",", ":"))
    return _digest(text) + text


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST]


def has_valid_digest(text: object) -> bool:
    """Whether it is a text that ``encode_stand_in`` or ``array_of`` made."""
    return isinstance(text, str) and text[:_DIGEST] == _digest(text[_DIGEST:])


def _value(text: str, file: str) -> Value:
    try:
        data: Json = json.loads(text[_DIGEST:])
    except (ValueError, RecursionError):
        raise damaged(file, "an encoded value is not JSON", why=_WHY) from None
    return decode_allowed(data, file=file)
