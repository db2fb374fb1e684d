"""Encodes values as bytes, and decodes them, for a closed set of types: nothing that another worker sends is executed.

Layout: 8 bytes (length of the JSON, little-endian), the JSON, then the blobs one after another. The JSON is that of
``ir.codec`` with a few more types; it refers to bytes and arrays by their index among the blobs. Every value comes back
equal and of the same type; a value of any other type is refused, never approximated.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fsdpckpt.errors import InternalError, UsageError
from fsdpckpt.ir.codec import Decoder, Encoder, Json


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of tensor number ``index`` in a tree that is sent without its tensors."""

    index: int


def encode(value: object) -> bytes:
    """``value`` as bytes. Raises UsageError for a type that cannot be sent; the error says where in ``value`` it is."""
    encoder = _Encoder()
    tree = encoder.json(value, "")
    header = json.dumps({"tree": tree, "blobs": [len(blob) for blob in encoder.blobs]}).encode()
    return b"".join([struct.pack("<q", len(header)), header, *encoder.blobs])


def decode(data: bytes) -> object:
    """The value that ``encode`` encoded as ``data``. Raises InternalError for any other bytes."""
    (length,) = struct.unpack_from("<q", data)
    header = json.loads(data[8 : 8 + length])
    blobs, offset = [], 8 + length
    for size in header["blobs"]:
        blobs.append(data[offset : offset + size])
        offset += size
    try:
        return _Decoder(blobs).value(header["tree"])
    except (KeyError, IndexError, TypeError, ValueError, struct.error) as error:
        raise InternalError(f"another worker sent a value that cannot be read back: {error!r}") from None


class _Encoder(Encoder):
    def __init__(self) -> None:
        self.blobs: list[bytes] = []

    def blob(self, data: bytes) -> Json:
        self.blobs.append(data)
        return len(self.blobs) - 1

    def extension(self, value: object, where: str) -> Json:
        encode = _ENCODERS.get(type(value))
        if encode is not None:
            return encode(self, value, where)
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufcSV" and not value.dtype.names:
            tag = "$array" if isinstance(value, np.ndarray) else "$number"
            return {tag: [value.dtype.str, list(value.shape), self.blob(value.tobytes())]}
        raise UsageError(
            f"a value of type {type(value).__module__}.{type(value).__qualname__} cannot cross between workers",
            key=where.removeprefix(".") or None,
            why="only plain values do: numbers, text, bytes, lists, dicts, dtypes, arrays; objects could run code",
            next_step="leave it out, or turn it into its state_dict()",
        )


_ENCODERS: dict[type, Callable[[_Encoder, Any, str], Json]] = {
    torch.Size: lambda _, value, where: {"$size": list(value)},
    frozenset: lambda encoder, value, where: {"$frozenset": encoder.items(value, where)},
    torch.dtype: lambda _, value, where: {"$dtype": str(value).removeprefix("torch.")},
    torch.device: lambda _, value, where: {"$device": str(value)},
    Slot: lambda _, value, where: {"$slot": value.index},
    io.BytesIO: lambda encoder, value, where: {"$file": encoder.blob(value.getvalue())},
}


class _Decoder(Decoder):
    def __init__(self, blobs: list[bytes]) -> None:
        self._blobs = blobs

    def blob(self, data: Json) -> bytes:
        return self._blobs[int(data)]  # type: ignore[arg-type]  # a number, by encode

    def extension(self, tag: str, data: Json) -> object:
        return _DECODERS[tag](self, data)

    def array(self, data: Json) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
        if not isinstance(data, list) or len(data) != 3:
            raise TypeError("an array has three parts")
        kind, shape, blob = data
        return np.frombuffer(bytearray(self.blob(blob)), np.dtype(str(kind))).reshape(shape)  # type: ignore[arg-type]


def _dtype(data: Json) -> torch.dtype:
    dtype = getattr(torch, str(data), None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"this torch has no dtype {data}")
    return dtype


_DECODERS: dict[str, Callable[[_Decoder, Json], object]] = {
    "$size": lambda decoder, data: torch.Size(decoder.items(data)),  # type: ignore[arg-type]
    "$frozenset": lambda decoder, data: frozenset(decoder.items(data)),
    "$dtype": lambda _, data: _dtype(data),
    "$device": lambda _, data: torch.device(str(data)),
    "$slot": lambda _, data: Slot(int(data)),  # type: ignore[arg-type]
    "$file": lambda decoder, data: io.BytesIO(decoder.blob(data)),
    "$array": lambda decoder, data: decoder.array(data),
    "$number": lambda decoder, data: decoder.array(data)[()],
}
