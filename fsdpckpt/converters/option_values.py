"""Options as Python code names them: strings become enums and byte counts, lists tuples. One table of their types."""

from __future__ import annotations

import dataclasses
import os
from enum import StrEnum
from typing import TypeVar

from fsdpckpt.errors import UsageError
from fsdpckpt.ir.checkpoint import Container, Layout, Section
from fsdpckpt.ir.units import Strategy
from fsdpckpt.options import (
    ConvertOptions,
    Launcher,
    LaunchOptions,
    MissingState,
    TensorForm,
    VerifyLevel,
    Visibility,
    parse_size,
)
from fsdpckpt.storage.protocols import is_url

__all__ = ["ENUMS", "TUPLES", "enum_of", "with_launch", "with_options"]

E = TypeVar("E", bound=StrEnum)

ENUMS: dict[str, type[StrEnum]] = {
    "launcher": Launcher,
    "output_visibility": Visibility,
    "to": Layout,
    "container": Container,
    "only": Section,
    "tensor": TensorForm,
    "verify": VerifyLevel,
    "strategy": Strategy,
    "missing_state": MissingState,
}
TUPLES = frozenset({"buffers", "include", "exclude", "unit"})
_DTYPES = frozenset({"dtype", "optim_dtype", "param_dtype"})
_PATHS = frozenset({"reference", "units", "parameters", "staging"})
_KEY_TYPES = ("name", "id")
_SIZES = frozenset({"max_memory", "max_shard_size"})


def with_options(options: ConvertOptions, named: dict[str, object]) -> ConvertOptions:
    """``options`` with those of ``named`` instead. Raises UsageError for names and values that are none."""
    known = {field.name for field in dataclasses.fields(ConvertOptions)}
    for name in named:
        if name not in known:
            raise UsageError(f"convert has no option {name!r}", expected=", ".join(sorted(known)), found=name)
    return dataclasses.replace(options, **{name: _option(name, value) for name, value in named.items()})  # type: ignore[arg-type]


def with_launch(launch: LaunchOptions, named: dict[str, object]) -> LaunchOptions:
    """The same for where it runs."""
    if isinstance(named.get("nproc_per_node"), int):
        named = {**named, "nproc_per_node": str(named["nproc_per_node"])}
    return dataclasses.replace(launch, **{name: _option(name, value) for name, value in named.items()})  # type: ignore[arg-type]


def _option(name: str, value: object) -> object:
    """A value as ``ConvertOptions`` holds it: strings become enums and byte counts, lists tuples."""
    if name in ENUMS and isinstance(value, str):
        return enum_of(ENUMS[name], value, name)
    if name in TUPLES:
        return (value,) if isinstance(value, str) else tuple(value)  # type: ignore[arg-type]
    if name == "rename":
        pairs = value.items() if isinstance(value, dict) else value
        return tuple((str(old), str(new)) for old, new in pairs)  # type: ignore[attr-defined]
    if name in _SIZES and isinstance(value, str):
        try:
            return parse_size(value)
        except (ValueError, OverflowError):
            option = "--" + name.replace("_", "-")
            raise UsageError(
                f"{option} takes a size, and {value!r} is none", next_step=f"{option} 128MiB, or 5GB, or 1000 (bytes)"
            ) from None
    if name == "key_type" and value not in (None, *_KEY_TYPES):
        raise UsageError(f"key_type cannot be {value!r}", expected=", ".join(_KEY_TYPES), found=str(value))
    if name in _PATHS and value is not None and not (isinstance(value, str) and is_url(value)):
        return os.fspath(value)  # type: ignore[call-overload]
    # torch.bfloat16 itself, without an import of torch
    return str(value).removeprefix("torch.") if name in _DTYPES and not isinstance(value, str | None) else value


def enum_of(kind: type[E], value: str | None, name: str) -> E | None:
    """The member of ``kind`` that ``value`` names. Raises UsageError that names the option ``name``."""
    if value is None:
        return None
    try:
        return kind(value)
    except ValueError:
        choices = ", ".join(kind)
        raise UsageError(f"{name} cannot be {value!r}", expected=choices, found=value) from None
