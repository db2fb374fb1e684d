"""Values as bytes and back, by a closed encoding: nothing that comes from another worker is ever executed.

Layout: 8 bytes (little-endian length of the JSON), the JSON, then the blobs one after the other. JSON says plain
values itself; all else is ``{"$": tag, "v": ...}``. Bytes and arrays are blobs, by their index in a list of lengths.
Every value comes back equal and of the same type; a type outside the closed set is refused, never approximated.
"""

from __future__ import annotations

import io
import json
import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from fsdpckpt.errors import InternalError, UsageError
from fsdpckpt.ir.values import Global, Object

__all__ = ["Slot", "decode", "encode"]

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None


@dataclass(frozen=True, slots=True)
class Slot:
    """Where tensor number ``index`` belongs in a tree that travels without its tensors."""

    index: int


def encode(value: object) -> bytes:
    """``value`` as bytes. UsageError for a type that cannot cross; the message says where in ``value`` it is."""
    encoder = _Encoder()
    tree = encoder.json(value, "")
    header = json.dumps({"tree": tree, "blobs": [len(blob) for blob in encoder.blobs]}).encode()
    return b"".join([struct.pack("<q", len(header)), header, *encoder.blobs])


def decode(data: bytes) -> object:
    """The value that ``encode`` made ``data`` of."""
    (length,) = struct.unpack_from("<q", data)
    header = json.loads(data[8 : 8 + length])
    blobs, offset = [], 8 + length
    for size in header["blobs"]:
        blobs.append(data[offset : offset + size])
        offset += size
    return _Decoder(blobs).value(header["tree"])


def _tagged(tag: str, value: Json) -> Json:
    return {"$": tag, "v": value}


class _Encoder:
    def __init__(self) -> None:
        self.blobs: list[bytes] = []

    def json(self, value: object, where: str) -> Json:
        if value is None or type(value) in {bool, int, str}:
            return value  # type: ignore[return-value]  # narrowed by the exact type
        if type(value) is float:
            return value if math.isfinite(value) else _tagged("float", struct.pack(">d", value).hex())
        if type(value) is list:
            return self._items(value, where)
        if type(value) is dict:
            return self._dict(value, where)
        if type(value) is OrderedDict:
            attributes = self.json(dict(vars(value)), f"{where} attributes")
            return _tagged("ordered", [self._pairs(value, where), attributes])
        simple = self._simple(value)
        return self._compound(value, where) if simple is None else simple

    def _simple(self, value: object) -> Json:
        for kind, tag, words in _SIMPLE:
            if type(value) is kind:
                return _tagged(tag, words(value))
        if type(value) in {bytes, bytearray}:
            return _tagged(type(value).__name__, self._blob(bytes(value)))  # type: ignore[call-overload]
        if type(value) is io.BytesIO:
            return _tagged("BytesIO", self._blob(value.getvalue()))
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufcSV" and not value.dtype.names:
            tag = "array" if isinstance(value, np.ndarray) else "number"
            return _tagged(tag, [value.dtype.str, list(value.shape), self._blob(value.tobytes())])
        return None

    def _compound(self, value: object, where: str) -> Json:
        if type(value) is tuple or type(value) is torch.Size:
            return _tagged("tuple" if type(value) is tuple else "Size", self._items(list(value), where))
        if type(value) in {set, frozenset}:
            return _tagged(type(value).__name__, self._items(list(value), where))  # type: ignore[call-overload]
        if type(value) is Object:
            parts = [value.function, value.args, value.new, value.state, value.has_state, value.items, value.entries]
            return _tagged("Object", self._items(parts, where))
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise UsageError(
            f"a value of type {kind} cannot cross between workers",
            key=where or None,
            why="only plain values do: numbers, text, bytes, lists, dicts, dtypes, arrays; objects could run code",
            next_step="leave it out, or turn it into its state_dict()",
        )

    def _items(self, items: list[object], where: str) -> list[Json]:
        return [self.json(item, f"{where}[{index}]") for index, item in enumerate(items)]

    def _pairs(self, value: Mapping[object, object], where: str) -> Json:
        return [[self.json(key, where), self.json(item, f"{where}.{key}".lstrip("."))] for key, item in value.items()]

    def _dict(self, value: dict[object, object], where: str) -> Json:
        if all(type(key) is str and key != "$" for key in value):
            return {str(key): self.json(item, f"{where}.{key}".lstrip(".")) for key, item in value.items()}
        return _tagged("dict", self._pairs(value, where))

    def _blob(self, data: bytes) -> int:
        self.blobs.append(data)
        return len(self.blobs) - 1


