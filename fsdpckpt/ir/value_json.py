"""Checkpoint values as JSON and back, exactly: what a text-only container needs to carry what is no tensor.

``decode(encode(value)) == value`` with the same types, for every value of ``ir.values``. JSON has fewer types than a
checkpoint, so everything it cannot say is an object with one ``$``-tag:

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

How safetensors files use this is written in ``containers.safetensors_scheme``.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TypeAlias

from fsdpckpt.errors import InternalError, SourceCorruptError
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Global, Key, Object, Value

__all__ = ["Json", "decode", "encode"]

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None

TensorKey: TypeAlias = Callable[[Tensor], str]


def encode(value: Value, *, tensor_key: TensorKey | None = None) -> Json:
    """``value`` as JSON. ``tensor_key`` gives the name each tensor inside it is stored under.

    Raises InternalError for a tensor without ``tensor_key``, or a type that is no checkpoint value.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if isinstance(value, list):
        return [encode(item, tensor_key=tensor_key) for item in value]
    if isinstance(value, dict):
        return _encode_dict(value, tensor_key)
    if isinstance(value, tuple):
        return {"$tuple": [encode(item, tensor_key=tensor_key) for item in value]}
    return _encode_rare(value, tensor_key)


def _encode_dict(value: dict[Key, Value], tensor_key: TensorKey | None) -> Json:
    if not isinstance(value, OrderedDict) and all(type(key) is str and not key.startswith("$") for key in value):
        return {str(key): encode(item, tensor_key=tensor_key) for key, item in value.items()}
    pairs: list[Json] = [[encode(k, tensor_key=tensor_key), encode(v, tensor_key=tensor_key)] for k, v in value.items()]
    if not isinstance(value, OrderedDict):
        return {"$dict": pairs}
    attributes: dict[Key, Value] = {str(name): item for name, item in vars(value).items()}
    if not attributes:
        return {"$ordered": pairs}
    return {"$ordered": pairs, "attributes": encode(attributes, tensor_key=tensor_key)}


def _encode_rare(value: Value, tensor_key: TensorKey | None) -> Json:
    if isinstance(value, Tensor):
        if tensor_key is None:
            raise InternalError("a tensor was to be written as JSON where no tensor can be stored")
        return {"$tensor": tensor_key(value)}
    if isinstance(value, Object):
        return {"$object": _encode_object(value, tensor_key)}
    return _encode_plain(value)


