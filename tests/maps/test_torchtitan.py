"""torchtitan's fused attention: the model saves q, k and v apart, the optimizer trains them as one; a map takes both to
Hugging Face's form. ``scripts/compare_maps`` compares all maps of torchtitan with torchtitan itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import fsdpckpt
from tests.oracle.compare import identical

DIM, HEADS, GROUPS, HEAD = 8, 4, 2, 6
LAYER = "layers.0.attention"


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One tensor of the rows of each group: its heads of q, then k, then v."""
    parts = [part.view(GROUPS, -1, HEAD, DIM) for part in (q, k, v)]
    return torch.cat(parts, dim=1).reshape(-1, DIM)


def halves(rows: torch.Tensor) -> torch.Tensor:
    """Rotary pairs that were neighbours, with their first elements before their second ones."""
    return rows.view(-1, HEAD // 2, 2, DIM).transpose(1, 2).reshape(rows.shape)


def checkpoint() -> dict[str, Any]:
    torch.manual_seed(0)

    def projections() -> list[torch.Tensor]:
        return [torch.randn(heads * HEAD, DIM) for heads in (HEADS, GROUPS, GROUPS)]

    others = {
        "tok_embeddings.weight": (11, DIM), "norm.weight": (DIM,), "lm_head.weight": (11, DIM),
        "layers.0.attention_norm.weight": (DIM,), "layers.0.ffn_norm.weight": (DIM,),
        f"{LAYER}.wo.weight": (DIM, HEADS * HEAD), "layers.0.feed_forward.w1.weight": (5, DIM),
        "layers.0.feed_forward.w2.weight": (DIM, 5), "layers.0.feed_forward.w3.weight": (5, DIM),
    }  # fmt: skip
    weights, first, second = ({name: torch.randn(shape) for name, shape in others.items()} for _ in range(3))
    q, k, v = projections()
    weights |= {f"{LAYER}.qkv_linear.w{name}.weight": part for name, part in (("q", q), ("k", k), ("v", v))}
    for moments in (first, second):
        moments[f"{LAYER}.qkv_linear.wqkv.weight"] = fused(*projections())
    state = {name: {"step": torch.tensor(2.0), "exp_avg": first[name], "exp_avg_sq": second[name]} for name in first}
    return {"model": weights, "optimizer": {"state": state, "param_groups": [{"lr": 0.1, "params": list(first)}]}}


def test_weights_that_are_apart_and_states_that_are_one_both_arrive(tmp_path: Path) -> None:
    saved = checkpoint()
    torch.save(saved, tmp_path / "titan.pt")
    (tmp_path / "base").mkdir()
    config = {"hidden_size": DIM, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": HEAD}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    options: dict[str, Any] = {"map": "torchtitan-llama3", "reference": tmp_path / "base"}
    fsdpckpt.convert(tmp_path / "titan.pt", tmp_path / "made", to="sharded", world_size=3, **options)
    fsdpckpt.convert(tmp_path / "made", tmp_path / "made.pt", to="full")
    made = torch.load(tmp_path / "made.pt")
    weights, state = saved["model"], saved["optimizer"]["state"]
    attention = "model.layers.0.self_attn"
    for name, change in (("q", halves), ("k", halves), ("v", torch.clone)):
        expected = change(weights[f"{LAYER}.qkv_linear.w{name}.weight"])
        assert identical(made["model"][f"{attention}.{name}_proj.weight"], expected)
    for moment in ("exp_avg", "exp_avg_sq"):
        one = state[f"{LAYER}.qkv_linear.wqkv.weight"][moment].view(GROUPS, -1, HEAD, DIM)
        q, k, v = (part.reshape(-1, DIM) for part in one.split([HEADS // GROUPS, 1, 1], dim=1))
        for name, expected in (("q", halves(q)), ("k", halves(k)), ("v", v)):
            assert identical(made["optimizer"]["state"][f"{attention}.{name}_proj.weight"][moment], expected)
    assert made["optimizer"]["state"].keys() == made["model"].keys()
    numbers = json.loads((tmp_path / "made" / "fsdpckpt.json").read_text())["maps"][0]["values"]
    assert numbers == {"head_dim": HEAD, "key_value_heads": GROUPS, "heads_per_group": HEADS // GROUPS}
    fsdpckpt.convert(tmp_path / "made", tmp_path / "back.pt", to="full", inverse=True, **options)
    assert fsdpckpt.diff(tmp_path / "titan.pt", tmp_path / "back.pt").same
