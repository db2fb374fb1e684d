"""Computes what each of N ranks would hold if FSDP sharded everything over all of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fsdpckpt.ir.checkpoint import NamedTensor, Section
from fsdpckpt.ir.tensors import Tensor

WORLD_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of rank 0, which has the largest shards, on ``ranks`` ranks.

    ``gradients``: of all weights with a floating-point dtype, in that dtype.
    """

    ranks: int
    weights: int
    gradients: int
    states: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.states


def memory_by_ranks(tensors: Sequence[NamedTensor], buffers: Collection[str], world_size: int) -> list[RankMemory]:
    """For each of ``WORLD_SIZES`` and the checkpoint's own."""
    sizes = sorted({*WORLD_SIZES, max(world_size, 1)})
    weights = [named for named in tensors if named.section is Section.MODEL]
    states = [named for named in tensors if named.section is Section.OPTIM]
    rows = []
    for ranks in sizes:
        cut = sum(_on_rank_0(named.tensor, ranks) for named in weights if named.key not in buffers)
        whole = sum(named.tensor.nbytes for named in weights if named.key in buffers)
        floats = sum(
            _on_rank_0(named.tensor, ranks)
            for named in weights
            if named.key not in buffers and named.tensor.dtype.kind == "float"
        )
        of_states = sum(_on_rank_0(each.tensor, ranks) for each in states)
        rows.append(RankMemory(ranks, cut + whole, floats, of_states))
    return rows


def _on_rank_0(tensor: Tensor, ranks: int) -> int:
    """The bytes of the first of the chunks that ``torch.chunk`` cuts the first dimension into; a scalar is whole."""
    if not tensor.shape or not tensor.shape[0]:
        return tensor.nbytes
    return tensor.nbytes // tensor.shape[0] * -(-tensor.shape[0] // ranks)
