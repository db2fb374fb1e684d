"""Makes dataclass fields into options: help text, values, and where they apply.

``option(...)`` declares a field of an option record (``fsdpckpt.options``). The command line, the keywords of the
Python API, the JSON that workers get and the checks of ``convert`` are all made from these declarations. The type of a
field decides its ``Kind`` of values where its declaration names none.
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
from enum import Enum, Flag, StrEnum, auto
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from fsdpckpt.errors import EMPTY, UsageError

Record = TypeVar("Record")
Function = TypeVar("Function", bound=Callable[..., Any])


class Group(StrEnum):
    """Headings of ``fsdpckpt convert --help``, in the order in which they are shown."""

    WRITTEN = "What is written"
    SELECTED = "What is converted, and its names"
    UNITS = "Units of FSDP1's flat parameters, and the order of parameters"
    SAFETY = "Safety"
    RESOURCES = "Resources"
    WORKERS = "Workers"
    OTHER = "Other options"


class Scope(Flag):
    """Where an option applies. It is refused anywhere else, because it was meant for another source or target."""

    MODEL = auto()  # a selected model section
    OPTIMIZER = auto()  # an optimizer section that is selected and written
    FLAT_PARAMETERS = auto()  # FSDP1's flat parameters, in the source or in the target
    PER_RANK_FILES = auto()  # a sharded target in one torch file per rank
    SHARDED = auto()  # a sharded or flattened target
    DTENSORS = auto()  # per-rank files or flat parameters
    SHARDED_OR_KEYED = auto()  # a sharded target, flat parameters, or --key-type
    REFERENCE = auto()  # as SHARDED_OR_KEYED, and Hugging Face's weights
    KEYED = auto()  # flat parameters, or --key-type
    KNOWLEDGE = auto()  # what the source does not record: which tensors are parameters, and their order
    SAFETENSORS = auto()  # a safetensors target
    WORKERS = auto()  # a run of several workers
    LAUNCH = auto()  # a run that starts its workers itself
    CHECKPOINT = auto()  # units from a checkpoint
    FINITE = auto()  # a search for NaN and Inf
    LIVE_MODEL = auto()  # units from a model that is built on the meta device


EVERYWHERE = Scope(0)


@dataclass(frozen=True, slots=True)
class Kind:
    """The values of an option. ``values``: their type on the command line; ``keyword``: their type in the Python API.

    ``convert`` turns a value from Python, JSON or the command line into the one that the record holds; it gets the flag
    of the option for its UsageError. ``choices``: all values. ``metavar``: the placeholder in help.
    """

    values: Any
    keyword: str
    convert: Callable[[str, Any], object]
    choices: tuple[str, ...] = ()
    metavar: str | None = None


def kind_of(annotation: object) -> Kind:
    """The kind of values for a field of this type."""
    if get_origin(annotation) in (Union, UnionType):
        (annotation,) = (one for one in get_args(annotation) if one is not NoneType)
    if annotation is bool:
        return FLAG
    if get_origin(annotation) is Literal:
        return words(get_args(annotation))
    if get_origin(annotation) is tuple:
        return TEXTS if get_args(annotation)[0] is str else PAIRS
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return _enum(annotation)
    return {str: TEXT, int: INTEGER, float: NUMBER}[cast("type", annotation)]


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
    pairs = []
    for pair in value.items() if isinstance(value, Mapping) else value:
        if isinstance(pair, str) and ("=" not in pair or pair[0] == "="):
            example = f"for example {flag} encoder=backbone"
            raise UsageError(f"{flag} takes OLD=NEW", expected="OLD=NEW", found=pair, next_step=example)
        old, new = pair.split("=", 1) if isinstance(pair, str) else pair
        if old == new:
            same = f"{flag} {old}={new}"
            raise UsageError(f"{same} has no effect: both names are the same", next_step=f"drop {same}")
        pairs.append((str(old), str(new)))
    return tuple(pairs)


def _dtype(_flag: str, value: object) -> str:
    """The name of a dtype; also accepts torch.bfloat16 itself, without importing torch."""
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


def parse_size(text: str) -> int:
    """``"128MiB"``, ``"5GB"``, ``"1000"`` to bytes. Raises ValueError for anything else."""
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?", text.strip().lower(), re.ASCII)
    if matched is None:
        raise ValueError(f"{text!r} is not a size; write for example 128MiB or 5GB")
    number, prefix, binary = matched.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix or " "))


def _torch_version(flag: str, value: object) -> str:
    """``2.8``, for ``2.8``, ``2.8.1`` or ``2.13.0+cpu``."""
    match = re.match(r"(\d+)\.(\d+)(?![\w])", str(value))
    if match is None:
        raise UsageError(f"{flag} takes a version", found=str(value), next_step=f"for example {flag} 2.8")
    return f"{int(match[1])}.{int(match[2])}"


TEXT = Kind(str, "str", _text)
INTEGER = Kind(str, "int", _integer, metavar="N")
NUMBER = Kind(str, "float", _number)
FLAG = Kind(bool, "bool", lambda _, value: value)
TEXTS = Kind(list[str], "str | Iterable[str]", _texts, metavar="GLOB")
PAIRS = Kind(list[str], "Mapping[str, str] | Iterable[tuple[str, str]]", _pairs, metavar="OLD=NEW")
PATH = Kind(str, "str | os.PathLike[str]", _path, metavar="FILE")
DTYPE = Kind(str, "str | torch.dtype", _dtype, metavar="DTYPE")
SIZE = Kind(str, "int | str", _size, metavar="SIZE")
WORKERS = Kind(str, "int | str", _workers, metavar="N|gpu|auto")
TORCH_VERSION = Kind(str, "str", _torch_version, metavar="VERSION")


@dataclass(frozen=True, slots=True)
class Option:
    """What the type of the field does not say. ``flag``: the long option, if it differs from the field's name.

    ``metavar``: the placeholder in help, if it differs from its kind's. ``minimum``: of a number. ``offered``: the
    values that it takes, if they are fewer than those of its type. ``completion``: values that the shell completes, for
    an option that takes others too. ``synonyms``: what people try instead, without dashes. ``changes_output``: whether
    the bytes that are written depend on it. ``excludes``: fields, of any record, that it cannot be given with.
    """

    help_text: str
    group: Group = Group.OTHER
    kind: Kind | None = None
    metavar: str | None = None
    flag: str | None = None
    short: str | None = None
    minimum: float | None = None
    offered: tuple[str, ...] = ()
    completion: tuple[str, ...] = ()
    synonyms: tuple[str, ...] = ()
    scope: Scope = EVERYWHERE
    changes_output: bool = True
    excludes: tuple[str, ...] = ()


def option(help_text: str, group: Group = Group.OTHER, *, default: object = None, **described: Any) -> Any:
    """The field of an option record; ``described``: further fields of ``Option``."""
    return dataclasses.field(default=default, metadata={"option": Option(help_text, group, **described)})


def repeatable(help_text: str, group: Group = Group.OTHER, **described: Any) -> Any:
    """The field of an option that may be given several times: a tuple, empty by default."""
    return option(help_text, group, default=(), **described)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One option of a record: its name in Python, its default, and everything that was declared for it."""

    name: str
    default: object
    kind: Kind
    option: Option

    @property
    def flag(self) -> str:
        """The option on the command line, as messages show it: ``--world-size``."""
        return self.option.flag or "--" + self.name.replace("_", "-")

    @property
    def metavar(self) -> str | None:
        """The placeholder for a value in help."""
        return f"<{'|'.join(self.choices)}>" if self.choices else self.option.metavar or self.kind.metavar

    @property
    def keyword(self) -> str:
        """The type of the keyword in the Python API, as source code."""
        return self.kind.keyword if self.default is not None else f"{self.kind.keyword} | None"

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that the command line takes; empty if it takes any others."""
        return self.option.offered or self.kind.choices

    def convert(self, value: object) -> object:
        """``value`` in the form of the record. Raises UsageError."""
        if value is None:
            return self.default
        if self.option.offered:
            words(self.option.offered).convert(self.flag, value)
        converted, least = self.kind.convert(self.flag, value), self.option.minimum
        if least is not None and isinstance(converted, int | float) and not converted >= least:
            raise UsageError(f"{self.flag} is too small", expected=f"{least} or more", found=str(value))
        return converted


def parameters(record: type) -> tuple[Parameter, ...]:
    """The options that the dataclass ``record`` declares, in its order."""
    return _parameters(cast("Hashable", record))


@cache
def _parameters(record: Any) -> tuple[Parameter, ...]:
    types = get_type_hints(record)
    return tuple(
        Parameter(field.name, field.default, declared.kind or kind_of(types[field.name]), declared)
        for field in dataclasses.fields(record)
        if (declared := field.metadata.get("option")) is not None
    )


def changed(record: Record, values: Mapping[str, object]) -> Record:
    """``record`` with ``values`` from Python, JSON or the command line. Raises UsageError."""
    kinds = {one.name: one for one in parameters(type(record))}
    converted: dict[str, object] = {}
    for name, value in values.items():
        try:
            converted[name] = kinds[name].convert(value)
        except UsageError as error:
            near = get_close_matches(str(value), kinds[name].choices, n=1)
            meant = f"did you mean {kinds[name].flag} {near[0]}?" if near else error.next_step
            error.next_step = instead(type(record), name, value) or meant
            raise
    return dataclasses.replace(record, **converted)  # type: ignore[type-var]


def instead(record: type, name: str, value: object) -> str | None:
    """The option of ``record`` that takes ``value``, which the one called ``name`` does not: ``--container dcp``."""
    for one in parameters(record):
        if one.name != name and value in (*one.choices, *one.option.completion):
            return f"{one.flag} {value}"
    return None


def synonym(records: Iterable[type], name: str) -> Parameter | None:
    """The option of ``records`` that people call ``name``."""
    spelt = name.replace("_", "-")
    return next((one for record in records for one in parameters(record) if spelt in one.option.synonyms), None)


def with_named(records: Iterable[Any], named: Mapping[str, object]) -> list[Any]:
    """The ``records`` of ``convert`` with the keywords ``named``. Raises UsageError for a name that is not an
    option.
    """
    records = list(records)
    homes = {one.name: number for number, record in enumerate(records) for one in parameters(type(record))}
    for name in named:
        if name not in homes:
            meant = synonym(map(type, records), name)
            close = [meant.name] if meant is not None else get_close_matches(name, homes, n=1)
            advice = f"did you mean {close[0]}?" if close else "help(fsdpckpt.convert) lists the options"
            raise UsageError(f"convert has no option {name!r}", next_step=advice)
    return [
        changed(record, {name: value for name, value in named.items() if homes[name] == number})
        for number, record in enumerate(records)
    ]


def given(record: object, scope: Scope) -> tuple[str, ...]:
    """The options of ``scope`` that differ from their defaults, as they are typed on the command line."""
    return tuple(
        one.flag
        for one in parameters(type(record))
        if scope in one.option.scope and getattr(record, one.name) != one.default
    )


def refuse_unused(record: object, scope: Scope, why: str, instead: str = "") -> None:
    """Raises UsageError if options of ``scope`` are given: they have no effect because of ``why``.

    ``instead``: what would give them one: ``add --to sharded``.
    """
    names = given(record, scope)
    if names:
        listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
        has = "has" if len(names) == 1 else "have"
        raise UsageError(
            f"{listed} {has} no effect: {why}", next_step=f"drop {listed}" + (f", or {instead}" if instead else "")
        )


def refuse_conflicts(*records: object) -> None:
    """Raises UsageError for two options of ``records`` that exclude each other."""
    every = {
        one.name: one
        for record in records
        for one in parameters(type(record))
        if getattr(record, one.name) != one.default
    }
    for one in every.values():
        for other in one.option.excludes:
            if other in every:
                flag = every[other].flag
                raise UsageError(f"{one.flag} does not go with {flag}", next_step=f"drop {one.flag} or {flag}")


def identity(record: object) -> dict[str, str]:
    """The given options that affect the output bytes: what a resumed run must repeat."""
    values = {one.name: getattr(record, one.name) for one in parameters(type(record)) if one.option.changes_output}
    return {name: str(value) for name, value in values.items() if value not in (None, ())}


def takes_options(*records: type) -> Callable[[Function], Function]:
    """Decorates a function with ``**named``: ``help()`` and completion show the options of ``records`` as its
    keywords.
    """

    def decorate(function: Function) -> Function:
        import inspect

        options = [one for record in records for one in parameters(record)]
        signature = inspect.signature(function)
        fixed = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        keywords = [
            inspect.Parameter(
                one.name, inspect.Parameter.KEYWORD_ONLY, default=_plain(one.default), annotation=one.keyword
            )
            for one in options
        ]
        function.__signature__ = signature.replace(parameters=[*fixed, *keywords])  # type: ignore[attr-defined]
        listed = "".join(f"    {one.name}: {one.option.help_text}\n" for one in options)
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nOptions:\n{listed}"
        return function

    return decorate


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else value
