"""What a rank of a job saves after some steps of a torchao optimizer.

The gradients are the same for any number of ranks, so that the states of an element are, too, where its block is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from tests.oracle.fake_group import as_rank
from tests.readers.played_ranks import save_as_ranks

KINDS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
# Blocks of 256 and 128 elements: several in a row; several rows in one; rows for three ranks only; not quantized.
SHAPES = {"wide": (16, 1024), "narrow": (256, 64), "short": (3, 4096), "bias": (10,)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.full(shape, 0.5)))


def grad_of(name: str, step: int) -> torch.Tensor:
    """Few different values, which compress well; another scale in each block of 64 elements."""
    shape = SHAPES[name]
    places = torch.arange(torch.Size(shape).numel())
    values = (places * (step + 3)) % 7 - 3.0
    return (values * (1 + (places // 64) % 5) / 8).reshape(shape)


@contextmanager
def uncompiled() -> Iterator[None]:
    """torchao compiles its step, which takes a minute and gives the same."""
    compiled, torch.compile = torch.compile, lambda function, **_: function  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compiled


def make(kind: str, world_size: int) -> tuple[Net, torch.optim.Optimizer]:
    from torchao import optim

    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer: torch.optim.Optimizer = getattr(optim, kind)(model.parameters(), lr=0.01)
    return model, optimizer


def step(model: Net, optimizer: torch.optim.Optimizer, number: int) -> None:
    for name, param in model.named_parameters():
        placed: Any = param
        param.grad = distribute_tensor(grad_of(name, number), placed.device_mesh, placed.placements, src_data_rank=None)
    with uncompiled():
        optimizer.step()


def state_of(kind: str, world_size: int, steps: int = 2) -> dict[str, Any]:
    """The model and the optimizer of this rank after ``steps``."""
    model, optimizer = make(kind, world_size)
    for number in range(steps):
        step(model, optimizer, number)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def save_ranks(kind: str, world_size: int, directory: Path) -> None:
    """One torch file of each rank."""
    directory.mkdir(parents=True)
    for rank in range(world_size):
        with as_rank(rank, world_size):
            torch.save(state_of(kind, world_size), directory / f"ckpt_world_size_{world_size}_rank_{rank}.pt")


def save_dcp(kind: str, world_size: int, directory: Path) -> None:
    save_as_ranks(directory, lambda _: state_of(kind, world_size), world_size, writer=dcp.FileSystemWriter)
