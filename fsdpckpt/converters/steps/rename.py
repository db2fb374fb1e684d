"""New names, as ``--rename`` and the prefix options ask: the last change of names."""

from __future__ import annotations

from dataclasses import replace

from fsdpckpt.converters.steps.draft import Draft
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.transform.renaming import Renaming


def rename(draft: Draft, decision: Decision) -> Draft:
    """Apply ``--rename`` and the prefix options. It comes late: sections are matched by the names of the source."""
    checkpoint, unmatched = renaming(draft, decision).applied_to(draft.checkpoint)
    return replace(draft.with_unmatched(unmatched), checkpoint=checkpoint, renamed=True)


def with_written_names(draft: Draft, decision: Decision, checkpoint: Checkpoint) -> Checkpoint:
    """``checkpoint`` with the names that will be written, which options and other checkpoints may use too."""
    if draft.renamed:
        return checkpoint
    keeps = not decision.options.clean_names
    named = draft.source_names.put_back_wrappers(checkpoint) if keeps else checkpoint
    return renaming(draft, decision).applied_to(named)[0]


def renaming(draft: Draft, decision: Decision) -> Renaming:
    """What the options do to names."""
    options = decision.options
    return Renaming(options.strip_prefix, options.rename, options.add_prefix, draft.leads)
