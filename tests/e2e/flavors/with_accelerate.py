"""accelerate saves and loads, started by with_transformers: ``save|load DIRECTORY``.

``save`` trains one model under FSDP1 and FSDP2 and writes ``accelerate-<form>`` for every form. ``load`` reads
DIRECTORY/jobs.json, a list of {"id", "form", "path"}, lets accelerate load each and take two steps, and writes the
losses to DIRECTORY/losses.json.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import accelerate.accelerator
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch import nn

from tests.e2e.flavors import jobs
from tests.e2e.flavors.small import filled, loss_of

FORMS = ("full1", "sharded1", "local1", "full2", "sharded2", "ranks2")
_TYPES = {
    "full": "FULL_STATE_DICT",
    "sharded": "SHARDED_STATE_DICT",
    "local": "LOCAL_STATE_DICT",
    "ranks": "SHARDED_STATE_DICT",
}


def plugin(form: str) -> FullyShardedDataParallelPlugin:
    kind, version = form[:-1], int(form[-1])
    options: dict[str, Any] = {"use_orig_params": True} if version == 1 else {}
    return FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        state_dict_type=_TYPES[kind],
        cpu_ram_efficient_loading=False,
        **options,
    )


def prepared(form: str, seed: int) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer, Any]:
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # it offers FSDP nowhere else
    PartialState._shared_state["device"] = torch.device("cpu")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin(form))
    assert accelerator.distributed_type is DistributedType.FSDP
    model = filled(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, betas=(0.85, 0.97), foreach=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.75)
    if form.endswith("2"):
        return accelerator, *accelerator.prepare(model, optimizer, scheduler)
    model = accelerator.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, betas=(0.85, 0.97), foreach=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.75)
    return accelerator, model, *accelerator.prepare(optimizer, scheduler)


@contextmanager
def files_by_rank(form: str) -> Iterator[None]:
    """Set ``use_dcp=False`` for the forms that need it: ``save_state`` has no argument for it."""
    with ExitStack() as patches:
        for name in ("save_fsdp_model", "save_fsdp_optimizer", "load_fsdp_model", "load_fsdp_optimizer"):
            if form.startswith("ranks"):
                own = partial(getattr(accelerate.accelerator, name), use_dcp=False)
                patches.enter_context(mock.patch.object(accelerate.accelerator, name, own))
        yield


def step(accelerator: Accelerator, model: nn.Module, optimizer: Any, scheduler: Any, number: int) -> str:
    """One training step; the loss before it, exactly."""
    return jobs.step(loss_of(model, number), optimizer, scheduler, backward=accelerator.backward)


def save(directory: str) -> None:
    for form in FORMS:
        accelerator, *training = prepared(form, seed=3)
        for number in range(3):
            step(accelerator, *training, number)
        jobs.seed_by_rank()
        path = os.path.join(directory, f"accelerate-{form}")
        with files_by_rank(form):
            accelerator.save_state(path)


def losses(form: str, path: str) -> list[str]:
    """Let accelerate load ``path`` over other weights; the losses of two more steps, and the next random numbers."""
    accelerator, *training = prepared(form, seed=99)
    step(accelerator, *training, 50)  # a DCP template has only those states that an optimizer has
    with files_by_rank(form):
        accelerator.load_state(path)
    drawn = jobs.drawn()
    return [*(step(accelerator, *training, number) for number in (60, 61)), *drawn]
