"""Refuses a source that contradicts itself, and a ``--reference`` that does not exist."""

from __future__ import annotations

from fsdpckpt import flags
from fsdpckpt.converters.steps.draft import Draft
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.errors import SourceMissingError
from fsdpckpt.ir import Section, section_of
from fsdpckpt.ir.checkpoint import Checkpoint, Note, Problem
from fsdpckpt.ir.fatal import fatal
from fsdpckpt.ir.invariants import state_completeness
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import plural, some_of
from fsdpckpt.transform.selection import KEYS_IN_MESSAGE


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
    checkpoint = draft.checkpoint
    problems = fatal_problems(checkpoint, section_of(decision.options.only))
    if problems:
        raise fatal(problems, source=checkpoint.source)
    return draft.with_checkpoint(_with_odd_states(checkpoint))


def fatal_problems(checkpoint: Checkpoint, only: Section | None) -> list[Problem]:
    """Those of the section that is requested, present or not; None requests both."""
    sections = {None, only} if only is not None else {None, *Section}
    return [problem for problem in checkpoint.problems if problem.fatal and problem.section in sections]


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
