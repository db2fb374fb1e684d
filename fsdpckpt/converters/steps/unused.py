"""Notes options that supply what the checkpoint states itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdpckpt import flags
from fsdpckpt.converters.steps.draft import Draft
from fsdpckpt.converters.steps.keys import needs_names
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.ir import Layout
from fsdpckpt.ir.checkpoint import Checkpoint, Note
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.options.declare import Scope, given


def find_unused(draft: Draft, decision: Decision) -> Draft:
    """Find the options that neither a step nor the target uses. Of several sections another one may use them."""
    options, checkpoint = decision.options, draft.checkpoint
    if draft.source_units is not None or draft.buffers_needed or options.missing_state is not None:
        return draft
    # Named sections use them on their own.
    if checkpoint.named or _is_rekeyed(draft, decision) or _is_undecided(checkpoint, decision):
        return draft
    unused = given(options, Scope.KNOWLEDGE)
    if decision.form is not None and decision.form.weights:  # the reference is the model's directory
        unused = tuple(option for option in unused if option != flags.reference)
    return replace(draft, unused=unused)


def note_unused(draft: Draft, sections: Sequence[Draft], used: Sequence[flags.Wording] = ()) -> Draft:
    """``draft`` with a note on the options that none of ``sections`` uses, of which it is made. ``used``: what was
    asked for all of them together.
    """
    taken = [each for each in sections if not each.left_out and _has_keys(each.checkpoint)]
    if not taken:
        return draft
    of_all = [option for option in taken[0].unused if all(option in each.unused for each in taken)]
    unused = [option for option in of_all if option not in used]
    if not unused:
        return draft
    why = f"{draft.checkpoint.source} records everything that this conversion needs"
    message = f"{' and '.join(f'{option}' for option in unused)} had no effect: {why}"
    return draft.with_checkpoint(draft.checkpoint.noted(Note("unused", message)))


def _has_keys(checkpoint: Checkpoint) -> bool:
    return checkpoint.model is not None or checkpoint.optim is not None


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
