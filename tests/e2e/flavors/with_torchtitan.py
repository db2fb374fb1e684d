"""torchtitan itself: ``torchrun -m tests.e2e.flavors.with_torchtitan save|load DIR``.

Its ``CheckpointManager`` saves and loads what its own containers of optimizers and schedules hold. The form of before,
with the model's names below ``model``, is saved and loaded as it was then, by PyTorch's calls.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset

from tests.e2e.flavors import small
from tests.e2e.flavors.jobs import step, work
from tests.e2e.flavors.standing_in import stand_in_for

stand_in_for("tyro", "spmd_types")

from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.optimizer import (  # noqa: E402
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
STEPS = 3
FIRST = r"(bias|norm\.weight)$"  # the parameters of the first group


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(1000))


class Progress:
    """The trainer's own state, as torchtitan saves it."""

    def __init__(self) -> None:
        self.step, self.ntokens_seen = 0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


class Training:
    """A sharded model with torchtitan's optimizers (two groups), schedules, data and progress."""

    def __init__(self, seed: int, kind: ModuleType = small) -> None:
        self.model = kind.filled(seed)
        self.loss_of = kind.loss_of
        for block in self.model.blocks if kind is small else self.model.model.layers:
            fully_shard(block)
        fully_shard(self.model)
        adam = {"lr": 0.02, "betas": (0.85, 0.97)}
        groups = [
            ParamGroupConfig(pattern=FIRST, optimizer_name="AdamW", optimizer_kwargs={**adam, "weight_decay": 0.0}),
            ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={**adam, "weight_decay": 0.3}),
        ]
        self.optimizers = OptimizersContainer(
            OptimizersContainer.Config(param_groups=groups, implementation="for-loop"), model_parts=[self.model]
        )
        self.schedules = LRSchedulersContainer.Config(warmup_steps=2, total_steps=9).build(
            optimizers=self.optimizers, training_steps=9
        )
        self.progress = Progress()
        self.data = ParallelAwareDataloader(Numbers(), dist.get_rank(), dist.get_world_size())
        self.read = iter(self.data)

    def step(self, number: int) -> str:
        self.progress.step += 1
        self.progress.ntokens_seen += 41 * int(next(self.read) + 1)
        return step(self.loss_of(self.model, number), self.optimizers, self.schedules)

    def manager(self, folder: str, *exclude: str) -> CheckpointManager:
        config = CheckpointManager.Config(
            enable=True, folder=folder, interval=1, keep_latest_k=0, exclude_from_loading=list(exclude),
            last_save_model_only=False,
        )  # fmt: skip
        return CheckpointManager(
            config, dataloader=self.data, model_parts=[self.model], optimizers=self.optimizers,
            lr_schedulers=self.schedules, states={"train_state": self.progress}, sd_adapter=None,
        )  # fmt: skip

    def content(self) -> dict[str, Any]:
        """The state dict of torchtitan before it put the model's names at the top, and names into the groups."""
        for group in self.optimizers.optimizers[0].param_groups:
            group.pop("param_names", None)
        model, optimizer = get_state_dict(self.model, self.optimizers.optimizers[0], options=FLAT)
        own = {"lr_scheduler": self.schedules.state_dict(), "train_state": self.progress.state_dict()}
        return {"model": model, "optimizer": optimizer, **own}

    def load_old(self, path: str) -> None:
        self.step(50)  # the states that DCP reads into
        content = self.content()
        dcp.load(content, checkpoint_id=path)
        set_state_dict(
            self.model, self.optimizers.optimizers[0], options=FLAT,
            model_state_dict=content["model"], optim_state_dict=content["optimizer"],
        )  # fmt: skip
        self.schedules.load_state_dict(content["lr_scheduler"])
        self.progress.load_state_dict(content["train_state"])


def save(directory: str) -> None:
    training = Training(seed=3)
    for number in range(STEPS):
        training.step(number)
    training.manager(os.path.join(directory, "torchtitan")).save(STEPS)
    dcp.save(training.content(), checkpoint_id=os.path.join(directory, "torchtitan-old", f"step-{STEPS}"))


def reference(path: str) -> list[str]:
    """The losses of the next two steps after PyTorch itself loaded a DCP directory of the other model."""
    from tests.e2e.flavors import causal

    model = causal.filled(99)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, foreach=False)
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    return [step(causal.loss_of(model, number), optimizer) for number in (60, 61)]


def losses(form: str, path: str) -> list[str]:
    """Load ``path`` over other weights; the losses of the next two steps, the rates, and what the trainer knows.

    ``path``: of torchtitan the folder with the ``step-N`` directories, of torchtitan-old such a directory.
    ``torchtitan-causal``: another producer's model and optimizer, without what torchtitan's trainer keeps of itself.
    ``reference-causal``: the losses alone, as PyTorch gives them.
    """
    if form == "reference-causal":
        return reference(path)
    if form == "torchtitan-causal":
        from tests.e2e.flavors import causal

        training, exclude = Training(seed=99, kind=causal), ("train_state",)
    else:
        training, exclude = Training(seed=99), ()
    if form == "torchtitan-old":
        training.load_old(path)
    elif not training.manager(path, "dataloader", *exclude).load():
        raise RuntimeError(f"torchtitan finds no checkpoint in {path}")
    known = str(training.progress.state_dict())
    rates = [group["lr"].hex() for group in training.optimizers.optimizers[0].param_groups]
    return [training.step(60), training.step(61), *rates, known]


if __name__ == "__main__":
    work(save, losses)
