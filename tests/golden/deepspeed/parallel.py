"""Makes checkpoints of models that are parallel in other ways than ZeRO's, by DeepSpeed 0.19 on 4 CPU ranks.

``torchrun --nproc-per-node 4 -m tests.golden.deepspeed.parallel pipeline DIR '{"zero_optimization": {"stage": 1}}'``
trains two pipeline stages of two data-parallel ranks; ``autotp`` two tensor-parallel ranks instead, ``experts`` two
expert-parallel ranks, ``autoep`` the same of a model of transformers, ``expert-pipeline`` two pipeline stages of two
expert-parallel ranks. Then
``python -m tests.golden.deepspeed.parallel truth DIR`` lets DeepSpeed's own ``ds_to_universal.py`` make
``DIR-universal``, and keeps in ``DIR/truth.pt`` its parameters and states, and the values that were never trained.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.golden.deepspeed.make import MOMENTS, USUAL, of_all_ranks, three_steps, two_groups, without_compiler

WORDS = 13
UNTRAINED = "untrained.pt"


class Words(nn.Module):
    """Embeddings, which the last layer of the pipeline shares, and a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.e = nn.Embedding(WORDS, width)
        self.register_buffer("scale", torch.randn(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.e(tokens)


class Layer(nn.Module):
    def __init__(self, width: int, *, frozen: bool = False) -> None:
        super().__init__()
        self.l, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.register_buffer("count", torch.arange(4))
        self.l.weight.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.l(self.norm(x)))


class Block(nn.Module):
    """A fused weight, and an inner width that two ranks cannot halve."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(torch.tanh(query) * key + value)
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 10)
        self.blocks = nn.ModuleList([Block(10, 7), Block(10, 7)])
        self.head = nn.Linear(10, WORDS, bias=False)
        self.scale = nn.Parameter(torch.randn(1))
        self.register_buffer("mask", torch.randn(3, 3))
        self.blocks[1].out.weight.requires_grad_(False)  # type: ignore[union-attr]
        self.blocks[1].norm.bias.requires_grad_(False)  # type: ignore[union-attr]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * (1 + self.scale)


class Sparse(nn.Module):
    """Two layers of four experts, of which each rank has two."""

    def __init__(self) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.embed, self.norm = nn.Embedding(WORDS, 6), nn.LayerNorm(6)
        self.layers = nn.ModuleList(
            MoE(6, nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 6)), num_experts=4, ep_size=2, k=1)
            for _ in range(2)
        )
        self.head = nn.Linear(6, WORDS)
        self.head.bias.requires_grad_(False)
        self.register_buffer("mask", torch.full((3,), 2.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(self.norm(x))


AUTOTP = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.qkv\.weight$"], "partition_type": "column", "shape": [3, -1], "partition_dim": 0},
        {"patterns": [r".*\.up\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.(out|down)\.weight$"], "partition_type": "row"},
    ],
}


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().view(-1, WORDS), tokens.view(-1))


def batches(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(0, WORDS, (2, 5), generator=generator)
        yield tokens, tokens


def trained_in_stages(net: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
    import deepspeed

    settings = {**USUAL, "gradient_accumulation_steps": 2, **config}
    engine = deepspeed.initialize(model=net, optimizer=optimizer, config=settings)[0]
    data = batches(engine.grid.get_data_parallel_rank())
    for _ in range(3):
        engine.train_batch(data)
    return engine


def pipeline(config: dict[str, Any]) -> Any:
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    def tied(**more: Any) -> Any:
        return TiedLayerSpec("embed", Words, 7, tied_weight_attr="e.weight", **more)

    layers = [
        tied(),
        LayerSpec(Layer, 7),
        lambda x: x * 1.5,
        LayerSpec(Layer, 7, frozen=True),
        LayerSpec(Layer, 7),
        LayerSpec(nn.LayerNorm, 7),
        tied(forward_fn=lambda words, x: x @ words.e.weight.t()),
    ]
    net = PipelineModule(layers, num_stages=2, loss_fn=loss_of, partition_method="uniform")
    return trained_in_stages(net, torch.optim.AdamW(two_groups(net), lr=1e-2), config)


class Routed(nn.Module):
    """An MoE layer of four experts, of which each rank has two."""

    def __init__(self) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.moe = MoE(6, nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 6)), num_experts=4, ep_size=2, k=1)
        self.register_buffer("scale", torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(x)[0]


def by_experts(net: nn.Module) -> torch.optim.Optimizer:
    """The parameters of experts in a group of their own."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    group = {"params": [param for param in net.parameters() if param.requires_grad], "name": "all", "weight_decay": 0.1}
    return torch.optim.AdamW(split_params_into_different_moe_groups_for_optimizer([group]), lr=1e-2)


def expert_pipeline(config: dict[str, Any]) -> Any:
    from deepspeed.pipe import LayerSpec, PipelineModule

    layers = [LayerSpec(nn.Embedding, WORDS, 6), LayerSpec(Routed), LayerSpec(Routed), LayerSpec(nn.Linear, 6, WORDS)]
    net = PipelineModule(layers, num_stages=2, loss_fn=loss_of, partition_method="uniform")
    return trained_in_stages(net, by_experts(net), config)


def autotp(config: dict[str, Any]) -> Any:
    import deepspeed
    from deepspeed.utils import groups

    net = Net()
    settings = {**USUAL, "tensor_parallel": {"autotp_size": 2, "partition_config": AUTOTP}, **config}
    engine = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(two_groups(net), lr=1e-2), config=settings)[0]
    data = batches(groups.get_data_parallel_rank())
    three_steps(engine, lambda: loss_of(engine(tokens := next(data)[0]), tokens))
    return engine


