"""Changes units by their lists of names, as a person edits a units file."""

from __future__ import annotations

from inspect import signature
from typing import Any

from fsdpckpt.ir.unit_lists import units_of_lists
from fsdpckpt.ir.units import Units

_LISTS = signature(units_of_lists).parameters


def relisted(units: Units, /, **changes: Any) -> Units:
    """``units`` with other lists, settings or units."""
    return units_of_lists(**{name: getattr(units, name) for name in _LISTS} | changes)
