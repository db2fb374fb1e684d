"""The built-in maps of transformers' experts, against transformers: what it saves for the Hub, what its model holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from tests.oracle.compare import identical

SMALL = {
    "vocab_size": 13, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_experts_per_tok": 1, "max_position_embeddings": 16,
}  # fmt: skip
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "transformers-mixtral": ("Mixtral", {"intermediate_size": 5, "num_local_experts": 3}),
    "transformers-qwen3-moe": ("Qwen3Moe", {"moe_intermediate_size": 5, "num_experts": 3, "head_dim": 4}),
    "transformers-deepseek-v3": ("DeepseekV3", {
        "intermediate_size": 12, "moe_intermediate_size": 5, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1, "q_lora_rank": 4, "kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2,
        "v_head_dim": 4}),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_experts_are_those_of_the_hub_and_those_of_the_model(tmp_path: Path, name: str) -> None:
    import transformers

    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SMALL, **sizes))
    model.save_pretrained(tmp_path / "hub")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    assert not fsdpckpt.diff(tmp_path / "hub", tmp_path / "model.pt").same
    fsdpckpt.convert(tmp_path / "hub", tmp_path / "fused.pt", map=name, only="model")
    assert fsdpckpt.diff(tmp_path / "fused.pt", tmp_path / "model.pt").same
    options = {"map": name, "inverse": True, "flavor": "huggingface", "reference": tmp_path / "hub"}
    fsdpckpt.convert(tmp_path / "model.pt", tmp_path / "export", **options)
    assert fsdpckpt.diff(tmp_path / "export", tmp_path / "hub").same
    loaded = getattr(transformers, f"{kind}ForCausalLM").from_pretrained(tmp_path / "export")
    for key, value in model.state_dict().items():
        assert identical(loaded.state_dict()[key], value), key
