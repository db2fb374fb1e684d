"""A flattened checkpoint under its parameters' names, for commands that only look: inspect, diff, verify, open."""

from __future__ import annotations

from dataclasses import replace

from fsdpckpt.errors import NeedsInformationError, SourceCorruptError
from fsdpckpt.flat.name_slices import is_flattened, name_slices
from fsdpckpt.flat.units.find import UnitsRequest, source_units
from fsdpckpt.ir.checkpoint import Checkpoint, Note, Problem
from fsdpckpt.ir.invariants import problems
from fsdpckpt.storage.sources import Sources

__all__ = ["logical"]


def logical(checkpoint: Checkpoint, sources: Sources, *, units: str | None = None, listing: bool = False) -> Checkpoint:
    """``checkpoint`` with slices turned into whole tensors by name, as far as its units are known.

    ``units``: a units file. Without one, those beside the checkpoint, or what its own model section proves. When
    nothing tells, the slices stay what they are, with a note that says what would name them. Raises SourceError when
    units contradict the checkpoint, NeedsInformationError when ``units`` is given and does not settle it.
    ``listing``: for a caller that lists problems and compares replicas itself. What contradicts the units beside the
    checkpoint is added to its problems then.
    """
    request = UnitsRequest(file=units)
    if not is_flattened(checkpoint, sources, request):
        return checkpoint
    try:
        found = source_units(checkpoint, request, sources)
    except NeedsInformationError as error:
        if units is not None:
            raise
        note = Note("unnamed", f"the slices keep their ids: {error.what}")
        return replace(checkpoint, notes=(*checkpoint.notes, note))
    except SourceCorruptError as error:
        if units is not None or not listing:
            raise
        return _with_problems(checkpoint, error)
    try:
        named = name_slices(checkpoint, found, sources, replicas=not listing)
    except SourceCorruptError as error:
        if not listing:
            raise
        return _with_problems(checkpoint, error)
    # What shows in slices shows again, under names, in what they became.
    in_slices = set(problems(checkpoint))
    return replace(named, problems=tuple(problem for problem in named.problems if problem not in in_slices))


def _with_problems(checkpoint: Checkpoint, error: SourceCorruptError) -> Checkpoint:
    """``checkpoint`` as it is, with one problem for each thing that ``error`` lists."""
    found = [Problem("units", f"{error.what}: {detail}", file=error.file) for detail in error.details]
    found = found or [Problem("units", error.what, file=error.file)]
    return replace(checkpoint, problems=(*checkpoint.problems, *found))
