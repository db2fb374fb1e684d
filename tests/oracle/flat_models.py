"""Small models that cover every way in which FSDP1 lays out flat parameters, with odd sizes.

A model's ``forward`` takes a generator for its random input and returns a loss, so that one training step looks the
same for all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Convolutions", "Nested", "Perceptron", "SameSized", "TiedTransformer", "Tiny", "Unused", "fill"]

IN, WIDTH, HIDDEN = 5, 7, 11


class Perceptron(nn.Module):
    """A residual two-layer perceptron, computed in its own dtype."""

    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.up = nn.Linear(width, hidden, dtype=dtype)
        self.down = nn.Linear(hidden, width, dtype=dtype)
        self.register_buffer("scale", torch.empty((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x.to(self.up.bias.dtype))))).to(x.dtype)


class Outer(nn.Module):
    """A module with its own parameter before a nested unit, and parameters of children on both sides of it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(3, WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.inner = Perceptron(dtype=dtype)
        self.tail = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(x).to(self.gain.dtype) * self.gain.sum(0)
        return x + self.tail(self.inner(y))


class Nested(nn.Module):
    """Units within units, and a buffer of one dimension, which looks like slices. ``inner``: dtype of the innermost."""

    def __init__(self, inner: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(IN, WIDTH)
        self.outer = Outer(inner)
        self.last = nn.Linear(WIDTH, 3)
        self.register_buffer("mask", torch.empty(WIDTH))
        self.register_buffer("counts", torch.empty(2, 3, dtype=torch.int64))

    def forward(self, generator: torch.Generator) -> Tensor:
        x = torch.randn(4, IN, generator=generator).to(self.first.weight.dtype)
        return self.last(self.outer(self.first(x) * self.mask.to(x.dtype))).float().square().mean()


class TiedTransformer(nn.Module):
    """``nn.Transformer`` whose output layer shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        layers = {"num_encoder_layers": 2, "num_decoder_layers": 1, "dim_feedforward": 5}
        self.transformer = nn.Transformer(6, 2, dropout=0.0, batch_first=True, **layers)
        self.output = nn.Linear(6, 13)
        self.output.weight = self.embed.weight
        self.register_buffer("vocabulary", torch.empty(13))

    def forward(self, generator: torch.Generator) -> Tensor:
        tokens = torch.randint(13, (2, 3, 4), generator=generator)
        y = self.output(self.transformer(self.embed(tokens[0]), self.embed(tokens[1])))
        return nn.functional.cross_entropy(y.reshape(12, 13), torch.randint(13, (12,), generator=generator))


class Unused(nn.Module):
    """``first`` is not used (no state for parameter 0), ``constant`` runs under ``no_grad``, one bias is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(IN, 3)
        self.used = nn.Linear(IN, WIDTH)
        self.constant = nn.Linear(WIDTH, WIDTH)
        self.last = Perceptron()
        self.spare = nn.Parameter(torch.empty(2, 3))

    def forward(self, generator: torch.Generator) -> Tensor:
        y = self.used(torch.randn(4, IN, generator=generator))
        with torch.no_grad():
            constant = self.constant(y)
        return self.last(y + constant).square().mean()


class Convolutions(nn.Module):
    """Convolutions in channels_last: FSDP1 flattens their weights in memory order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 5, (2, 3))
        self.block = nn.Sequential(nn.Conv2d(5, 4, 3), nn.Tanh(), nn.Conv2d(4, 3, (3, 1)))
        self.last = nn.Linear(3, 2)
        self.to(memory_format=torch.channels_last)

    def forward(self, generator: torch.Generator) -> Tensor:
        x = torch.randn(2, 3, 7, 6, generator=generator).to(memory_format=torch.channels_last)
        return self.last(self.block(torch.tanh(self.first(x))).mean((2, 3))).square().mean()


class Tiny(nn.Module):
    """Parameters with fewer elements than ranks, down to one element in a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(1, 1, bias=False)
        self.two = nn.Linear(2, 1)
        self.shift = nn.Parameter(torch.empty(1))
        self.last = nn.Linear(1, 2, bias=False)

    def forward(self, generator: torch.Generator) -> Tensor:
        x = torch.randn(3, 2, generator=generator)
        return self.last(self.one(self.two(x)) + self.shift).square().mean()


class SameSized(nn.Module):
    """Parameters of the same size in one unit, and units of the same size: element counts do not distinguish them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.b = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, generator: torch.Generator) -> Tensor:
        x = torch.randn(4, WIDTH, generator=generator)
        for layer in self.a:
            x = x + torch.tanh(layer(x))
        return self.last(self.b(x)).square().mean()


def fill(model: nn.Module, seed: int) -> None:
    """Give every parameter and buffer random values that are the same in every process."""
    generator = torch.Generator().manual_seed(4000 + seed)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.5)
            else:
                tensor.copy_(torch.randint(100, tensor.shape, generator=generator))
