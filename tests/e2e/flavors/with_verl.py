"""verl itself: ``torchrun -m tests.e2e.flavors.with_verl save|load DIR``.

Its ``FSDPCheckpointManager`` saves and loads a small Llama that its own functions wrapped, with FSDP1 and FSDP2, on one
mesh and on a mesh of replicas; its model merger reads what either wrote. ``reference<kind>`` is a DCP directory that
PyTorch itself reshards.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from transformers import PreTrainedTokenizerFast

from tests.e2e.flavors.causal import WORDS, filled, loss_of
from tests.e2e.flavors.jobs import drawn, seed_by_rank, step, work
from tests.e2e.flavors.standing_in import stand_in_for, without_running

without_running("verl", "verl.utils.checkpoint")  # they import every engine that verl knows, and Ray
stand_in_for("omegaconf", "peft", "tensordict")

from verl.model_merger.base_model_merger import ModelMergerConfig  # noqa: E402
from verl.model_merger.fsdp_model_merger import FSDPModelMerger  # noqa: E402
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager  # noqa: E402
from verl.utils.fsdp_utils import apply_fsdp2, get_fsdp_wrap_policy  # noqa: E402

KINDS = ("1", "2", "1h", "2h")  # FSDP1, FSDP2, and both on a mesh of replicas


class Training:
    """A wrapped model, its optimizer, its schedule, and verl's manager of their checkpoints."""

    def __init__(self, kind: str, seed: int) -> None:
        world = dist.get_world_size()
        shape, names = ((2, world // 2), ("ddp", "fsdp")) if kind.endswith("h") else ((world,), ("fsdp",))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        self.model = filled(seed)
        if kind.startswith("1"):
            strategy = ShardingStrategy.HYBRID_SHARD if kind.endswith("h") else ShardingStrategy.FULL_SHARD
            self.model = FullyShardedDataParallel(
                self.model, auto_wrap_policy=get_fsdp_wrap_policy(self.model), device_mesh=mesh,
                sharding_strategy=strategy, device_id=torch.device("cpu"), use_orig_params=False,
            )  # fmt: skip
        else:
            apply_fsdp2(self.model, {"mesh": mesh, "reshard_after_forward": True}, {})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02, betas=(0.85, 0.97), foreach=False)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.75**step)
        self.manager = FSDPCheckpointManager(self.model, self.optimizer, self.scheduler, processing_class=tokenizer())

    def step(self, number: int) -> str:
        return step(loss_of(self.model, number), self.optimizer, self.scheduler)

    def content(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "lr_scheduler": self.scheduler.state_dict()}

    def load_reference(self, path: str) -> None:
        self.step(50)  # the states that DCP reads into
        content = self.content()
        dcp.load(content, checkpoint_id=path)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"]
        )
        self.scheduler.load_state_dict(content["lr_scheduler"])


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{number}": number for number in range(WORDS)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), unk_token="w0")


def save(directory: str) -> None:
    for kind in KINDS:
        training = Training(kind, seed=3)
        for number in range(3):
            training.step(number)
        seed_by_rank()
        path = os.path.join(directory, f"verl{kind}", "global_step_3", "actor")
        training.manager.save_checkpoint(path, global_step=3)
        dcp.save(training.content(), checkpoint_id=os.path.join(directory, f"reference{kind}", "step-3"))


def merged(path: str) -> None:
    """The output of verl's merger for the checkpoint ``path``, in ``path``-merged."""
    FSDPModelMerger(
        ModelMergerConfig(
            operation="merge", backend="fsdp", local_dir=path, target_dir=f"{path}-merged",
            hf_model_config_path=os.path.join(path, "huggingface"),
        )
    ).merge_and_save()  # fmt: skip


def losses(form: str, path: str) -> list[str]:
    """Load ``path`` over other weights; the losses of the next two steps, the rate and place of the schedule, and
    for verl random numbers. ``merged``: verl's merger reads it instead, and nothing is said.
    """
    if form == "merged":
        if dist.get_rank() == 0:
            merged(path)
        return []
    name, kind = form.rstrip("12h"), form[len(form.rstrip("12h")) :]
    training = Training(kind, seed=99)
    random_numbers: list[str] = []
    if name == "verl":
        training.manager.load_checkpoint(path)
        random_numbers = drawn()
    else:
        training.load_reference(path)
    rate = training.optimizer.param_groups[0]["lr"].hex()
    return [training.step(60), training.step(61), rate, str(training.scheduler.last_epoch), *random_numbers]


if __name__ == "__main__":
    work(save, losses)
