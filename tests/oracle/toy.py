"""The small model all oracle checkpoints come from, and how it is wrapped and trained.

Odd on purpose: rows that no world size divides, a parameter with fewer rows than ranks, a tied weight, a bf16 unit, a
frozen unit, buffers of several dtypes (one without elements, one 0-dim, one fp8), two optimizer groups in another order
than ``model.parameters()``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import AdamW, Optimizer

__all__ = [
    "BUFFERS", "HIDDEN", "VOCABULARY", "WIDTH", "Block", "Toy", "adamw", "as_fsdp1", "clean", "full1", "seeded_model",
    "shard1", "shard2", "sharded1", "sharding_groups", "step",
]  # fmt: skip

VOCABULARY, WIDTH, HIDDEN = 17, 9, 13
BUFFERS = ("counter", "mask", "scale", "void", "coarse")  # what every rank holds whole


class Block(nn.Module):
    """One FSDP unit: a residual two-layer perceptron, computed in its own dtype."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.up = nn.Linear(WIDTH, HIDDEN, dtype=dtype)
        self.down = nn.Linear(HIDDEN, WIDTH, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(self.norm(x.to(self.up.bias.dtype)))))
        return x + y.to(x.dtype)


class Frozen(nn.Module):
    """A unit whose parameters no optimizer has."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x)


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.gain = nn.Parameter(torch.empty(2, WIDTH))
        self.blocks = nn.ModuleList([Block(), Block(torch.bfloat16), Block()])
        self.frozen = Frozen()
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embed.weight
        self.register_buffer("counter", torch.tensor(0))
        self.register_buffer("mask", torch.empty(5, dtype=torch.bool))
        self.register_buffer("scale", torch.empty(3, 2))
        self.register_buffer("void", torch.empty(0, 4))
        self.register_buffer("coarse", torch.empty(7).to(torch.float8_e4m3fn))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.gain.sum(0)
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x))


def seeded_model(seed: int = 0) -> Toy:
    """The model with random weights that are the same in every process."""
    generator = torch.Generator().manual_seed(1000 + seed)
    model = Toy()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
        model.counter.fill_(41 + seed)
        model.mask.copy_(torch.rand(5, generator=generator) < 0.5)
        model.mask[seed % 5] = True
        model.scale.copy_(torch.randn(3, 2, generator=generator))
        model.coarse.copy_(torch.randn(7, generator=generator))
    return model


def sharding_groups(size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The (sharding, replicating) groups of this rank; every rank must make all of them."""
    world, rank = dist.get_world_size(), dist.get_rank()
    shards = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    replicas = [dist.new_group(list(range(place, world, size))) for place in range(size)]
    return shards[rank // size], replicas[rank % size]


def shard1(model: nn.Module, *, use_orig_params: bool = True, **options: Any) -> FullyShardedDataParallel:
    """The model under FSDP1: a unit for each block, one for the frozen part, one for the rest."""
    units = ModuleWrapPolicy({Block, Frozen})
    device = torch.device("cpu")
    return FullyShardedDataParallel(
        model, auto_wrap_policy=units, use_orig_params=use_orig_params, device_id=device, **options
    )


def as_fsdp1(model: nn.Module, form: str) -> Any:
    """Inside, the model gives and takes its state dict, and FSDP1 that of an optimizer: full, sharded or local."""
    # offload_to_cpu=True on a CPU run segfaults for models and aliases exp_avg with exp_avg_sq for optimizers.
    if form == "full":
        configs: tuple[Any, ...] = (
            FullStateDictConfig(offload_to_cpu=False, rank0_only=False),
            FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False),
        )
    elif form == "sharded":
        configs = ShardedStateDictConfig(offload_to_cpu=False), ShardedOptimStateDictConfig(offload_to_cpu=False)
    else:
        configs = (LocalStateDictConfig(offload_to_cpu=False),)
    return FullyShardedDataParallel.state_dict_type(model, StateDictType[f"{form.upper()}_STATE_DICT"], *configs)


def full1(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The full model and optimizer by name, on every rank, as FSDP1 gives them."""
    with as_fsdp1(model, "full"):
        return model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)


def sharded1(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    with as_fsdp1(model, "sharded"):
        return model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)


def shard2(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The model under FSDP2, with the same units."""
    for module in model.modules():
        if isinstance(module, (Block, Frozen)):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def clean(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def adamw(model: nn.Module) -> Optimizer:
    """AdamW over two groups, blocks first (so ids are not in ``model.parameters()`` order), one with a tensor lr."""
    named = [(clean(name), p) for name, p in model.named_parameters() if p.requires_grad]
    blocks = [p for name, p in named if name.startswith("blocks.")]
    rest = [p for name, p in named if not name.startswith("blocks.")]
    groups = [
        {"params": blocks, "lr": 1e-2, "betas": (0.9, 0.95), "label": "blocks"},
        {"params": rest, "lr": torch.tensor(3e-3), "betas": (0.8, 0.999), "weight_decay": 0.0, "label": "rest"},
    ]
    return AdamW(groups, foreach=False, eps=1e-6)


def step(model: nn.Module, optimizer: Optimizer, *, rank: int, number: int) -> None:
    """One training step on random tokens that depend on the rank and the step number only."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    tokens = torch.randint(VOCABULARY, (3, 4), generator=generator)
    target = torch.randint(VOCABULARY, (12,), generator=generator)
    loss = nn.functional.cross_entropy(model(tokens).reshape(12, VOCABULARY), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
