"""Applies ``--missing-state`` to parameters without optimizer state."""

from __future__ import annotations

from fsdpckpt.converters.steps.draft import Draft
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.units import Units
from fsdpckpt.storage.sources import Sources
from fsdpckpt.transform.missing_state import Choice, fill


def fill_states(draft: Draft, decision: Decision) -> Draft:
    """Make the states that are missing, or leave them out with a note that lists the parameters, which is the default.

    Units say which parameters are frozen: those of the target, else of the source, else of ``--units``.
    """
    missing = decision.options.missing_state
    units = draft.units if draft.units is not None else draft.known_units
    filled = fill_missing(
        draft.checkpoint, missing.value if missing is not None else "skip", units=units, sources=draft.sources
    )
    return draft.with_checkpoint(filled)


def fill_missing(checkpoint: Checkpoint, choice: Choice, *, units: Units | None, sources: Sources) -> Checkpoint:
    """``transform.missing_state.fill`` for a checkpoint keyed by name; reads 0-dim states from its files."""
    return fill(checkpoint, choice, units=units, read=lambda tensor: sources.read_elements(checkpoint.files, tensor))
