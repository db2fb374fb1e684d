"""The model of ``make.py`` in plain PyTorch, with the names in Megatron's checkpoints: one parameter for all layers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import layer_norm, linear, scaled_dot_product_attention, silu

LAYERS, WIDTH, HEADS, GROUPS, INNER, WORDS = 3, 8, 4, 2, 12, 16
HEAD = WIDTH // HEADS


class Part(nn.Module):
    """Named parameters and nothing else."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


def part(outputs: int, inputs: int, *, norm: bool) -> Part:
    before = {"layer_norm_weight": (LAYERS, WIDTH), "layer_norm_bias": (LAYERS, WIDTH)} if norm else {}
    return Part(**before, weight=(LAYERS, outputs, inputs), bias=(LAYERS, outputs))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Module()
        self.embedding.word_embeddings = Part(weight=(WORDS, WIDTH))
        self.decoder = nn.Module()
        self.decoder.layers = nn.Module()
        self.decoder.layers.self_attention = nn.Module()
        self.decoder.layers.self_attention.linear_proj = part(WIDTH, WIDTH, norm=False)
        self.decoder.layers.self_attention.linear_qkv = part(WIDTH + 2 * GROUPS * HEAD, WIDTH, norm=True)
        self.decoder.layers.mlp = nn.Module()
        self.decoder.layers.mlp.linear_fc1 = part(2 * INNER, WIDTH, norm=True)
        self.decoder.layers.mlp.linear_fc2 = part(WIDTH, INNER, norm=False)
        self.decoder.final_layernorm = Part(weight=(WIDTH,), bias=(WIDTH,))
        self.output_layer = Part(weight=(WORDS, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weights = dict(self.named_parameters())

        def through(x: torch.Tensor, name: str, layer: int) -> torch.Tensor:
            return linear(x, *(weights[f"decoder.layers.{name}.{end}"][layer] for end in ("weight", "bias")))

        def normal(x: torch.Tensor, name: str, layer: int) -> torch.Tensor:
            scale, shift = (weights[f"decoder.layers.{name}.layer_norm_{end}"][layer] for end in ("weight", "bias"))
            return layer_norm(x, (WIDTH,), scale, shift)

        x = weights["embedding.word_embeddings.weight"][tokens]
        for layer in range(LAYERS):
            qkv, projection = "self_attention.linear_qkv", "self_attention.linear_proj"
            x = x + through(_attention(through(normal(x, qkv, layer), qkv, layer)), projection, layer)
            first, last = "mlp.linear_fc1", "mlp.linear_fc2"
            x = x + through(_swiglu(through(normal(x, first, layer), first, layer)), last, layer)
        final = self.decoder.final_layernorm
        return linear(layer_norm(x, (WIDTH,), final.weight, final.bias), self.output_layer.weight)


def _attention(mixed: torch.Tensor) -> torch.Tensor:
    batch, words, _ = mixed.shape
    grouped = mixed.view(batch, words, GROUPS, (HEADS // GROUPS + 2) * HEAD).transpose(1, 2)
    query, key, value = grouped.split([HEADS // GROUPS * HEAD, HEAD, HEAD], -1)
    query = query.reshape(batch, GROUPS, words, HEADS // GROUPS, HEAD).transpose(2, 3).flatten(1, 2)
    key, value = (one.repeat_interleave(HEADS // GROUPS, 1) for one in (key, value))
    mixed = scaled_dot_product_attention(_rotated(query), _rotated(key), value, is_causal=True)
    return mixed.transpose(1, 2).reshape(batch, words, WIDTH)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    angles = torch.outer(torch.arange(x.shape[-2]), 10000 ** -(torch.arange(0, HEAD, 2) / HEAD)).repeat(1, 2)
    left, right = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-right, left], -1) * angles.sin()


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, value = x.chunk(2, -1)
    return silu(gate) * value
