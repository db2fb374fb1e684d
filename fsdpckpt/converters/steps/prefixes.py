"""The prefixes of wrappers: names go without them until they are written."""

from __future__ import annotations

from dataclasses import replace

from fsdpckpt import flags
from fsdpckpt.converters.steps.draft import Draft
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.ir import Layout
from fsdpckpt.ir.checkpoint import Note
from fsdpckpt.ir.names import leading_wrapper
from fsdpckpt.ir.row_names import normalise
from fsdpckpt.ir.table import Table


def remove_prefixes(draft: Draft, _: Decision) -> Draft:
    """Remove the prefixes of wrappers: sections, files of units and options are matched by the names without them."""
    opened = list(draft.opened.params)
    leading = leading_wrapper(opened) if draft.source_units is not None else ""
    checkpoint, source_names = normalise(draft.checkpoint, leading=leading, like=opened)
    return replace(draft, checkpoint=checkpoint, source_names=source_names)


def clean_words(draft: Draft, decision: Decision) -> Draft:
    """With ``--clean-names`` clean ``param_names`` too, as the keys are already."""
    checkpoint = draft.checkpoint
    if not decision.options.clean_names:
        return draft
    groups = checkpoint.optim.param_groups if checkpoint.optim is not None else None
    has_words = any("param_names" in group for group in groups or ())
    cleaned = Table.of(checkpoint).with_plain_words().written(checkpoint) if has_words else checkpoint
    to_flattened = decision.layout is Layout.FLATTENED
    if to_flattened or not (draft.source_names.wrapped or cleaned.optim != checkpoint.optim):
        names = "flat parameters" if to_flattened else f"the names in {checkpoint.source}"
        message = f"{flags.clean_names} had no effect: {names} have no wrapper prefixes"
        cleaned = cleaned.noted(Note("unused", message))
    return draft.with_checkpoint(cleaned)


def keeps_prefixes(decision: Decision) -> bool:
    """Whether the names that are written have the prefixes of wrappers that the source has."""
    exports_weights = decision.form is not None and decision.form.weights
    to_flattened = decision.layout is Layout.FLATTENED
    return not (decision.options.clean_names or exports_weights or to_flattened)


def restore_prefixes(draft: Draft, decision: Decision) -> Draft:
    """Give names back the prefixes of the source; a note lists those that lose them for good."""
    names, keeps = draft.source_names, keeps_prefixes(decision)
    return draft.with_checkpoint(
        names.put_back_wrappers(draft.checkpoint) if keeps else names.report_wrappers(draft.checkpoint)
    )
