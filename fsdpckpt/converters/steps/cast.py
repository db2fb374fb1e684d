"""Prepares ``--dtype`` and ``--optim-dtype``, which the writers apply to the model and to the states."""

from __future__ import annotations

from fsdpckpt.converters.steps.draft import Draft
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.transform.selection import copy_aliased_tensors


def give_own_tensors(draft: Draft, decision: Decision) -> Draft:
    """Give each key its own tensor if any is cast: the cast of one must not reach a copy under another key."""
    casts = decision.options.dtype is not None or decision.options.optim_dtype is not None
    return draft.with_checkpoint(copy_aliased_tensors(draft.checkpoint)) if casts else draft
