"""Defines the inert Python values of a checkpoint: what its pickles say, with nothing executed.

Scalars, lists, tuples, sets and dicts are themselves (``collections.OrderedDict`` too; attributes such as ``_metadata``
are in its ``vars()``). Of everything else only what ``formats.pickle.allowlist`` lists can occur, as a record:
``Global`` for a name, ``Object`` for a call.

``Encoder`` and ``Decoder`` turn values into JSON and back: equal, and of the same types. What JSON has no type for is
an object whose first key is a tag that begins with ``$``:

    None, bool, int, str, finite float     themselves (Python writes the shortest digits that read back equal)
    list                                   array
    dict with string keys without ``$``    object
    any other dict                         {"$dict": [[key, value], ...]}
    collections.OrderedDict                {"$ordered": [[key, value], ...], "attributes": {...} when it has any}
    tuple, set                             {"$tuple": [...]}, {"$set": [...]}
    inf, -inf, nan                         {"$float": 16 hexadecimal digits of the IEEE bits, big-endian}
    complex                                {"$complex": [real, imaginary]}
    bytes, bytearray                       {"$bytes": base64}, {"$bytearray": base64}
    Global                                 {"$global": [module, name]}
    Object                                 {"$object": {"function": [...], "args": [...], ...}}
    Tensor                                 {"$tensor": the key it is stored under}

Safetensors files hold values in this form. ``comm.trees`` adds the types that workers exchange, and sends bytes beside
the JSON.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar, Union

import numpy as np

from fsdpckpt.errors import InternalError
from fsdpckpt.ir.tensors import Tensor

Scalar: TypeAlias = bool | int | float | complex | str | bytes | bytearray | None
Key: TypeAlias = Union[Scalar, "Global", "Object", tuple["Key", ...]]
Value: TypeAlias = Union[
    Scalar, Tensor, "Global", "Object", list["Value"], tuple["Value", ...], set["Key"], dict["Key", "Value"]
]
Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Global:
    """An allow-listed importable name, e.g. ``torch.float32``: never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


UNREAD = Global("fsdpckpt", "unread")
"""Stands for a value that a reader left unread."""


