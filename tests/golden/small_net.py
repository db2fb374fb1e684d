"""The model whose shards are in ``xla`` and ``fairscale``: odd sizes, a 0-dim parameter, a buffer of integers, and one
parameter under two names. Its moments are the parameters of the same model with other random values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

STEP = 17


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 5)
        self.norm = nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x))


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 3)
        self.block = Block()
        self.temperature = nn.Parameter(torch.zeros(()))
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("scale", torch.zeros(3, 2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in (*self.parameters(), self.scale):
                tensor.copy_(torch.randn(tensor.shape, generator=draw))
            self.count.fill_(1000 + seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.emb(x)) * self.temperature


def nets() -> tuple[Net, Net, Net]:
    """The model, and those whose parameters are its ``exp_avg`` and ``exp_avg_sq``."""
    return Net(11), Net(22), Net(33)
