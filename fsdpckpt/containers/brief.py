"""A few words for a value that may be anything: never longer than a line, never slower than its first items."""

from __future__ import annotations

__all__ = ["brief"]

_SCALARS = (str, int, float, complex, bytes, bytearray, type(None))
_SHOWN = 80  # characters
_MOST_DIGITS = 1 << 12  # bits of an int that Python writes as text


def brief(value: object) -> str:
    """``value`` if it is a scalar, or a short tuple or list of such; else what it is. ``repr`` goes through all of it,
    and a value from a file may hold another one ten times, and that one a third."""
    if isinstance(value, (tuple, list)) and len(value) <= 8 and all(isinstance(item, _SCALARS) for item in value):
        opening, closing = "()" if isinstance(value, tuple) else "[]"
        return _cut(opening + ", ".join(map(_scalar, value)) + closing)
    if isinstance(value, _SCALARS):
        return _cut(_scalar(value))
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, (tuple, list, dict, set)) else "")


def _scalar(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > _MOST_DIGITS:
        return "a huge number"
    return repr(value[:_SHOWN]) if isinstance(value, (str, bytes, bytearray)) else repr(value)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
