"""Decides how sharded tensors lie on the mesh of the target."""

from __future__ import annotations

from fsdpckpt.converters.steps.draft import Draft
from fsdpckpt.converters.steps.rename import with_written_names
from fsdpckpt.converters.steps.shard import sharding_hints
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.ir import Container, Layout
from fsdpckpt.ir.checkpoint import Note
from fsdpckpt.ir.row_names import normalise
from fsdpckpt.transform.placements import (
    LikeCheckpoint,
    PlacementRules,
    apply_placements,
    place_remaining,
    warn_of_uneven_cuts,
)
from fsdpckpt.transform.quantized import refuse_cut_codes, require_whole_blocks
from fsdpckpt.transform.sharded import mark_sharded, note_undetermined


def place(draft: Draft, decision: Decision) -> Draft:
    """Place every sharded tensor on the target's mesh, by the names it will have there."""
    target = decision.mesh
    if target is None:
        return draft
    notes = [Note("inferred", target.note)] if target.note is not None else []
    noted = draft.checkpoint.noted(*notes)
    # Rules, and another checkpoint, say nothing of what is not sharded.
    needs_marks = isinstance(target.placing, PlacementRules | LikeCheckpoint)
    marked = mark_sharded(noted, sharding_hints(draft, decision)) if needs_marks else noted
    named, _ = normalise(with_written_names(draft, decision, marked))
    return draft.with_checkpoint(apply_placements(marked, named, target))


def place_rest(draft: Draft, decision: Decision) -> Draft:
    """Place what nothing has placed, and check that rank files can be cut like that."""
    placed, sharded = draft.checkpoint, decision.layout is Layout.SHARDED
    if decision.mesh is not None:
        placed = place_remaining(draft.checkpoint, decision.mesh)
    if sharded and decision.world_size is not None:
        require_whole_blocks(placed, decision.world_size, placed=decision.mesh is not None)
        if decision.world_size > 1:
            refuse_cut_codes(placed)
    on_fixed_mesh = sharded and decision.mesh is not None and decision.container is Container.TORCH
    return draft.with_checkpoint(warn_of_uneven_cuts(placed) if on_fixed_mesh else placed)  # DCP loads on any mesh


def note_unproved_cuts(draft: Draft, decision: Decision) -> Draft:
    """Note the keys that are cut although nothing says that they are no buffers, under the names that they have now."""
    if draft.model_for_ids:  # the model's own section notes them
        return draft
    rules = decision.mesh.placing if decision.mesh is not None else None
    return draft.with_checkpoint(
        note_undetermined(draft.checkpoint, rules.file if isinstance(rules, PlacementRules) else None)
    )
