"""FSDP2 goes on where DeepSpeed stopped, on another number of ranks. In the order in which it is run:

1. ``torchrun --nproc-per-node N -m tests.golden.deepspeed.onward train DIR CONFIG`` trains with DeepSpeed, saves after
   three steps, and writes the losses of the next three.
2. ``fsdpckpt convert DIR DCP --to sharded --world-size M``.
3. ``torchrun --nproc-per-node M -m tests.golden.deepspeed.onward resume DIR DCP`` loads it into FSDP2, and compares.

All ranks see the same data: what they average does not depend on their number.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.golden.deepspeed.make import USUAL, Net, three_steps, two_groups, without_compiler

AFTER = range(3, 6)


def loss_of(model: Any, number: int) -> torch.Tensor:
    tokens = torch.randint(0, 13, (2, 5), generator=torch.Generator().manual_seed(number))
    return nn.functional.cross_entropy(model(tokens).float().view(-1, 13), tokens.view(-1))


def adamw(net: Net, lr: float) -> torch.optim.AdamW:
    """Two param groups of different settings, and what is frozen in neither."""
    matrices, vectors = two_groups(net)
    return torch.optim.AdamW([matrices, vectors | {"lr": 3 * lr, "weight_decay": 0.0}], lr)


def train(directory: Path, config: dict[str, Any]) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    without_compiler()
    torch.manual_seed(0)
    net = Net()
    settings = {**USUAL, "gradient_clipping": 0.0, **config}
    engine, *_ = deepspeed.initialize(model=net, optimizer=adamw(net, 1e-3), config=settings)
    numbers = count()
    three_steps(engine, lambda: loss_of(engine, next(numbers)))
    engine.save_checkpoint(str(directory), tag="global_step3")
    losses = three_steps(engine, lambda: loss_of(engine, next(numbers)))
    if engine.global_rank == 0:
        (directory / "losses.json").write_text(json.dumps(losses))
    torch.distributed.destroy_process_group()


def resume(directory: Path, converted: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.distributed.init_process_group("gloo")
    torch.manual_seed(5)  # so that nothing is right by chance
    net = Net()
    bf16 = next((directory / "global_step3").glob("bf16_*"), None)
    fully_shard(net, mp_policy=MixedPrecisionPolicy(*[torch.bfloat16 if bf16 else None] * 2))
    optimizer = adamw(net, 1.0)
    model, states = get_state_dict(net, optimizer)
    dcp.load({"model": model, "optimizer": states}, checkpoint_id=converted)
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=states)

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = loss_of(net, number)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    losses = [step(number) for number in AFTER]
    expected = json.loads((directory / "losses.json").read_text())
    assert losses == expected, (losses, expected)
    print("every loss is equal", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(Path(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        resume(Path(sys.argv[2]), sys.argv[3])
