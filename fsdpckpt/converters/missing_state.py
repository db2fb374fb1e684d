"""``--missing-state``: the pass of the planner, with the one thing it cannot know, the values of ``step``."""

from __future__ import annotations

from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import Units
from fsdpckpt.storage.sources import Sources
from fsdpckpt.transform.missing_state import Choice, fill

__all__ = ["fill_missing"]


def fill_missing(checkpoint: Checkpoint, choice: Choice, *, units: Units | None, sources: Sources) -> Checkpoint:
    """``planner.missing_state.fill`` of a checkpoint keyed by name, 0-dim states read from its files."""

    def read(tensor: Tensor) -> bytes:
        chunks = tensor.chunks
        path = checkpoint.files[int(chunks.file[0])].path
        return sources.open(path).read(int(chunks.offset[0]), tensor.dtype.itemsize)

    return fill(checkpoint, choice, units=units, read=read)
