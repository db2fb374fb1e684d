"""A process group of any size in one process: torch's fake one, which knows its rank and moves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

# What DTensor remembers with the mesh of the rank that asked first; versions of torch have some of them.
_CACHES = (
    ("torch.distributed.tensor._redistribute", "clear_redistribute_planner_cache"),
    ("torch.distributed.tensor.debug", "_clear_sharding_prop_cache"),
    ("torch.distributed.tensor.debug", "_clear_python_sharding_prop_cache"),
    ("torch.distributed.tensor.debug", "_clear_fast_path_sharding_prop_cache"),
)


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        for module, clear in _CACHES:
            with suppress(ImportError):
                getattr(import_module(module), clear, lambda: None)()


def rows(tensor: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """What rank ``rank`` holds of ``tensor``: torch.chunk's chunk, or no rows."""
    chunks = tensor.chunk(world_size)
    return chunks[rank] if rank < len(chunks) else tensor[:0]
