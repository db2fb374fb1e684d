"""Says which values an option takes, and makes them from Python, JSON or the command line.

The type of a field decides its ``Kind`` where ``option_fields.option`` is given none.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, StrEnum
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

from fsdpckpt.errors import EMPTY, UsageError


@dataclass(frozen=True, slots=True)
class Kind:
    """The values of an option. ``values``: their type on the command line; ``keyword``: their type in the Python API.

    ``convert`` makes the value that the record holds of one from Python, JSON or the command line, and gets the
    flag of the option for its UsageError. ``choices``: all values there are.
    """

    values: Any
    keyword: str
    convert: Callable[[str, Any], object]
    choices: tuple[str, ...] = ()


def kind_of(annotation: object) -> Kind:
    """The kind of values of a field with this type."""
    optional = get_origin(annotation) in (Union, UnionType)
    if optional:
        (annotation,) = (one for one in get_args(annotation) if one is not NoneType)
    if annotation is bool:
        return TOGGLE if optional else FLAG
    if get_origin(annotation) is Literal:
        return words(get_args(annotation))
    if get_origin(annotation) is tuple:
        return TEXTS if get_args(annotation)[0] is str else PAIRS
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return _enum(annotation)
    return {str: TEXT, int: INTEGER, float: NUMBER}[cast("type", annotation)]


def _unchanged(_flag: str, value: object) -> object:
    return value


def _integer(flag: str, value: object) -> int:
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value, re.ASCII):
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{flag} takes a whole number", found=str(value))
    return value


def _number(flag: str, value: object) -> float:
    with suppress(ValueError, TypeError, OverflowError):
        number = float(cast("str", value))
        if not math.isnan(number) and not isinstance(value, bool):
            return number
    raise UsageError(f"{flag} takes a number", found=str(value))


def _text(flag: str, value: str) -> str:
    if not value:
        raise UsageError(f"{flag} is empty", why=EMPTY, next_step=f"give it a value, or drop {flag}")
    return value


def _texts(flag: str, value: str | Iterable[str]) -> tuple[str, ...]:
    return tuple(_text(flag, one) for one in ([value] if isinstance(value, str) else value))


def _pairs(flag: str, value: Mapping[str, str] | Iterable[str | Iterable[str]]) -> tuple[tuple[str, str], ...]:
    """``(old, new)`` pairs; on the command line each is written ``OLD=NEW``."""
    found = []
    for pair in value.items() if isinstance(value, Mapping) else value:
        old, new = _pair(flag, pair) if isinstance(pair, str) else pair
        if old == new:
            raise UsageError(
                f"{flag} {old}={new} has no effect: both names are the same", next_step=f"drop {flag} {old}={new}"
            )
        found.append((str(old), str(new)))
    return tuple(found)


def _pair(flag: str, text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not equals or not old:
        raise UsageError(
            f"{flag} takes OLD=NEW",
            expected="OLD=NEW",
            found=text,
            next_step=f"for example {flag} encoder=backbone",
        )
    return old, new


def _dtype(_flag: str, value: object) -> str:
    """The name of a dtype; torch.bfloat16 itself is one, too, without an import of torch."""
    return value if isinstance(value, str) else str(value).removeprefix("torch.")


def _size(flag: str, value: int | str) -> int:
    if not isinstance(value, str):
        return value
    try:
        return parse_size(value)
    except (ValueError, OverflowError):
        raise UsageError(
            f"{flag}: {value!r} is not a size", next_step=f"{flag} 128MiB, or 5GB, or 1000 (bytes)"
        ) from None


def _workers(flag: str, value: int | str) -> str:
    text = str(value)
    if text not in ("gpu", "auto") and not (text.isdecimal() and int(text)):
        raise UsageError(f"{flag} takes a number, gpu or auto", found=text, next_step=f"for example {flag} 4")
    return text


def _path(flag: str, value: str | os.PathLike[str]) -> str:
    return _text(flag, os.fspath(value))


def words(choices: tuple[str, ...]) -> Kind:
    """The kind of values that are one of ``choices``."""

    def convert(flag: str, value: object) -> object:
        word = value.value if isinstance(value, Enum) else value
        if word not in choices:
            raise UsageError(f"{flag} cannot be {value!r}", expected=", ".join(choices), found=str(value))
        return word

    return Kind(str, f"Literal[{', '.join(map(repr, choices))}]".replace("'", '"'), convert, choices)


def _enum(members: type[StrEnum]) -> Kind:
    check = words(tuple(member.value for member in members))

    def convert(flag: str, value: object) -> object:
        return members(str(check.convert(flag, value)))

    return dataclasses.replace(check, keyword=f"{members.__name__} | {check.keyword}", convert=convert)


_UNITS = {
    "": 1,
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "t": 1000**4,
    "ki": 1024,
    "mi": 1024**2,
    "gi": 1024**3,
    "ti": 1024**4,
}


def parse_size(text: str) -> int:
    """``"128MiB"``, ``"5GB"``, ``"1000"`` to bytes. Raises ValueError for anything else."""
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|[kmgt]i?)b?", text.strip().lower(), re.ASCII)
    if matched is None:
        raise ValueError(f"{text!r} is not a size; write for example 128MiB or 5GB")
    return int(float(matched[1]) * _UNITS[matched[2]])


def _torch_version(flag: str, value: object) -> str:
    """``2.8``, of ``2.8``, ``2.8.1`` or ``2.13.0+cpu``."""
    match = re.match(r"(\d+)\.(\d+)(?![\w])", str(value))
    if match is None:
        raise UsageError(f"{flag} takes a version", found=str(value), next_step=f"for example {flag} 2.8")
    return f"{int(match[1])}.{int(match[2])}"


TEXT = Kind(str, "str", _text)
INTEGER = Kind(str, "int", _integer)
NUMBER = Kind(str, "float", _number)
FLAG = Kind(bool, "bool", _unchanged)
TOGGLE = Kind(bool, "bool", _unchanged)
TEXTS = Kind(list[str], "str | Iterable[str]", _texts)
PAIRS = Kind(list[str], "Mapping[str, str] | Iterable[tuple[str, str]]", _pairs)
PATH = Kind(str, "str | os.PathLike[str]", _path)
DTYPE = Kind(str, "str | torch.dtype", _dtype)
SIZE = Kind(str, "int | str", _size)
WORKERS = Kind(str, "int | str", _workers)
TORCH_VERSION = Kind(str, "str", _torch_version)
