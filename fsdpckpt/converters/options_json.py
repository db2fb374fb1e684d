"""The options of a conversion as JSON, for workers that a launcher starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from fsdpckpt.converters.option_values import ENUMS, TUPLES
from fsdpckpt.options import ConvertOptions, LaunchOptions

__all__ = ["convert_options", "launch_options", "to_json"]

_KINDS: dict[str, Callable[[Any], object]] = {
    **ENUMS,
    **dict.fromkeys(TUPLES, tuple),
    "rename": lambda pairs: tuple((old, new) for old, new in pairs),
}


def to_json(options: ConvertOptions | LaunchOptions) -> dict[str, Any]:
    """The fields by name, as JSON types."""
    return asdict(options)


def _fields(document: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _KINDS[name](value) if name in _KINDS and value is not None else value for name, value in document.items()
    }


def convert_options(document: Mapping[str, Any]) -> ConvertOptions:
    """The ``ConvertOptions`` that ``to_json`` made ``document`` of."""
    return ConvertOptions(**_fields(document))


def launch_options(document: Mapping[str, Any]) -> LaunchOptions:
    """The ``LaunchOptions`` that ``to_json`` made ``document`` of."""
    return LaunchOptions(**_fields(document))
