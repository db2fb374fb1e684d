"""Defines the inert Python values a checkpoint is made of: what a pickle said, with nothing of it executed.

Plain scalars, lists, tuples and dicts stay themselves (``collections.OrderedDict`` too, its attributes such
as ``_metadata`` kept in ``vars()``). Everything else a checkpoint may hold from the closed set of
``formats.pickle.allowlist`` is kept as a record of what was written: ``Global`` for a name, ``Object`` for a call.

``encode`` and ``decode`` keep values as JSON, exactly: they come back equal, and of the same types. JSON has fewer
types than a checkpoint, so everything it cannot say is an object with one ``$``-tag:

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

Safetensors files hold values this way (``formats.safetensors``). Workers exchange values through a subclass that adds
types and sends bytes beside the JSON (``comm.trees``).
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import struct
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar, Union, cast, overload

import numpy as np

from fsdpckpt.errors import InternalError, SourceCorruptError
from fsdpckpt.ir.tensors import Tensor

Scalar: TypeAlias = bool | int | float | complex | str | bytes | bytearray | None
Key: TypeAlias = Union[Scalar, "Global", "Object", tuple["Key", ...]]
Value: TypeAlias = Union[
    Scalar, Tensor, "Global", "Object", list["Value"], tuple["Value", ...], set["Key"], dict["Key", "Value"]
]

_Key = TypeVar("_Key", bound=Key)


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
        if self.function.name != "scalar" or len(self.args) != 2:
            return None
        data, code = self.args[1], numpy_code(self.args[0])
        if code is None or not isinstance(data, bytes) or len(data) != np.dtype(code).itemsize:
            return None
        number: np.generic = np.frombuffer(data, code)[0]
        return number

    def parts(self) -> tuple[Any, ...]:
        """Everything that makes two objects equal."""
        return self.function, self.args, self.new, self.state, self.has_state, self.items, self.entries

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Object):
            return self.parts() == other.parts()
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
    """The part of ``values`` that a hash covers: equal for equal values, at a bounded cost."""
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
    """``f4`` for what NumPy pickles as ``dtype('f4', False, True)``; None if torch has no equal dtype."""
    if not isinstance(dtype, Object) or dtype.function.name != "dtype" or not dtype.args:
        return None
    order = dtype.state[1] if isinstance(dtype.state, tuple) and len(dtype.state) > 1 else None
    code = dtype.args[0]
    return code if isinstance(code, str) and code in _NUMPY_CODES and order in ("<", "|") else None


def like(mapping: Mapping[Any, object], items: Mapping[Key, Any]) -> dict[Key, Any]:
    """``items`` as a dict of the type of ``mapping``: an ``OrderedDict`` with its attributes, or a plain one."""
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


@overload
def with_tensors(value: dict[_Key, Value], change: Callable[[Tensor], Tensor]) -> dict[_Key, Value]: ...
@overload
def with_tensors(value: Value, change: Callable[[Tensor], Tensor]) -> Value: ...
def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with ``change`` applied to every tensor in it; containers are copied with their types and
    attributes.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return like(value, {key: with_tensors(child, change) for key, child in value.items()})
    if isinstance(value, (list, tuple)):
        return type(value)(with_tensors(child, change) for child in value)
    return value


def value_at(value: Value, path: tuple[Key, ...]) -> Any:
    """The value at ``path``. Raises KeyError, IndexError or TypeError if there is none."""
    inner: Any = value
    for key in path:
        inner = inner[key]
    return inner


def _has(value: Value, path: tuple[Key, ...]) -> bool:
    try:
        value_at(value, path)
    except (KeyError, IndexError, TypeError):
        return False
    return True


def replaced(value: Value, path: tuple[Key, ...], new: Value) -> Value:
    """A copy of ``value`` with ``new`` at ``path``, ``value`` itself if it has nothing there. Only the containers on
    the way are copied.
    """
    if not path or not _has(value, path):
        return value if path else new
    copy = _copy(value)
    copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return tuple(copy) if isinstance(value, tuple) else copy


def without(value: Value, path: tuple[Key, ...], *, prune: bool = False) -> Value:
    """A copy of ``value`` without the entry at ``path``, ``value`` itself if it has none. ``prune``: and without
    containers that become empty.
    """
    if not _has(value, path):
        return value
    copy = _copy(value)
    if len(path) > 1:
        copy[path[0]] = without(copy[path[0]], path[1:], prune=prune)
    if len(path) == 1 or (prune and not copy[path[0]]):
        del copy[path[0]]
    return tuple(copy) if isinstance(value, tuple) else copy


def _copy(container: Value) -> Any:
    return like(container, container) if isinstance(container, dict) else list(cast("list[Value]", container))


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
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(equal(*pair, as_loaded=as_loaded) for pair in zip(a, b, strict=True))
    if isinstance(a, Object) and isinstance(b, Object):
        return a == b or equal(a.parts(), b.parts(), as_loaded=as_loaded)
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    return a.chunks is b.chunks if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b


def _as_python_number(value: Value) -> Value:
    number = value.number if isinstance(value, Object) else None
    return value if number is None else number.item()


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
        kind = "a list" if isinstance(value, list) else "a tuple"
        text = f"{kind} of {len(value)}, beginning {', '.join(map(value_text, value[:2]))}"
    elif isinstance(value, (list, tuple)):
        inner = ", ".join(map(value_text, value))
        text = f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    else:
        text = repr(value)
    return text if len(text) <= longest else text[: longest - 3] + "..."


Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None

_PLAIN = frozenset({type(None), bool, int, str})


def encode(value: Value, *, tensor_key: Callable[[Tensor], str] | None = None) -> Json:
    """``value`` as JSON. ``tensor_key`` returns the name under which a tensor inside it is stored.

    Raises InternalError for a tensor without ``tensor_key``, or a type that is not a checkpoint value.
    """
    return _ValueEncoder(tensor_key).json(value, "")


def decode(
    data: Json,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    file: str | None = None,
    names: set[Global] | None = None,
) -> Value:
    """The inverse of ``encode``. ``tensors`` resolves ``$tensor``; ``file`` names the source in messages.

    Every importable name in the value is added to ``names``: ``formats.pickle.allowlist.decode_allowed`` checks them.
    Raises SourceCorruptError for an unknown tag, a malformed one, or a missing tensor.
    """
    try:
        decoder = _ValueDecoder({} if tensors is None else tensors, set() if names is None else names)
        return decoder.value(data)  # type: ignore[return-value]
    except (KeyError, TypeError, ValueError, struct.error, binascii.Error, RecursionError) as error:
        raise SourceCorruptError(
            "a value kept as JSON cannot be read back",
            file=file,
            found=f"{type(error).__name__}: {error}",
            why="the text was edited, or a newer fsdpckpt wrote it",
        ) from None


class Encoder(ABC):
    """Values to JSON. A subclass adds types in ``extension``, and may keep bytes elsewhere with ``blob``.

    Types are matched exactly: a subclass of ``int`` or ``dict`` could hold more than its value. ``where``: the path of
    a value inside the outermost one, for messages.
    """

    def json(self, value: object, where: str) -> Json:
        kind = type(value)
        if kind in _PLAIN:
            return value  # type: ignore[return-value]  # narrowed by the exact type
        if kind is list:
            return self.items(value, where)  # type: ignore[arg-type]
        if kind is dict or kind is OrderedDict:
            return self._mapping(value, where)  # type: ignore[arg-type]
        encode = _ENCODERS.get(kind)
        return self.extension(value, where) if encode is None else encode(self, value, where)

    def blob(self, data: bytes) -> Json:
        """``data`` as base64."""
        return base64.b64encode(data).decode("ascii")

    @abstractmethod
    def extension(self, value: object, where: str) -> Json:
        """Encode ``value``, whose type is not in the table. Raises what the subclass decides."""

    def items(self, values: Iterable[object], where: str) -> list[Json]:
        return [
            value if type(value) in _PLAIN else self.json(value, f"{where}[{index}]")  # type: ignore[misc]
            for index, value in enumerate(values)
        ]

    def _mapping(self, value: dict[object, object], where: str) -> Json:
        if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {str(key): self.json(item, f"{where}.{key}") for key, item in value.items()}
        pairs = self.pairs(value.items(), where)
        if type(value) is dict:
            return {"$dict": pairs}
        attributes = vars(value)
        if not attributes:
            return {"$ordered": pairs}
        return {"$ordered": pairs, "attributes": self.json(dict(attributes), f"{where} attributes")}

    def pairs(self, pairs: Iterable[tuple[object, object]], where: str) -> list[Json]:
        return [[self.json(key, where), self.json(item, f"{where}.{key}")] for key, item in pairs]

    def object(self, value: Object, where: str) -> Json:
        record: dict[str, Json] = {
            "function": [value.function.module, value.function.name],
            "args": self.items(value.args, where),
        }
        if value.new:
            record["new"] = True
        if value.has_state:
            record["state"] = self.json(value.state, where)
        if value.items:
            record["items"] = self.items(value.items, where)
        if value.entries:
            record["entries"] = self.pairs(value.entries, where)
        return record


def _float(value: float) -> Json:
    return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}


_ENCODERS: Mapping[type, Callable[[Encoder, Any, str], Json]] = {
    float: lambda _, value, where: _float(value),
    complex: lambda _, value, where: {"$complex": [_float(value.real), _float(value.imag)]},
    bytes: lambda encoder, value, where: {"$bytes": encoder.blob(value)},
    bytearray: lambda encoder, value, where: {"$bytearray": encoder.blob(bytes(value))},
    tuple: lambda encoder, value, where: {"$tuple": encoder.items(value, where)},
    set: lambda encoder, value, where: {
        # Sorted, so that the same set gives the same file every time.
        "$set": sorted(encoder.items(value, where), key=lambda item: json.dumps(item, sort_keys=True))
    },
    Global: lambda _, value, where: {"$global": [value.module, value.name]},
    Object: lambda encoder, value, where: {"$object": encoder.object(value, where)},
}


class _ValueEncoder(Encoder):
    def __init__(self, tensor_key: Callable[[Tensor], str] | None) -> None:
        self._tensor_key = tensor_key

    def extension(self, value: object, where: str) -> Json:
        if not isinstance(value, Tensor):
            raise InternalError(f"a value of type {type(value).__name__} cannot be written as JSON", key=where or None)
        if self._tensor_key is None:
            raise InternalError("a tensor was to be written as JSON where no tensor can be stored", key=where or None)
        return {"$tensor": self._tensor_key(value)}


class Decoder:
    """JSON to values. A subclass adds types in ``extension``, and may find bytes elsewhere with ``blob``.

    Raises KeyError, TypeError, ValueError or struct.error for what no encoder wrote.
    """

    def value(self, data: Json) -> object:
        if isinstance(data, list):
            return [self.value(item) for item in data]
        if not isinstance(data, dict):
            return data
        tag = next(iter(data), "")
        if not tag.startswith("$"):
            return {key: self.value(item) for key, item in data.items()}
        decode = _DECODERS.get(tag)
        return self.extension(tag, data[tag]) if decode is None else decode(self, data)

    def blob(self, data: Json) -> bytes:
        """The inverse of ``Encoder.blob``."""
        return base64.b64decode(str(data), validate=True)

    def extension(self, tag: str, data: Json) -> object:
        """Decode a tag that is not in the table."""
        raise KeyError(tag)

    def items(self, data: Json) -> list[object]:
        if not isinstance(data, list):
            raise TypeError("an array was expected")
        return [self.value(item) for item in data]

    def pairs(self, data: Json) -> list[tuple[Key, Value]]:
        pairs: list[tuple[Key, Value]] = []
        for pair in self.items(data):
            if not isinstance(pair, list) or len(pair) != 2:
                raise TypeError("a pair was expected")
            pairs.append((_key(pair[0]), pair[1]))
        return pairs

    def ordered(self, data: dict[str, Json]) -> object:
        ordered: OrderedDict[Key, Value] = OrderedDict(self.pairs(data["$ordered"]))
        attributes = self.value(data.get("attributes", {}))
        if not isinstance(attributes, dict):
            raise TypeError("attributes must be an object")
        for name, value in attributes.items():
            vars(ordered)[str(name)] = value
        return ordered

    def name(self, data: Json) -> Global:
        if not isinstance(data, list) or len(data) != 2:
            raise TypeError("a module and a name were expected")
        return Global(str(data[0]), str(data[1]))

    def object(self, record: Json) -> Object:
        if not isinstance(record, dict):
            raise TypeError("an object record was expected")
        args, items = self.items(record["args"]), self.items(record.get("items", []))
        return Object(
            self.name(record["function"]),
            tuple(args),  # type: ignore[arg-type]  # values, by this decoder
            new=record.get("new") is True,
            state=self.value(record.get("state")),  # type: ignore[arg-type]
            has_state="state" in record,
            items=items,  # type: ignore[arg-type]
            entries=self.pairs(record.get("entries", [])),
        )


class _ValueDecoder(Decoder):
    def __init__(self, tensors: Mapping[str, Tensor], names: set[Global]) -> None:
        self._tensors = tensors
        self._names = names

    def name(self, data: Json) -> Global:
        name = super().name(data)
        self._names.add(name)
        return name

    def extension(self, tag: str, data: Json) -> Tensor:
        if tag != "$tensor":
            raise KeyError(tag)
        return self._tensors[str(data)]


def _key(value: object) -> Key:
    if isinstance(value, (list, dict, set, Tensor)):
        raise TypeError(f"a {type(value).__name__} cannot be a key")
    return value  # type: ignore[return-value]  # a tuple of unhashable values raises TypeError when it is used


def _complex(decoder: Decoder, data: Json) -> complex:
    parts = decoder.items(data)
    if len(parts) != 2 or not all(isinstance(part, float) for part in parts):
        raise TypeError("two floats were expected")
    return complex(parts[0], parts[1])  # type: ignore[call-overload,no-any-return]


_DECODERS: Mapping[str, Callable[[Decoder, dict[str, Json]], object]] = {
    "$dict": lambda decoder, data: dict(decoder.pairs(data["$dict"])),
    "$ordered": Decoder.ordered,
    "$tuple": lambda decoder, data: tuple(decoder.items(data["$tuple"])),
    "$set": lambda decoder, data: {_key(item) for item in decoder.items(data["$set"])},
    "$float": lambda _, data: struct.unpack(">d", bytes.fromhex(str(data["$float"])))[0],
    "$complex": lambda decoder, data: _complex(decoder, data["$complex"]),
    "$bytes": lambda decoder, data: decoder.blob(data["$bytes"]),
    "$bytearray": lambda decoder, data: bytearray(decoder.blob(data["$bytearray"])),
    "$global": lambda decoder, data: decoder.name(data["$global"]),
    "$object": lambda decoder, data: decoder.object(data["$object"]),
}
