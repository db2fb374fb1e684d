"""Saves of PyTorch's safetensors writer into a directory that has shards of an older one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fsdpckpt
from fsdpckpt.errors import SourceCorruptError
from tests.oracle.compare import identical
from tests.oracle.fake_group import as_rank
from tests.readers.played_ranks import save_as_ranks

Model = dict[str, torch.Tensor]


def model(seed: int) -> Model:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"a": (15, 3), "b": (7,), "c": (3, 5), "d": (1,), "e": (0, 2)}
    return {name: torch.randn(shape, generator=draw).bfloat16() for name, shape in shapes.items()}


def rows_of_rank(value: torch.Tensor, mesh: DeviceMesh, rank: int) -> DTensor:
    chunks = value.chunk(mesh.size())
    local = chunks[rank] if rank < len(chunks) else value[:0]
    return DTensor.from_local(
        local.clone(), mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.stride()
    )


def save(path: Path, values: Model, world: int) -> None:
    def of_rank(rank: int) -> Model:
        mesh = init_device_mesh("cpu", (world,))
        return {name: rows_of_rank(value, mesh, rank) for name, value in values.items()}

    writer = lambda to: HuggingFaceStorageWriter(to, save_distributed=True)  # noqa: E731
    save_as_ranks(path, of_rank, world, writer=writer)


@pytest.mark.parametrize(("before", "after"), [(4, 1), (5, 3), (7, 2)])
def test_shards_of_an_older_save_that_say_the_same_are_left_out(tmp_path: Path, before: int, after: int) -> None:
    source, values = tmp_path / "saved", model(0)
    save(source, values, before)
    save(source, values, after)
    assert "overlap" in {problem.kind for problem in fsdpckpt.verify(source).problems}
    report = fsdpckpt.convert(source, tmp_path / "full.pt")
    assert [note.kind for note in report.notes].count("repeated") == 1
    converted = torch.load(tmp_path / "full.pt")["model"]
    with fsdpckpt.open(source) as opened:
        for name, value in values.items():
            assert identical(converted[name], value)
            assert identical(opened[name].torch(), value)
    assert fsdpckpt.diff(source, tmp_path / "full.pt").same
    for rank in range(6):
        with as_rank(rank, 6):
            expected = {
                name: rows_of_rank(value, init_device_mesh("cpu", (6,)), rank) for name, value in values.items()
            }
            state = {name: torch.zeros_like(value) for name, value in expected.items()}
            dcp.load(state, storage_reader=fsdpckpt.StorageReader(source, model=""), no_dist=True)
            assert all(identical(state[name].to_local(), expected[name].to_local()) for name in values)


def test_shards_of_an_older_save_that_say_something_else_are_refused(tmp_path: Path) -> None:
    source, values = tmp_path / "saved", model(0)
    save(source, {**values, "a": values["a"].clone().index_fill_(0, torch.tensor([14]), 9.0)}, 5)
    save(source, values, 3)
    for use in (lambda: fsdpckpt.convert(source, tmp_path / "full.pt"), lambda: fsdpckpt.StorageReader(source)):
        with pytest.raises(SourceCorruptError, match="contradicts itself"):
            use()
    assert not (tmp_path / "full.pt").exists()


def test_a_tensor_that_stands_twice_and_differs_keeps_all_repeats_from_being_left_out(tmp_path: Path) -> None:
    """Of equal boxes, which count as replicas elsewhere, one may be the older save's."""
    source, values = tmp_path / "saved", model(0)
    save(source, values, 4)
    save(source, values, 1)
    place = '{"a": {"saved_offsets": [0, 0]}}'
    name = source / "shard-00002-model-00001-of-00001.safetensors"
    save_file({"a": values["a"] + 1}, name, metadata={"DCP_SHARDING_INFO": place})
    with pytest.raises(SourceCorruptError, match="contradicts itself"):
        fsdpckpt.convert(source, tmp_path / "full.pt")
