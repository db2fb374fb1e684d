"""Training goes on after a built-in map: in Hugging Face's own Llama as it did in a model of torchtitan's form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

import fsdpckpt
from tests.oracle.compare import identical

VOCABULARY, DIM, HEADS, GROUPS, HIDDEN, LAYERS, THETA = 13, 24, 4, 2, 10, 2, 10000.0
HEAD = DIM // HEADS


class Attention(nn.Module):
    """Neighbours are a rotary pair, as torchtitan has them; Hugging Face pairs one half with the other."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(DIM, HEADS * HEAD, bias=False)
        self.wk = nn.Linear(DIM, GROUPS * HEAD, bias=False)
        self.wv = nn.Linear(DIM, GROUPS * HEAD, bias=False)
        self.wo = nn.Linear(HEADS * HEAD, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [part.unflatten(-1, (-1, HEAD)) for part in (self.wq(x), self.wk(x), self.wv(x))]
        q, k, v = rotated(heads[0]), rotated(heads[1]), heads[2]
        several = HEADS // GROUPS
        k, v = (part.repeat_interleave(several, dim=2) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return self.wo(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


def rotated(x: torch.Tensor) -> torch.Tensor:
    rates = THETA ** (-torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)
    angles = torch.outer(torch.arange(x.shape[1], dtype=torch.float64), rates)
    turns = torch.polar(torch.ones_like(angles), angles)[None, :, None]
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns).flatten(-2)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(DIM, eps=1e-5) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Titan(nn.Module):
    """Llama with the names and the rotary pairs of torchtitan 0.2."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(LAYERS)})
        self.norm = nn.RMSNorm(DIM, eps=1e-5)
        self.output = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x)
        return self.output(self.norm(x))


def hugging_face() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=DIM,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model.double()


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        tokens = torch.randint(VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(step))
        answer = model(tokens)
        logits = getattr(answer, "logits", answer)
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def resumed(make: Callable[[], nn.Module], path: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A job that starts from ``path`` as PyTorch loads it: names in the model, positions in the optimizer."""
    model = make()
    optimizer = optimizer_of(model)
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return model, optimizer


def names(model: nn.Module, path: Path) -> Path:
    path.write_text("\n".join(name for name, _ in model.named_parameters()))
    return path


def test_two_steps_after_the_map_are_those_of_the_other_model_and_back_they_are_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    titan = Titan().double()
    optimizer = optimizer_of(titan)
    train(titan, optimizer, range(2))
    torch.save({"model": titan.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "titan.pt")
    expected = train(titan, optimizer, range(2, 4))
    torch.save({"model": titan.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "later.pt")

    options = {"map": "torchtitan-0.2-llama3", "map_value": {"head_dim": str(HEAD)}, "verify": "full"}
    of_titan, of_other = names(Titan(), tmp_path / "titan.txt"), names(hugging_face(), tmp_path / "other.txt")
    fsdpckpt.convert(tmp_path / "titan.pt", tmp_path / "hf.pt", parameters=of_other, **options)
    other, of_optimizer = resumed(hugging_face, tmp_path / "hf.pt")
    # transformers computes norms and rotary angles in float32.
    assert train(other, of_optimizer, range(2, 4)) == pytest.approx(expected, abs=1e-6)
    fsdpckpt.convert(tmp_path / "later.pt", tmp_path / "later-hf.pt", parameters=of_other, **options)
    later, of_later = resumed(hugging_face, tmp_path / "later-hf.pt")
    for name, parameter in later.named_parameters():
        mapped, trained = of_later.state[parameter], of_optimizer.state[other.get_parameter(name)]
        torch.testing.assert_close(other.get_parameter(name), parameter, rtol=0, atol=1e-5)
        for state in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(trained[state], mapped[state], rtol=0, atol=1e-6)

    # The list describes the model that is written; the other one's comes from a checkpoint of its job.
    torch.save({"model": hugging_face().state_dict()}, tmp_path / "job.pt")
    known = {"parameters": of_titan, "reference": tmp_path / "job.pt"}
    fsdpckpt.convert(tmp_path / "hf.pt", tmp_path / "back.pt", inverse=True, **known, **options)
    again, of_again = resumed(lambda: Titan().double(), tmp_path / "back.pt")
    assert train(again, of_again, range(2, 4)) == expected
    for name, value in titan.state_dict().items():
        assert identical(again.state_dict()[name], value), name
