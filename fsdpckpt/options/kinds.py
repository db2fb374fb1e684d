"""The kinds of values that options take: their types, their checks, and how they are converted.

``OptionKind.convert`` takes what Python, JSON or the command line gives and raises UsageError for what is not such a
value.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

from fsdpckpt import flags
from fsdpckpt.errors import EMPTY, UsageError
from fsdpckpt.flags import Flag
from fsdpckpt.ir import Section, SectionName


@dataclass(frozen=True, slots=True)
class OptionKind:
    """The values of an option. ``cli_type``: their type on the command line; ``python_type``: their type in the Python
    API, as source code.

    ``convert`` turns a value from Python, JSON or the command line into the one that the record holds; it gets the flag
    of the option for its UsageError. ``choices``: all values, if help lists them. ``metavar``: the placeholder in help.
    """

    cli_type: Any
    python_type: str
    convert: Callable[[Flag, Any], object]
    choices: tuple[str, ...] = ()
    metavar: str | None = None


def kind_of(annotation: object) -> OptionKind:
    """The kind of values for a field of this type."""
    if get_origin(annotation) in (Union, UnionType):
        (annotation,) = (member for member in get_args(annotation) if member is not NoneType)
    if annotation is bool:
        return FLAG
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
        return OptionKind(str, _literal_type(choices), lambda _, value: value, choices)
    if get_origin(annotation) is tuple:
        return TEXTS if get_args(annotation)[0] is str else PAIRS
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        members, choices = annotation, tuple(member.value for member in annotation)
        python_type = f"{members.__name__} | {_literal_type(choices)}"
        return OptionKind(str, python_type, lambda _, value: members(value), choices)
    return {str: TEXT, int: INTEGER, float: NUMBER}[cast("type", annotation)]


def _literal_type(choices: tuple[str, ...]) -> str:
    return f"Literal[{', '.join(map(repr, choices))}]".replace("'", '"')


def _integer(flag: Flag, value: object) -> int:
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value, re.ASCII):
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{flag} takes a whole number", found=str(value))
    return value


def _number(flag: Flag, value: object) -> float:
    with suppress(ValueError, TypeError, OverflowError):
        number = float(cast("str", value))
        if not math.isnan(number) and not isinstance(value, bool):
            return number
    raise UsageError(f"{flag} takes a number", found=str(value))


def _flag(flag: Flag, value: object) -> bool:
    if not isinstance(value, bool):
        # Only Python gives another value.
        raise UsageError(f"{flag.keyword} takes True or False", found=repr(value))
    return value


def _text(flag: Flag, value: object) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{flag} takes text", found=repr(value))
    if not value:
        raise empty(flag)
    return value


def empty(flag: Flag) -> UsageError:
    """The error for an option whose value is an empty text."""
    return UsageError(f"{flag} is empty", why=EMPTY, next_step=f"give it a value, or drop {flag}")


def _texts(flag: Flag, value: object) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) or not isinstance(value, Iterable) else value
    return tuple(_text(flag, text) for text in values)


def _pairs(flag: Flag, value: object) -> tuple[tuple[str, str], ...]:
    """``(old, new)`` pairs; on the command line each is written ``OLD=NEW``, or ``NAME=N`` for a map's numbers."""
    form, pair_to_show = "OLD=NEW", "encoder=backbone"
    if flag.python == flags.map_value.python:
        form, pair_to_show = "NAME=N", "head_dim=128"
    values = value.items() if isinstance(value, Mapping) else value
    pairs = []
    for pair in [values] if isinstance(values, str) or not isinstance(values, Iterable) else values:
        old, equals, new = pair.partition("=") if isinstance(pair, str) else ("", "", "")
        if isinstance(pair, tuple | list) and len(pair) == 2:
            old, new = map(str, pair)
        elif not old or not equals:
            example = f"for example {flag(pair_to_show)}"
            raise UsageError(f"{flag} takes {form}", expected=form, found=str(pair), next_step=example)
        if old == new:
            same = flag(f"{old}={new}")
            raise UsageError(f"{same} has no effect: both names are the same", next_step=f"drop {same}")
        pairs.append((old, new))
    return tuple(pairs)


def _size(flag: Flag, value: object) -> int:
    if not isinstance(value, str):
        return _integer(flag, value)
    try:
        return parse_size(value)
    except (ValueError, OverflowError):
        raise UsageError(
            f"{flag}: {value!r} is not a size", next_step=f"{flag('128MiB')}, or 5GB, or 1000 (bytes)"
        ) from None


