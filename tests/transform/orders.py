"""Makes orders of parameters from names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.parameters import Named, Parameter
from fsdpckpt.transform.parameter_order import Doubt, ParameterOrder


def order_of(
    names: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    source: str = "the parameter order",
    *,
    groups: Sequence[Sequence[str]] | None = None,
    uncertain: Collection[str] = (),
    doubtful: Collection[str] = (),
    plain: Collection[str] = (),
    by_unit: Sequence[str] = (),
    **more: Any,
) -> ParameterOrder:
    """The order that lists ``names``; all other arguments that are names say the same of rows."""
    known, row_of = shapes or {}, {name: row for row, name in enumerate(names)}
    rows = [Parameter(name, known[name], DTYPES["float32"]) if name in known else Named(name) for name in names]
    doubts: dict[int, Doubt] = {}
    for doubt, of_names in ((Doubt.OPTIMIZER, uncertain), (Doubt.MODEL, doubtful), (Doubt.PLAIN, plain)):
        doubts.update({row_of[name]: doubts.get(row_of[name], Doubt(0)) | doubt for name in of_names})
    return ParameterOrder(
        tuple(rows),
        source,
        members=None if groups is None else tuple(tuple(row_of[name] for name in group) for group in groups),
        doubts=doubts,
        unit_order=tuple(row_of[name] for name in by_unit),
        **more,
    )
