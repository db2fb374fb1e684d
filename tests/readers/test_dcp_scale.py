"""Hundreds of ranks: every chunk of the columns is where PyTorch says that the rank holds it."""

from __future__ import annotations

import pickle
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fsdpckpt import api
from fsdpckpt.formats.dcp import metadata as reader
from fsdpckpt.storage.local import LocalFile
from tests.oracle.fake_group import as_rank

RANKS = 512
SCALE = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "bench_scale_make.py"))
SHAPES = {"embed.weight": (1031, 5), "norm.weight": (700,), "few.weight": (3, 7, 2), "even.weight": (1024, 3)}

Box = tuple[tuple[int, ...], tuple[int, ...]]


def state_of(world_size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world_size,))

    def sharded(shape: tuple[int, ...]) -> DTensor:
        size, _ = compute_local_shape_and_global_offset(shape, mesh, [Shard(0)])
        local = torch.empty(size, dtype=torch.bfloat16, device="meta")
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)

    model = {name: sharded(shape) for name, shape in SHAPES.items()}
    states = {name: {"step": torch.tensor(1.0), "exp_avg": sharded(shape)} for name, shape in SHAPES.items()}
    return {"model": model, "optim": {"state": states, "param_groups": [{"lr": 0.1, "params": list(SHAPES)}]}}


def copied(value: Any) -> Any:
    """As it arrives from another rank."""
    return pickle.loads(pickle.dumps(value))


def saved(directory: Path, world_size: int) -> dict[tuple[str, Box], str]:
    """Write ``.metadata`` with torch's planner and writer; returns the file of every box that some rank writes."""
    plans, first = [], None
    for rank in range(world_size):
        with as_rank(rank, world_size):
            planner = DefaultSavePlanner()
            planner.set_up_planner(state_of(world_size), is_coordinator=rank == 0)
            plans.append(copied(planner.create_local_plan()))
            first = first or planner
    assert first is not None
    plans, metadata = first.create_global_plan(plans)
    results, held = [], {}
    for rank, plan in enumerate(plans):
        at, written = 0, []
        for item in sorted(copied(plan).items, key=lambda each: each.type != WriteItemType.BYTE_IO):
            if item.tensor_data is not None:
                chunk = item.tensor_data.chunk
                held[item.index.fqn, (tuple(chunk.offsets), tuple(chunk.sizes))] = f"__{rank}_0.distcp"
            where = _StorageInfo(f"__{rank}_0.distcp", at, 1000 + rank)
            written.append(WriteResult(index=item.index, size_in_bytes=1000 + rank, storage_data=where))
            at += 1000 + rank
        results.append(copied(written))
    FileSystemWriter(str(directory)).finish(metadata, results)
    return held


def rows_of(found: reader.DcpMetadata) -> Iterator[tuple[str, Box, str]]:
    """Key, box and file of every chunk."""
    for key, tensor in found.tensors.items():
        chunks = tensor.chunks
        for start, size, file in zip(chunks.start.tolist(), chunks.size.tolist(), chunks.file.tolist(), strict=True):
            yield key, (tuple(start), tuple(size)), found.files[file]


def forbidden_for_many(add: Any) -> Any:
    def wrapped(self: Any, key: str, ndim: int, some: Any) -> None:
        listed = list(some)
        assert len(listed) <= 8 or not self._tensors, f"{key} is read chunk by chunk"
        add(self, key, ndim, listed)

    return wrapped


def test_every_chunk_of_512_ranks_is_the_one_that_pytorch_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = saved(tmp_path, RANKS)
    monkeypatch.setattr(reader.ChunkTable, "add", forbidden_for_many(reader.ChunkTable.add))
    columns = list(rows_of(reader.parse_metadata(LocalFile(str(tmp_path / ".metadata")))))
    found = {(key, box): file for key, box, file in columns}
    assert found == expected and len(found) == len(columns) > 2000


def test_the_directory_that_the_benchmark_makes_is_what_its_shapes_say(tmp_path: Path) -> None:
    SCALE["make"](str(tmp_path / "c"), 6, layers=1, columns=8, items=True)
    found = api.inspect(str(tmp_path / "c"), ranks=True)
    assert found.checkpoint.problems == () and found.checkpoint.world_size == 6
    expected = {name: SCALE["boxes"](shape, 6) for name, shape in SCALE["parameters"](1, 8).items()}
    for named in found.tensors:
        if named.section == "model":
            chunks = named.tensor.chunks
            rows = zip(map(tuple, chunks.start.tolist()), map(tuple, chunks.size.tolist()), strict=True)
            assert list(rows) == expected[named.param]
    assert api.verify(str(tmp_path / "c")).problems == ()
