"""DTensor files of the PyTorch that runs this are read, and those written for it hold what it saves: 2.4 and newer.

``scripts/torch_versions`` runs this with several versions; only what all of them have is used here.
"""

from __future__ import annotations

from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

import fsdpckpt
from fsdpckpt.errors import UsageError
from fsdpckpt.writers.dtensor_pickle import target_version
from tests.oracle.compare import identical, require_parts
from tests.oracle.fake_group import as_rank

try:
    from torch.distributed.tensor import DTensor, Replicate, Shard
except ImportError:  # torch 2.4
    from torch.distributed._tensor import DTensor, Replicate, Shard

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
WHOLE = {"up.weight": torch.randn(16, 3), "down.weight": torch.randn(4, 8), "norm.weight": torch.randn(7)}


def mesh_case(kind: str, rank: int) -> dict[str, tuple[Any, list[Any], torch.Tensor]]:
    """Of each tensor the mesh, the placements and what ``rank`` holds."""
    if kind == "one dimension":
        mesh = init_device_mesh("cpu", (4,))
        return {name: (mesh, [Shard(0)], chunk(whole, 4, rank)) for name, whole in WHOLE.items()}
    if kind == "replicas":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "shard"))
        return {name: (mesh, [Replicate(), Shard(0)], chunk(whole, 2, rank % 2)) for name, whole in WHOLE.items()}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = divmod(rank, 2)
    twice, columns = chunk(chunk(WHOLE["up.weight"], 2, tp), 2, dp), WHOLE["down.weight"].chunk(2, dim=1)[tp]
    return {
        "up.weight": (mesh, [strided_shard(), Shard(0)], twice),
        "down.weight": (mesh, [Shard(0), Shard(1)], chunk(columns, 2, dp)),
        "norm.weight": (mesh["dp"], [Shard(0)], chunk(WHOLE["norm.weight"], 2, dp)),
    }


def strided_shard() -> Any:
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(0, split_factor=2)


def chunk(tensor: torch.Tensor, count: int, at: int) -> torch.Tensor:
    chunks = tensor.chunk(count)
    return (chunks[at] if at < len(chunks) else tensor[:0]).clone()


def state(kind: str, rank: int) -> dict[str, Any]:
    return {
        name: DTensor.from_local(
            local, mesh, placements, run_check=False, shape=WHOLE[name].shape, stride=WHOLE[name].stride()
        )
        for name, (mesh, placements, local) in mesh_case(kind, rank).items()
    }


def assert_equal_meshes(found: Any, expected: Any) -> None:
    """Attribute by attribute: torch compares some of them only, and needs others later."""
    ours, theirs = vars(found), vars(expected)
    assert ours.keys() | {"_hash"} == theirs.keys() | {"_hash"}
    for name in theirs.keys() - {"_hash", "_thread_id"}:
        if name.startswith("_pg_"):
            continue  # process groups, found anew
        if isinstance(theirs[name], torch.Tensor):
            assert identical(ours[name], theirs[name]), name
        elif name in ("_root_mesh", "_parent_mesh") and theirs[name] is not None:
            assert_equal_meshes(ours[name], theirs[name])
        else:
            assert ours[name] == theirs[name] and type(ours[name]) is type(theirs[name]), name


def placements(path: Path) -> dict[str, str]:
    return {tensor["key"]: tensor["placement"] for tensor in fsdpckpt.inspect(path).to_json()["tensors"]}


KINDS = ["one dimension", "replicas", "tensor parallelism"]


def saved(kind: str, directory: Path) -> Path:
    """The files of four ranks in a new directory. Skips the test where this torch has no such DTensors."""
    if kind == KINDS[2] and VERSION < (2, 5):
        pytest.skip("torch 2.4 has no _StridedShard")
    directory.mkdir()
    for rank in range(4):
        with as_rank(rank, 4):
            torch.save(state(kind, rank), directory / f"model_world_size_4_rank_{rank}.pt")
    return directory


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_gets_the_dtensors_that_this_torch_saves(tmp_path: Path, kind: str) -> None:
    source = saved(kind, tmp_path / "source")
    report = fsdpckpt.convert(source, tmp_path / "target", container="torch", world_size=4, verify="full")
    version = ".".join(map(str, VERSION))
    assert any(f"for PyTorch {version}," in note.message for note in report.notes)
    for rank, weights_only in product(range(4), (False, True)):
        with as_rank(rank, 4):
            if weights_only and VERSION < (2, 11) and (VERSION < (2, 5) or kind == KINDS[2]):
                continue  # 2.4 takes no DTensors so, 2.10 and older no _StridedShard
            expected = state(kind, rank)
            path = tmp_path / "target" / f"model_world_size_4_rank_{rank}.pt"
            found = torch.load(path, weights_only=weights_only)
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert type(found[name]) is DTensor
                assert identical(found[name].to_local(), tensor.to_local()), name
                assert found[name].placements == tensor.placements and found[name].shape == tensor.shape
                assert found[name].stride() == tensor.stride()
                ours, theirs = found[name].device_mesh, tensor.device_mesh
                assert_equal_meshes(ours, theirs)
                assert vars(found[name]._spec).keys() == vars(tensor._spec).keys()
                if VERSION > (2, 4):  # whose meshes know the thread that made them
                    assert found[name]._spec == tensor._spec and hash(found[name]._spec) == hash(tensor._spec)
                    tensor.copy_(found[name])  # as load_state_dict does
                assert ours.get_group(0) == theirs.get_group(0) and dist.get_rank() == rank


@pytest.mark.parametrize("kind", KINDS)
def test_dcp_of_this_torch_loads_what_is_written_and_what_storage_reader_reads(tmp_path: Path, kind: str) -> None:
    source, target = saved(kind, tmp_path / "source"), tmp_path / "target"
    fsdpckpt.convert(source, target, container="dcp", world_size=2 if kind == KINDS[2] else 3)
    for reader in (dcp.FileSystemReader(target), fsdpckpt.StorageReader(target), fsdpckpt.StorageReader(source)):
        loaded = {"model": {name: torch.empty_like(whole) for name, whole in WHOLE.items()}}
        dcp.load(loaded, storage_reader=reader)
        require_parts(loaded["model"], WHOLE)


@pytest.mark.parametrize("version", ["2.4", "2.6", "2.9", "2.10", "2.12", "2.13", "2.15"])
@pytest.mark.parametrize("kind", KINDS)
def test_files_for_every_torch_are_read_again(tmp_path: Path, kind: str, version: str) -> None:
    source, target = saved(kind, tmp_path / "source"), tmp_path / "target"
    if kind == KINDS[2] and version == "2.4":
        with pytest.raises(UsageError, match="no placement for FSDP2 over tensor parallelism"):
            fsdpckpt.convert(source, target, container="torch", world_size=4, torch_version=version)
        return
    fsdpckpt.convert(source, target, container="torch", world_size=4, torch_version=version, verify="full")
    assert fsdpckpt.diff(source, target).same
    assert placements(target) == placements(source)


def test_a_version_that_is_a_guess_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each version loads its own form only: where none is installed, the job's is not known."""
    (installed,) = target_version(None)[1]
    assert not installed.warning and torch.__version__[:4] in installed.message

    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    (guessed,) = target_version(None)[1]
    assert guessed.warning and "if the job uses another" in guessed.message
    assert not target_version("2.8")[1]
