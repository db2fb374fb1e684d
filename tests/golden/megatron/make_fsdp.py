"""Makes one ``fsdp_dtensor`` checkpoint beside this file, by Megatron FSDP on CPU ranks. With it on PYTHONPATH:

``torchrun --nproc-per-node 4 -m tests.golden.megatron.make_fsdp fsdp-dtensor '{"tp": 2}'``.

The model is that of ``make.py`` in bf16, and the steps are those of ``save_checkpoint`` (``megatron/training``, in no
package). Parameters without elements on a rank get empty states there, as on GPUs: torch's AdamW makes none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.golden.megatron.make import HERE, OnCpu, joined


class Stream:
    """A CUDA stream or event that has nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: Stream()


def patch() -> None:
    """What Megatron FSDP of 0.16 needs to run without CUDA."""
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = Stream
    cuda.current_stream = cuda.default_stream = lambda *_: Stream()
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.current_device = lambda: 0
    cuda.synchronize = cuda.empty_cache = lambda *_, **__: None
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.Tensor.record_stream = lambda *_: None
    for name in ("empty", "zeros", "ones", "full", "tensor", "empty_like", "zeros_like"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))  # a mode does not reach the hooks of backward
    from_group = DeviceMesh.from_group
    DeviceMesh.from_group = staticmethod(lambda group, device_type, **kwargs: from_group(group, "cpu", **kwargs))
    OnCpu().__enter__()
    import megatron.core.distributed.fsdp.mcore_fsdp_adapter as adapter
    import megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer as buffer
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    adapter.TELinear = type("TELinear", (), {})
    adapter._get_rng_state_dict = adapter._load_rng_state_dict = lambda *_: None
    buffer.gradient_reduce_preprocessing = _scaled  # Gloo scales no sums


def _on_cpu(function: Any) -> Any:
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return on_cpu


def _scaled(gradient: torch.Tensor, factor: float | None, _: Any) -> Any:
    if factor is not None:
        gradient.mul_(factor)
    return dist.ReduceOp.SUM


def build(tp: int) -> tuple[Any, Any]:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    config = TransformerConfig(
        num_layers=3, hidden_size=8, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=12,
        use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0, gated_linear_unit=True,
        activation_func=nn.functional.silu, tensor_model_parallel_size=tp, bf16=True, params_dtype=torch.bfloat16,
        masked_softmax_fusion=False, bias_activation_fusion=False, bias_dropout_fusion=False,
        gradient_accumulation_fusion=False, apply_rope_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    torch.manual_seed(1)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=16,
        max_sequence_length=8,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    ).bfloat16()
    with torch.no_grad():  # nothing is 0 or 1
        for name, param in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                generator = torch.Generator().manual_seed(sum(map(ord, name)))
                param.add_(torch.randn(param.shape, generator=generator) / 10)
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True, use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params",
        overlap_grad_reduce=True, overlap_param_gather=True,
    )  # fmt: skip
    wrapped = FullyShardedDataParallel(config, settings, Float16Module(config, model), device=torch.device("cuda:0"))
    adam = OptimizerConfig(
        optimizer="adam", lr=1e-2, weight_decay=0.5, use_distributed_optimizer=True, bf16=True,
        params_dtype=torch.bfloat16, clip_grad=0.0,
    )  # fmt: skip
    return wrapped, get_megatron_optimizer(adam, [wrapped])


def step(model: Any, optimizer: Any) -> None:
    model.zero_grad_buffer()
    optimizer.zero_grad()
    tokens = torch.randint(0, 16, (2, 8))
    mask = torch.ones(2, 1, 8, 8).triu(1).bool()
    labels = torch.roll(tokens, -1, 1)
    model(tokens, torch.arange(8)[None].expand(2, 8), mask, labels=labels).float().mean().backward()
    model.finish_grad_sync()
    optimizer.step()


def complete(optimizer: Any) -> None:
    """A state on every rank for every parameter, in one order."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        params = [param for group in one.optimizer.param_groups for param in group["params"]]
        empty = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.zeros_like)
        states = {
            param: one.optimizer.state.get(param)
            or {"step": torch.tensor(3.0), **{key: make(param) for key, make in empty.items()}}
            for param in params
        }
        one.optimizer.state.clear()
        one.optimizer.state.update(states)


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    inner = model.module  # what unwrap_model gives
    state = {"model": inner.state_dict_for_save_checkpoint()}
    state["optimizer"] = optimizer.sharded_state_dict(state, metadata={"distrib_optim_sharding_type": "fsdp_dtensor"})
    state["model"] = {key: value for key, value in state["model"].items() if not key.endswith("._extra_state")}
    return state


def held(state: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of every weight and of its states."""
    parts: dict[str, Any] = {key.replace("module.", ""): {"param": value} for key, value in state["model"].items()}
    for key, entry in state["optimizer"]["state"].items():
        parts[key.replace("module.", "")].update(entry)
    return {
        name: {key: (part.to_local() if isinstance(part, DTensor) else part).clone() for key, part in entry.items()}
        for name, entry in parts.items()
    }


def whole(ranks: list[dict[str, Any]], tp: int) -> dict[str, dict[str, torch.Tensor]]:
    """Tensor parallel ranks are neighbours; FSDP cuts what each has by rows."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, entry in ranks[0].items():
        for key, part in entry.items():
            shards = [torch.cat([rank[name][key] for rank in ranks[one::tp]]) for one in range(tp)] if part.ndim else []
            found.setdefault(name, {})[key] = joined(name, shards) if shards else part
    return found


def main(name: str, config: dict[str, Any]) -> None:
    patch()
    from megatron.core import parallel_state
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor
    from megatron.core.transformer.fsdp_dtensor_checkpoint import handle_swiglu_in_state_dict

    dist.init_process_group("gloo")
    tp = config.get("tp", 1)
    parallel_state.initialize_model_parallel(tp, 1)
    model, optimizer = build(tp)
    for group in optimizer.param_groups:
        group["weight_decay"] *= group["wd_mult"]
    torch.manual_seed(5 + parallel_state.get_data_parallel_rank())
    for _ in range(3):
        step(model, optimizer)
    complete(optimizer)
    state = state_of(model, optimizer)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, held(state))
    settings = {key.replace("module.", ""): value for key, value in state["optimizer"]["param_to_group_meta"].items()}
    state["model"], state["optimizer"] = handle_swiglu_in_state_dict(model.module, state["model"], state["optimizer"])
    preprocess_state_dict_for_uneven_dtensor(state)
    state |= {"args": argparse.Namespace(num_layers=3), "checkpoint_version": 3.0, "iteration": 3}
    made: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    directory = Path(made[0], name)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(directory))
    if dist.get_rank() == 0:
        torch.save({"params": whole(ranks, tp), "settings": settings}, directory / "truth.pt")
        with tarfile.open(HERE / f"{name}.tar.xz", "w:xz") as archive:
            archive.add(directory, name)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
