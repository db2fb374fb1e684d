"""Makes dataclass fields into options: help text, values, and where they apply.

``option(...)`` declares a field of an ``OptionRecord`` (``fsdpckpt.options``). The command line, the keywords of the
Python API, the JSON that workers get and the checks of ``convert`` are all made from these declarations. The type of a
field decides its kind of values where its declaration names none. A record checks and converts its values when it
is made, whoever makes it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum, StrEnum, auto
from enum import Flag as FlagEnum
from functools import cache
from inspect import get_annotations
from types import MappingProxyType, NoneType, UnionType
from typing import Any, ClassVar, Literal, Self, Union, cast, get_args, get_origin, get_type_hints

from fsdpckpt import flags
from fsdpckpt.errors import EMPTY, UsageError
from fsdpckpt.flags import UNNAMED, Flag, Switch, Wording
from fsdpckpt.ir import Section, SectionName


class Heading(StrEnum):
    """Headings of ``fsdpckpt convert --help``, in the order in which they are shown."""

    WRITTEN = "What is written"
    SELECTED = "What is converted, and its names"
    UNITS = "Units of FSDP1's flat parameters, and the order of parameters"
    RUN = "Every checkpoint of a run"
    SAFETY = "Safety"
    RESOURCES = "Resources"
    WORKERS = "Workers"
    OTHER = "Other options"


class Scope(FlagEnum):
    """Where an option applies. It is refused anywhere else, because it was meant for another source or target."""

    MODEL = auto()  # a selected model section
    OPTIMIZER = auto()  # an optimizer section that is selected and written
    FLAT_PARAMETERS = auto()  # FSDP1's flat parameters, in the source or in the target
    PER_RANK_FILES = auto()  # a sharded target in one torch file per rank
    SHARDED = auto()  # a sharded or flattened target
    DTENSORS = auto()  # per-rank files or flat parameters
    KNOWLEDGE = auto()  # what the source may not record: parameters, their order, units. Never refused: noted if unused
    SAFETENSORS = auto()  # a safetensors target
    WORKERS = auto()  # a run of several workers
    LAUNCH = auto()  # a run that starts its workers itself
    CHECKPOINT = auto()  # units from a checkpoint
    FINITE = auto()  # a search for NaN and Inf
    FRAMEWORK = auto()  # a check whether a framework resumes
    LIVE_MODEL = auto()  # units from a model that is built on the meta device
    MAP = auto()  # a layout map
    CLASSES = auto()  # units from the classes of wrapped modules


EVERYWHERE = Scope(0)


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


BY_TYPE = OptionKind(str, "", lambda _, value: value)  # the kind that the type of the field decides


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a record. ``option`` declares it, and ``options_of`` adds what the field itself says.

    ``name``: that of the field and of the keyword in Python. ``flag``: the option in messages, and its name on the
    command line. ``metavar``: the placeholder for a value in help. ``minimum``: of a number. ``choices``: the values
    that it takes; empty if it takes any others. ``completion``: values that the shell completes, for an option that
    takes others too. ``synonyms``: what people try instead, without dashes. ``changes_output``: whether the bytes that
    are written depend on it.
    """

    help_text: str
    heading: Heading = Heading.OTHER
    default: object = None
    kind: OptionKind = BY_TYPE
    name: str = ""
    flag: Flag = UNNAMED
    short: str | None = None
    metavar: str | None = None
    minimum: float | None = None
    choices: tuple[str, ...] = ()
    completion: tuple[str, ...] = ()
    synonyms: tuple[str, ...] = ()
    scope: Scope = EVERYWHERE
    changes_output: bool = True

    @property
    def python_type(self) -> str:
        """The type of the keyword in the Python API, as source code."""
        return self.kind.python_type if self.default is not None else f"{self.kind.python_type} | None"

    def convert(self, value: object) -> object:
        """``value`` in the form of the record. Raises UsageError."""
        if value is None:
            return self.default
        plain = value.value if isinstance(value, Enum) else value
        if plain == "" and self.kind is not FLAG:
            raise empty(self.flag)
        if self.choices and plain not in self.choices:
            expected = ", ".join(self.choices)
            raise UsageError(f"{self.flag} cannot be {value!r}", expected=expected, found=str(value))
        converted = self.kind.convert(self.flag, plain)
        if self.minimum is not None and isinstance(converted, int | float) and not converted >= self.minimum:
            raise UsageError(f"{self.flag} is too small", expected=f"{self.minimum} or more", found=str(value))
        return converted


def option(help_text: str, heading: Heading = Heading.OTHER, *, default: object = None, **declared: Any) -> Any:
    """The field of an option record; ``declared``: further fields of ``Option``."""
    return option_field(Option(help_text, heading, default, **declared))


def repeatable(help_text: str, heading: Heading = Heading.OTHER, **declared: Any) -> Any:
    """The field of an option that may be given several times: a tuple, empty by default."""
    return option(help_text, heading, default=(), **declared)


