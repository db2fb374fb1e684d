"""Which dtype each tensor is written with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from fsdpckpt.ir.checkpoint import Checkpoint, Note, Section
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.tensors import Tensor

__all__ = ["DtypeRule"]

_COUNTER = "step"


@dataclass(frozen=True, slots=True)
class DtypeRule:
    """The casts of one conversion; None casts nothing.

    ``model`` applies to the floating tensors of the model section. ``optim`` applies to the floating states of the
    optimizer that have elements of a parameter: 0-dim states and ``step`` are counters, which a short float would
    round, and stay what they are, as do tensors inside param groups. Integers, bools and complex are never cast.
    """

    model: DType | None = None
    optim: DType | None = None

    def of(self, section: Section, state: str | None, tensor: Tensor) -> DType:
        """The dtype ``tensor`` is written with; ``state`` is the optimizer state's name, None for anything else."""
        if section is Section.MODEL:
            wanted = self.model
        elif section is Section.OPTIM and state is not None and state != _COUNTER and tensor.shape:
            wanted = self.optim
        else:
            wanted = None
        return tensor.dtype if wanted is None or not tensor.dtype.floating else wanted

    def casts(self, checkpoint: Checkpoint) -> tuple[Mapping[Tensor, DType], list[Note]]:
        """The new dtype of every tensor that changes, and one note for each kind of cast."""
        changed: dict[Tensor, DType] = {}
        kinds: Counter[tuple[Section, str, str]] = Counter()
        if self.model is None and self.optim is None:
            return changed, []
        for named in checkpoint.tensors():
            dtype = self.of(named.section, named.state, named.tensor)
            if dtype is not named.tensor.dtype:
                changed[named.tensor] = dtype
                kinds[named.section, named.tensor.dtype.name, dtype.name] += 1
        notes = [
            Note("cast", f"{section.value}: {count} tensor{'' if count == 1 else 's'} cast from {old} to {new}")
            for (section, old, new), count in kinds.items()
        ]
        return changed, notes
