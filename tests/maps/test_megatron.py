"""Megatron's dense layers in Hugging Face's form, from layers of their own and from equal layers in one tensor.

``scripts/compare_maps`` compares what both models compute.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from tests.oracle.compare import require_parts

LAYERS, DIM, HEADS, GROUPS, HEAD, WIDTH = 3, 8, 6, 2, 4, 5
LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": (DIM,),
    "self_attention.linear_qkv.weight": ((HEADS + 2 * GROUPS) * HEAD, DIM),
    "self_attention.linear_qkv.bias": ((HEADS + 2 * GROUPS) * HEAD,),
    "self_attention.linear_proj.weight": (DIM, HEADS * HEAD),
    "mlp.linear_fc1.layer_norm_weight": (DIM,),
    "mlp.linear_fc1.weight": (2 * WIDTH, DIM),
    "mlp.linear_fc2.weight": (DIM, WIDTH),
}
OTHERS = {"embedding.word_embeddings.weight": (12, DIM), "decoder.final_layernorm.weight": (DIM,)}


def written_out(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Hugging Face's form of layers of their own, in torch's words."""
    made = {"model.embed_tokens.weight": state["embedding.word_embeddings.weight"]}
    made["model.norm.weight"] = state["decoder.final_layernorm.weight"]
    for number in range(LAYERS):
        layer = {name: state[f"decoder.layers.{number}.{name}"] for name in LAYER}
        to = f"model.layers.{number}"
        made[f"{to}.input_layernorm.weight"] = layer["self_attention.linear_qkv.layer_norm_weight"]
        made[f"{to}.post_attention_layernorm.weight"] = layer["mlp.linear_fc1.layer_norm_weight"]
        made[f"{to}.self_attn.o_proj.weight"] = layer["self_attention.linear_proj.weight"]
        made[f"{to}.mlp.down_proj.weight"] = layer["mlp.linear_fc2.weight"]
        made[f"{to}.mlp.gate_proj.weight"], made[f"{to}.mlp.up_proj.weight"] = layer["mlp.linear_fc1.weight"].chunk(2)
        for part in ("weight", "bias"):
            rows = layer[f"self_attention.linear_qkv.{part}"]
            grouped = rows.view(GROUPS, HEADS // GROUPS + 2, HEAD, *rows.shape[1:])
            for name, of in (("q", slice(0, -2)), ("k", slice(-2, -1)), ("v", slice(-1, None))):
                made[f"{to}.self_attn.{name}_proj.{part}"] = grouped[:, of].reshape(-1, *rows.shape[1:])
    return made


@pytest.mark.parametrize("stacked", [False, True])
def test_layers_are_those_of_hugging_face_and_megatrons_again(tmp_path: Path, stacked: bool) -> None:
    torch.manual_seed(0)
    forms: dict[str, dict[str, torch.Tensor]] = {}
    saved: dict[str, dict[str, torch.Tensor]] = {}
    for form in ("model", "exp_avg"):
        others = {name: torch.randn(shape) for name, shape in OTHERS.items()}
        layers = {name: torch.randn(LAYERS, *shape) for name, shape in LAYER.items()}
        apart = {f"decoder.layers.{n}.{name}": value[n] for name, value in layers.items() for n in range(LAYERS)}
        forms[form] = written_out({**others, **apart})
        one = {f"decoder.layers.{name}": value for name, value in layers.items()}
        saved[form] = {**others, **(one if stacked else {name: value.clone() for name, value in apart.items()})}
    state = {name: {"step": torch.tensor(3.0), "exp_avg": value} for name, value in saved["exp_avg"].items()}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": list(state)}]}
    torch.save({"model": saved["model"], "optimizer": optimizer}, tmp_path / "megatron.pt")
    values = {"head_dim": HEAD, "key_value_heads": GROUPS, "heads_per_group": HEADS // GROUPS}
    options: dict[str, Any] = {"map": "megatron-llama" if stacked else "megatron-fsdp-llama", "map_value": values}
    fsdpckpt.convert(tmp_path / "megatron.pt", tmp_path / "hf.pt", **options)
    made = torch.load(tmp_path / "hf.pt")
    moments = {name: entry["exp_avg"] for name, entry in made["optimizer"]["state"].items()}
    for found, expected in ((made["model"], forms["model"]), (moments, forms["exp_avg"])):
        assert found.keys() == expected.keys()
        require_parts(found, expected)
    fsdpckpt.convert(tmp_path / "hf.pt", tmp_path / "back.pt", inverse=True, **options)
    assert fsdpckpt.diff(tmp_path / "megatron.pt", tmp_path / "back.pt").same
