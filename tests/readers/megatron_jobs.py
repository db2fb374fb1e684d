"""What the ranks of a Megatron-LM job save in its torch format: tensor-parallel ranks, pipeline stages, interleaved
ones, experts, latent attention, and the distributed optimizer.

The files are what ``save_checkpoint`` builds (``generate_state_dict`` and ``get_checkpoint_name`` of
``megatron/training/checkpointing.py``, ``ChainedOptimizer.state_dict`` of ``megatron/core/optimizer/optimizer.py``,
``_get_param_groups`` of ``megatron/core/optimizer/__init__.py``, the ranks of ``RankGenerator``,
``DistributedOptimizer.save_parameter_state`` and ``_compute_per_buffer_param_layout`` of
``megatron/core/optimizer/distrib_optimizer.py``), at d98e8a6. Shards are made of heads, query groups, gates and values.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

WIDTH, HEAD, INNER, EXPERT_INNER, WORDS = 6, 5, 12, 4, 24
WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
Cut = Callable[[torch.Tensor, int, int], torch.Tensor]


def copy(value: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    return value


def rows(value: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    return value.chunk(ranks)[rank]


def columns(value: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    return value.chunk(ranks, dim=1)[rank]


def gate_and_value(value: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    return torch.cat([part.chunk(ranks)[rank] for part in value.chunk(2)])


@dataclass
class Run:
    """A job of ``tensor`` x ``stages`` x ``experts`` ranks. ``layers``: of each chunk, in the order of the pipeline.

    ``fused``: the layers have biases and norms of equal values, as those of TransformerEngine, and the arguments are
    those of a version without experts.
    """

    tensor: int = 1
    stages: int = 1
    layers: tuple[int, ...] = (1, 2)
    experts: int = 1
    expert_count: int = 0
    expert_tensor: int = 0
    grouped: bool = False
    tied: bool = False
    heads: int = 4
    groups: int = 4
    gated: bool = True
    fused: bool = False
    whole: dict[str, torch.Tensor] = field(default_factory=dict)
    cuts: dict[str, Cut] = field(default_factory=dict)
    states: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(7)
        self.expert_tensor = self.expert_tensor or self.tensor
        self.chunks = len(self.layers) // self.stages
        self.add(WORD_EMBEDDINGS, (WORDS, WIDTH), rows)
        for number in range(sum(self.layers)):
            layer = f"decoder.layers.{number}."
            self.add_attention(f"{layer}self_attention.", f"{layer}input_layernorm.weight")
            if not self.expert_count:
                shape, cut = ((2 * INNER, WIDTH), gate_and_value) if self.gated else ((INNER, WIDTH), rows)
                self.add(f"{layer}mlp.linear_fc1.weight", shape, cut)
                self.add(f"{layer}mlp.linear_fc2.weight", (WIDTH, INNER), columns)
                continue
            self.add(f"{layer}mlp.router.weight", (self.expert_count, WIDTH), copy)
            self.add(f"{layer}mlp.shared_experts.linear_fc1.weight", (2 * INNER, WIDTH), gate_and_value)
            for expert, name in self.expert_names():
                shape, cut = (
                    ((2 * EXPERT_INNER, WIDTH), gate_and_value) if "fc1" in name else ((WIDTH, EXPERT_INNER), columns)
                )
                self.add(f"{layer}mlp.experts.{name.format(expert)}", shape, cut)
        self.add("decoder.final_layernorm.weight", (WIDTH,), copy)
        if not self.tied:
            self.add("output_layer.weight", (WORDS, WIDTH), rows)
        for name, value in self.whole.items():
            self.states[name] = {key: torch.rand(value.shape) for key in ("exp_avg", "exp_avg_sq")}

    def add_attention(self, attention: str, norm: str) -> None:
        self.add(f"{attention}linear_qkv.layer_norm_weight" if self.fused else norm, (WIDTH,), copy)
        self.add(f"{attention}linear_proj.weight", (WIDTH, self.heads * HEAD), columns)
        size = (self.heads + 2 * self.groups) * HEAD  # of each query group its queries, then its key and its value
        self.add(f"{attention}linear_qkv.weight", (size, WIDTH), rows)
        if self.fused:
            self.add(f"{attention}linear_qkv.bias", (size,), rows)
            self.add(f"{attention}linear_proj.bias", (WIDTH,), copy)

    def expert_names(self) -> Iterator[tuple[int, str]]:
        """In the order of a state dict: TEGroupedMLP has all first weights before the second ones."""
        names = ["linear_fc1.weight{}", "linear_fc2.weight{}"]
        if self.grouped:
            yield from ((expert, name) for name in names for expert in range(self.expert_count))
            return
        names = ["local_experts.{}.linear_fc1.weight", "local_experts.{}.linear_fc2.weight"]
        yield from ((expert, name) for expert in range(self.expert_count) for name in names)

    def add(self, name: str, shape: tuple[int, ...], cut: Cut) -> None:
        equal = self.fused and "norm" in name
        self.whole[name], self.cuts[name] = torch.ones(shape) if equal else torch.randn(shape), cut

    def shard(self, name: str, value: torch.Tensor, tensor: int) -> torch.Tensor:
        if ".experts." in name:
            return self.cuts[name](value, tensor % self.expert_tensor, self.expert_tensor).clone()
        return self.cuts[name](value, tensor, self.tensor).clone()

    def local(self, stage: int, expert: int) -> list[dict[str, str]]:
        """What each chunk of a rank calls its parameters, with their names in the whole model."""
        found = []
        local = self.expert_count // self.experts
        for number in range(self.chunks):
            at = number * self.stages + stage
            first, names = sum(self.layers[:at]), {}
            if at == 0:
                names[WORD_EMBEDDINGS] = WORD_EMBEDDINGS
            for layer in range(self.layers[at]):
                for name in (each for each in self.whole if each.startswith(f"decoder.layers.{first + layer}.")):
                    own = name.replace(f"layers.{first + layer}.", f"layers.{layer}.")
                    if ".experts." in name:
                        head, _, tail = own.partition("mlp.experts.")
                        digits = "".join(filter(str.isdigit, tail.replace("fc1", "").replace("fc2", "")))
                        if int(digits) // local != expert:
                            continue
                        before, after = (tail[: -len(digits)], "") if self.grouped else tail.split(digits, 1)
                        own = f"{head}mlp.experts.{before}{int(digits) % local}{after}"
                    names[own] = name
            if at == len(self.layers) - 1:
                names["decoder.final_layernorm.weight"] = "decoder.final_layernorm.weight"
                if not self.tied or self.stages > 1:
                    names["output_layer.weight"] = WORD_EMBEDDINGS if self.tied else "output_layer.weight"
            found.append(names)
        return found

    def arguments(self, rank: int, world: int) -> argparse.Namespace:
        arguments = {
            "tensor_model_parallel_size": self.tensor, "pipeline_model_parallel_size": self.stages, "rank": rank,
            "num_attention_heads": self.heads, "group_query_attention": self.groups != self.heads,
            "num_query_groups": self.groups if self.groups != self.heads else 1, "kv_channels": HEAD,
            "swiglu": self.gated, "ffn_hidden_size": INNER, "padded_vocab_size": WORDS,
        }  # fmt: skip
        if not self.fused:
            arguments |= {
                "world_size": world, "virtual_pipeline_model_parallel_size": self.chunks if self.chunks > 1 else None,
                "expert_model_parallel_size": self.experts, "expert_tensor_parallel_size": self.expert_tensor,
                "num_layers": sum(self.layers), "moe_ffn_hidden_size": EXPERT_INNER,
                "moe_shared_expert_intermediate_size": INNER, "num_experts": self.expert_count or None,
                "untie_embeddings_and_output_weights": not self.tied,
            }  # fmt: skip
        return argparse.Namespace(**arguments)

    def content(self, rank: int, world: int, tensor: int, stage: int, expert: int) -> dict[str, Any]:
        chunks = self.local(stage, expert)
        names = [name for chunk in chunks for name in chunk.values()]
        content: dict[str, Any] = {
            "args": self.arguments(rank, world), "checkpoint_version": 3.0, "iteration": 7,
            "opt_param_scheduler": {"num_steps": 7}, "rng_state": [{"torch_rng_state": torch.full((3,), rank)}],
        }  # fmt: skip
        for number, chunk in enumerate(chunks):
            key = f"model{number}" if self.chunks > 1 else "model"
            content[key] = {own: self.shard(name, self.whole[name], tensor).bfloat16() for own, name in chunk.items()}
            content[key] |= {f"{own.rpartition('.')[0]}._extra_state": None for own in chunk if "linear" in own}
        parallel = [".experts." in name and self.experts > 1 for name in names]
        kinds = [False, True] if any(parallel) else [False]
        saved = [
            self.optimizer([name for name, each in zip(names, parallel, strict=True) if each is kind], tensor)
            for kind in kinds
        ]
        content["optimizer"] = saved if len(saved) > 1 else saved[0]
        return content

    def optimizer(self, names: list[str], tensor: int) -> dict[str, Any]:
        groups = [[name for name in names if (self.whole[name].ndim > 1) is decayed] for decayed in (True, False)]
        ids = iter(range(len(names)))
        param_groups = [
            {"lr": 0.1, "wd_mult": decay, **({"step": 7} if of_group else {}), "params": [next(ids) for _ in of_group]}
            for decay, of_group in zip((1.0, 0.0), groups, strict=True)
        ]
        states = [
            {key: self.shard(name, value, tensor) for key, value in self.states[name].items()}
            for of_group in groups
            for name in of_group
        ]
        masters = [[self.shard(name, self.whole[name], tensor) for name in of_group] for of_group in groups]
        return {
            "optimizer": {"state": dict(enumerate(states)), "param_groups": param_groups},
            "fp32_from_fp16_params": masters,
        }

    def save(self, run: Path, change: Callable[[dict[str, Any]], object] = lambda _: None) -> Path:
        """Every process in turn; of those with one name, which hold the same, the first writes."""
        ranks = max(self.tensor, self.expert_tensor * self.experts)
        world = ranks * self.stages
        for rank in range(world):
            tensor, expert = rank % self.tensor, rank // self.expert_tensor % self.experts
            stage = rank // ranks
            name = f"mp_rank_{tensor:02}" + (f"_{stage:03}" if self.stages > 1 else "")
            folder = run / "iter_0000007" / (name + (f"_{expert:03}" if self.experts > 1 else ""))
            if folder.exists():
                continue
            folder.mkdir(parents=True)
            content = self.content(rank, world, tensor, stage, expert)
            change(content)
            torch.save(content, folder / "model_optim_rng.pt")
        (run / "latest_checkpointed_iteration.txt").write_text("7")
        return run


QUERY_LATENT, LATENT, KEY, ROTARY, VALUE = 10, 4, 3, 2, 5


@dataclass
class Latent(Run):
    """A job whose attention is latent. ``duplicated``: whether each rank has the whole projections to latents."""

    duplicated: bool = True

    def add_attention(self, attention: str, norm: str) -> None:
        down = copy if self.duplicated else rows
        self.add(norm, (WIDTH,), copy)
        self.add(f"{attention}linear_proj.weight", (WIDTH, self.heads * VALUE), columns)
        for own, shape, cut in (
            ("q_down_proj.weight", (QUERY_LATENT, WIDTH), down),
            ("q_up_proj.weight", (self.heads * (KEY + ROTARY), QUERY_LATENT), rows),
            ("kv_down_proj.weight", (LATENT + ROTARY, WIDTH), down),
            ("kv_up_proj.weight", (self.heads * (KEY + VALUE), LATENT), rows),
            ("q_up_proj.layer_norm_weight", (QUERY_LATENT,), copy),
            ("kv_up_proj.layer_norm_weight", (LATENT,), copy),
        ):
            self.add(f"{attention}linear_{own}", shape, cut)

    def arguments(self, rank: int, world: int) -> argparse.Namespace:
        latent = {"q_lora_rank": QUERY_LATENT, "kv_lora_rank": LATENT, "qk_head_dim": KEY, "v_head_dim": VALUE}
        usual = vars(super().arguments(rank, world))
        return argparse.Namespace(**{**usual, **latent, "qk_pos_emb_head_dim": ROTARY, "multi_latent_attention": True})


ALIGNED, SHARDS = 64, 128


def up(position: int, multiple: int) -> int:
    return -(-position // multiple) * multiple


def layout(numels: list[tuple[int, bool]], bucket: int | None) -> tuple[list[int], int]:
    """Where each parameter is in the tensor without the padding between buckets. ``numels``: in the order of the
    buffer, each with whether it is an embedding that stages share; ``bucket``: its size."""
    starts: list[int] = []
    done = position = first = count = 0  # of the buckets before; in the padded buffer
    for numel, shared in numels:
        position = up(position, ALIGNED)
        if shared and count:
            done, first, count = done + position - first, up(position, SHARDS), 0
            position = first
        starts.append(done + position - first)
        position, count = position + numel, count + 1
        if shared or (bucket is not None and position - first >= bucket):
            done, first, count = done + position - first, up(position, SHARDS), 0
            position = first
    return starts, done + position - first


class Distributed(Run):
    """A job with the distributed optimizer. ``bucket``: the size of its buckets."""

    bucket: int | None = None

    def names_in(self, names: list[str]) -> dict[str, bool]:
        tied = self.tied and self.stages > 1
        return {name: tied and name == WORD_EMBEDDINGS for name in reversed(names)}

    def buffer(self, names: list[str], tensor: int) -> dict[Any, Any]:
        values = {name: self.shard(name, self.whole[name], tensor) for name in names}
        listed = self.names_in(names)
        starts, length = layout([(values[name].numel(), shared) for name, shared in listed.items()], self.bucket)
        flat: dict[str, Any] = {key: torch.zeros(length) for key in ("param", "exp_avg", "exp_avg_sq")}
        for name, start in zip(listed, starts, strict=True):
            for key, whole in {"param": self.whole[name], **self.states[name]}.items():
                own = self.shard(name, whole, tensor).flatten()
                flat[key][start : start + len(own)] = own
        return {(torch.bfloat16, torch.float32): {**flat, "numel_unpadded": length}}

    def content(self, rank: int, world: int, tensor: int, stage: int, expert: int) -> dict[str, Any]:
        content = super().content(rank, world, tensor, stage, expert)
        saved = content["optimizer"]
        for number, each in enumerate(saved if isinstance(saved, list) else [saved]):
            del each["fp32_from_fp16_params"], each["optimizer"]["state"]
            for group in each["optimizer"]["param_groups"]:
                del group["params"]
                group["is_expert_parallel"] = number == 1
        return content

    def save(self, run: Path, change: Callable[[dict[str, Any]], object] = lambda _: None) -> Path:
        super().save(run, change)
        for folder in (run / "iter_0000007").iterdir():
            numbers = list(map(int, folder.name.removeprefix("mp_rank_").split("_")))
            tensor, rest = numbers[0], numbers[1:]
            stage = rest.pop(0) if self.stages > 1 else 0
            expert = rest.pop(0) if self.experts > 1 else 0
            chunks = [list(chunk.values()) for chunk in self.local(stage, expert)]
            states: list[Any] = []
            for kind in [False, True] if self.experts > 1 else [None]:
                buffers: dict[Any, Any] = {"buckets_coalesced": True}
                for chunk in chunks:
                    names = [name for name in chunk if kind is None or (".experts." in name) is kind]
                    if names:
                        buffers[len(buffers) - 1] = self.buffer(names, tensor)
                # The other parameters are saved by the first of the ranks that have them.
                states.append(None if kind is False and expert and self.expert_tensor == self.tensor else buffers)
            torch.save(states if len(states) > 1 else states[0], folder / "distrib_optim.pt")
        return run


RUNS: dict[str, dict[str, Any]] = {
    "stages": {"stages": 2},
    "uneven stages with tensor parallelism": {"tensor": 2, "stages": 3, "layers": (1, 2, 0)},
    "tied words": {"tensor": 2, "stages": 2, "tied": True},
    "interleaved": {"stages": 2, "layers": (1, 2, 1, 1)},
    "experts": {"experts": 2, "expert_count": 4, "layers": (2,)},
    "grouped experts": {"tensor": 2, "experts": 2, "expert_count": 4, "grouped": True, "layers": (1,)},
    "experts that are not cut": {"tensor": 2, "experts": 2, "expert_count": 12, "expert_tensor": 1, "grouped": True,
                                 "layers": (1,)},
    "all": {"tensor": 2, "stages": 2, "experts": 2, "expert_count": 4, "layers": (1, 1, 0, 1)},
    "one rank": {"layers": (3,)},
    "two fused": {"tensor": 2, "layers": (2,), "fused": True},
    "two with query groups and no gates": {"tensor": 2, "layers": (2,), "groups": 2, "gated": False, "fused": True},
    "four fused": {"tensor": 4, "layers": (2,), "heads": 8, "groups": 4, "fused": True},
    "three fused": {"tensor": 3, "layers": (2,), "heads": 6, "groups": 3, "fused": True},
}  # fmt: skip
