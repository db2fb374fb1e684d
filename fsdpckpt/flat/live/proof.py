"""Units of a live model against the numbers its flat parameters hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fsdpckpt.flat.live.states import Managed
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.units import Strategy, Unit
from fsdpckpt.layouts.flattened import FlatLayout, alignment

__all__ = ["aligning_dtype", "contradictions"]


def aligning_dtype(unit: Unit, one: Managed) -> Unit:
    """``unit`` with the ``param_dtype`` by which it was aligned.

    A model that was cast after it was wrapped (``model.half()``) keeps the alignment of its former dtype.
    """
    aligned = getattr(one.handle, "_aligned_numel", 0)
    if not aligned or alignment(_deciding(unit)) == aligned:
        return unit
    for name in ("float32", "bfloat16", "float64", "float8_e4m3fn"):
        if alignment(DTYPES[name].itemsize) == aligned:
            return replace(unit, param_dtype=DTYPES[name])
    return unit


def _deciding(unit: Unit) -> int:
    """Bytes of the elements that decide the alignment."""
    return (unit.param_dtype if unit.param_dtype is not None else unit.params[0].dtype).itemsize


def contradictions(unit: Unit, one: Managed, *, shard_size: int, use_orig_params: bool) -> Iterator[str]:
    """Each number of the live flat parameter that the layout of ``unit`` gives otherwise."""
    layout = FlatLayout.of(
        [param.numel for param in unit.params],
        world_size=shard_size,
        aligned=alignment(_deciding(unit)) if use_orig_params else None,
        sharded=unit.strategy is not Strategy.NO_SHARD,
    )
    pairs = {
        "elements": (layout.total, _numel(getattr(one.flat_param, "_unpadded_unsharded_size", None))),
        "elements of a shard": (layout.shard, _numel(getattr(one.flat_param, "_sharded_size", None))),
        "places of the parameters": (layout.start.tolist(), _places(one.flat_param)),
    }
    for what, (computed, live) in pairs.items():
        if live is not None and computed != live:
            yield f"{unit.key}: {what}: computed {computed}, FSDP has {live}"


def _numel(size: Any) -> int | None:
    return None if size is None else int(size.numel())


def _places(flat: Any) -> list[int] | None:
    numels, padding = getattr(flat, "_numels_with_padding", None), getattr(flat, "_is_padding_mask", None)
    if numels is None or padding is None:
        return None
    found, at = [], 0
    for numel, filler in zip(numels, padding, strict=True):
        if not filler:
            found.append(at)
        at += numel
    return found
