"""Proves that a DeepSpeed job goes on from a universal checkpoint that fsdpckpt wrote. In the order in which it is run:

1. ``torchrun --nproc-per-node 2 -m tests.golden.deepspeed.resume train FSDP2`` trains with FSDP2, and saves there.
2. ``fsdpckpt convert FSDP2/dcp DIR --flavor deepspeed-universal`` writes it for DeepSpeed.
3. ``torchrun --nproc-per-node N -m tests.golden.deepspeed.resume load DIR FSDP2 STAGE`` loads it with DeepSpeed 0.19,
   and compares every weight, every state and, on 2 ranks, the losses of the next three steps with FSDP2's own.
4. ``python -m tests.golden.deepspeed.resume digest DIR`` writes ``loaded.json``: SHA-256 of every file that was loaded.

``tests/e2e/flavors/test_deepspeed.py`` runs the first three where DeepSpeed is installed. Losses are equal to the last
bit only on processors that compute alike, so ``FSDP2`` has to be trained where it is compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.golden.deepspeed.make import (
    HERE,
    MOMENTS,
    USUAL,
    Net,
    of_all_ranks,
    three_steps,
    two_groups,
    without_compiler,
)

FSDP2 = HERE / "fsdp2"


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def loss_of(model: Any, generator: torch.Generator) -> torch.Tensor:
    tokens = torch.randint(0, 13, (2, 5), generator=generator)
    return torch.nn.functional.cross_entropy(model(tokens).view(-1, 13), tokens.view(-1))


def batches(rank: int, before: int) -> torch.Generator:
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(before):
        torch.randint(0, 13, (2, 5), generator=generator)
    return generator


def train(directory: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    net = make()
    fully_shard(net)
    trained = [param for param in net.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(two_groups(net), lr=1e-3, weight_decay=0.1)
    generator = batches(rank, 0)

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(net, generator)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    for _ in range(3):
        step()
    model, states = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optimizer": states}, checkpoint_id=directory / "dcp")
    names = {param: name for name, param in net.named_parameters()}
    truth = {
        names[param]: {
            "weight": param.detach().full_tensor().clone(),  # type: ignore[attr-defined]
            **{key: optimizer.state[param][key].full_tensor().clone() for key in MOMENTS},
        }
        for param in trained
    }
    if rank == 0:
        dcp_to_torch_save(directory / "dcp", directory / "full.pt")  # smaller
    by_rank = of_all_ranks([step() for _ in range(3)])
    if rank == 0:
        torch.save({"params": truth, "losses": by_rank}, directory / "truth.pt")
    torch.distributed.destroy_process_group()


def load(directory: str, trained: Path, stage: int, more: dict[str, Any]) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    without_compiler()
    net = make()
    settings = {"zero_optimization": {"stage": stage}, "checkpoint": {"load_universal": True}}
    config = {**USUAL, **settings, "gradient_clipping": 0.0, **more}  # 1.0 by default
    for param in net.parameters():  # so that nothing is right by chance; DeepSpeed loads no frozen parameters
        if param.requires_grad:
            torch.nn.init.ones_(param)
    optimizer = torch.optim.AdamW([{"params": group["params"]} for group in two_groups(net)], lr=0.5)
    engine, wrapped, _, _ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    assert engine.load_checkpoint(directory, load_lr_scheduler_states=False)[0] is not None
    assert engine.global_steps == 3
    truth = torch.load(trained / "truth.pt")
    for name, param in net.named_parameters():
        if param.requires_grad:
            weight = safe_get_full_fp32_param(param)
            assert torch.equal(weight.flatten(), truth["params"][name]["weight"].flatten()), name
            for key in MOMENTS:
                state = safe_get_full_optimizer_state(param, key)
                assert torch.equal(state.flatten(), truth["params"][name][key].flatten()), (name, key)
    inner = wrapped.optimizer
    assert all(float(state["step"]) == 3 for state in inner.state.values())
    for state in inner.state.values():  # ZeRO 3 gives all flat tensors one and the same, which then counts for each
        state["step"] = state["step"].clone()
    assert all(group["lr"] == 1e-3 and group["weight_decay"] == 0.1 for group in inner.param_groups)
    if engine.world_size == 2:
        generator = batches(engine.global_rank, 3)
        losses = three_steps(engine, lambda: loss_of(engine, generator))
        expected = truth["losses"][engine.global_rank]
        assert losses == expected or more, (losses, expected)
        print(f"rank {engine.global_rank}: next losses {losses}, expected {expected}", flush=True)
    print(f"rank {engine.global_rank}: every weight and state is equal", flush=True)
    torch.distributed.destroy_process_group()


def digests(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != "fsdpckpt.json")
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(Path(sys.argv[2]))
    elif sys.argv[1] == "load":
        load(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5]) if len(sys.argv) > 5 else {})
    else:
        (HERE / "loaded.json").write_text(json.dumps(digests(Path(sys.argv[2])), indent=1) + "\n")
