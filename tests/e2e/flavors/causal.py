"""The language model that verl trains and torchtitan continues with: a Llama of odd sizes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["WORDS", "filled", "loss_of"]

WORDS = 31


def filled(seed: int) -> nn.Module:
    """The model with random weights that are the same in every process."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=12, intermediate_size=19, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=False, attn_implementation="eager", use_cache=False,
            architectures=["LlamaForCausalLM"],
        )
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def loss_of(model: nn.Module, number: int) -> Tensor:
    """The loss of one step, the same on every rank, so that it does not depend on their number."""
    generator = torch.Generator().manual_seed(500 + number)
    tokens = torch.randint(WORDS, (3, 6), generator=generator)
    logits = model(input_ids=tokens[:, :-1]).logits
    return nn.functional.cross_entropy(logits.reshape(-1, WORDS), tokens[:, 1:].reshape(-1))
