"""Finds the units of a flattened source or target: given, beside the source, or inferred; always proved.

For a source the proof is the number of elements that each rank holds (``planner.flat_match``); for a target the names,
shapes, dtypes and order of what is written there.
"""

from __future__ import annotations

from dataclasses import replace

from fsdpckpt.flat.name_slices import is_flattened
from fsdpckpt.flat.units.request import ORDER, FoundUnits, UnitsRequest, load_units, require_order
from fsdpckpt.flat.units.source import source_units
from fsdpckpt.flat.units.target import target_units
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.storage.sources import Sources

__all__ = ["ORDER", "FoundUnits", "UnitsRequest", "find_units", "load_units", "source_units", "target_units"]


def find_units(checkpoint: Checkpoint, request: UnitsRequest, sources: Sources) -> FoundUnits:
    """The units of any checkpoint. One that is not flattened needs ``request`` to say what whole tensors do not show.

    Raises what ``source_units`` and ``target_units`` raise.
    """
    if is_flattened(checkpoint, sources, request):
        found = source_units(checkpoint, request, sources)
        require_order(found, checkpoint.source)
        return replace(found, how=(*found.how, *(found.match.proved if found.match is not None else ())))
    found = target_units(checkpoint, request, None, None, sources)
    return replace(found, how=tuple(line.removeprefix("target ") for line in found.how))
