"""Formats numbers and values for people: pure functions from data to text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def size_text(nbytes: int) -> str:
    """``1536`` -> ``1.5 KiB``; below 1024 whole bytes."""
    if nbytes < 1024:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in _UNITS:
        value /= 1024
        if value < 1023.95 or unit == _UNITS[-1]:
            break
    return f"{value:.1f} {unit}"


def bytes_text(nbytes: int) -> str:
    """A length that may differ from another by few bytes: ``1,234 bytes``, ``3.6 GiB (3,843,594,918 bytes)``."""
    exact = plural(nbytes, "byte")
    return exact if nbytes < 10_000 else f"{size_text(nbytes)} ({exact})"


def duration_text(seconds: float) -> str:
    """``3.2 s``, ``6 min 36 s``, ``2 h 5 min``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def count_text(count: int) -> str:
    """``1234567`` -> ``1,234,567``."""
    return f"{count:,}"


def plural(count: int, word: str) -> str:
    """``3 tensors``, ``1 tensor``."""
    return f"{count_text(count)} {word}{'' if count == 1 else 's'}"


def shape_text(shape: Iterable[int]) -> str:
    """``(3, 4)`` -> ``[3, 4]``, as PyTorch shows shapes."""
    return "[" + ", ".join(map(str, shape)) + "]"


def dtypes_text(dtypes: Mapping[str, int]) -> str:
    """``float32 81, int64 1``; the name alone when there is one dtype."""
    if len(dtypes) == 1:
        return next(iter(dtypes))
    return ", ".join(f"{name} {count}" for name, count in dtypes.items())


_SCALARS = (str, int, float, complex, bytes, bytearray, type(None))
_SHOWN = 80  # characters
_MOST_DIGITS = 1 << 12  # bits of an int that Python writes as text


def first_of(values: Sequence[object], most: int) -> str:
    """The first ``most`` of ``values``, separated by commas, and ``...`` where there are more."""
    return ", ".join(map(str, values[:most])) + (", ..." if len(values) > most else "")


def truncate(value: object) -> str:
    """A scalar, or a short tuple or list of scalars, in at most 80 characters; of any other value its type and length.

    ``repr`` would visit nested values, and those from a file may be nested so that this takes exponential time.
    """
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
