"""A process group of any size in one process: torch's fake one, which knows its rank and moves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    clear_redistribute_planner_cache()  # it is keyed by the mesh, which does not say who this rank is
    try:
        yield
    finally:
        dist.destroy_process_group()


def rows(tensor: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """What rank ``rank`` holds of ``tensor``: torch.chunk's chunk, or no rows."""
    chunks = tensor.chunk(world_size)
    return chunks[rank] if rank < len(chunks) else tensor[:0]
