"""Compare per-rank files for large worlds with FSDP's shards: ``python -m tests.oracle.fake JOBS RESULTS``.

One process plays one rank of N after another on PyTorch's "fake" process group. JOBS is a JSON list of ``{"id",
"tensor", "path", "truth", "world_size", "ranks"}``, RESULTS becomes ``{id: [what is wrong]}``.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor

from tests.oracle.compare import differences, optimizer_by_id
from tests.oracle.fake_group import as_rank
from tests.oracle.process import quiet_worker
from tests.oracle.toy import BUFFERS, seeded_model, shard2


def sharded_by_fsdp2(weights: dict[str, torch.Tensor], world_size: int) -> dict[str, Any]:
    """This rank's state dict of a model that had these weights when FSDP2 sharded it. Takes no communication."""
    model = seeded_model(seed=5)
    model.load_state_dict(weights, strict=False)
    return shard2(model, init_device_mesh("cpu", (world_size,))).state_dict()


def held_by_fsdp2(truth: dict[str, Any], world_size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """This rank's sharded model and optimizer. A moment is sharded as FSDP2 shards a parameter with its values."""
    optimizer = truth["optimizer"]
    states = {name: dict(entry) for name, entry in optimizer["state"].items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        shards = sharded_by_fsdp2({name: entry[moment] for name, entry in states.items()}, world_size)
        for name, entry in states.items():
            entry[moment] = shards[name]
    return sharded_by_fsdp2(truth["model"], world_size), {"state": states, "param_groups": optimizer["param_groups"]}


def held_by_fsdp1(value: Any, rank: int, world_size: int, *, plain: bool = False) -> Any:
    """A full state dict with every tensor FSDP1 manages cut by FSDP1's own function."""
    if isinstance(value, dict):
        return {
            key: held_by_fsdp1(child, rank, world_size, plain=plain or key in (*BUFFERS, "param_groups"))
            for key, child in value.items()
        }
    if isinstance(value, torch.Tensor) and value.ndim and not plain:
        return _create_chunk_sharded_tensor(value, rank, world_size, world_size, dist.group.WORLD, torch.device("cpu"))
    return value


def rank_file(directory: str | os.PathLike[str], section: str, world_size: int, rank: int) -> dict[str, Any]:
    """What one rank's file holds. Its ShardedTensors are on no allow-list of ``torch.load``; it is our own output."""
    path = os.path.join(directory, f"{section}_world_size_{world_size}_rank_{rank}.pt")
    content: dict[str, Any] = torch.load(path, weights_only=False)
    return content


def check_rank(job: dict[str, Any], rank: int) -> Iterator[str]:
    world_size = job["world_size"]
    truth = torch.load(job["truth"], weights_only=True)
    by_id = job["tensor"] == "dtensor-ids"
    if job["tensor"] == "sharded-tensor":
        model, optimizer = (held_by_fsdp1(truth[section], rank, world_size) for section in ("model", "optimizer"))
    else:
        model, optimizer = held_by_fsdp2(truth, world_size)
    for section, expected in (("model", model), ("optim", optimizer_by_id(optimizer) if by_id else optimizer)):
        found = rank_file(job["path"], section, world_size, rank)
        yield from differences(found, expected, f"rank {rank} {section}: ")


def check(job: dict[str, Any]) -> Iterator[str]:
    for rank in job["ranks"]:
        with as_rank(rank, job["world_size"]):
            try:
                yield from check_rank(job, rank)
            except Exception:  # noqa: BLE001 - reported as what is wrong with this rank
                yield f"rank {rank}: {traceback.format_exc()}"


def main() -> None:
    jobs_file, results_file = sys.argv[1:]
    quiet_worker(limit=100)
    with open(jobs_file) as file:
        jobs = json.load(file)
    results = {job["id"]: list(check(job))[:40] for job in jobs}
    with open(results_file, "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
