"""Makes dataclass fields into options: help text, values, and where they apply.

``option(...)`` declares a field of an ``OptionRecord`` (``fsdpckpt.options``). The command line, the keywords of the
Python API, the JSON that workers get and the checks of ``convert`` are all made from these declarations. The type of a
field decides its kind of values where its declaration names none. A record checks and converts its values when it
is made, whoever makes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum, StrEnum, auto
from enum import Flag as FlagEnum
from functools import cache
from inspect import get_annotations
from typing import Any, ClassVar, Self, cast, get_type_hints

from fsdpckpt import flags
from fsdpckpt.errors import UsageError
from fsdpckpt.flags import UNNAMED, Flag, Switch, Wording
from fsdpckpt.options.kinds import FLAG, OptionKind, empty, kind_of


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
    wordings: list[Wording] = []
    for option in options_of(type(record)):
        value = getattr(record, option.name)
        if scope not in option.scope or value == option.default:
            continue
        if isinstance(option.flag, Switch) and value is False:
            wordings.append(option.flag.off)
        else:
            wordings.append(option.flag)
    return tuple(wordings)


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