def _workers(flag: Flag, value: object) -> str:
    text = str(value)
    if text not in ("gpu", "auto") and not re.fullmatch(r"0*[1-9]\d{0,8}", text, re.ASCII):
        raise UsageError(f"{flag} takes a number, gpu or auto", found=text, next_step=f"for example {flag(4)}")
    return text


def _path(flag: Flag, value: object) -> str:
    return _text(flag, os.fspath(value) if isinstance(value, os.PathLike) else value)


def _paths(flag: Flag, value: object) -> tuple[str, ...]:
    values = [value] if isinstance(value, str | os.PathLike) or not isinstance(value, Iterable) else value
    return tuple(_path(flag, path) for path in values)


def one_of(
    names: tuple[str, ...],
    noun: str,
    example: str,
    metavar: str,
    python_type: str = "str",
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> OptionKind:
    """The kind of values that are one of many ``names``, which help does not list: only an error does.

    ``noun``: what they are: ``"a device type"``. ``aliases``: what people call them. Also takes an object of torch
    with one of these names, ``torch.bfloat16``, without importing torch.
    """

    def convert(flag: Flag, value: object) -> str:
        name = value if isinstance(value, str) else str(value).removeprefix("torch.")
        if name not in names:
            near = [aliases.get(name), *get_close_matches(name, names, n=1), example]
            raise UsageError(
                f"{flag(name)} is not {noun}",
                expected=", ".join(names),
                found=name,
                next_step=f"{flag(next(filter(None, near)))}",
            )
        return name

    return OptionKind(str, python_type, convert, metavar=metavar)


def _section_kind(*sections: str) -> OptionKind:
    """One of ``sections``, or ``model:NAME`` or ``optim:NAME``."""
    expected = (*sections, *(f"{name}:NAME" for name in SECTIONS))

    def convert(flag: Flag, value: object) -> Section | SectionName:
        text = str(value)
        section, colon, name = text.partition(":")
        if section not in (SECTIONS if colon else sections) or bool(colon) != bool(name):
            near = get_close_matches(text, sections, n=1)
            raise UsageError(
                f"{flag} cannot be {value!r}",
                expected=", ".join(expected),
                found=text,
                next_step=f"did you mean {flag(near[0])}?" if near else None,
            )
        return SectionName(text) if colon else Section(text)

    return OptionKind(str, "Section | str", convert, metavar="|".join(expected))


def parse_size(text: str) -> int:
    """``"128MiB"``, ``"5GB"``, ``"1000"`` to bytes. Raises ValueError for anything else."""
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?", text.strip().lower(), re.ASCII)
    if matched is None:
        raise ValueError(f"{text!r} is not a size; write for example 128MiB or 5GB")
    number, prefix, binary = matched.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix or " "))


def _torch_version(flag: Flag, value: object) -> str:
    """``2.8``, for ``2.8``, ``2.8.1`` or ``2.13.0+cpu``."""
    return _version(flag, value, "2.8")


def _version(flag: Flag, value: object, example: str = "4.53") -> str:
    match = re.match(r"(\d{1,4})\.(\d{1,4})(?![\w])", str(value))
    if match is None:
        raise UsageError(f"{flag} takes a version", found=str(value), next_step=f"for example {flag(example)}")
    return f"{int(match[1])}.{int(match[2])}"


SECTIONS = (Section.MODEL.value, Section.OPTIM.value)  # what a conversion or a comparison may be limited to
SECTION = _section_kind(*SECTIONS)
ANY_SECTION = _section_kind(*SECTIONS, Section.EXTRA.value)
TEXT = OptionKind(str, "str", _text)
INTEGER = OptionKind(str, "int", _integer, metavar="N")
NUMBER = OptionKind(str, "float", _number)
FLAG = OptionKind(bool, "bool", _flag)
TEXTS = OptionKind(list[str], "str | Iterable[str]", _texts, metavar="GLOB")
PAIRS = OptionKind(list[str], "Mapping[str, str] | Iterable[tuple[str, str]]", _pairs, metavar="OLD=NEW")
PATH = OptionKind(str, "str | os.PathLike[str]", _path, metavar="FILE")
PATHS = OptionKind(list[str], "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]", _paths, metavar="FILE")
SIZE = OptionKind(str, "int | str", _size, metavar="SIZE")
WORKERS = OptionKind(str, "int | str", _workers, metavar="N|gpu|auto")
TORCH_VERSION = OptionKind(str, "str", _torch_version, metavar="VERSION")
VERSION = OptionKind(str, "str", _version, metavar="VERSION")
