"""Targets on meshes of two and three dimensions, against what FSDP2 and tensor parallelism hold and save."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard import load_with_process_group
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor

from fsdpckpt.errors import UsageError
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.options import TensorForm
from fsdpckpt.writers import WriteSpec, torch_ranks
from fsdpckpt.writers import dcp as dcp_writer
from tests.materialise import materialise
from tests.oracle.compare import identical
from tests.oracle.fake_group import as_rank
from tests.readers.played_ranks import save_as_ranks
from tests.writers.meshes import (
    MESHES,
    MeshCase,
    assert_equal,
    held,
    hsdp,
    net,
    our_sharding,
    over_tp,
    sharded_model,
)
from tests.writers.source import Raw, checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")


def some_ranks(world_size: int) -> range:
    return range(0, world_size, max(1, world_size // 3))


def source_of(case: MeshCase, odd: int) -> tuple[Raw, Checkpoint]:
    """The whole model and one moment of each parameter, placed as torch places them."""
    raw = Raw()
    whole = net(case.world_size, odd)
    with as_rank(0, case.world_size):
        placed = {
            n: our_sharding(case, v)
            for n, v in sharded_model(case, lambda: net(case.world_size, odd)).named_parameters()
        }
    model = OrderedDict(
        (name, replace(raw.whole(value, sharded=name in placed), sharding=placed.get(name)))
        for name, value in whole.state_dict().items()
    )
    state = {
        name: {
            "step": raw.whole(torch.tensor(4.0), sharded=False),
            "exp_avg": replace(raw.whole(value.detach() * 2, sharded=True), sharding=placed[name]),
        }
        for name, value in whole.named_parameters()
    }
    groups: list[dict[Any, Any]] = [{"params": list(state), "lr": 0.1, "betas": (0.9, 0.99)}]
    return raw, checkpoint(model, Optimizer.of(state, groups))  # type: ignore[arg-type]


def spec_of(case: MeshCase) -> WriteSpec:
    return WriteSpec(world_size=case.world_size, meshes=(case.mesh,), mesh_device="cpu")


@pytest.mark.parametrize(
    ("case", "odd"), [(case, odd) for case in MESHES for odd in ((3, 0) if case.world_size <= 4 else (3,))], ids=str
)
def test_every_rank_holds_the_dtensors_of_that_mesh(case: MeshCase, odd: int, tmp_path: Path) -> None:
    raw, source = source_of(case, odd)
    target = torch_ranks.lay_out(source, spec_of(case))
    materialise(target, raw.files, str(tmp_path))
    for rank in some_ranks(case.world_size):
        with as_rank(rank, case.world_size):
            truth = held(case, odd)
            for section, expected in (("model", truth["model"]), ("optim", truth["optimizer"])):
                path = tmp_path / f"{section}_world_size_{case.world_size}_rank_{rank}.pt"
                found = torch.load(path, weights_only=True)
                assert_equal(found, expected, section)


def torch_saves_it_right(case: MeshCase, odd: int) -> bool:
    """Not uneven rows that FSDP and tensor parallelism both cut: DCP declares other boxes than the ranks hold."""
    return not odd or case.tp is None or 1 in (case.shape["tp"], case.shape["dp_shard"])


@pytest.mark.parametrize(
    ("case", "odd"),
    [
        (case, odd)
        for case in MESHES
        for odd in ((1, 0) if case.world_size <= 4 else (0 if case.tp or case.rows else 1,))
        if torch_saves_it_right(case, odd)
    ],
    ids=str,
)
def test_dcp_has_the_items_of_that_mesh_in_the_files_of_the_ranks_that_write_them(
    case: MeshCase, odd: int, tmp_path: Path
) -> None:
    raw, source = source_of(case, odd)
    materialise(dcp_writer.lay_out(source, spec_of(case)), raw.files, str(tmp_path / "ours"))
    ranks: list[dict[str, Any]] = []
    for rank in range(case.world_size):
        with as_rank(rank, case.world_size):
            ranks.append(held(case, odd))
    save_as_ranks(tmp_path / "theirs", lambda rank: ranks[rank], case.world_size)
    ours, theirs = (metadata(tmp_path / name) for name in ("ours", "theirs"))
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    for key, entry in theirs.state_dict_metadata.items():
        mine = ours.state_dict_metadata[key]
        assert type(mine) is type(entry)
        if hasattr(entry, "chunks"):
            assert (mine.size, mine.chunks) == (entry.size, entry.chunks), key
    files = [{(i.fqn, i.offset): info.relative_path for i, info in one.storage_data.items()} for one in (ours, theirs)]
    assert files[0] == files[1]
    loaded = [joined(tmp_path / name, tmp_path) for name in ("ours", "theirs")]
    assert_equal(loaded[0], loaded[1], "joined")


def metadata(directory: Path) -> Any:
    with open(directory / ".metadata", "rb") as file:
        return pickle.load(file)


def joined(directory: Path, tmp_path: Path) -> Any:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(str(directory), str(tmp_path / "joined.pt"))
    return torch.load(tmp_path / "joined.pt", weights_only=True)


@pytest.mark.parametrize("case", [case for case in MESHES if case.tp and case.world_size in (4, 8)], ids=str)
def test_uneven_rows_cut_twice_are_saved_as_the_ranks_hold_them(case: MeshCase, tmp_path: Path) -> None:
    raw, source = source_of(case, 3)
    materialise(dcp_writer.lay_out(source, spec_of(case)), raw.files, str(tmp_path))
    state = joined(tmp_path, tmp_path)
    for name, value in net(case.world_size, 3).state_dict().items():
        assert identical(state["model"][name], value), name


@pytest.mark.parametrize(("replicate", "shard"), [(1, 2), (2, 2), (2, 4), (4, 4), (8, 8)])
def test_sharded_tensors_of_hybrid_shard_are_those_of_each_sharding_group(
    replicate: int, shard: int, tmp_path: Path
) -> None:
    case = hsdp(replicate, shard)
    raw, source = source_of(case, 3)
    target = torch_ranks.lay_out(source, replace(spec_of(case), tensor=TensorForm.SHARDED_TENSOR))
    materialise(target, raw.files, str(tmp_path))
    for rank in some_ranks(case.world_size):
        with as_rank(rank, case.world_size):
            groups = [dist.new_group(list(range(g * shard, g * shard + shard))) for g in range(replicate)]
            group = groups[rank // shard]
            path = tmp_path / f"model_world_size_{case.world_size}_rank_{rank}.pt"
            with load_with_process_group(group):
                found = torch.load(path, weights_only=False)
            for name, whole in net(case.world_size, 3).state_dict().items():
                if name == "seen":
                    assert identical(found[name], whole)
                    continue
                truth = _create_chunk_sharded_tensor(whole, rank % shard, shard, 8, group, torch.device("cpu"))
                shards, *described = found[name].__getstate__()
                true_shards, *expected = truth.__getstate__()
                assert described == expected, name
                assert [one.metadata for one in shards] == [one.metadata for one in true_shards], name
                assert all(identical(one.tensor, true.tensor) for one, true in zip(shards, true_shards, strict=True))


def test_a_sharded_tensor_cannot_be_on_a_mesh_of_tensor_parallelism() -> None:
    _, source = source_of(over_tp(2, 2), 0)
    with pytest.raises(UsageError, match=r"col.weight is \[_StridedShard\(0, sf=2\), Shard\(0\)\] on the mesh"):
        torch_ranks.lay_out(source, replace(spec_of(over_tp(2, 2)), tensor=TensorForm.SHARDED_TENSOR))
