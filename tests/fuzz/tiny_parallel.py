"""Tiny checkpoints of several ranks that DeepSpeed and Megatron-LM save, one of each form, for ``tests.fuzz.tiny``."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

ROW = torch.arange(6, dtype=torch.float32)
EXPERTS = "m.experts"  # of AutoEP


def _optimizer(path: str, weights: list[torch.Tensor], **group: Any) -> tuple[str, object]:
    """A rank's file of ZeRO 1: a param group for each of its flat ``weights``; ``group``: of the last."""
    groups = [{"lr": 0.1, "params": [number]} for number in range(len(weights))]
    groups[-1].update(group)
    base = {"state": {number: {"exp_avg": weight / 2} for number, weight in enumerate(weights)}, "param_groups": groups}
    states = {"base_optimizer_state": base, "single_partition_of_fp32_groups": [weight.clone() for weight in weights]}
    return path, {"optimizer_state_dict": states}


def autotp() -> Iterator[tuple[str, object]]:
    pieces = [
        {"shape": [1, 3], "source": [3 * rank, [3, 1]], "dest": [0, [3, 1]], "locations": [rank]} for rank in range(2)
    ]
    ranks = {rank: {"shard_shape": [1, 3], "pieces": pieces[rank : rank + 1]} for rank in range(2)}
    cut = {"logical_shape": [2, 3], "ranks": ranks}
    info = {"affine_map": {"version": 1, "params": {"^w$": cut}}, "universal_checkpoint_version": 0.4}
    for rank in range(2):
        module = {"module": {"w": ROW[:3].reshape(1, 3), "mask": ROW}, "param_shapes": [{"w": torch.Size([1, 3])}]}
        more = {"buffer_names": ["mask"], "mp_world_size": 2, "universal_checkpoint_info": info}
        yield f"autotp/mp_rank_0{rank}_model_states.pt", {**module, **more}
        yield _optimizer(f"autotp/zero_pp_rank_0_mp_rank_0{rank}_optim_states.pt", [ROW[:3].clone()])


def experts() -> Iterator[tuple[str, object]]:
    name = "m.deepspeed_moe.experts.deepspeed_experts.{}.a"
    for rank in range(2):
        yield f"experts/layer_0_expert_{rank}_mp_rank_00_model_states.pt", {name.format(rank): ROW[:2].clone()}
        path = f"experts/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        yield _optimizer(path, [ROW[:2].clone()], name="ep_size_2", moe=True)
    module = {"module": {"mask": ROW.clone()}, "param_shapes": [{name.format(0): torch.Size([2])}]}
    yield "experts/mp_rank_00_model_states.pt", {**module, "buffer_names": ["mask"], "dp_world_size": 2}


def experts_without_zero() -> Iterator[tuple[str, object]]:
    name = "m.deepspeed_moe.experts.deepspeed_experts.{}.a"
    for rank in range(2):
        yield f"plain-experts/layer_0_expert_{rank}_mp_rank_00_model_states.pt", {name.format(rank): ROW[:2].clone()}
    module = {"module": {"w": ROW.clone()}, "num_experts": [2], "global_steps": 3}
    yield "plain-experts/mp_rank_00_model_states.pt", module


def _autoep_layers(rank: int) -> list[dict[str, Any]]:
    strides = [3, 3, 1]
    pieces = [
        {"shape": [1, 1, 3], "source": [3 * each, strides], "dest": [0, strides], "locations": [each]}
        for each in range(2)
    ]
    ranks = {each: {"shard_shape": [1, 1, 3], "pieces": pieces[each : each + 1]} for each in range(2)}
    maps = {"version": 1, "params": {f"{EXPERTS}.w1": {"logical_shape": [2, 1, 3], "ranks": ranks}}}
    placed = [{"rank": each, "experts": [each]} for each in range(2)]
    sizes = {"num_experts": 2, "num_local_experts": 1, "ep_size": 2, "expert_data_parallel_world_size": 1}
    own = {"ep_rank": rank, "expert_data_parallel_rank": 0, "moe_layer_id": 0, "expert_key_prefix": EXPERTS}
    return [{**sizes, **own, "expert_placement": {"version": 1, "ranks": placed}, "affine_maps": maps}]


_AUTOEP_SHAPES = [{"w": torch.Size([2, 3])}, {f"{EXPERTS}.w1": torch.Size([1, 1, 3])}]


