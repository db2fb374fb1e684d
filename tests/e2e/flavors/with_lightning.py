"""Lightning saves and loads: ``torchrun -m tests.e2e.flavors.with_lightning save|load DIRECTORY``, as with_accelerate.

Forms: ``fabric-sharded``, ``fabric-full`` (Fabric, FSDP1); ``trainer-sharded``, ``trainer-full`` (Trainer, FSDP1);
``parallel-sharded`` (Trainer with ModelParallelStrategy, FSDP2).
"""

from __future__ import annotations

import logging
import os
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.strategies import FSDPStrategy as FabricFSDP
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from tests.e2e.flavors.jobs import step, work
from tests.e2e.flavors.offloading import on_cpus, without_offloading
from tests.e2e.flavors.small import Block, filled, loss_of

FORMS = ("fabric-sharded", "fabric-full", "trainer-sharded", "trainer-full", "parallel-sharded")


class OnCpu(FSDPStrategy):
    """Lightning refuses exactly this class without a GPU, so a subclass stands for it."""


class FabricOnCpu(FabricFSDP):
    pass


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, betas=(0.85, 0.97), foreach=False)


class Training(lightning.LightningModule):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner = filled(seed)
        self.losses: list[str] = []

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = loss_of(self.inner, 60 + len(self.losses))
        self.losses.append(loss.item().hex())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.75)]


class Parallel(Training):
    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        if isinstance(self.inner.head.weight, torch.distributed.tensor.DTensor):
            return
        for module in self.inner.blocks:
            fully_shard(module, mesh=mesh)
        fully_shard(self.inner, mesh=mesh)


def trained(form: str, seed: int, steps: int, path: str | None) -> tuple[lightning.Trainer, Training]:
    world = dist.get_world_size()
    kind, layout = form.split("-")
    strategy: Any
    if kind == "parallel":
        strategy = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1, process_group_backend="gloo")
    else:
        strategy = OnCpu(
            auto_wrap_policy={Block}, state_dict_type=layout, process_group_backend="gloo", use_orig_params=True
        )
    trainer = lightning.Trainer(
        accelerator="cpu", devices=world, strategy=strategy, max_steps=steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, max_epochs=-1, use_distributed_sampler=False,
    )  # fmt: skip
    model = (Parallel if kind == "parallel" else Training)(seed)
    trainer.fit(model, torch.utils.data.DataLoader([0] * 1000), ckpt_path=path, weights_only=False)
    return trainer, model


def fabric_prepared(form: str, seed: int) -> tuple[lightning.Fabric, Any, Any]:
    layout = form.split("-")[1]
    strategy = FabricOnCpu(
        auto_wrap_policy={Block}, state_dict_type=layout, process_group_backend="gloo", use_orig_params=True
    )
    fabric = lightning.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(filled(seed))
    return fabric, model, fabric.setup_optimizers(adamw(model))


def fabric_step(fabric: lightning.Fabric, model: Any, optimizer: Any, number: int) -> str:
    return step(loss_of(model, number), optimizer, backward=fabric.backward)


def save(directory: str) -> None:
    for form in FORMS:
        path = os.path.join(directory, form + (".ckpt" if form.endswith("full") else ""))
        if form.startswith("fabric"):
            fabric, model, optimizer = fabric_prepared(form, seed=3)
            for number in range(3):
                fabric_step(fabric, model, optimizer, number)
            fabric.save(path, {"model": model, "optimizer": optimizer, "iteration": 17, "seen": [3, 5]})
        else:
            trainer, _ = trained(form, seed=3, steps=3, path=None)
            trainer.save_checkpoint(path)


def losses(form: str, path: str) -> list[str]:
    """Let Lightning load ``path`` over other weights; the losses of the next two steps, and what else was restored."""
    if not form.startswith("fabric"):
        trainer, model = trained(form, seed=99, steps=5, path=path)
        rates = [group["lr"].hex() for group in trainer.optimizers[0].param_groups]
        return [*model.losses, str(trainer.global_step), *rates]
    fabric, model, optimizer = fabric_prepared(form, seed=99)
    fabric_step(fabric, model, optimizer, 50)
    state = {"model": model, "optimizer": optimizer, "iteration": 0, "seen": []}
    fabric.load(path, state)
    return [
        *(fabric_step(fabric, model, optimizer, number) for number in (60, 61)),
        str(state["iteration"]),
        str(state["seen"]),
    ]


if __name__ == "__main__":
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    without_offloading()
    on_cpus()
    work(save, losses)
