"""Runs on each rank of ``scripts/bench_loading``: saves one checkpoint in several forms, loads it as sharded DTensors.

Bytes are what the kernel counts as read by the process (``/proc/self/io``), whether from the page cache or not.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.storage import StorageReader as TorchReader
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fsdpckpt
from fsdpckpt.options.kinds import parse_size

LAYERS = 8


def tensors(nbytes: int) -> dict[str, torch.Tensor]:
    """Random weights of a made-up model, about ``nbytes`` in all: the same on every rank."""
    rows = 4099  # no rank count divides it
    width = nbytes // (LAYERS * 4 * rows)
    generator = torch.Generator().manual_seed(3)
    return {f"layers.{number}.weight": torch.randn(rows, width, generator=generator) for number in range(LAYERS)}


def sharded(shapes: dict[str, torch.Size], mesh: DeviceMesh) -> dict[str, Any]:
    """Empty shards of this rank."""
    found = {}
    for name, shape in shapes.items():
        whole = torch.empty(shape, device="meta")
        local = torch.empty(whole.chunk(mesh.size())[mesh.get_local_rank()].shape)
        found[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=whole.stride())
    return {"model": found}


def read_so_far() -> int:
    with open("/proc/self/io") as file:
        return int(next(line for line in file if line.startswith("rchar")).split()[1])


def measure(state: dict[str, Any], reader: Callable[[], TorchReader]) -> tuple[float, list[int]]:
    """Seconds of the slowest rank, and the bytes that each rank read. Making the reader is included."""
    dist.barrier()
    before, began = read_so_far(), time.perf_counter()
    dcp.load(state, storage_reader=reader())
    seconds, nbytes = time.perf_counter() - began, read_so_far() - before
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (seconds, nbytes))
    return max(one[0] for one in everyone), [one[1] for one in everyone]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=parse_size, default=1 << 30)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--where", default=None, help="a directory on the disk to measure")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    place: list[Any] = [tempfile.mkdtemp(dir=options.where) if rank == 0 else None]
    dist.broadcast_object_list(place)
    try:
        run(str(place[0]), options.size, options.runs, mesh)
    finally:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(place[0])
        dist.destroy_process_group()


def run(place: str, size: int, runs: int, mesh: DeviceMesh) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    one, many, torch_file = (os.path.join(place, name) for name in ("one-file", "four-files", "full.pt"))
    weights = tensors(size)
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    if rank == 0:
        dcp.save({"model": weights}, checkpoint_id=one, no_dist=True)
        torch.save({"model": weights}, torch_file)
    state = sharded(shapes, mesh)
    for name, whole in weights.items():
        state["model"][name].to_local().copy_(whole.chunk(world)[rank])
    dcp.save(state, checkpoint_id=many)
    total = sum(tensor.nbytes for tensor in weights.values())
    rows: list[tuple[str, str, Callable[[], TorchReader]]] = [
        ("dcp, one file", "FileSystemReader", lambda: FileSystemReader(one)),
        ("dcp, one file", "fsdpckpt.StorageReader", lambda: fsdpckpt.StorageReader(one)),
        ("dcp of 4 ranks", "FileSystemReader", lambda: FileSystemReader(many)),
        ("dcp of 4 ranks", "fsdpckpt.StorageReader", lambda: fsdpckpt.StorageReader(many)),
        ("one torch file", "fsdpckpt.StorageReader", lambda: fsdpckpt.StorageReader(torch_file)),
    ]
    say = sys.stdout.write if rank == 0 else (lambda _: 0)
    say(f"{total / 1e9:.2f} GB of weights loaded by {world} ranks, median of {runs}, files in the page cache\n")
    say(f"{'source':16}{'reader':26}{'seconds':>9}{'read by all':>14}{'of the weights':>16}\n")
    for source, name, reader in rows:
        measure(sharded(shapes, mesh), reader)  # imports, and the page cache
        found = []
        for _ in range(runs):
            state = sharded(shapes, mesh)
            found.append(measure(state, reader))
        for key, whole in weights.items():
            if not torch.equal(state["model"][key].to_local(), whole.chunk(world)[rank]):
                raise SystemExit(f"{name} loaded other values from {source}")
        seconds, nbytes = sorted(found)[len(found) // 2]
        say(f"{source:16}{name:26}{seconds:9.2f}{sum(nbytes) / 1e9:11.2f} GB{sum(nbytes) / total:14.2f} x\n")


if __name__ == "__main__":
    main()
