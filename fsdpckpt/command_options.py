"""Declares the options of all commands but ``convert``, and translates options to keywords of the Python API.

Options that ``convert`` has too are taken from it. Messages use the options of the command line; ``in_python``
translates them for ``str(error)``: there ``--world-size 3`` is ``world_size=3``. Imports neither numpy nor torch, since
``--help`` needs all of it.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from fsdpckpt.ir import Section, Strategy
from fsdpckpt.option_fields import (
    DTYPE,
    EVERYWHERE,
    FLAG,
    INTEGER,
    NUMBER,
    PAIRS,
    PATH,
    SIZE,
    TEXTS,
    Group,
    Parameter,
    Scope,
    option,
    parameters,
    repeatable,
)
from fsdpckpt.options import SECTIONS, ConvertOptions, LaunchOptions


def _as_in_convert(name: str, help_text: str | None = None, scope: Scope = EVERYWHERE) -> Any:
    """The option ``name`` of ``convert``, for another command."""
    (same,) = (one for one in parameters(ConvertOptions) if one.name == name)
    declared = dataclasses.replace(same.option, group=Group.OTHER, scope=scope)
    if help_text is not None:
        declared = dataclasses.replace(declared, help_text=help_text)
    return dataclasses.field(default=same.default, metadata={"option": declared})


_UNITS_FILE: Any = {"kind": PATH}
_THREADS: Any = {"minimum": 1}


@dataclass(frozen=True, slots=True)
class InspectOptions:
    """Options of ``fsdpckpt inspect``."""

    keys: tuple[str, ...] = repeatable("Show only matching keys; may be repeated.")
    section: Section | None = option("Show only this section.")
    names_only: bool = option(
        "Print only the keys, one per line, for pipes.", default=False, excludes=("as_json", "all_keys", "ranks")
    )
    all_keys: bool = option("One row for each key, also of repeated layers.", default=False, flag="--all")
    ranks: bool = option(
        "Show the place of each chunk of a tensor: rank, file, byte offset, and box (offsets and sizes).", default=False
    )
    stats: bool = option("Read the data: min, max, mean, std, norm, NaN and Inf counts of each tensor.", default=False)
    report: str | None = option(
        "Also write a self-contained page: who holds what, sizes by module, the optimizer's health.",
        metavar="FILE.html",
    )
    ignore_file: tuple[str, ...] = _as_in_convert("ignore_file")
    units: str | None = option("Units file for flattened shards.", **_UNITS_FILE)
    threads: int | None = option("Number of threads that read and compute.", **_THREADS)


@dataclass(frozen=True, slots=True)
class DiffOptions:
    """Options of ``fsdpckpt diff``."""

    rtol: float | None = option("Relative tolerance (default: every byte must be equal).", metavar="X", minimum=0.0)
    atol: float | None = option("Absolute tolerance (default: every byte must be equal).", metavar="X", minimum=0.0)
    only: Section | None = option("Compare only this section.", offered=SECTIONS)
    all_keys: bool = option(
        "Print every key, also what is the same and of repeated layers.", default=False, flag="--all"
    )
    strict: bool = option("Count extras that only one of them has a place for (random states of ranks).", default=False)
    ignore_file: tuple[str, ...] = _as_in_convert(
        "ignore_file", "Leave out files and directories of A and B with this name or path; may be repeated."
    )
    units: str | None = option("Units file for flattened shards.", **_UNITS_FILE)
    threads: int | None = option("Number of threads that read and compute.", **_THREADS)


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """Options of ``fsdpckpt verify``."""

    digests: bool = option("Print a layout-independent SHA-256 of each tensor.", default=False)
    finite: bool = option("Report NaN and Inf in parameters and optimizer states; reads them all.", default=False)
    include: tuple[str, ...] = repeatable(
        "With --finite: search only matching keys, buffers too; may be repeated.", scope=Scope.FINITE
    )
    exclude: tuple[str, ...] = repeatable(
        "With --finite: leave out matching keys; may be repeated.", scope=Scope.FINITE
    )
    ignore_file: tuple[str, ...] = _as_in_convert("ignore_file")
    units: str | None = option("Units file for flattened shards.", **_UNITS_FILE)
    threads: int | None = option("Number of threads that read and compute.", **_THREADS)


@dataclass(frozen=True, slots=True)
class UnitsOptions:
    """Options of ``fsdpckpt units``, which makes a units file from a checkpoint or from a model."""

    source: str | None = option(
        "Checkpoint to infer the units from, or to check those of --model against.", flag="--from", metavar="SRC"
    )
    ignore_file: tuple[str, ...] = _as_in_convert("ignore_file", None, Scope.CHECKPOINT)
    units: str | None = _as_in_convert(
        "units", "With --from: check this units file against the checkpoint.", Scope.CHECKPOINT
    )
    reference: str | None = _as_in_convert("reference", None, Scope.CHECKPOINT)
    parameters: str | None = _as_in_convert("parameters", None, Scope.CHECKPOINT)
    buffers: tuple[str, ...] = _as_in_convert(
        "buffers", "Model keys that are not parameters ('none': there are none); may be repeated.", Scope.CHECKPOINT
    )
    unit: tuple[str, ...] = _as_in_convert("unit", None, Scope.CHECKPOINT)
    model: str | None = option("Your function or class that builds the model; it is run.", metavar="MODULE:NAME")
    wrap: tuple[str, ...] = repeatable(
        "A wrapped class ('none': only the root); may be repeated.", metavar="MODULE:CLASS", scope=Scope.LIVE_MODEL
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
class OutputOptions:
    """What every command prints, and where."""

    as_json: bool = option("Print one JSON document on stdout, and nothing else there.", default=False, flag="--json")
    quiet: bool = option("Suppress messages and progress on stderr.", default=False, short="-q")


_OPTIONS = {
    one.flag: one
    for record in (ConvertOptions, LaunchOptions, InspectOptions, DiffOptions, VerifyOptions)
    for one in parameters(record)
}
# A command for a terminal stays unchanged. Else an option, and the word after it, which may be its value.
_MENTION = re.compile(
    r"(?:fsdpckpt (?:inspect|convert|diff|verify|units)|torchrun|curl|pip)\b[^`#\n]*"
    r"|(?P<flag>--[a-z][a-z-]*[a-z])(?: (?P<value>'[^']*'|(?:[^\s,;:()`?]|,(?=\w))*[^\s,;:()`.?]))?(?: \(repeatable\))?"
)


def in_python(text: str) -> str:
    """``text`` with the options of the command line as keywords of the Python API."""
    return _MENTION.sub(_worded, text)


def _worded(mention: re.Match[str]) -> str:
    flag, value = mention["flag"], mention["value"]
    one = _OPTIONS.get(flag) or _OPTIONS.get(f"--{flag.removeprefix('--no-')}") if flag else None
    if one is None:
        return mention[0]
    if one.kind == FLAG:
        return f"{one.name}={flag == one.flag}" + mention[0].removeprefix(flag)
    if value is None or not _is_value(one, value):
        return one.name + mention[0].removeprefix(flag)
    return f"{one.name}={_literal(one, value)}"


def _is_value(one: Parameter, word: str) -> bool:
    """Whether ``word`` is a value of the option, not a word of the sentence."""
    kinds = {
        INTEGER: r"\d+",
        NUMBER: r"[\d.]+",
        SIZE: r"\d\S*",
        PATH: r".*[./].*",
        DTYPE: r"[a-z]+\d\w*",
        TEXTS: r"none|\d+|(?:\w+=\d+,?)+",
        PAIRS: ".+=.+",
    }
    known = word in one.choices or word in one.option.completion
    return known or word[0] == "'" or word.isupper() or re.fullmatch(kinds.get(one.kind, "(?!)"), word) is not None


def _literal(one: Parameter, word: str) -> str:
    if one.kind == PAIRS:
        old, _, new = word.partition("=")
        return f"{{{old}: {new}}}" if word.isupper() else f"{{{old!r}: {new!r}}}"
    bare = word[0] == "'" or word.isupper() or (word.isdigit() and one.kind != TEXTS) or one.kind == NUMBER
    return word if bare else f"{word!r}"
