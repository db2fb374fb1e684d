"""Makes the recorded arguments of a job say that a file holds the whole model."""

from __future__ import annotations

from fsdpckpt.converters.steps.draft import Draft
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.ir.checkpoint import Container, Layout, Note
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.readers.recorded_parts import parallel_sizes, with_sizes_of_one


def record_one_rank(draft: Draft, decision: Decision) -> Draft:
    """Megatron-LM's arguments say among how many ranks a model was divided, and readers take a file in which not all of
    it is for one rank's part. Where only some of its parameters are written, the arguments say that one rank has them.
    """
    if decision.container is not Container.TORCH or decision.layout is not Layout.FULL:
        return draft
    checkpoint = draft.checkpoint
    params: dict[Key, Value] = {}
    params.update(checkpoint.params)
    sizes = parallel_sizes({**checkpoint.extra, "model": params}, "")
    if not sizes:
        return draft
    listed = ", ".join(f"args.{name}={size}" for name, size in sizes.items())
    message = f"{listed} of the source: 1 in the target, which has whole parameters, and not all of the model"
    note = Note("normalised", message, keys=("args",))
    return draft.with_checkpoint(checkpoint.with_extras(lambda extra: with_sizes_of_one(extra, sizes)).noted(note))
