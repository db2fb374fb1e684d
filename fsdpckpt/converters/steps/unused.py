"""Notes options that supply what the checkpoint states itself."""

from __future__ import annotations

from fsdpckpt import flags
from fsdpckpt.converters.steps.draft import Draft
from fsdpckpt.converters.steps.keys import needs_names
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.ir import Layout
from fsdpckpt.ir.checkpoint import Checkpoint, Note
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.options.declare import Scope, given


def note_unused(draft: Draft, decision: Decision) -> Draft:
    """Note them, unless a step has used them or will."""
    options, checkpoint = decision.options, draft.checkpoint
    has_nothing = checkpoint.model is None and checkpoint.optim is None  # of several sections, which use them
    if draft.source_units is not None or draft.buffers_needed or has_nothing:
        return draft
    unused = given(options, Scope.KNOWLEDGE)
    if decision.form is not None and decision.form.weights:  # the reference is the model's directory
        unused = tuple(option for option in unused if option != flags.reference)
    # Named sections use them on their own.
    if not unused or options.missing_state is not None or checkpoint.named:
        return draft
    if _is_rekeyed(draft, decision) or _is_undecided(checkpoint, decision):
        return draft
    why = f"{checkpoint.source} records everything that this conversion needs"
    message = f"{' and '.join(f'{option}' for option in unused)} had no effect: {why}"
    return draft.with_checkpoint(checkpoint.noted(Note("unused", message)))


def _is_rekeyed(draft: Draft, decision: Decision) -> bool:
    """Whether the optimizer has other keys than its own at the end or on the way."""
    optim = draft.checkpoint.optim
    on_the_way = ["name"] if needs_names(draft, decision) else []
    wanted = {decision.options.key_type or draft.source_keys, *on_the_way}
    return optim is not None and wanted != {optim.key_type}


def _is_undecided(checkpoint: Checkpoint, decision: Decision) -> bool:
    """Whether something has to say which tensors of a sharded target are cut."""
    if checkpoint.model is None or decision.layout is not Layout.SHARDED:
        return False
    leaves = checkpoint.model.params.values()
    return any(isinstance(leaf, Tensor) and leaf.ndim and leaf.sharded is None for leaf in leaves)