def _encode_plain(value: Value) -> Json:
    if isinstance(value, set):
        # Sets have no order: a sorted one gives the same file every time.
        return {"$set": sorted((encode(item) for item in value), key=lambda item: json.dumps(item, sort_keys=True))}
    if isinstance(value, complex):
        return {"$complex": [encode(value.real), encode(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        tag = "$bytes" if isinstance(value, bytes) else "$bytearray"
        return {tag: base64.b64encode(value).decode("ascii")}
    if isinstance(value, Global):
        return {"$global": [value.module, value.name]}
    raise InternalError(f"a value of type {type(value).__name__} cannot be written as JSON")


def _encode_object(value: Object, tensor_key: TensorKey | None) -> Json:
    record: dict[str, Json] = {
        "function": [value.function.module, value.function.name],
        "args": [encode(item, tensor_key=tensor_key) for item in value.args],
    }
    if value.new:
        record["new"] = True
    if value.has_state:
        record["state"] = encode(value.state, tensor_key=tensor_key)
    if value.items:
        record["items"] = [encode(item, tensor_key=tensor_key) for item in value.items]
    if value.entries:
        record["entries"] = [
            [encode(k, tensor_key=tensor_key), encode(v, tensor_key=tensor_key)] for k, v in value.entries
        ]
    return record


def decode(data: Json, *, tensors: Mapping[str, Tensor] | None = None, file: str | None = None) -> Value:
    """The value ``encode`` was given. ``tensors`` resolves ``$tensor``; ``file`` names the source in messages.

    Raises SourceCorruptError for an unknown tag, a malformed one, or a tensor that is not there.
    """
    try:
        return _decode(data, {} if tensors is None else tensors)
    except (KeyError, TypeError, ValueError, struct.error, binascii.Error, RecursionError) as error:
        raise SourceCorruptError(
            "a value kept as JSON cannot be read back",
            file=file,
            found=f"{type(error).__name__}: {error}",
            why="the text was edited, or a newer fsdpckpt wrote it",
        ) from None


def _decode(data: Json, tensors: Mapping[str, Tensor]) -> Value:
    if isinstance(data, list):
        return [_decode(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    tag = next(iter(data), "")
    if not tag.startswith("$"):
        return {key: _decode(item, tensors) for key, item in data.items()}
    if tag == "$tensor":
        return tensors[str(data[tag])]
    return _DECODERS[tag](data, tensors)


def _items(data: Json, tensors: Mapping[str, Tensor]) -> list[Value]:
    if not isinstance(data, list):
        raise TypeError("an array was expected")
    return [_decode(item, tensors) for item in data]


def _pairs(data: Json, tensors: Mapping[str, Tensor]) -> list[tuple[Key, Value]]:
    pairs: list[tuple[Key, Value]] = []
    for pair in _items(data, tensors):
        if not isinstance(pair, list) or len(pair) != 2:
            raise TypeError("a pair was expected")
        key, value = pair
        pairs.append((_key(key), value))
    return pairs


def _key(value: Value) -> Key:
    if isinstance(value, (list, dict, set, Tensor)):
        raise TypeError(f"a {type(value).__name__} cannot be a key")
    return value  # type: ignore[return-value]  # a tuple of unhashable values raises TypeError when it is used


def _decode_ordered(data: dict[str, Json], tensors: Mapping[str, Tensor]) -> Value:
    ordered: OrderedDict[Key, Value] = OrderedDict(_pairs(data["$ordered"], tensors))
    attributes = _decode(data.get("attributes", {}), tensors)
    if not isinstance(attributes, dict):
        raise TypeError("attributes must be an object")
    for name, value in attributes.items():
        vars(ordered)[str(name)] = value
    return ordered


def _decode_object(data: dict[str, Json], tensors: Mapping[str, Tensor]) -> Value:
    record = data["$object"]
    if not isinstance(record, dict):
        raise TypeError("an object record was expected")
    return Object(
        _global(record["function"]),
        tuple(_items(record["args"], tensors)),
        new=record.get("new") is True,
        state=_decode(record.get("state"), tensors),
        has_state="state" in record,
        items=_items(record.get("items", []), tensors),
        entries=_pairs(record.get("entries", []), tensors),
    )


def _global(data: Json) -> Global:
    if not isinstance(data, list) or len(data) != 2:
        raise TypeError("a module and a name were expected")
    return Global(str(data[0]), str(data[1]))


def _number(data: Json) -> float:
    value = _decode(data, {})
    if not isinstance(value, float):
        raise TypeError("a float was expected")
    return value


def _decode_complex(data: dict[str, Json], tensors: Mapping[str, Tensor]) -> Value:
    del tensors
    parts = data["$complex"]
    if not isinstance(parts, list) or len(parts) != 2:
        raise TypeError("two numbers were expected")
    return complex(_number(parts[0]), _number(parts[1]))


def _base64(data: Json) -> bytes:
    return base64.b64decode(str(data), validate=True)


_DECODERS: dict[str, Callable[[dict[str, Json], Mapping[str, Tensor]], Value]] = {
    "$dict": lambda data, tensors: dict(_pairs(data["$dict"], tensors)),
    "$ordered": _decode_ordered,
    "$tuple": lambda data, tensors: tuple(_items(data["$tuple"], tensors)),
    "$set": lambda data, tensors: {_key(item) for item in _items(data["$set"], tensors)},
    "$float": lambda data, _: struct.unpack(">d", bytes.fromhex(str(data["$float"])))[0],
    "$complex": _decode_complex,
    "$bytes": lambda data, _: _base64(data["$bytes"]),
    "$bytearray": lambda data, _: bytearray(_base64(data["$bytearray"])),
    "$global": lambda data, _: _global(data["$global"]),
    "$object": _decode_object,
}