def experts(config: dict[str, Any]) -> Any:
    import deepspeed

    net = Sparse()
    engine = deepspeed.initialize(model=net, optimizer=by_experts(net), config={**USUAL, **config})[0]
    data = batches(engine.global_rank)
    three_steps(engine, lambda: loss_of(engine(tokens := next(data)[0]), tokens))
    return engine


def autoep(config: dict[str, Any]) -> Any:
    """A Mixtral whose MoE blocks AutoEP replaces. Without ZeRO 3 the experts of the second are frozen."""
    import deepspeed
    from deepspeed.module_inject.auto_ep_presets import base
    from transformers import MixtralConfig, MixtralForCausalLM

    # DeepSpeed 0.19.8 does not know how transformers 5.24 records router logits, which nothing here asks for.
    base._install_instance_transformers_output_recorders = lambda *_, **__: None
    sizes = {"vocab_size": WORDS, "hidden_size": 6, "intermediate_size": 8, "num_hidden_layers": 2, "head_dim": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    net = MixtralForCausalLM(MixtralConfig(**sizes, **heads, max_position_embeddings=16))
    if config["zero_optimization"]["stage"] < 3:
        net.model.layers[1].mlp.experts.requires_grad_(False)
    parallel = {"enabled": True, "autoep_size": 2, "preset_model": "mixtral", "use_grouped_mm": False}
    adamw = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True, "weight_decay": 0.1}}
    settings = {**USUAL, "expert_parallel": parallel, "optimizer": adamw, **config}
    trained = [param for param in net.parameters() if param.requires_grad]
    engine = deepspeed.initialize(model=net, model_parameters=trained, config=settings)[0]
    data = batches(engine.global_rank)
    three_steps(engine, lambda: loss_of(engine(input_ids=(tokens := next(data)[0]), use_cache=False).logits, tokens))
    return engine


