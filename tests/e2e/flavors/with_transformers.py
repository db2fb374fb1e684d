"""The Trainer of transformers saves and loads: ``torchrun -m tests.e2e.flavors.with_transformers save|load DIRECTORY``.

As with_accelerate, whose forms it plays too (one start for both: they import the same), by ``Trainer.train`` alone:
forms ``trainer-full1``, ``trainer-sharded1`` (FSDP1), ``trainer-full2``, ``trainer-sharded2`` (FSDP2), each a run with
one ``checkpoint-3``.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tests.e2e.flavors import with_accelerate
from tests.e2e.flavors.jobs import work
from tests.e2e.flavors.offloading import without_offloading

FORMS = ("trainer-full1", "trainer-sharded1", "trainer-full2", "trainer-sharded2")
SAVED_AFTER, ENDS_AFTER = 3, 5  # steps
WORDS = 31


class Watched(Trainer):
    """Remembers its losses exactly: what it logs is rounded."""

    def compute_loss(self, *arguments: Any, **named: Any) -> Any:
        loss = super().compute_loss(*arguments, **named)
        self.seen.append(loss.item().hex())
        return loss


def arguments(directory: str, seed: int, steps: int, **more: Any) -> TrainingArguments:
    settings = {
        "output_dir": directory, "max_steps": steps, "save_steps": SAVED_AFTER, "per_device_train_batch_size": 2,
        "learning_rate": 0.02, "adam_beta1": 0.85, "weight_decay": 0.1, "logging_steps": 1, "seed": seed,
        "data_seed": 5, "report_to": "none", "disable_tqdm": True, "optim": "adamw_torch",
    }  # fmt: skip
    return TrainingArguments(**settings | more)


def trainer(form: str, directory: str, *, seed: int, steps: int) -> Watched:
    """``<form>-even``: every batch the same and no dropout, so that no loss depends on the number of ranks."""
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    form, _, even = form.removeprefix("trainer-").partition("-")
    given = arguments(
        directory, seed, steps, use_cpu=True, save_strategy="steps" if steps == SAVED_AFTER else "no", fsdp=True,
        fsdp_config={
            "version": int(form[-1]), "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": f"{form[:-1].upper()}_STATE_DICT", "sync_module_states": False,
        }, **({"weight_decay": 0.0, "max_grad_norm": 0.0} if even else {}),
    )  # fmt: skip
    assert given.device.type == "cpu"
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # it offers FSDP nowhere else
    PartialState._shared_state["device"] = torch.device("cpu")
    data = even_texts() if even else texts()
    made = Watched(model=model(seed, dropout=0.0 if even else 0.25), args=given, train_dataset=data)
    made.seen: list[str] = []
    assert made.is_fsdp_enabled
    return made


def model(seed: int, *, dropout: float) -> LlamaForCausalLM:
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=14, intermediate_size=19, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=6, tie_word_embeddings=False, attention_dropout=dropout,
        )
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return made


def texts() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(WORDS, (60, 5), generator=torch.Generator().manual_seed(500))
    return [{"input_ids": each, "labels": each} for each in tokens]


def even_texts() -> list[dict[str, torch.Tensor]]:
    return texts()[:1] * 60


def save(directory: str) -> None:
    with_accelerate.save(directory)
    for form in FORMS:
        made = trainer(form, os.path.join(directory, form), seed=3, steps=SAVED_AFTER)
        torch.manual_seed(70 + dist.get_rank())  # else all ranks have the same random state
        made.train()


def losses(form: str, path: str) -> list[str]:
    """Let the Trainer resume from ``path`` over other weights; its losses, and what else it reports of the run."""
    if not form.startswith("trainer-"):
        return with_accelerate.losses(form, path)
    resumed = trainer(form, os.path.dirname(path), seed=99, steps=ENDS_AFTER)
    resumed.train(resume_from_checkpoint=path)
    history = [(each["step"], each["learning_rate"]) for each in resumed.state.log_history if "learning_rate" in each]
    return [*resumed.seen, str(resumed.state.global_step), json.dumps(history)]


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    without_offloading()
    work(save, losses, group=False)