def option_field(declared: Option) -> Any:
    """The field of an option record for ``declared``."""
    return dataclasses.field(default=declared.default, metadata={"option": declared})


class OptionRecord:
    """Base class of option records, whose fields ``option`` and ``repeatable`` declare.

    A new record converts every value, from Python, JSON or the command line, to the type of its field; None is the
    default. Raises UsageError for a value that the option does not take.
    """

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __post_init__(self) -> None:
        for option in options_of(type(self)):
            value = getattr(self, option.name)
            try:
                converted = option.convert(value)
            except UsageError as error:
                near = get_close_matches(str(value), option.choices, n=1)
                meant = f"did you mean {option.flag(near[0])}?" if near else error.next_step
                error.next_step = _option_taking(type(self), option.name, value) or meant
                raise
            object.__setattr__(self, option.name, converted)  # the record is frozen

    @classmethod
    def of(cls, **values: Any) -> Self:
        """The record with ``values`` of any type that its options take."""
        return cls(**values)


def options_of(record: type[OptionRecord]) -> tuple[Option, ...]:
    """The options that ``record`` declares, in its order, then those of the record that it extends."""
    return _options_of(cast("Hashable", record))  # mypy takes no class for hashable


@cache
def _options_of(record: Any) -> tuple[Option, ...]:
    types, own = get_type_hints(record), get_annotations(record)
    fields = sorted(dataclasses.fields(record), key=lambda field: field.name not in own)
    return tuple(_with_field(field.metadata["option"], field.name, types[field.name]) for field in fields)


def _with_field(declared: Option, name: str, annotation: object) -> Option:
    """``declared`` with what the field with this ``name`` and type says."""
    kind = kind_of(annotation) if declared.kind == BY_TYPE else declared.kind
    choices = declared.choices or kind.choices
    metavar = f"<{'|'.join(choices)}>" if choices else declared.metavar or kind.metavar
    flag = flags.of_keyword(name, switch=kind is FLAG) if declared.flag == UNNAMED else declared.flag
    return dataclasses.replace(declared, name=name, kind=kind, choices=choices, metavar=metavar, flag=flag)


_COMMON_VALUES = ("auto", "none")  # what several options call their default, or their least value


def _option_taking(record: type[OptionRecord], name: str, value: object) -> str | None:
    """The option of ``record`` that takes ``value``, which the option ``name`` does not: ``--container dcp``.

    A value that many options have in common was meant for ``name``.
    """
    for other in options_of(record):
        if other.name != name and value not in _COMMON_VALUES and value in (*other.choices, *other.completion):
            return f"{other.flag(value)}"
    return None


def option_with_synonym(records: Iterable[type[OptionRecord]], name: str) -> Option | None:
    """The option of ``records`` that people call ``name``."""
    synonym = name.replace("_", "-")
    options = (option for record in records for option in options_of(record))
    return next((option for option in options if synonym in option.synonyms), None)


def given(record: OptionRecord, scope: Scope) -> tuple[Wording, ...]:
    """The options of ``scope`` that differ from their defaults, as messages name them."""
    values = ((option, getattr(record, option.name)) for option in options_of(type(record)) if scope in option.scope)
    return tuple(
        option.flag.off if isinstance(option.flag, Switch) and value is False else option.flag
        for option, value in values
        if value != option.default
    )


def arguments_of(record: OptionRecord) -> list[Wording]:
    """The options of ``record`` that differ from their defaults, with their values."""
    arguments: list[Wording] = []
    for option in options_of(type(record)):
        value = getattr(record, option.name)
        if value == option.default:
            continue
        if isinstance(option.flag, Switch):
            arguments.append(option.flag if value else option.flag.off)
            continue
        for single in value if isinstance(value, tuple) else (value,):
            arguments.append(option.flag("=".join(single) if isinstance(single, tuple) else single))
    return arguments


def refuse_unused(record: OptionRecord, scope: Scope, why: str, remedy: str = "") -> None:
    """Raises UsageError if options of ``scope`` are given: they have no effect because of ``why``.

    ``remedy``: what would give them an effect: ``add --to sharded``.
    """
    unused = [f"{flag}" for flag in given(record, scope)]
    if unused:
        listed = " and ".join(filter(None, (", ".join(unused[:-1]), unused[-1])))
        has = "has" if len(unused) == 1 else "have"
        raise UsageError(
            f"{listed} {has} no effect: {why}", next_step=f"drop {listed}" + (f", or {remedy}" if remedy else "")
        )


def output_options(record: OptionRecord) -> dict[str, str]:
    """The options that affect the output bytes, defaults included: what a resumed run must repeat."""
    options = (option for option in options_of(type(record)) if option.changes_output)
    values = {option.name: getattr(record, option.name) for option in options}
    return {name: str(value) for name, value in values.items() if value not in (None, ())}
