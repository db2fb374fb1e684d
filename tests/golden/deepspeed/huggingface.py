"""DeepSpeed in accelerate and in the Trainer of transformers, on CPU ranks: ``python -m torch.distributed.run
--nproc-per-node N -m tests.golden.deepspeed.huggingface save|load accelerate|trainer DIRECTORY STAGE``.

``save`` trains and saves after three steps, ``load`` goes on from a universal checkpoint in DIRECTORY; both take two
more steps, and print each rank's losses (``save`` writes them to ``next.json``). All ranks see the same data, so that
no loss depends on their number.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.golden.deepspeed.make import USUAL, of_all_ranks, without_compiler

STEP = "checkpoint-3"


def config(stage: int, **more: Any) -> dict[str, Any]:
    once = {"zero_optimization": {"stage": stage}, "gradient_clipping": 0.0, "gradient_accumulation_steps": 1}
    return {**USUAL, **once, **more}


def prepared(stage: int, seed: int, **more: Any) -> tuple[Any, ...]:
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    from tests.e2e.flavors.small import filled

    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(stage, **more)))
    model = filled(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, betas=(0.85, 0.97), foreach=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.75)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def accelerate(what: str, directory: Path, stage: int) -> list[str]:
    from tests.e2e.flavors.small import filled
    from tests.e2e.flavors.with_accelerate import step

    loading = what == "load"
    more = {"checkpoint": {"load_universal": True}} if loading else {}
    accelerator, *training = prepared(stage, 99 if loading else 3, **more)
    if loading:
        training[0].module.scale.copy_(filled(3).scale)  # of a universal checkpoint DeepSpeed loads no buffers
        accelerator.load_state(str(directory))
    else:
        for number in range(3):
            step(accelerator, *training, number)
        rank = torch.distributed.get_rank()
        torch.manual_seed(70 + rank)
        random.seed(7 + rank)
        np.random.seed(17 + rank)
        accelerator.save_state(str(directory))
    drawn = [torch.rand(()).item().hex(), random.random().hex(), float(np.random.rand()).hex()]
    return [*(step(accelerator, *training, number) for number in (60, 61)), *drawn]


def trainer(what: str, directory: Path, stage: int) -> list[str]:
    """``directory``: a run's. DeepSpeed makes the optimizer, as most of its configurations ask for, and then saves the
    state of the schedule in its own files: there is no ``scheduler.pt``."""
    from tests.e2e.flavors.with_transformers import ENDS_AFTER, Watched, arguments, even_texts, model

    optimizer = {"type": "AdamW", "params": {"torch_adam": True, "lr": "auto", "betas": "auto", "weight_decay": "auto"}}
    more = {"checkpoint": {"load_universal": True}} if what == "load" else {"optimizer": optimizer}
    given = arguments(
        str(directory), 99 if what == "load" else 3, ENDS_AFTER, save_strategy="steps", weight_decay=0.0,
        max_grad_norm=0.0, accelerator_config={"use_configured_state": True}, deepspeed=config(stage, **more),
    )  # fmt: skip
    made = Watched(model=model(given.seed, dropout=0.0), args=given, train_dataset=even_texts())
    made.seen = []
    made.train(resume_from_checkpoint=str(directory / STEP) if what == "load" else None)
    history = [(each["step"], each["learning_rate"]) for each in made.state.log_history if "learning_rate" in each]
    return [*made.seen[-2:], json.dumps(history)]


def main(what: str, by: str, directory: Path, stage: int) -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_DEEPSPEED": "true"}
    without_compiler()
    from accelerate import PartialState

    PartialState(backend="gloo")  # without a GPU it takes each rank for a world of its own
    found = (trainer if by == "trainer" else accelerate)(what, directory, stage)
    by_rank = of_all_ranks(found)
    if torch.distributed.get_rank() == 0:
        if what == "save":
            (directory / "next.json").write_text(json.dumps(by_rank, indent=1))
        print(json.dumps(by_rank))
    torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
