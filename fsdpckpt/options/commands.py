"""Declares the options of all commands but ``convert``, and makes keywords of the Python API from them.

Options that ``convert`` has too are taken from it. Imports neither numpy nor torch, since ``--help`` needs all of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from inspect import Parameter, cleandoc, signature
from typing import Any, Literal, TypeVar

from fsdpckpt import flags
from fsdpckpt.errors import UsageError
from fsdpckpt.ir import Section, SectionName, Strategy
from fsdpckpt.options import FLAVORS, ConvertOptions
from fsdpckpt.options.declare import (
    EVERYWHERE,
    Heading,
    OptionRecord,
    Scope,
    option,
    option_field,
    option_with_synonym,
    options_of,
    repeatable,
)
from fsdpckpt.options.kinds import ANY_SECTION, PATH, VERSION

Function = TypeVar("Function", bound=Callable[..., Any])

FRAMEWORKS = tuple(name for name in FLAVORS if name != "plain")  # ``plain`` is the form of no framework


def _as_in_convert(name: str, help_text: str | None = None, scope: Scope = EVERYWHERE) -> Any:
    """The option ``name`` of ``convert``, for another command."""
    (same,) = (option for option in options_of(ConvertOptions) if option.name == name)
    text = help_text or same.help_text
    return option_field(dataclasses.replace(same, help_text=text, heading=Heading.OTHER, scope=scope))


_NAMES = "A checkpoint with the model's names, shapes and order, for flattened shards and ids."
_BUFFERS = "Model keys that are not parameters ('none': there are none); may be repeated."


def _units_file() -> Any:
    return option("Units file for flattened shards, or the fsdpckpt.json that records units.", kind=PATH)


def _threads() -> Any:
    return option("Number of threads that read and compute.", minimum=1)


@dataclass(frozen=True, slots=True)
class KnowledgeOptions(OptionRecord):
    """What a checkpoint may not record, beside a units file: for every command that only reads."""

    unit: tuple[str, ...] = _as_in_convert("unit")
    reference: str | None = _as_in_convert("reference", _NAMES)
    parameters: str | None = _as_in_convert("parameters")
    buffers: tuple[str, ...] = _as_in_convert("buffers", _BUFFERS)
    use_orig_params: bool | None = _as_in_convert("use_orig_params")
    strategy: Strategy | None = _as_in_convert("strategy", "FSDP1's sharding strategy.")
    param_dtype: str | None = _as_in_convert("param_dtype")
    shard_size: int | None = _as_in_convert("shard_size")


@dataclass(frozen=True, slots=True)
class InspectOptions(KnowledgeOptions):
    """Options of ``fsdpckpt inspect``."""

    keys: tuple[str, ...] = repeatable("Show only matching keys; may be repeated.")
    section: Section | SectionName | None = option(
        "Show only this section; NAME is one of several models or optimizers.",
        kind=ANY_SECTION,
        completion=tuple(section.value for section in Section),
    )
    names_only: bool = option("Print only the keys, one per line, for pipes.", default=False)
    all_keys: bool = option("One row per key; do not fold layers.", default=False, flag=flags.all_)
    ranks: bool = option(
        "Show the place of each chunk of a tensor: rank, file, byte offset, and box (offsets and sizes).", default=False
    )
    stats: bool = option("Read the data: min, max, mean, std, norm, NaN and Inf counts of each tensor.", default=False)
    report: str | None = option(
        "Also write an HTML page: what each rank has, sizes by module, the state of the optimizer.",
        metavar="FILE.html",
    )
    ignore_file: tuple[str, ...] = _as_in_convert("ignore_file")
    threads: int | None = _threads()
    units: str | None = _units_file()


@dataclass(frozen=True, slots=True)
class DiffOptions(KnowledgeOptions):
    """Options of ``fsdpckpt diff``."""

    rtol: float | None = option("Relative tolerance (default: every byte must be equal).", metavar="X", minimum=0.0)
    atol: float | None = option("Absolute tolerance (default: every byte must be equal).", metavar="X", minimum=0.0)
    only: Section | SectionName | None = _as_in_convert(
        "only", "Compare only this section; NAME is one of several models or optimizers, as inspect lists them."
    )
    report: str | None = option(
        "Also write an HTML page: how far each layer and state moved, outliers, keys that only one side has.",
        metavar="FILE.html",
    )
    all_keys: bool = option("One row per key, equal keys too; do not fold layers.", default=False, flag=flags.all_)
    strict: bool = option(
        "Treat extras that only one side can hold (random states of ranks) as differences.", default=False
    )
    map: tuple[str, ...] = _as_in_convert(
        "map",
        "Compare what this layout map makes of A: a TOML or JSON file, or the name of a built-in one; may be repeated.",
    )
    inverse: bool = _as_in_convert("inverse", None, Scope.MAP)
    map_value: tuple[tuple[str, str], ...] = _as_in_convert("map_value", None, Scope.MAP)
    ignore_file: tuple[str, ...] = _as_in_convert(
        "ignore_file", "Leave out files and directories of A and B with this name or path; may be repeated."
    )
    threads: int | None = _threads()
    units: str | None = _units_file()


@dataclass(frozen=True, slots=True)
class VerifyOptions(KnowledgeOptions):
    """Options of ``fsdpckpt verify``."""

    flavor: str | None = option(
        f"Also check whether this framework resumes from SRC: {', '.join(FRAMEWORKS)}.",
        flag=flags.for_,
        metavar="FLAVOR",
        completion=FRAMEWORKS,
    )
    world_size: int | None = option(
        "With --for: on this many ranks (default: as many as saved it).", minimum=1, scope=Scope.FRAMEWORK
    )
    junit: str | None = option("Also write the result as JUnit XML, which CI systems show.", metavar="FILE.xml")
    digests: bool = option("Print a layout-independent SHA-256 of each tensor.", default=False)
    finite: bool = option("Report NaN and Inf in parameters and optimizer states; reads them all.", default=False)
    include: tuple[str, ...] = repeatable(
        "With --finite: search only matching keys, buffers too; may be repeated.", scope=Scope.FINITE
    )
    exclude: tuple[str, ...] = repeatable(
        "With --finite: leave out matching keys; may be repeated.", scope=Scope.FINITE
    )
    ignore_file: tuple[str, ...] = _as_in_convert("ignore_file")
    threads: int | None = _threads()
    units: str | None = _units_file()


@dataclass(frozen=True, slots=True)
class UnitsOptions(OptionRecord):
    """Options of ``fsdpckpt units``, which makes a units file from a checkpoint or from a model."""

    source: str | None = option(
        "Checkpoint to infer the units from, or to check those of --model or --config against.",
        flag=flags.from_,
        metavar="SRC",
    )
    ignore_file: tuple[str, ...] = _as_in_convert("ignore_file", None, Scope.CHECKPOINT)
    units: str | None = _as_in_convert(
        "units", "With --from: check this units file against the checkpoint.", Scope.CHECKPOINT
    )
    reference: str | None = _as_in_convert("reference", None, Scope.CHECKPOINT)
    parameters: str | None = _as_in_convert("parameters", None, Scope.CHECKPOINT)
    buffers: tuple[str, ...] = _as_in_convert("buffers", _BUFFERS, Scope.CHECKPOINT)
    unit: tuple[str, ...] = _as_in_convert("unit", None, Scope.CHECKPOINT)
    model: str | None = option("Your function or class that builds the model; it is run.", metavar="MODULE:NAME")
    config: str | None = option(
        "Directory of a Hugging Face base model: its config.json, and names and shapes from its safetensors files. No "
        "code of the model is run.",
        kind=PATH,
        metavar="DIR",
    )
    transformers_version: str | None = option(
        "With --config: the version of transformers in the training job, for models whose parameters changed places.",
        kind=VERSION,
    )
    wrap: tuple[str, ...] = repeatable(
        "A wrapped class ('none': only the root); may be repeated. With --config its name is enough.",
        metavar="MODULE:CLASS",
        scope=Scope.CLASSES,
    )
    ignore: tuple[str, ...] = repeatable(
        "With --model: modules and parameters that FSDP ignores; may be repeated.", scope=Scope.LIVE_MODEL
    )
    use_orig_params: bool | None = _as_in_convert("use_orig_params")
    strategy: Strategy | None = _as_in_convert("strategy", "FSDP1's sharding strategy (with --model: full-shard).")
    param_dtype: str | None = _as_in_convert("param_dtype")
    shard_size: int | None = _as_in_convert("shard_size")
    output: str | None = option("Write the units file here.", short="-o", metavar="FILE")
    overwrite: bool = option("Replace an existing FILE.", default=False)


@dataclass(frozen=True, slots=True)
class OutputOptions(OptionRecord):
    """What every command prints, and where."""

    as_json: bool = option("Print one JSON document on stdout, and nothing else there.", default=False, flag=flags.json)
    quiet: bool = option("Suppress messages and progress on stderr.", default=False, short="-q")
    fail_on: Literal["warning"] | None = option("Exit with 1 if there is a warning; the output is kept.")


def keywords_of(function: Callable[..., object], record: OptionRecord) -> dict[str, Any]:
    """The options of ``record`` that are keywords of ``function``."""
    names = signature(function).parameters
    options = [option for option in options_of(type(record)) if option.name in names]
    return {option.name: getattr(record, option.name) for option in options}


def with_keywords(records: Iterable[OptionRecord], keywords: Mapping[str, object]) -> list[Any]:
    """The ``records`` of ``convert`` with the values of ``keywords``. Raises UsageError for a name that is not an
    option.
    """
    records = list(records)
    record_of = {option.name: number for number, record in enumerate(records) for option in options_of(type(record))}
    for name in keywords:
        if name not in record_of:
            meant = option_with_synonym(map(type, records), name)
            close = [meant.name] if meant is not None else get_close_matches(name, record_of, n=1)
            advice = f"did you mean {close[0]}?" if close else "help(fsdpckpt.convert) lists the options"
            raise UsageError(f"convert has no option {name!r}", next_step=advice)
    changed: list[Any] = []
    for number, record in enumerate(records):
        own = {name: value for name, value in keywords.items() if record_of[name] == number}
        changed.append(dataclasses.replace(record, **own))
    return changed


def takes_options(*records: type[OptionRecord]) -> Callable[[Function], Function]:
    """Decorates a function with ``**keywords``: ``help()`` and completion show the options of ``records`` as its
    keywords.
    """

    def decorate(function: Function) -> Function:
        options = [option for record in records for option in options_of(record)]
        declared = signature(function)
        fixed = [param for param in declared.parameters.values() if param.kind is not Parameter.VAR_KEYWORD]
        keywords = [
            Parameter(
                option.name, Parameter.KEYWORD_ONLY, default=_plain(option.default), annotation=option.python_type
            )
            for option in options
        ]
        function.__signature__ = declared.replace(parameters=[*fixed, *keywords])  # type: ignore[attr-defined]
        listed = "".join(f"    {option.name}: {option.help_text}\n" for option in options)
        function.__doc__ = f"{cleandoc(function.__doc__ or '')}\n\nOptions:\n{listed}"
        return function

    return decorate


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else value
