"""One process plays one rank of N on PyTorch's "fake" process group, and wraps models with real FSDP1 there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

World = Callable[..., None]


@pytest.fixture
def world() -> Iterator[World]:
    """``world(size, rank=0)`` makes this process that rank; it stays so until the next call or the test's end.

    ``store``: what the ranks share, None for a store that keeps nothing.
    """

    def become(size: int, *, rank: int = 0, store: dist.Store | None = None) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=store or FakeStore(), rank=rank, world_size=size)

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()
