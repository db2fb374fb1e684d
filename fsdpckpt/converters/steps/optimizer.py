"""The optimizer before its names change: its groups, and states that FSDP must not cut."""

from __future__ import annotations

from dataclasses import replace

from fsdpckpt.converters.steps.draft import Draft
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.ir import Container, Layout
from fsdpckpt.ir.bitsandbytes import unwrapped
from fsdpckpt.transform.weight_decay import list_parameters, note_one_group


def unwrap_quantized(draft: Draft, decision: Decision) -> Draft:
    """Turn the states that bitsandbytes wraps to keep FSDP from cutting them into ordinary states, which are cut like
    their parameters. Files of ranks are read without the dict, and one DCP directory for one process keeps it.
    """
    optim = draft.checkpoint.optim
    one_process = decision.container is Container.DCP and decision.world_size in (None, 1)
    if optim is None or decision.layout is Layout.FULL or (decision.layout is Layout.SHARDED and one_process):
        return draft
    state = {key: unwrapped(entry) for key, entry in optim.state.items()}
    return draft.with_checkpoint(replace(draft.checkpoint, optim=optim.with_state(state)))


def group_parameters(draft: Draft, decision: Decision) -> Draft:
    """Apply ``--no-weight-decay``; note a single group if the target's framework makes two."""
    grouped = list_parameters(draft.checkpoint, decision.options.no_weight_decay)
    two = decision.flavor is not None and decision.flavor.two_groups
    return draft.with_checkpoint(note_one_group(grouped) if two else grouped)
