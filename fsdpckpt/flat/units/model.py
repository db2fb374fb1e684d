"""Units of a model that was only built, held against a checkpoint of it."""

from __future__ import annotations

from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.flat.match import Mismatch, match
from fsdpckpt.flat.units.request import UnitsRequest, against
from fsdpckpt.ir.checkpoint import Layout
from fsdpckpt.ir.units import Units
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.storage.sources import Sources

__all__ = ["prove"]


def prove(units: Units, source: str, sources: Sources) -> tuple[str, ...]:
    """What the checkpoint at ``source`` confirms of ``units``, in words.

    A flattened one has the number of elements of every slice, any other one names and shapes. Raises
    SourceCorruptError, which lists everything there that contradicts the units, and SourceError.
    """
    checkpoint = open_checkpoint(source, sources=sources)
    if checkpoint.layout is not Layout.FLATTENED:
        wrong = tuple(against(units, UnitsRequest(reference=source), sources))
        return _confirmed(wrong, (f"names and shapes are those of {source}; its units do not show there",), source)
    found = match(checkpoint, units)
    if isinstance(found, Mismatch):
        return _confirmed(found.contradictions, (), source)
    return found.proved


def _confirmed(wrong: tuple[str, ...], proved: tuple[str, ...], source: str) -> tuple[str, ...]:
    if wrong:
        raise SourceCorruptError(
            f"the units of the model are not those of {source}",
            details=wrong,
            why="the checkpoint is of another model, or was saved with other classes wrapped, another "
            "use_orig_params, strategy or MixedPrecision.param_dtype",
            next_step="give --wrap, --use-orig-params/--no-use-orig-params, --strategy and --param-dtype as the "
            "training script does",
            file=source,
        )
    return proved
