"""Units in words and as rows of a table: pure functions from data to text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fsdpckpt.text import count_text, plural, shape_text

if TYPE_CHECKING:
    from fsdpckpt.ir.units import Unit, Units

__all__ = ["HEADINGS", "NUMERIC", "rest", "row", "summary"]

HEADINGS = ("flat parameter", "strategy", "parameters", "frozen", "elements", "dtype", "param_dtype")
NUMERIC = frozenset({"parameters", "frozen", "elements"})


def summary(units: Units) -> Iterator[str]:
    """What there is, above the table."""
    params = units.params()
    elements = sum(param.numel for param in params.values())
    ranks = f", {plural(units.world_size, 'rank')}" if units.world_size is not None else ""
    groups = f" in sharding groups of {units.shard_size}" if units.shard_size is not None else ""
    yield (
        f"{plural(len(units.units), 'unit')}, {plural(len(params), 'parameter')}, {count_text(elements)} elements; "
        f"use_orig_params={units.use_orig_params}{ranks}{groups}"
    )
    yield ""


def row(unit: Unit) -> list[str]:
    """The cells of one unit, under ``HEADINGS``."""
    frozen = sum(not param.requires_grad for param in unit.params)
    return [
        unit.key,
        unit.strategy.value,
        count_text(len(unit.params)),
        count_text(frozen) if frozen else "-",
        count_text(sum(param.numel for param in unit.params)),
        unit.params[0].dtype.name if unit.params else "-",
        unit.param_dtype.name if unit.param_dtype is not None else "-",
    ]


def rest(units: Units) -> Iterator[str]:
    """What lies in no unit, and what is known of the optimizer."""
    yield ""
    for param in units.unmanaged:
        yield f"outside of all units: {param.name} {param.dtype.name} {shape_text(param.shape)}"
    for later, first in units.shared:
        yield f"shared: {later} is {first}"
    if units.groups is not None:
        sizes = ", ".join(count_text(len(group)) for group in units.groups)
        yield f"optimizer groups: {len(units.groups)}, of {sizes} parameters"
