"""The model that the producers' own libraries train: odd sizes, fewer rows than ranks, a buffer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

__all__ = ["Block", "Small", "biases_and_others", "filled", "loss_of", "sharded"]

WORDS, WIDTH, HIDDEN = 13, 7, 11


class Block(nn.Module):
    """What is wrapped as one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.gain = nn.Parameter(torch.empty(2, WIDTH))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("scale", torch.empty(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.gain.sum(0) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def filled(seed: int) -> Small:
    """The model with random weights that are the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    model = Small()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.5)
    return model


def sharded(seed: int, mesh: DeviceMesh | None = None) -> Small:
    """That model under FSDP2."""
    model = filled(seed)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    return model


def biases_and_others(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Its parameters for two groups of an optimizer."""
    named = list(model.named_parameters())
    biases = [param for name, param in named if name.endswith("bias")]
    return biases, [param for name, param in named if not name.endswith("bias")]


def loss_of(model: nn.Module, number: int) -> Tensor:
    """The loss of one step, on data that is the same on every rank: it does not depend on their number."""
    generator = torch.Generator().manual_seed(500 + number)
    tokens, targets = (torch.randint(WORDS, shape, generator=generator) for shape in ((3, 5), (15,)))
    return nn.functional.cross_entropy(model(tokens).reshape(15, WORDS), targets)