def autoep() -> Iterator[tuple[str, object]]:
    """ZeRO 1, ZeRO 3, and a universal checkpoint."""
    for rank in range(2):
        own = [ROW[3 * rank : 3 * rank + 3], ROW[:3] + rank]
        path = f"autoep/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        yield _optimizer(path, own, name="ep_size_2", moe=True)
        expert = {f"{EXPERTS}.w1.{rank}": (ROW[:3] + rank).reshape(1, 3)}
        yield f"autoep/layer_0_expert_{rank}_mp_rank_00_model_states.pt", expert
    weights = {"w": ROW.reshape(2, 3)}
    common = {"param_shapes": _AUTOEP_SHAPES, "dp_world_size": 2}
    yield "autoep/mp_rank_00_model_states.pt", {"module": weights, **common, "ds_autoep_layers": _autoep_layers(0)}
    for rank in range(2):
        module = {
            "module": {"w": ROW[:0], f"{EXPERTS}.w1": ROW[:0]},
            **common,
            "ds_autoep_layers": _autoep_layers(rank),
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        yield f"autoep-zero3/{name}_model_states.pt", module
        flat = [ROW[3 * rank : 3 * rank + 3].clone(), ROW[:3] + rank]
        groups = [{"lr": 0.1, "params": [0]}, {"lr": 0.1, "params": [1], "name": "ep_size_2", "moe": True}]
        inner = {"state": {number: {"exp_avg": each / 2} for number, each in enumerate(flat)}, "param_groups": groups}
        states = {"zero_stage": 3, "fp32_flat_groups": flat, "optimizer_state_dict": inner}
        yield f"autoep-zero3/{name}_optim_states.pt", {"optimizer_state_dict": states}
        yield f"autoep-universal/{name}_model_states.pt", module
    yield "autoep-universal/zero/optimizer_state.pt", {"param_groups": groups}
    for name, shape in {"w": (2, 3), f"{EXPERTS}.w1": (2, 1, 3)}.items():
        yield f"autoep-universal/zero/{name}/fp32.pt", {"param": ROW.reshape(shape).clone(), "cat_dim": 0}
        yield f"autoep-universal/zero/{name}/exp_avg.pt", {"param": ROW.reshape(shape) / 2, "cat_dim": 0}


@dataclass
class fragment_address:  # noqa: N801  # its name in the pickle
    numel: int
    start: int


def pipelines() -> Iterator[tuple[str, object]]:
    """Two stages, with a layer that is tied; ZeRO 1, and bf16 without ZeRO."""
    stages = [{"tied_modules.e.w": (2, 3), "1.w": (3,)}, {"2.w": (3,), "tied_modules.e.w": (2, 3)}]
    fragment_address.__module__ = "deepspeed.utils.tensor_fragment"
    for name in ("deepspeed", "deepspeed.utils", fragment_address.__module__):
        sys.modules.setdefault(name, ModuleType(name))
    sys.modules[fragment_address.__module__].fragment_address = fragment_address  # type: ignore[attr-defined]
    for kind in ("pipeline", "pipeline-bf16"):
        for stage, shapes in enumerate(stages):
            flat, record, at = [], OrderedDict(), 0
            for name, shape in shapes.items():
                flat.append(ROW[: torch.Size(shape).numel()])
                record[name] = fragment_address(flat[-1].numel(), at)
                at += flat[-1].numel()
            path = f"{kind}/zero_pp_rank_0_mp_rank_0{stage}_optim_states.pt"
            _, content = _optimizer(path, [torch.cat(flat)])
            states: Any = {"module": None, "buffer_names": ["1.b"] if stage == 0 else [], "mp_world_size": 2}
            if kind == "pipeline":
                states["param_shapes"] = [{name: torch.Size(shape) for name, shape in shapes.items()}]
            else:
                content["optimizer_state_dict"]["param_slice_mappings"] = [record]  # type: ignore[index]
            yield path, content
            yield f"{kind}/mp_rank_0{stage}_model_states.pt", states
        yield f"{kind}/layer_00-model_states.pt", {"w": ROW.reshape(2, 3)}
        yield f"{kind}/layer_01-model_states.pt", {"w": ROW[:3].clone(), "b": ROW[:1].clone()}
        yield f"{kind}/layer_02-model_states.pt", {"w": ROW[:3].clone()}


FC1 = "decoder.layers.0.mlp.linear_fc1.weight"
_ARGUMENTS = {"tensor_model_parallel_size": 2, "swiglu": True, "ffn_hidden_size": 2, "padded_vocab_size": 2}


def megatron() -> Iterator[tuple[str, object]]:
    """Two tensor-parallel ranks, and the same with the distributed optimizer."""
    for rank in range(2):
        model = {FC1: ROW.reshape(2, 3).clone().bfloat16()}
        inner = {"state": {0: {"exp_avg": ROW.reshape(2, 3).clone()}}, "param_groups": [{"params": [0]}]}
        optimizer: dict[str, object] = {"optimizer": inner, "fp32_from_fp16_params": [[ROW.reshape(2, 3).clone()]]}
        content = {"args": _ARGUMENTS, "model": model, "optimizer": optimizer, "iteration": 3}
        yield f"megatron-torch/iter_0000003/mp_rank_0{rank}/model_optim_rng.pt", content
        optimizer = {"optimizer": {"param_groups": [{"lr": 0.1, "step": 3}]}}
        path = f"megatron-buffers/iter_0000003/mp_rank_0{rank}"
        yield f"{path}/model_optim_rng.pt", {**content, "optimizer": optimizer}
        buffer = {"param": ROW.clone(), "exp_avg": ROW / 2, "numel_unpadded": 6}
        yield f"{path}/distrib_optim.pt", {"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): buffer}}


def megatron_grid() -> Iterator[tuple[str, object]]:
    """Two pipeline stages, each of two expert-parallel ranks."""
    sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}
    arguments = {**sizes, "num_layers": 2, "num_experts": 2, "world_size": 4}
    layer = "decoder.layers.0."
    for stage in range(2):
        for expert in range(2):
            weights = {f"{layer}input_layernorm.weight": ROW[:2] + stage, f"{layer}mlp.experts.linear_fc2.weight0": ROW}
            optimizers = []
            for value in weights.values():
                inner = {"state": {0: {"exp_avg": value / 2}}, "param_groups": [{"params": [0]}]}
                optimizers.append({"optimizer": inner, "fp32_from_fp16_params": [[value.clone()]]})
            content = {
                "args": {**arguments, "rank": 2 * stage + expert},
                "model": {name: value.bfloat16() for name, value in weights.items()},
                "optimizer": optimizers,
                "iteration": 3,
            }
            yield f"megatron-grid/iter_0000003/mp_rank_00_00{stage}_00{expert}/model_optim_rng.pt", content


def files() -> Iterator[tuple[str, object]]:
    """Everything, by path."""
    for made in (autotp, experts, experts_without_zero, autoep, pipelines, megatron, megatron_grid):
        yield from made()