def train(kind: str, directory: Path, config: dict[str, Any]) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    without_compiler()
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    first = Net()  # the values that AutoTP cuts, and never trains
    torch.manual_seed(0)
    kinds = {"pipeline": pipeline, "autotp": autotp, "experts": experts, "autoep": autoep}
    engine = {**kinds, "expert-pipeline": expert_pipeline}[kind](config)
    engine.save_checkpoint(str(directory), tag="global_step3", client_state={"epoch": 3})
    module = first if kind == "autotp" else engine.module
    trained = {name for name, value in module.named_parameters() if value.requires_grad}
    untrained = {name: value.clone() for name, value in module.state_dict().items() if name not in trained}
    if kind in ("experts", "autoep", "expert-pipeline"):
        from deepspeed.utils import groups

        keep_held(engine, directory, groups._get_expert_parallel_rank("ep_size_2"))
    elif "zero_optimization" not in config:
        keep_held(engine, directory, 0)
    by_rank = of_all_ranks(untrained)
    if engine.global_rank == 0:
        # A tied layer is only saved by its first stage: the others' buffers are their own.
        values = {name: value for of_rank in reversed(by_rank) for name, value in of_rank.items()}
        torch.save(values, directory / UNTRAINED)
    torch.distributed.barrier()
    os._exit(0)  # DeepSpeed's threads do not always end


def keep_held(engine: Any, directory: Path, expert_rank: int) -> None:
    """What each rank's own memory has of the weights and states (``param._hp_mapping``), and the module in bfloat16.
    ``ds_to_universal.py`` does not join the experts of MoE layers, nor what was saved without ZeRO.
    """
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    partitioned = engine.zero_optimization_partition_weights()
    if not partitioned:
        engine.optimizer._hp_optimizer_states_linked = False  # its link to the states is from before the first step
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    fragments: dict[str, Any] = {}
    for name, param in engine.module.named_parameters() if partitioned else ():
        values = {state: safe_get_full_optimizer_state(param, state).flatten() for state in MOMENTS}
        values["fp32"] = safe_get_full_fp32_param(param).flatten().clone()
        fragments[name] = {"start": 0, "shape": param.ds_shape, "values": values}
    for name, param in engine.module.named_parameters():
        mapping = getattr(param, "_hp_mapping", None)
        if mapping is not None:
            place = mapping.lp_fragment_address
            values = {state: mapping.get_optim_state_fragment(state).clone() for state in MOMENTS}
            values["fp32"] = mapping.get_hp_fragment().clone()
            fragments[name] = {"start": place.start, "shape": param.shape, "values": values}
    module = {} if partitioned else engine.module.state_dict()
    of_rank = {"expert_rank": expert_rank, "fragments": fragments, "module": module}
    by_rank = of_all_ranks(of_rank)
    if engine.global_rank == 0:
        torch.save(by_rank, directory / "truth.pt")


def truth(directory: Path) -> None:
    """Keep what DeepSpeed's own program joins. It checks that every pattern was used, those of frozen weights, too."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.checkpoint import ds_to_universal

    params: dict[str, dict[str, torch.Tensor]] = {}
    made = directory.with_name(f"{directory.name}-universal")
    step, one = str(directory / "global_step3"), ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    sys.argv = ["", "--input_folder", step, "--output_folder", str(made), "--inject_missing_state", "--no_strict", *one]
    ds_to_universal.main(ds_to_universal.parse_arguments())
    for file in Path(made, "zero").glob("*/*.pt"):
        value = torch.load(file, weights_only=False)
        value = torch.as_tensor(value["param"] if isinstance(value, dict) else value).clone()
        params.setdefault(file.parent.name, {})[file.stem] = value
    untrained = torch.load(directory / UNTRAINED)
    torch.save({"params": params, "untrained": untrained}, directory / "truth.pt")
    for name in (UNTRAINED, "zero_to_fp32.py", "zero_to_torch.py"):
        (directory / name).unlink()


if __name__ == "__main__":
    if sys.argv[1] == "truth":
        truth(Path(sys.argv[2]))
    else:
        train(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
