"""Makes an LR scheduler for two param groups of one for one."""

from __future__ import annotations

from fsdpckpt.converters.steps.draft import Draft
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.converters.target.schedule import doubled_schedule


def double_schedule(draft: Draft, decision: Decision) -> Draft:
    """Give the LR scheduler a second entry for each param group if the only group is split in two."""
    return draft.with_checkpoint(doubled_schedule(draft.checkpoint)) if decision.splits_param_group else draft
