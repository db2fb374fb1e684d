"""Makes the checkpoints of several ranks that DeepSpeed and Megatron-LM save, without them.

    bench_parallel_make.py FORM DIRECTORY COUNT

COUNT is that of tensors: a quarter are parameters, the others their float32 weights and two states. Each of 4 ranks has
a part of every parameter, or the parameters of a pipeline stage.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch

RANKS = 4
Files = Iterator[tuple[str, object]]
Shape = tuple[int, ...]


def flat_states(shapes: dict[str, Shape]) -> dict[str, Any]:
    """One flat tensor of ZeRO 1, and its states."""
    count = sum(map(prod, shapes.values()))
    state = {"step": torch.tensor(9.0), "exp_avg": torch.randn(count), "exp_avg_sq": torch.rand(count)}
    return {"weights": torch.randn(count), "state": state}


def zero_states(tensors: list[dict[str, Any]], groups: list[dict[str, Any]]) -> dict[str, Any]:
    states = {number: each["state"] for number, each in enumerate(tensors)}
    listed = [{"lr": 0.1, **group, "params": [number]} for number, group in enumerate(groups)]
    return {
        "optimizer_state_dict": {
            "zero_stage": 1,
            "base_optimizer_state": {"state": states, "param_groups": listed},
            "single_partition_of_fp32_groups": [each["weights"] for each in tensors],
            "group_paddings": [0] * len(tensors),
        }
    }


def cut_from(flat: dict[str, Any], shapes: dict[str, Shape]) -> dict[str, torch.Tensor]:
    """The copies in bfloat16 of the parameters in a flat tensor."""
    parts = flat["weights"].split([prod(shape) for shape in shapes.values()])
    return {name: part.view(shape).bfloat16() for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def autotp(count: int) -> Files:
    """Rows of every parameter on each of the tensor-parallel ranks."""
    shapes: dict[str, Shape] = {f"layers.{number}.weight": (5 + number % 7, 16) for number in range(count)}
    maps = {}
    for name, (rows, columns) in shapes.items():
        ranks = {}
        for rank in range(RANKS):
            strides = [columns, 1]
            piece = {"shape": [rows, columns], "source": [rank * rows * columns, strides], "dest": [0, strides]}
            ranks[rank] = {"shard_shape": [rows, columns], "pieces": [{**piece, "locations": [rank]}]}
        pattern = "^" + name.replace(".", r"\.") + "$"
        maps[pattern] = {"logical_shape": [RANKS * rows, columns], "ranks": ranks}
    info = {"affine_map": {"version": 1, "params": maps}, "universal_checkpoint_version": 0.4}
    for rank in range(RANKS):
        flat = flat_states(shapes)
        described = {"param_shapes": [shapes], "mp_world_size": RANKS, "universal_checkpoint_info": info}
        yield f"mp_rank_0{rank}_model_states.pt", {"module": cut_from(flat, shapes), "buffer_names": [], **described}
        yield f"zero_pp_rank_0_mp_rank_0{rank}_optim_states.pt", zero_states([flat], [{}])


def pipeline(count: int) -> Files:
    """Layers of ten parameters, as many on each stage."""
    layers = max(count // 10, RANKS)
    for stage in range(RANKS):
        numbers = range(stage * layers // RANKS, (stage + 1) * layers // RANKS)
        shapes: dict[str, Shape] = {f"{number}.w{at}": (5 + at, 16) for number in numbers for at in range(10)}
        flat = flat_states(shapes)
        copies = cut_from(flat, shapes)
        for number in numbers:
            own = {f"w{at}": copies[f"{number}.w{at}"].clone() for at in range(10)}
            yield f"layer_{number:02}-model_states.pt", own
        described = {"param_shapes": [shapes], "mp_world_size": RANKS, "buffer_names": []}
        yield f"mp_rank_0{stage}_model_states.pt", {"module": None, **described}
        yield f"zero_pp_rank_0_mp_rank_0{stage}_optim_states.pt", zero_states([flat], [{}])


def experts(count: int) -> Files:
    """MoE layers of eight experts, two on each of the expert-parallel ranks; a weight and a bias each."""
    local = 2
    name = "layers.{}.deepspeed_moe.experts.deepspeed_experts.{}.{}"
    layers = max(count // (2 * RANKS * local), 1)
    shapes: dict[str, Shape] = {}
    for layer in range(layers):
        for expert in range(local):
            shapes |= {name.format(layer, expert, "weight"): (5, 16), name.format(layer, expert, "bias"): (16,)}
    whole = []
    for rank in range(RANKS):
        dense, flat = flat_states({"w": (4,)}), flat_states(shapes)
        copies = cut_from(flat, shapes)
        for layer in range(layers):
            for expert in range(local):
                number = rank * local + expert
                own = {
                    name.format(layer, number, each): copies[name.format(layer, expert, each)].clone()
                    for each in ("weight", "bias")
                }
                yield f"layer_{layer}_expert_{number}_mp_rank_00_model_states.pt", own
        groups = [{}, {"name": f"ep_size_{RANKS}", "moe": True}]
        yield f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", zero_states([dense, flat], groups)
        whole.append(dense["weights"])
    module = {"module": {"w": torch.cat(whole).bfloat16()}, "param_shapes": [{"w": (16,)}, shapes], "buffer_names": []}
    yield "mp_rank_00_model_states.pt", {**module, "dp_world_size": RANKS}


def autoep(count: int) -> Files:
    """The same of AutoEP under ZeRO 3, which has two tensors for each layer."""
    layers, local = max(count // 2, 1), 2
    shapes: dict[str, Shape] = {}
    described = []
    for layer in range(layers):
        prefix = f"layers.{layer}.experts"
        shapes |= {f"{prefix}.{name}": (local, 5, 16) for name in ("w1", "w2")}
        placed = [{"rank": rank, "experts": [local * rank, local * rank + 1]} for rank in range(RANKS)]
        described.append({
            "moe_layer_id": layer, "expert_key_prefix": prefix, "num_experts": RANKS * local, "ep_size": RANKS,
            "num_local_experts": local, "expert_placement": {"version": 1, "ranks": placed},
            "expert_data_parallel_world_size": 1, "expert_data_parallel_rank": 0,
        })  # fmt: skip
    for rank in range(RANKS):
        dense, flat = flat_states({"w": (4,)}), flat_states(shapes)
        groups = [{"lr": 0.1, "params": [0]}, {"lr": 0.1, "params": [1], "name": f"ep_size_{RANKS}", "moe": True}]
        inner = {"state": {0: dense["state"], 1: flat["state"]}, "param_groups": groups}
        states = {
            "zero_stage": 3,
            "fp32_flat_groups": [dense["weights"], flat["weights"]],
            "optimizer_state_dict": inner,
        }
        own = [{**layer, "ep_rank": rank} for layer in described]
        module = {name: torch.zeros(0) for name in ("w", *shapes)}
        content = {"module": module, "param_shapes": [{"w": (16,)}, shapes], "buffer_names": [], "dp_world_size": RANKS}
        yield f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", {**content, "ds_autoep_layers": own}
        yield f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", {"optimizer_state_dict": states}


WIDTH, INNER = 16, 8
_SIZES = {
    "tensor_model_parallel_size": RANKS, "pipeline_model_parallel_size": 1, "num_attention_heads": RANKS,
    "group_query_attention": False, "kv_channels": 4, "swiglu": True, "ffn_hidden_size": INNER, "padded_vocab_size": 64,
}  # fmt: skip


def megatron(count: int) -> Iterator[tuple[int, dict[str, torch.Tensor], dict[str, Any]]]:
    """Each tensor-parallel rank's float32 weights, and what else is in its file of the model."""
    for rank in range(RANKS):
        weights = {"embedding.word_embeddings.weight": torch.randn(64 // RANKS, WIDTH)}
        for number in range(max(count // 4, 1)):
            layer = f"decoder.layers.{number}."
            weights[f"{layer}self_attention.linear_qkv.weight"] = torch.randn(12, WIDTH)
            weights[f"{layer}self_attention.linear_proj.weight"] = torch.randn(WIDTH, 4)
            weights[f"{layer}mlp.linear_fc1.weight"] = torch.randn(2 * INNER // RANKS, WIDTH)
            weights[f"{layer}mlp.linear_fc2.weight"] = torch.randn(WIDTH, INNER // RANKS)
        arguments = argparse.Namespace(**_SIZES, num_layers=max(count // 4, 1), rank=rank, world_size=RANKS)
        model = {name: value.bfloat16() for name, value in weights.items()}
        yield rank, weights, {"args": arguments, "iteration": 9, "model": model}


def megatron_torch(count: int) -> Files:
    for rank, weights, content in megatron(count):
        states = {
            number: {"exp_avg": torch.randn_like(each), "exp_avg_sq": torch.rand_like(each)}
            for number, each in enumerate(weights.values())
        }
        inner = {"state": states, "param_groups": [{"lr": 0.1, "step": 9, "params": list(states)}]}
        optimizer = {"optimizer": inner, "fp32_from_fp16_params": [list(weights.values())]}
        yield f"iter_0000009/mp_rank_0{rank}/model_optim_rng.pt", {**content, "optimizer": optimizer}


def megatron_buffers(count: int) -> Files:
    """The same with the distributed optimizer: every parameter at a multiple of 64 elements, backwards."""
    for rank, weights, content in megatron(count):
        optimizer = {"optimizer": {"param_groups": [{"lr": 0.1, "step": 9}]}}
        yield f"iter_0000009/mp_rank_0{rank}/model_optim_rng.pt", {**content, "optimizer": optimizer}
        parts: list[torch.Tensor] = []
        at = 0
        for weight in reversed(weights.values()):
            parts += [torch.zeros(-at % 64), weight.flatten()]
            at += -at % 64 + weight.numel()
        flat = torch.cat(parts)
        buffer = {"param": flat, "exp_avg": torch.randn(at), "exp_avg_sq": torch.rand(at), "numel_unpadded": at}
        saved = {"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): buffer}}
        yield f"iter_0000009/mp_rank_0{rank}/distrib_optim.pt", saved


FORMS: dict[str, Callable[[int], Files]] = {
    "autotp": autotp,
    "pipeline": pipeline,
    "experts": experts,
    "autoep": autoep,
    "megatron-torch": megatron_torch,
    "megatron-buffers": megatron_buffers,
}


def main() -> None:
    form, directory, count = sys.argv[1:]
    torch.manual_seed(1)
    for name, content in FORMS[form](int(count) // 4):
        path = os.path.join(directory, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(content, path)


if __name__ == "__main__":
    main()
