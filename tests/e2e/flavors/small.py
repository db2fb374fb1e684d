"""The model that the producers' own libraries train: odd sizes, fewer rows than ranks, a buffer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Block", "Small", "batch", "filled", "loss_of"]

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


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one step: the same on every rank, so that the loss does not depend on their number."""
    generator = torch.Generator().manual_seed(500 + number)
    return torch.randint(WORDS, (3, 5), generator=generator), torch.randint(WORDS, (15,), generator=generator)


def loss_of(model: nn.Module, number: int) -> Tensor:
    tokens, targets = batch(number)
    return nn.functional.cross_entropy(model(tokens).reshape(15, WORDS), targets)
