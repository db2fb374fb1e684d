"""Refuses a source that contradicts itself, and states whose values the target would change."""

from __future__ import annotations

from fsdpckpt import flags
from fsdpckpt.converters.steps.draft import Draft
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.errors import SourceMissingError, SourceUnsupportedError
from fsdpckpt.ir import Layout, Section, section_of
from fsdpckpt.ir.checkpoint import Checkpoint, Note
from fsdpckpt.ir.fatal import fatal
from fsdpckpt.ir.invariants import state_completeness
from fsdpckpt.options import MissingState
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import plural, some_of
from fsdpckpt.transform.selection import KEYS_IN_MESSAGE
from fsdpckpt.transform.sharded import refuse_casts, refuse_in_blocks


def require_reference(draft: Draft, decision: Decision) -> Draft:
    """Raises SourceMissingError for a ``--reference`` that does not exist, needed or not: it is a typing error."""
    path = decision.options.reference
    if path is not None and not _exists(path, draft.sources):
        raise SourceMissingError(
            f"{flags.reference(path)} does not exist", file=path, next_step="give the path of a checkpoint, or drop it"
        )
    return draft


def _exists(path: str, sources: Sources) -> bool:
    return sources.stat(path) is not None


def require_sound(draft: Draft, decision: Decision) -> Draft:
    """Raises a SourceError that lists every fatal problem of the requested sections, present or not.

    A state that is only odd is carried as it is, with a warning.
    """
    only = section_of(decision.options.only)
    sections = {None, only} if only is not None else {None, *Section}
    checkpoint = draft.checkpoint
    problems = [problem for problem in checkpoint.problems if problem.fatal and problem.section in sections]
    if problems:
        raise fatal(problems, source=checkpoint.source)
    return draft.with_checkpoint(_with_odd_states(checkpoint))


def _with_odd_states(checkpoint: Checkpoint) -> Checkpoint:
    """``checkpoint`` with a warning about states that are in no group or lack a part of what others have. Parameters
    without any state have a note of their own.
    """
    optim = checkpoint.optim
    if optim is None:
        return checkpoint
    without_state = {str(key) for key in optim.all_keys() if not optim.state.get(key)}
    odd = [
        problem.message
        for problem in state_completeness(optim)
        if not problem.fatal and problem.key not in without_state
    ]
    if not odd:
        return checkpoint
    count = plural(len(odd), "optimizer state", "are")
    message = f"{count} carried although something is odd about them: {some_of(odd, KEYS_IN_MESSAGE)}"
    return checkpoint.noted(Note("odd-states", message, warning=True))


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