_SIMPLE: tuple[tuple[type, str, Callable[..., Json]], ...] = (
    (complex, "complex", lambda value: struct.pack(">dd", value.real, value.imag).hex()),
    (torch.dtype, "dtype", lambda value: str(value).removeprefix("torch.")),
    (torch.device, "device", str),
    (Global, "Global", lambda value: [value.module, value.name]),
    (Slot, "Slot", lambda value: value.index),
)


class _Decoder:
    def __init__(self, blobs: list[bytes]) -> None:
        self._blobs = blobs

    def value(self, tree: Json) -> object:
        if isinstance(tree, list):
            return [self.value(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        if "$" not in tree:
            return {key: self.value(item) for key, item in tree.items()}
        return self._tagged(str(tree["$"]), tree["v"])

    def _tagged(self, tag: str, inner: Json) -> object:
        if tag in _FROM_BLOB:
            return _FROM_BLOB[tag](self._blobs[int(inner)])  # type: ignore[arg-type]  # a number, by encode
        if tag in _FROM_TEXT:
            return _FROM_TEXT[tag](inner)
        if tag in {"array", "number"}:
            return self._array(tag, inner)
        return self._compound(tag, self.value(inner))

    def _array(self, tag: str, inner: Json) -> object:
        if not isinstance(inner, list) or len(inner) != 3:
            raise InternalError("another worker sent an array without its three parts")
        kind, shape, blob = inner
        data = bytearray(self._blobs[int(blob)])  # type: ignore[arg-type]  # a number, by encode
        array = np.frombuffer(data, np.dtype(str(kind))).reshape(shape)  # type: ignore[arg-type]  # a list of numbers
        return array if tag == "array" else array[()]

    def _compound(self, tag: str, inner: object) -> object:
        if not isinstance(inner, list) or tag not in _FROM_LIST:
            raise InternalError(f"another worker sent a value of unknown kind {tag!r}")
        return _FROM_LIST[tag](inner)


def _ordered(parts: list[object]) -> object:
    pairs, attributes = parts
    found: OrderedDict[object, object] = OrderedDict(pairs)  # type: ignore[call-overload]
    vars(found).update(attributes)  # type: ignore[call-overload]
    return found


_FROM_BLOB: Mapping[str, Callable[[bytes], object]] = {"bytes": bytes, "bytearray": bytearray, "BytesIO": io.BytesIO}
_FROM_TEXT: Mapping[str, Callable[..., object]] = {
    "float": lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
    "complex": lambda text: complex(*struct.unpack(">dd", bytes.fromhex(text))),
    "dtype": lambda name: (
        getattr(torch, name) if isinstance(getattr(torch, name, None), torch.dtype) else _unknown(name)
    ),
    "device": torch.device,
    "Global": lambda parts: Global(*parts),
    "Slot": Slot,
}
_FROM_LIST: Mapping[str, Callable[[list[object]], object]] = {
    "tuple": tuple,
    "Size": torch.Size,  # type: ignore[dict-item]
    "set": set,
    "frozenset": frozenset,
    "dict": dict,  # type: ignore[dict-item]
    "ordered": _ordered,
    "Object": lambda parts: Object(*parts),  # type: ignore[arg-type]
}


def _unknown(name: str) -> object:
    raise InternalError(f"another worker sent a dtype that this torch has not: {name}")