@dataclass(slots=True, eq=False, repr=False)
class Object:
    """An allow-listed call ``function(*args)``, and the state, items and entries set on its result.

    ``new`` distinguishes pickle's NEWOBJ (``cls.__new__``) from REDUCE. ``state`` is BUILD's argument and ``has_state``
    says whether there was one (None is a state too). ``items`` and ``entries`` are those of APPENDS and SETITEMS.

    Two objects are equal if all of this is; as keys and in sets, a NumPy number equals the Python number of the same
    value.
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
        """The NumPy number that the call makes; None for any other call, and for one with no Python equivalent
        (longdouble).
        """
        match self.args:
            case (dtype, bytes() as data) if self.function.name == "scalar" and (code := numpy_code(dtype)) is not None:
                return np.frombuffer(data, code)[0] if len(data) == np.dtype(code).itemsize else None
        return None

    def fields(self) -> tuple[Any, ...]:
        """Everything that makes two objects equal."""
        return self.function, self.args, self.new, self.state, self.has_state, self.items, self.entries

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Object):
            return self.fields() == other.fields()
        number = self.number if isinstance(other, (bool, int, float, complex)) else None
        return number is not None and bool(number.item() == other)

    def __hash__(self) -> int:
        number = self.number
        if number is not None and number == number:  # noqa: PLR0124 (NaN equals nothing)
            return hash(number.item())
        return hash((self.function, _hashed_part(self.args)))

    def __str__(self) -> str:
        return f"{self.function}(...)" if self.number is None else str(self.number)

    def __repr__(self) -> str:
        return str(self) if self.number is None else repr(self.number.item())


_HASHED_ITEMS, _HASHED_BYTES = 16, 64
_NUMPY_CODES = frozenset(["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"])


def _hashed_part(value: Value, depth: int = 2) -> object:
    """The part of ``value`` that a hash covers: equal for equal values, at a bounded cost."""
    if isinstance(value, (list, tuple)) and depth:
        return tuple(_hashed_part(item, depth - 1) for item in value[:_HASHED_ITEMS])
    if isinstance(value, (bytes, bytearray)):
        return bytes(value[:_HASHED_BYTES])
    return value if isinstance(value, (str, int, float, complex)) else None


def numpy_code(dtype: Value) -> str | None:
    """``f4`` for what NumPy pickles as ``dtype('f4', False, True)``; None if torch has no equal dtype."""
    match dtype:
        case Object(Global(_, "dtype"), (str() as code, *_), state=tuple((_, "<" | "|", *_))) if code in _NUMPY_CODES:
            return code
    return None


def like(mapping: Mapping[Any, object], items: Mapping[_Key, Any]) -> dict[_Key, Any]:
    """``items`` as a dict of the type of ``mapping``: an ``OrderedDict`` with its attributes, or a plain one."""
    if not isinstance(mapping, OrderedDict):
        return dict(items)
    ordered = OrderedDict(items)
    vars(ordered).update(vars(mapping))
    return ordered


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


def with_tensors(value: _Value, change: Callable[[Tensor], Tensor]) -> _Value:
    """``value`` with ``change`` applied to every tensor in it. Containers are copied with types and attributes."""
    changed: Any = value
    if isinstance(value, Tensor):
        changed = change(value)
    elif isinstance(value, dict):
        changed = like(value, {key: with_tensors(child, change) for key, child in value.items()})
    elif isinstance(value, (list, tuple)):
        changed = type(value)(with_tensors(child, change) for child in value)
    return changed  # type: ignore[no-any-return]  # of the type of ``value``


def value_at(value: Value, path: tuple[Key, ...]) -> Any:
    """The value at ``path``. Raises KeyError, IndexError or TypeError if there is none."""
    inner: Any = value
    for key in path:
        inner = inner[key]
    return inner


def find_value(value: Value, path: tuple[Key, ...]) -> Value:
    """The value at ``path``, None if there is none."""
    try:
        found: Value = value_at(value, path)
    except (KeyError, IndexError, TypeError):
        return None
    return found


_ABSENT: Any = object()


def replaced(value: Any, path: tuple[Key, ...], new: Value) -> Any:
    """A copy of ``value`` with ``new`` at ``path``, ``value`` itself if it has nothing there. Only the containers that
    lead there are copied.
    """
    if not path:
        return new
    try:
        inner = value[path[0]]
    except (KeyError, IndexError, TypeError):
        return value
    changed = replaced(inner, path[1:], new)
    if changed is inner:
        return value
    copy: Any = like(value, value) if isinstance(value, dict) else list(value)
    if changed is _ABSENT:
        del copy[path[0]]
    else:
        copy[path[0]] = changed
    return tuple(copy) if isinstance(value, tuple) else copy


def without(value: Value, path: tuple[Key, ...]) -> Value:
    """A copy of ``value`` without the entry at ``path``, ``value`` itself if there is none."""
    return replaced(value, path, _ABSENT) if path else value


def equal(a: Value, b: Value, *, as_loaded: bool = False) -> bool:
    """Whether ``a`` and ``b`` are equal and of the same type. NaN equals NaN, and a tensor one of the same chunks.

    ``as_loaded``: as a program sees them that loads them. The order of keys and the class of a dict do not matter, and
    a NumPy number equals the Python number of the same value.
    """
    if as_loaded and isinstance(a, Object) != isinstance(b, Object):
        a, b = _as_python_number(a), _as_python_number(b)
    if isinstance(a, dict) and isinstance(b, dict):
        same_keys = a.keys() == b.keys() if as_loaded else type(a) is type(b) and list(a) == list(b)
        return same_keys and all(equal(value, b[key], as_loaded=as_loaded) for key, value in a.items())
    if a is b or type(a) is not type(b):
        return a is b
    if isinstance(a, Object) and isinstance(b, Object):
        a, b = a.fields(), b.fields()
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(equal(*pair, as_loaded=as_loaded) for pair in zip(a, b, strict=True))
    if isinstance(a, (float, complex)) and isinstance(b, (float, complex)):
        parts = ((a.real, b.real), (a.imag, b.imag))
        return all(x == y or (math.isnan(x) and math.isnan(y)) for x, y in parts)
    if isinstance(a, set) and a != b:  # a NaN in one set is not the one in the other
        return encode(a) == encode(b)
    return a.chunks is b.chunks if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b


def _as_python_number(value: Value) -> Value:
    number = value.number if isinstance(value, Object) else None
    return value if number is None else number.item()


def as_float(number: int | float) -> float:
    """``number`` as a float; infinity if it is an int beyond those."""
    try:
        return float(number)
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")


def value_text(value: object, longest: int = 60) -> str:
    """``value`` in at most ``longest`` characters: scalars as in Python, tensors and objects by their type."""
    if isinstance(value, Tensor):
        return f"tensor {value.dtype.name} {list(value.shape)}"
    if isinstance(value, Object):
        text = f"{value.function}(...)"
    elif isinstance(value, Global):
        text = "(not read)" if value == UNREAD else str(value)
    elif isinstance(value, (bytes, bytearray)):
        text = f"{len(value)} bytes"
    elif isinstance(value, (list, tuple)) and len(value) > 8:
        text = f"a {type(value).__name__} of {len(value)}, beginning {', '.join(map(value_text, value[:2]))}"
    elif isinstance(value, (list, tuple)):
        inner = ", ".join(map(value_text, value))
        text = f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    else:
        text = repr(value)
    return text if len(text) <= longest else text[: longest - 3] + "..."


def encode(value: Value, *, tensor_key: Callable[[Tensor], str] | None = None) -> Json:
    """``value`` as JSON. ``tensor_key`` returns the name under which a tensor inside it is stored.

    Raises InternalError for a tensor without ``tensor_key``, or a type that is not a checkpoint value.
    """
    return Encoder(tensor_key).encode(value, "")


_SAME_IN_JSON = frozenset({type(None), bool, int, str})


class Encoder:
    """Values to JSON. A subclass adds types in ``encode_other``, and may keep bytes elsewhere with ``encode_bytes``.

    Types are matched exactly: a subclass of ``int`` or ``dict`` could hold more than its value. ``where``: the path of
    a value inside the outermost one, for messages.
    """

    def __init__(self, tensor_key: Callable[[Tensor], str] | None = None) -> None:
        self._tensor_key = tensor_key

    def encode(self, value: Any, where: str) -> Json:
        kind = type(value)
        if kind in _SAME_IN_JSON:
            return value  # type: ignore[no-any-return]  # narrowed by the exact type
        if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(item, f"{where}.{key}") for key, item in value.items()}
        encode = _ENCODERS.get(kind)
        return self.encode_other(value, where) if encode is None else encode(self, value, where)

    def encode_items(self, values: Iterable[Any], where: str) -> list[Json]:
        return [
            value if type(value) in _SAME_IN_JSON else self.encode(value, f"{where}[{index}]")
            for index, value in enumerate(values)
        ]

    def encode_pairs(self, pairs: Iterable[tuple[Any, Any]], where: str) -> list[Json]:
        return [[self.encode(key, where), self.encode(item, f"{where}.{key}")] for key, item in pairs]

    def encode_bytes(self, data: bytes) -> Json:
        return base64.b64encode(data).decode("ascii")

    def encode_other(self, value: object, where: str) -> Json:
        """Encode ``value``, whose type is not in the table."""
        if isinstance(value, Tensor) and self._tensor_key is not None:
            return {"$tensor": self._tensor_key(value)}
        raise InternalError(f"a value of type {type(value).__name__} cannot be written as JSON", key=where or None)


def _encode_object(encoder: Encoder, value: Object, where: str) -> Json:
    return {
        "function": [value.function.module, value.function.name],
        "args": encoder.encode_items(value.args, where),
        **({"new": True} if value.new else {}),
        **({"state": encoder.encode(value.state, where)} if value.has_state else {}),
        **({"items": encoder.encode_items(value.items, where)} if value.items else {}),
        **({"entries": encoder.encode_pairs(value.entries, where)} if value.entries else {}),
    }


_ENCODERS: Mapping[type, Callable[[Encoder, Any, str], Json]] = {
    float: lambda _, value, where: value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()},
    complex: lambda encoder, value, where: {"$complex": encoder.encode_items((value.real, value.imag), where)},
    bytes: lambda encoder, value, where: {"$bytes": encoder.encode_bytes(value)},
    bytearray: lambda encoder, value, where: {"$bytearray": encoder.encode_bytes(bytes(value))},
    list: Encoder.encode_items,
    tuple: lambda encoder, value, where: {"$tuple": encoder.encode_items(value, where)},
    set: lambda encoder, value, where: {
        # Sorted, so that the same set gives the same file every time.
        "$set": sorted(encoder.encode_items(value, where), key=lambda item: json.dumps(item, sort_keys=True))
    },
    dict: lambda encoder, value, where: {"$dict": encoder.encode_pairs(value.items(), where)},
    OrderedDict: lambda encoder, value, where: {
        "$ordered": encoder.encode_pairs(value.items(), where),
        **({"attributes": encoder.encode(dict(vars(value)), f"{where} attributes")} if vars(value) else {}),
    },
    Global: lambda _, value, where: {"$global": [value.module, value.name]},
    Object: lambda encoder, value, where: {"$object": _encode_object(encoder, value, where)},
}


class Decoder:
    """JSON to values. A subclass adds types in ``decode_other``, and may find bytes elsewhere with ``decode_bytes``.

    ``tensors`` resolves ``$tensor``. ``names``: every importable name so far. Raises KeyError, TypeError, ValueError or
    struct.error for what no encoder wrote; ``formats.pickle.allowlist.decode_allowed`` decodes what a file says.
    """

    def __init__(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        self._tensors = tensors or {}
        self.names: set[Global] = set()

    def decode(self, data: Json) -> Any:
        if isinstance(data, list):
            return [self.decode(item) for item in data]
        if not isinstance(data, dict):
            return data
        tag = next(iter(data), "")
        if not tag.startswith("$"):
            return {key: self.decode(item) for key, item in data.items()}
        if tag == "$ordered":
            ordered = OrderedDict(self.decode_pairs(data[tag]))
            attributes = self.decode(data.get("attributes", {}))
            if any(hasattr(OrderedDict, name) for name in attributes):
                raise ValueError("an attribute hides a method of a dictionary")
            vars(ordered).update(attributes)
            return ordered
        decode = _DECODERS.get(tag)
        return self.decode_other(tag, data[tag]) if decode is None else decode(self, data[tag])

    def decode_items(self, data: Json) -> list[Any]:
        if not isinstance(data, list):
            raise TypeError("an array was expected")
        return [self.decode(item) for item in data]

    def decode_pairs(self, data: Json) -> list[tuple[Key, Value]]:
        return [(require_key(key), value) for key, value in map(_pair, self.decode_items(data))]

    def decode_bytes(self, data: Any) -> bytes:
        return base64.b64decode(data, validate=True)

    def decode_other(self, tag: str, data: Json) -> Any:
        """Decode a tag that is not in the table."""
        if tag != "$tensor":
            raise KeyError(tag)
        return self._tensors[str(data)]

    def decode_name(self, data: Json) -> Global:
        name = Global(*map(str, _pair(data)))
        self.names.add(name)
        return name


def _pair(data: Json) -> list[Any]:
    if not isinstance(data, list) or len(data) != 2:
        raise TypeError("a pair was expected")
    return data


def require_key(value: Any) -> Key:
    """``value``, which may be a key. Raises TypeError for one that may not."""
    hash(value)
    if isinstance(value, Tensor):
        raise TypeError("a Tensor cannot be a key")
    return value  # type: ignore[no-any-return]  # narrowed by what can be hashed


def _decode_object(decoder: Decoder, record: Any) -> Object:
    return Object(
        decoder.decode_name(record["function"]),
        tuple(decoder.decode_items(record["args"])),
        new=record.get("new") is True,
        state=decoder.decode(record.get("state")),
        has_state="state" in record,
        items=decoder.decode_items(record.get("items", [])),
        entries=decoder.decode_pairs(record.get("entries", [])),
    )


_DECODERS: Mapping[str, Callable[[Decoder, Any], Any]] = {
    "$dict": lambda decoder, data: dict(decoder.decode_pairs(data)),
    "$tuple": lambda decoder, data: tuple(decoder.decode_items(data)),
    "$set": lambda decoder, data: set(map(require_key, decoder.decode_items(data))),
    "$float": lambda _, data: struct.unpack(">d", bytes.fromhex(data))[0],
    "$complex": lambda decoder, data: complex(*_pair(decoder.decode_items(data))),
    "$bytes": lambda decoder, data: decoder.decode_bytes(data),
    "$bytearray": lambda decoder, data: bytearray(decoder.decode_bytes(data)),
    "$global": Decoder.decode_name,
    "$object": _decode_object,
}
