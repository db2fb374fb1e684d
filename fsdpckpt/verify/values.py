"""Equality and short text of values that are no tensors."""

from __future__ import annotations

from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Global, Object, Value

__all__ = ["same_value", "value_text"]

LONGEST = 60  # characters of a value in a message


def same_value(one: Value, other: Value) -> bool:
    """Equal in type and value; NaN equals NaN; the order of a dict's keys does not count, its class does not either."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(value, other[key]) for key, value in one.items())
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(same_value(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, Object) and isinstance(other, Object):
        return _parts(one) == _parts(other) or all(
            same_value(a, b) for a, b in zip(_parts(one), _parts(other), strict=True)
        )
    return one == other or (isinstance(one, float) and one != one and other != other)  # noqa: PLR0124


def _parts(value: Object) -> list[Value]:
    entries: list[Value] = [(key, item) for key, item in value.entries]
    return [value.function, value.new, value.has_state, list(value.args), value.state, list(value.items), entries]


def _object_text(value: Global | Object) -> str:
    if isinstance(value, Object):
        return f"{value.function}(...)"
    return "(not read)" if (value.module, value.name) == ("fsdpckpt", "unread") else str(value)


def value_text(value: Value) -> str:
    """A value in at most about 60 characters: scalars as Python writes them, tensors and objects by what they are."""
    if isinstance(value, Tensor):
        return f"tensor {value.dtype.name} {list(value.shape)}"
    if isinstance(value, (Global, Object)):
        text = _object_text(value)
    elif isinstance(value, (bytes, bytearray)):
        text = f"{len(value)} bytes"
    elif isinstance(value, (list, tuple)) and len(value) > 8:
        kind = "a list" if isinstance(value, list) else "a tuple"
        text = f"{kind} of {len(value)}, beginning {', '.join(value_text(item) for item in value[:2])}"
    elif isinstance(value, (list, tuple)):
        inner = ", ".join(value_text(item) for item in value)
        text = f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    else:
        text = repr(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
