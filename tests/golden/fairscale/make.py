"""Makes the files of this directory, where fairscale is installed: ``python -m tests.golden.fairscale.make``.

fairscale's own class shards the model, for one rank after the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from fairscale.nn.data_parallel import FullyShardedDataParallel

from tests.golden.small_net import STEP, nets

HERE = Path(__file__).parent


class Group:
    """A process group of which only rank and size are asked."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = lambda: rank, lambda: size


def wrapped(net: Any, rank: int, world: int, nested: bool, **options: Any) -> Any:
    group = Group(rank, world)
    options |= {
        "process_group": group, "process_group_reduce_scatter": group, "compute_device": torch.device("cpu")
    }  # fmt: skip
    if nested:
        net.block = FullyShardedDataParallel(net.block, **options)
    return FullyShardedDataParallel(net, **options)


def save(name: str, world: int, *, nested: bool, **options: Any) -> list[Any]:
    directory = HERE / name
    directory.mkdir(exist_ok=True)
    saved = []
    for rank in range(world):
        model, *moments = (wrapped(net, rank, world, nested, **options) for net in nets())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.125)
        for param, first, second in zip(model.parameters(), *(one.parameters() for one in moments), strict=True):
            optimizer.state[param] = {"step": STEP, "exp_avg": first.detach(), "exp_avg_sq": second.detach()}
        record, states = model.local_metadata_dict(), {**optimizer.state_dict(), "loss_scale": 128.0}
        content = {"model": dict(model.local_state_dict()), "shard_metadata": record, "last_optimizer_state": states}
        torch.save(content | {"extra_state": {"epoch": 3}}, directory / f"last-shard{rank}.pt")
        saved.append(content)
    return saved


def main() -> None:
    save("apart", 2, nested=True, flatten_parameters=False)
    save("one", 1, nested=False)
    flat = save("flat", 3, nested=True)
    shards, records = [one["model"] for one in flat], [one["shard_metadata"] for one in flat]
    whole = FullyShardedDataParallel.consolidate_shard_weights(shards, records)
    model = nets()[0].state_dict()
    # It takes the shared parameters of the last wrapped module alone, and so none of these.
    assert model.keys() - whole.keys() == {"head.weight"}
    assert all(torch.equal(tensor, model[name]) for name, tensor in whole.items())


if __name__ == "__main__":
    main()
