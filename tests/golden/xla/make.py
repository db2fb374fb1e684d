"""Makes the files of this directory: ``python -m tests.golden.xla.make DIRECTORY_WITH_TORCH_XLA``.

torch_xla's own class shards the model, for one rank after the other; only the device below it is replaced by the CPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.golden.small_net import STEP, nets

HERE = Path(__file__).parent


def load(place: str) -> Any:
    """``XlaFullyShardedDataParallel`` and the function that puts its shards together."""
    os.environ["XLA_DISABLE_FUNCTIONALIZATION"] = "1"
    for name, content in {
        "torch_xla": {"device": lambda: torch.device("cpu"), "sync": lambda: None, "_XLAC": SimpleNamespace()},
        "torch_xla.runtime": {},
        "torch_xla.core": {},
        "torch_xla.core.xla_model": dict.fromkeys(["all_gather", "all_reduce", "optimization_barrier_"], id),
        "torch_xla.utils": {},
        "torch_xla.utils.checkpoint": {"checkpoint": None, "chkpt_status": None},
        "torch_xla.distributed": {},
    }.items():
        module = ModuleType(name)
        module.__path__ = [f"{place}/{name.replace('.', '/')}"]
        vars(module).update(content)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    from torch_xla.distributed import fsdp

    return fsdp


def main(place: str) -> None:
    fsdp = load(place)

    def wrapped(net: Any, rank: int, world: int, nested: bool, **options: Any) -> Any:
        options |= {
            "sharding_groups": [list(range(world))], "sharding_rank": rank, "sharding_world_size": world
        }  # fmt: skip
        if nested:
            net.block = fsdp.XlaFullyShardedDataParallel(net.block, **options)
        return fsdp.XlaFullyShardedDataParallel(net, **options)

    def save(name: str, world: int, *, nested: bool, apart: bool, **options: Any) -> None:
        directory = HERE / name
        directory.mkdir(exist_ok=True)
        for rank in range(world):
            model, *moments = (wrapped(net, rank, world, nested, **options) for net in nets())
            optimizer = torch.optim.Adam(model.parameters(), lr=0.125)
            if not apart:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
            for param, first, second in zip(model.parameters(), *(one.parameters() for one in moments), strict=True):
                step = torch.tensor(float(STEP))
                adam = {"step": step, "exp_avg": first.detach(), "exp_avg_sq": second.detach()}
                optimizer.state[param] = adam if apart else {"momentum_buffer": first.detach()}
            record = {"shard_metadata": model.get_shard_metadata()}
            weights, states = {"model": model.state_dict()}, {"optimizer": optimizer.state_dict()}
            if apart:  # as the Trainer of transformers does
                torch.save(weights | record, directory / f"rank{rank}-of-{world}-pytorch_model.bin")
                torch.save(states | record, directory / f"rank{rank}-of-{world}-optimizer.pt")
            else:
                content = weights | record | states | {"epoch": 3}
                torch.save(content, directory / f"run_rank-{rank:08d}-of-{world:08d}.pth")

    save("flat", 3, nested=True, apart=True, flatten_parameters=True)
    save("apart", 2, nested=False, apart=False)
    model = {name: tensor for name, tensor in nets()[0].state_dict().items() if name != "head.weight"}
    flat = [torch.load(HERE / "flat" / f"rank{rank}-of-3-pytorch_model.bin") for rank in range(3)]
    whole = fsdp.consolidate_sharded_state_dicts([one["model"] for one in flat], flat[0]["shard_metadata"])
    assert whole.keys() == model.keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in model.items())


if __name__ == "__main__":
    main(sys.argv[1])
