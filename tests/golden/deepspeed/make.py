"""Makes one directory beside this file, by DeepSpeed 0.19 on CPU ranks:

``torchrun --nproc-per-node 3 -m tests.golden.deepspeed.make zero3-bf16 '{"bf16": {"enabled": true}, ...}'``.

``truth.pt`` holds what DeepSpeed itself gathers of every parameter, and each rank's losses of the next three steps.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

HERE = Path(__file__).parent
MOMENTS = ("exp_avg", "exp_avg_sq")
USUAL: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Odd sizes, tied weights, a frozen weight, a parameter of one element, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.blocks = nn.Sequential(Block(7), Block(7))
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.adapter = nn.Linear(7, 7)
        self.adapter.weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.randn(1))
        self.register_buffer("mask", torch.randn(3, 3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.adapter(self.embed(tokens)))) * (1 + self.scale)


def without_compiler() -> None:
    """DeepSpeed compiles an operation of shared memory first, which is not needed. As an attribute of
    ``deepspeed.comm``, ``torch`` may be torch itself."""
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None


def two_groups(net: nn.Module) -> list[dict[str, Any]]:
    """What is trained: matrices, which decay, and the rest."""
    trained = [param for param in net.parameters() if param.requires_grad]
    matrices = {"params": [param for param in trained if param.ndim > 1], "weight_decay": 0.1}
    return [matrices, {"params": [param for param in trained if param.ndim <= 1]}]


def three_steps(engine: Any, step: Callable[[], torch.Tensor]) -> list[float]:
    """The losses."""
    losses = []
    for _ in range(3):
        loss = step()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def of_all_ranks(value: Any) -> list[Any]:
    by_rank: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(by_rank, value)
    return by_rank


def main(name: str, config: dict[str, Any]) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    without_compiler()
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    torch.manual_seed(0)
    net = Net()
    trained = {name: param for name, param in net.named_parameters() if param.requires_grad}
    optimizer = torch.optim.AdamW(two_groups(net), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps: 0.9**steps)
    settings = {**USUAL, "gradient_clipping": 1.0, **config}
    engine, wrapped, *_ = deepspeed.initialize(model=net, optimizer=optimizer, lr_scheduler=scheduler, config=settings)

    def step() -> torch.Tensor:
        tokens = torch.randint(0, 13, (2, 5))
        return nn.functional.cross_entropy(engine(tokens).float().view(-1, 13), tokens.view(-1))

    torch.manual_seed(100 + engine.global_rank)
    three_steps(engine, step)
    engine.save_checkpoint(str(HERE / name), tag="global_step3", client_state={"epoch": 3})
    if hasattr(wrapped, "bit16_groups"):  # its link to the states is from before the first step
        wrapped._hp_optimizer_states_linked = False
        wrapped._lazy_init_hp_params_optimizer_state()
    # Under round_robin_gradients DeepSpeed 0.19 gathers the wrong elements: then the truth is the module alone.
    misplaced = config["zero_optimization"].get("round_robin_gradients")
    truth = {
        key: {
            "weight": safe_get_full_fp32_param(param).flatten().clone(),
            **{state: safe_get_full_optimizer_state(param, state).flatten().clone() for state in MOMENTS},
        }
        for key, param in trained.items()
    }
    if misplaced:
        truth = {key: {"weight": param.detach().flatten().clone()} for key, param in trained.items()}
    by_rank = of_all_ranks(three_steps(engine, step))
    if engine.global_rank == 0:
        torch.save({"params": truth, "losses": by_rank}, HERE / name / "truth.pt")
        for script in ("zero_to_fp32.py", "zero_to_torch.py"):
            (HERE / name / script).unlink(missing_ok=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
