"""verl's and torchtitan's calls, which are PyTorch's own: ``torchrun -m tests.e2e.flavors.with_torch save|load DIR``.

verl (``FSDPCheckpointManager``): sharded model files of FSDP1 (with a mesh) or FSDP2, raw optimizer files, extras.
torchtitan (``CheckpointManager``): DCP of the model's names at the top level, or below ``model``, and of an optimizer
with flattened keys. ``reference<kind>`` is a DCP directory that PyTorch itself reshards.
"""

from __future__ import annotations

import json
import os
import random
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.e2e.flavors.jobs import work
from tests.e2e.flavors.small import Block, filled, loss_of
from tests.oracle.process import quiet_worker

KINDS = ("1", "2", "1h", "2h")  # FSDP1, FSDP2, and both on a mesh of replicas
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Training:
    """A wrapped model, its optimizer and its schedule."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind = kind
        world = dist.get_world_size()
        shape, names = ((2, world // 2), ("ddp", "fsdp")) if kind.endswith("h") else ((world,), ("fsdp",))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        self.model: nn.Module = filled(seed)
        if kind.startswith("1"):
            strategy = ShardingStrategy.HYBRID_SHARD if kind.endswith("h") else ShardingStrategy.FULL_SHARD
            self.model = FullyShardedDataParallel(
                self.model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_mesh=mesh, sharding_strategy=strategy,
                device_id=torch.device("cpu"), use_orig_params=False,
            )  # fmt: skip
        else:
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02, betas=(0.85, 0.97), foreach=False)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.75)

    def step(self, number: int) -> str:
        loss = loss_of(self.model, number)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item().hex()

    def sharded(self) -> Any:
        return FullyShardedDataParallel.state_dict_type(
            self.model,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=False),
            ShardedOptimStateDictConfig(offload_to_cpu=False),
        )

    def save_verl(self, path: str) -> None:
        os.makedirs(os.path.join(path, "huggingface"), exist_ok=True)
        extra = {"lr_scheduler": self.scheduler.state_dict(), "rng": random_states()}
        if self.kind.startswith("1"):
            with self.sharded():
                sections = {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}
        else:
            sections = {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}
        for section, content in {**sections, "extra_state": extra}.items():
            torch.save(content, rank_file(path, section))
        if dist.get_rank() == 0:
            config = {"FSDP_version": int(self.kind[0]), "world_size": dist.get_world_size()}
            with open(os.path.join(path, "fsdp_config.json"), "w") as file:
                json.dump(config, file, indent=4)
            for name in ("config.json", "tokenizer.json"):
                with open(os.path.join(path, "huggingface", name), "w") as file:
                    json.dump({"of": name}, file)

    def load_verl(self, path: str) -> None:
        model, optimizer, extra = (
            torch.load(rank_file(path, section), weights_only=False) for section in ("model", "optim", "extra_state")
        )
        if self.kind.startswith("1"):
            with self.sharded():
                self.model.load_state_dict(model)
                self.optimizer.load_state_dict(optimizer)
        else:
            self.model.load_state_dict(model)
            self.optimizer.load_state_dict(optimizer)
        self.scheduler.load_state_dict(extra["lr_scheduler"])
        torch.set_rng_state(extra["rng"]["cpu"])
        np.random.set_state(extra["rng"]["numpy"])
        random.setstate(extra["rng"]["random"])

    def content(self, form: str) -> dict[str, Any]:
        """The state dict of torchtitan's generation ``form``, or the plain one."""
        options = None if form == "reference" else FLAT
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        top = model if form == "torchtitan" else {"model": model}
        return {**top, "optimizer": optimizer, "lr_scheduler": {"last_epoch": self.scheduler.last_epoch}}

    def load_dcp(self, form: str, path: str) -> None:
        content = self.content(form)
        dcp.load(content, checkpoint_id=path)
        optimizer, schedule = content.pop("optimizer"), content.pop("lr_scheduler")
        model = content if form == "torchtitan" else content["model"]
        options = None if form == "reference" else FLAT
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=options)
        self.scheduler.last_epoch = schedule["last_epoch"]


def random_states() -> dict[str, Any]:
    return {"cpu": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}


def rank_file(path: str, section: str) -> str:
    return os.path.join(path, f"{section}_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt")


def save(directory: str) -> None:
    rank = dist.get_rank()
    for kind in KINDS:
        training = Training(kind, seed=3)
        for number in range(3):
            training.step(number)
        torch.manual_seed(70 + rank)
        random.seed(7 + rank)
        np.random.seed(17 + rank)
        training.save_verl(os.path.join(directory, f"verl{kind}", "global_step_3", "actor"))
        forms = ("reference", "torchtitan", "torchtitan-old") if kind == "2" else ("reference",)
        for form in forms:
            dcp.save(training.content(form), checkpoint_id=os.path.join(directory, form + kind, "step-3"))


def losses(form: str, path: str) -> list[str]:
    """Load ``path`` over other weights; the losses of the next two steps, the rate, and for verl random numbers."""
    name, kind = form.rstrip("12h"), form[len(form.rstrip("12h")) :]
    training = Training(kind, seed=99)
    drawn = []
    if name == "verl":
        training.load_verl(path)
        drawn = [torch.rand(()).item().hex(), random.random().hex(), float(np.random.rand()).hex()]
    else:
        training.step(50)
        training.load_dcp(name, path)
    return [training.step(60), training.step(61), *drawn]


def main() -> None:
    quiet_worker(limit=270)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    work(save, losses)


if __name__ == "__main__":
    main()
