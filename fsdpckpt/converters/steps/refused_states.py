"""Refuses states whose values the target would change."""

from __future__ import annotations

from fsdpckpt import flags
from fsdpckpt.converters.steps.draft import Draft
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.errors import SourceUnsupportedError
from fsdpckpt.ir import Layout
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.options import MissingState
from fsdpckpt.transform.quantized import refuse_casts, refuse_in_blocks
from fsdpckpt.transform.spanning import refuse_spanning


def refuse_states(draft: Draft, decision: Decision) -> Draft:
    """Raises UsageError or SourceUnsupportedError for states whose values the target, or an option, would change."""
    checkpoint, options = draft.checkpoint, decision.options
    if options.optim_dtype is not None:
        refuse_casts(checkpoint)
    if options.missing_state is MissingState.ZEROS:
        refuse_in_blocks(checkpoint, "zeros in blocks are not made", f"drop {flags.missing_state('zeros')}")
    if Layout.FLATTENED in (decision.layout, checkpoint.layout):
        _refuse_prodigy_slices(checkpoint)
    if decision.layout is Layout.FLATTENED:
        refuse_in_blocks(checkpoint, "FSDP1 cuts flat parameters inside of its blocks")
        refuse_spanning(checkpoint, "each rank of FSDP1 has such states of its own slices, joined in their order")
    return draft


def _refuse_prodigy_slices(checkpoint: Checkpoint) -> None:
    """Raises SourceUnsupportedError for states that cover only some of a rank's elements."""
    for group in (checkpoint.optim.param_groups if checkpoint.optim is not None else None) or ():
        step = group.get("slice_p")
        if isinstance(step, int) and step > 1 and "d_numerator" in group:
            raise SourceUnsupportedError(
                f"the states s and p0 of Prodigy (prodigyopt) with slice_p={step} cannot be cut like flat parameters",
                file=checkpoint.source,
                why=f"a rank keeps every {step}th element of its own slice, and other slices have others",
                next_step=f"{flags.only('model')} converts the model alone; Prodigy(slice_p=1) can be converted with "
                "its states",
            )
