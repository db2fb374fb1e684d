"""Makes one checkpoint beside this file, by Megatron-core on CPU ranks. With it on PYTHONPATH:

``torchrun --nproc-per-node 4 -m tests.golden.megatron.make uneven '{"pp": 2, "tp": 2}'``.

Megatron asks for CUDA in many places: ``OnCpu`` answers with the CPU. ``truth.pt`` holds what the ranks' own tensors
are put together, under the names in the file, and the losses of the next three steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import filesystem
from torch.overrides import TorchFunctionMode

HERE = Path(__file__).parent
FIRST_STAGE = 2  # layers of three
SPLIT = {
    "word_embeddings.weight": 0, "output_layer.weight": 0, "linear_qkv.weight": 0, "linear_qkv.bias": 0,
    "linear_proj.weight": 1, "linear_fc1.weight": 0, "linear_fc1.bias": 0, "linear_fc2.weight": 1,
}  # fmt: skip  # the dimension that tensor parallel ranks divide
RENAMED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


class OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith(("cuda", "0")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to:
            args = (args[0], *("cpu" if isinstance(arg, torch.device) else arg for arg in args[1:]))
        if func is torch.Tensor.cuda:
            return args[0]
        answer = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return answer.replace("torch.", "torch.cuda.")
        return answer


def patch() -> None:
    """What Megatron-core 0.12 to 0.16 needs to run with torch 2.13 and without CUDA."""
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_, **__: None
    torch.cuda.get_device_capability = lambda *_: (8, 0)
    numpy.product = numpy.prod
    write = filesystem._write_item
    filesystem._write_item = lambda *args: write(*args, filesystem.SerializationFormat.TORCH_SAVE)
    OnCpu().__enter__()
    import megatron.core.optimizer.distrib_optimizer as optimizer
    import megatron.core.transformer.moe.moe_utils as moe
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    optimizer.quantize_param_shard = optimizer.quantize_param_fragment = lambda *_, **__: None
    moe.te_general_gemm = None


class Training:
    def __init__(self, config: dict[str, Any]) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.module import Float16Module

        self.config = config
        tp, pp, ep = (config.get(key, 1) for key in ("tp", "pp", "ep"))
        parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
        self.tp, self.pp, self.dp = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(),
        )
        stages = {"num_layers_in_first_pipeline_stage": FIRST_STAGE, "num_layers_in_last_pipeline_stage": 1}
        experts = {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False}
        bf16 = config.get("bf16", False)
        dtype = torch.bfloat16 if bf16 else torch.float32
        transformer = TransformerConfig(
            num_layers=3, hidden_size=8, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=12,
            use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0, gated_linear_unit=True,
            activation_func=nn.functional.silu, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
            expert_model_parallel_size=ep, pipeline_dtype=torch.float32, bf16=bf16, params_dtype=dtype,
            masked_softmax_fusion=False, bias_activation_fusion=False, bias_dropout_fusion=False,
            gradient_accumulation_fusion=False, apply_rope_fusion=False, persist_layer_norm=False,
            **(stages if pp > 1 else {}), **(experts if ep > 1 else {}),
        )  # fmt: skip
        torch.manual_seed(1 + self.pp)
        model = GPTModel(
            transformer,
            get_gpt_layer_local_spec(4 if ep > 1 else None),
            vocab_size=16,
            max_sequence_length=8,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        ).to(dtype)
        sharding = config.get("optimizer")
        self.model, self.sharding, self.metadata = model, sharding, dict(config.get("metadata", {}))
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=bool(sharding), grad_reduce_in_fp32=True)
        self.ddp = DistributedDataParallel(transformer, ddp, Float16Module(transformer, model) if bf16 else model)
        with torch.no_grad():  # nothing is 0 or 1
            for name, param in model.named_parameters():
                if "norm" in name or name.endswith("bias"):
                    param.add_(self._random(name, param.shape, rank=0).to(dtype) / 10)
        settings = OptimizerConfig(
            optimizer="adam", lr=1e-2, weight_decay=0.5, bf16=bf16, params_dtype=dtype,
            use_distributed_optimizer=bool(sharding), clip_grad=1.0,
        )  # fmt: skip
        self.optimizer = get_megatron_optimizer(settings, [self.ddp])
        self.optimizers = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        for group in self.optimizer.param_groups:
            group["weight_decay"] *= group["wd_mult"]  # as OptimizerParamScheduler does at each step
        torch.manual_seed(5 + self.dp)

    def _random(self, name: str, shape: torch.Size, *, rank: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name)) + rank))

    def step(self) -> float | None:
        """One step. Pipeline stages take random gradients, which need no schedule."""
        from megatron.core.distributed import finalize_model_grads

        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = None
        if self.config.get("pp", 1) == 1:
            tokens = torch.randint(0, 16, (2, 8))
            mask = torch.ones(2, 1, 8, 8).triu(1).bool()
            labels = torch.roll(tokens, -1, 1)
            loss = self.ddp(tokens, torch.arange(8)[None].expand(2, 8), mask, labels=labels).float().mean()
            loss.backward()
            finalize_model_grads([self.ddp], None)
        else:
            for name, param in self.ddp.named_parameters():
                param.main_grad.copy_(self._random(name, param.shape, rank=self.tp if _split(name) is not None else 0))
            self.ddp.finish_grad_sync()
        self.optimizer.step()
        return None if loss is None else loss.item()

    def held(self) -> dict[str, Any]:
        """This rank's part of every parameter and of its states. ``range``: elements of the flattened shard."""
        states: dict[str, Any] = {}
        for optimizer in self.optimizers:
            for name, param in self.model.named_parameters():
                if param in getattr(optimizer, "model_param_gbuf_map", {}):
                    found = optimizer._get_model_param_range_map(param)["param"]
                    values = optimizer._get_main_param_and_optimizer_states(param)
                    states[name] = {"range": (found.start, found.end), **values}
                elif (main := getattr(param, "main_param", param)) in optimizer.optimizer.state:
                    states[name] = {"param": main, **optimizer.optimizer.state[main]}
        params = {name: param.detach() for name, param in self.model.named_parameters()}
        return {"tp": self.tp, "pp": self.pp, "params": params, "states": states}

    def save(self, directory: str) -> None:
        import megatron.core
        from megatron.core import dist_checkpointing, parallel_state
        from megatron.core.dist_checkpointing.mapping import ShardedObject

        metadata = dict(self.metadata)
        if self.sharding:
            metadata["distrib_optim_sharding_type"] = self.sharding
        old = megatron.core.__version__.startswith("0.12")
        group = {} if old else {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        args = argparse.Namespace(num_layers=3, params_dtype=torch.float32, iteration=3)
        state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": 3}
        state["model"] = self.model.sharded_state_dict(metadata={**metadata, **group})
        keyword = {"sharding_type": self.sharding} if self.sharding else {}
        keyword = keyword if old else {"metadata": {**metadata, **group}}
        state["optimizer"] = self.optimizer.sharded_state_dict(state, **keyword)
        state["opt_param_scheduler"] = {"max_lr": 1e-2, "num_steps": 3}
        shape, place = (self.config.get("pp", 1), self.config.get("tp", 1)), (self.pp, self.tp)
        rng = [{"random_rng_state": random.getstate()[2:], "torch_rng_state": torch.get_rng_state()[:64]}]
        state["rng_state"] = ShardedObject("rng_state", rng, shape, place, replica_id=self.dp)
        dist_checkpointing.save(state, directory, **({} if old else {"content_metadata": metadata}))


def _split(name: str) -> int | None:
    return next((dim for end, dim in SPLIT.items() if name.endswith(end)), None)


def joined(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """The parameter whose parts tensor parallel ranks hold. The gate and the value of SwiGLU are divided each."""
    dim = _split(name)
    if dim is None or len(parts) == 1:
        assert all(torch.equal(part, parts[0]) for part in parts), name
        return parts[0]
    if "linear_fc1" in name:
        halves = [part.chunk(2) for part in parts]
        return torch.cat([*(gate for gate, _ in halves), *(value for _, value in halves)])
    return torch.cat(parts, dim)


def unflattened(shape: torch.Size, parts: list[dict[str, Any]], key: str) -> torch.Tensor:
    """One tensor parallel rank's shard of a state, whose ranges data-parallel ranks hold."""
    if "range" not in parts[0]:
        return parts[0][key]
    flat = torch.full((shape.numel(),), torch.nan)
    for part in parts:
        flat[slice(*part["range"])] = part[key]
    assert not flat.isnan().any(), key
    return flat.view(shape)


def whole(ranks: list[dict[str, Any]]) -> dict[str, dict[str, torch.Tensor]]:
    """By name in the file: the ``copy`` that the model computed with, the weight (``param``) and the states."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for pp in sorted({rank["pp"] for rank in ranks}):
        stage = [rank for rank in ranks if rank["pp"] == pp]
        shards = [[rank for rank in stage if rank["tp"] == tp] for tp in sorted({rank["tp"] for rank in stage})]
        for name in stage[0]["params"]:
            values = {"copy": joined(name, [shard[0]["params"][name] for shard in shards])}
            for key in ("param", "exp_avg", "exp_avg_sq"):
                held = [[rank["states"][name] for rank in shard if name in rank["states"]] for shard in shards]
                shapes = [shard[0]["params"][name].shape for shard in shards]
                parts = [unflattened(shape, part, key) for shape, part in zip(shapes, held, strict=True)]
                values[key] = joined(name, parts).clone()
            layer = re.search(r"layers\.(\d+)", name)
            number = name
            if layer is not None:
                number = name.replace(layer[0], f"layers.{int(layer[1]) + FIRST_STAGE * (pp > 0)}")
            for old, new in RENAMED.items():
                number = number.replace(old, new)
            found[number] = values
    stacked: dict[str, dict[str, torch.Tensor]] = {}
    for name, values in found.items():
        others = sorted(other for other in found if re.sub(r"layers\.\d", "layers.0", other) == name)
        if ".layers." not in name:
            stacked[name] = values
        elif others:  # one tensor for all layers
            of_layers = {key: torch.stack([found[other][key] for other in others]) for key in values}
            stacked[name.replace("layers.0.", "layers.")] = of_layers
    return stacked


def main(name: str, config: dict[str, Any]) -> None:
    patch()
    dist.init_process_group("gloo")
    training = Training(config)
    for _ in range(3):
        training.step()
    made: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    directory = Path(made[0], name)
    directory.mkdir(exist_ok=True)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, training.held())
    truth = {"params": whole(ranks)} if config.get("ep", 1) == 1 else {"ranks": ranks}
    training.save(str(directory))
    losses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(losses, [training.step() for _ in range(3)])
    if dist.get_rank() == 0:
        torch.save({**truth, "losses": losses}, directory / "truth.pt")
        with tarfile.open(HERE / f"{name}.tar.xz", "w:xz") as archive:
            archive.add(directory, name)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":  # the writer starts processes that import this file
    main(sys.argv[1], json.loads(sys.argv[2]))
