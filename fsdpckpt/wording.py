"""Numbers and values as people read them: pure functions from data to text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["count_text", "dtypes_text", "plural", "shape_text", "size_text"]

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


def count_text(count: int) -> str:
    """``1234567`` -> ``1,234,567``."""
    return f"{count:,}"


def plural(count: int, word: str) -> str:
    """``3 tensors``, ``1 tensor``."""
    return f"{count_text(count)} {word}{'' if count == 1 else 's'}"


def shape_text(shape: Iterable[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def dtypes_text(dtypes: Mapping[str, int]) -> str:
    """``float32 81, int64 1``; the name alone when there is one dtype."""
    if len(dtypes) == 1:
        return next(iter(dtypes))
    return ", ".join(f"{name} {count}" for name, count in dtypes.items())
