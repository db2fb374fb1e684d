"""``config.json`` beside weights says how large they are: a part of them is found, and nothing that fits is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

import fsdpckpt
from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.ir.model_config import adapter_disagreements, certain_disagreements, disagreements

CONFIG = LlamaConfig(
    vocab_size=46, hidden_size=24, intermediate_size=36, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=77, tie_word_embeddings=False,
)  # fmt: skip
FIELDS = json.loads(CONFIG.to_json_string(use_diff=False))
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def llama() -> Weights:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG)
    return {name: torch.zeros(tensor.shape) for name, tensor in model.state_dict().items()}


def rows_of_one_rank(weights: Weights, world_size: int) -> Weights:
    return {name: tensor.chunk(world_size)[0].clone() for name, tensor in weights.items()}


def columns_of_one_rank(weights: Weights) -> Weights:
    return {name: tensor.chunk(2, dim=-1)[0].clone() for name, tensor in weights.items()}


def without_layer(weights: Weights, number: int) -> Weights:
    return {name: tensor for name, tensor in weights.items() if f".{number}." not in name}


def tensor_parallel(weights: Weights) -> Weights:
    """A rank of two: rows of the projections into heads, columns of those back."""
    cut = {name: 0 for name in weights if "q_proj" in name or "k_proj" in name or "v_proj" in name}
    return {n: t.chunk(2, dim=cut[n])[0].clone() if n in cut else t for n, t in weights.items()}


def save(directory: Path, weights: Weights, fields: dict[str, Any] | None = None, where: str = "config.json") -> Path:
    directory.mkdir()
    save_file(weights, directory / "model.safetensors")
    (directory / where).parent.mkdir(exist_ok=True)
    (directory / where).write_text(json.dumps(fields or FIELDS))
    return directory


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda weights: rows_of_one_rank(weights, 3), {"vocab_size", "hidden_size", "intermediate_size"}),
        (columns_of_one_rank, {"hidden_size", "intermediate_size"}),
        (lambda weights: without_layer(weights, 2), {"num_hidden_layers"}),
        (lambda weights: without_layer(weights, 1), {"num_hidden_layers"}),
        (tensor_parallel, {"num_attention_heads", "num_key_value_heads"}),
    ],
    ids=["rows", "columns", "last layer", "middle layer", "heads"],
)
def test_a_part_of_the_weights_is_a_problem_of_every_command(
    llama: Weights, change: Callable[[Weights], Weights], said: set[str], tmp_path: Path
) -> None:
    source = save(tmp_path / "s", change(llama))
    for path in (source, source / "model.safetensors"):
        problems = fsdpckpt.verify(path).problems
        assert {problem.kind for problem in problems} == {"config"}
        assert said <= {problem.message.partition("states ")[2].partition(" ")[0] for problem in problems}
        with pytest.raises(SourceCorruptError, match=r"does not contain the model that its config\.json describes"):
            fsdpckpt.convert(path, tmp_path / "o.pt")
    fsdpckpt.convert(source, tmp_path / "o.pt", ignore_file=["config.json"])
    assert set(torch.load(tmp_path / "o.pt")["model"]) <= set(llama)


def sizes(weights: Weights) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in weights.items()}


def of_experts(count: int, *, fused: bool = False, layers: int = 2) -> Weights:
    above = [f"model.layers.{layer}.mlp.experts" for layer in range(layers)]
    if fused:
        return {f"{each}.gate_up_proj": torch.zeros(count, 8, 4) for each in above}
    return {f"{each}.{n}.gate_proj.weight": torch.zeros(4, 4) for each in above for n in range(count)}


DEFAULTS = {"num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("field", ["num_local_experts", "n_routed_experts", "num_experts"])
def test_a_part_of_the_experts_is_found_in_any_layer(*, field: str, fused: bool) -> None:
    whole = of_experts(6, fused=fused)
    for fields in (
        {field: 6},
        {field: 3},
        {field: [6, 6]},
        {"num_shared_experts": 8},
        {field: None},
        DEFAULTS | {field: 6},
    ):
        assert not certain_disagreements(fields, sizes(whole))
    one_layer = whole | {name: value[:4] for name, value in whole.items() if "layers.1." in name}
    if not fused:
        one_layer = {
            name: value for name, value in whole.items() if not name.startswith("model.layers.1.mlp.experts.5")
        }
    (found,) = certain_disagreements({field: 6}, sizes(one_layer))
    assert (found.field, found.stated, found.found) == (field, 6, 4 if fused else 5)
    assert found.what == "the number of model.layers.1.mlp.experts"
    beside = {"model.layers.0.mlp.shared_experts.gate_proj.weight": torch.zeros(4, 4)}
    assert not certain_disagreements({field: 6}, sizes(whole | beside))


def test_the_configuration_of_a_verl_checkpoint_lies_below_it(llama: Weights, tmp_path: Path) -> None:
    part = without_layer(llama, 0)
    source = save(tmp_path / "s", part, where="huggingface/config.json")
    assert [problem.kind for problem in fsdpckpt.verify(source).problems] == ["config"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"vocab_size": 40},  # resized after config.json was written
        {"vocab_size": 64},
        {"num_hidden_layers": 2},  # a layer was added
        {"num_hidden_layers": 2, "num_nextn_predict_layers": 1},
        {"hidden_size": 48, "embedding_size": 24},  # another field says why
        {"head_dim": 8, "kv_channels": 4},
        {"intermediate_size": [36, 36]},
        {"num_attention_heads": None},
        {"text_config": {"vocab_size": 46}, "vocab_size": 9},
    ],
)
def test_what_cannot_be_decided_is_no_problem(llama: Weights, fields: dict[str, Any], tmp_path: Path) -> None:
    if "hidden_size" in fields:
        llama = {name: tensor for name, tensor in llama.items() if "layers" not in name}
    assert fsdpckpt.verify(save(tmp_path / "s", llama, {**FIELDS, **fields})).whole


def test_other_weights_beside_a_configuration_are_not_compared(llama: Weights, tmp_path: Path) -> None:
    part = without_layer(llama, 0)
    source = save(tmp_path / "s", llama)
    torch.save({"model": part}, tmp_path / "s" / "other.pt")
    assert fsdpckpt.verify(source / "other.pt").whole
    vision = {f"vision_tower.{name}": tensor[:1] for name, tensor in part.items()}
    assert not certain_disagreements(FIELDS, {name: tuple(tensor.shape) for name, tensor in vision.items()})


@pytest.mark.parametrize("text", ["", "[]", "{", '{"hidden_size": "wide"}'])
def test_a_configuration_that_says_nothing_is_no_problem(llama: Weights, text: str, tmp_path: Path) -> None:
    source = save(tmp_path / "s", llama)
    (source / "config.json").write_text(text)
    assert fsdpckpt.verify(source).whole


def test_a_part_that_options_select_is_written_beside_the_configuration(llama: Weights, tmp_path: Path) -> None:
    source = save(tmp_path / "s", llama)
    fsdpckpt.convert(source, tmp_path / "o", include=["model.layers.0.*"], flavor="huggingface")
    assert (tmp_path / "o" / "config.json").exists()
    assert [problem.kind for problem in fsdpckpt.verify(tmp_path / "o").problems] == ["config"]


@pytest.mark.parametrize(("rank", "whole"), [(8, True), (4, True), (16, False)])
def test_an_adapter_that_is_one_ranks_part_has_another_rank_than_its_configuration(
    rank: int, whole: bool, tmp_path: Path
) -> None:
    (tmp_path / "s").mkdir()
    name = "base_model.model.layers.0.q_proj.lora_{}.weight"
    save_file(
        {name.format("A"): torch.zeros(8, 24), name.format("B"): torch.zeros(24, 8)},
        tmp_path / "s" / "adapter_model.safetensors",
    )
    (tmp_path / "s" / "adapter_config.json").write_text(json.dumps({"r": rank, "peft_type": "LORA"}))
    problems = fsdpckpt.verify(tmp_path / "s").problems
    assert [problem.kind for problem in problems] == ([] if whole else ["config"] * 2)
    patterns = {"r": 64, "rank_pattern": {"q_proj": 8}}
    assert not adapter_disagreements(patterns, {name.format("A"): (8, 24), name.format("B"): (24, 8)})


def test_what_from_pretrained_would_not_load_is_more_than_what_is_certain() -> None:
    shapes = {"model.embed_tokens.weight": (46, 24), "model.layers.0.input_layernorm.weight": (24,)}
    assert [each.field for each in disagreements({"vocab_size": 48, "num_hidden_layers": 1}, shapes)] == ["vocab_size"]
    assert not certain_disagreements({"vocab_size": 48, "num_hidden_layers": 1}, shapes)
