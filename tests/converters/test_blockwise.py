"""torchao's states in blocks: carried where blocks stay whole, as torchao itself has them there; refused elsewhere."""

from __future__ import annotations

import json
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, SourceUnsupportedError, UsageError
from fsdpckpt.formats.torch.torchao import StoredBlocks
from fsdpckpt.ir.checkpoint import Section
from fsdpckpt.readers.dcp import blockwise
from tests.golden.torchao.net import KINDS, SHAPES, make, save_ranks, state_of, step
from tests.oracle.fake_group import as_rank
from tests.readers.contents import opened

pytestmark = pytest.mark.filterwarnings("ignore")
GOLDEN = Path(__file__).parents[1] / "golden" / "torchao" / "states.tar.xz"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("torchao")
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(directory, filter="data")
    return directory


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", ["ranks-4", "dcp-4"])
@pytest.mark.parametrize("container", ["torch", "dcp"])
def test_two_ranks_get_what_torchao_has_on_two(
    kind: str, source: str, container: str, saved: Path, tmp_path: Path
) -> None:
    target = tmp_path / "two"
    fsdpckpt.convert(saved / kind / source, target, to="sharded", container=container, world_size=2, verify="full")
    assert fsdpckpt.diff(saved / kind / "ranks-2", target).same
    assert not fsdpckpt.verify(target).problems


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("between", ["full.pt", "full", "mesh", "whole.safetensors"])
def test_there_and_back(kind: str, between: str, saved: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "full.pt": {"to": "full"},
        "full": {"to": "full", "container": "dcp"},
        "mesh": {"mesh": "dp_replicate=2,dp_shard=2", "to": "sharded", "container": "torch"},
        "whole.safetensors": {"to": "full"},
    }[between]
    source, target = saved / kind / "ranks-4", tmp_path / between
    if between == "mesh":  # the ranks are on a mesh of one dimension without a name
        fsdpckpt.convert(source, tmp_path / "one.pt", to="full")
        source = tmp_path / "one.pt"
        options["placements"] = tmp_path / "placements.json"
        placed = {"dp_replicate": "Replicate()", "dp_shard": "Shard(0)"}
        (tmp_path / "placements.json").write_text(json.dumps({"*": placed}))
    fsdpckpt.convert(source, target, **options)
    fsdpckpt.convert(target, tmp_path / "again", to="sharded", container="torch", world_size=4, mesh="dp=4")
    assert fsdpckpt.diff(saved / kind / "ranks-4", tmp_path / "again").same


@pytest.mark.parametrize("shard", ["plain", "larger blocks", "another shape"])
def test_shards_that_are_not_alike_are_refused(
    shard: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = blockwise._item

    def other(directory: Any, tensor: Any, row: int, *arguments: Any) -> StoredBlocks | None:
        item = read(directory, tensor, row, *arguments)
        if row != 1 or item is None or shard == "plain":
            return None if row == 1 else item
        rows, *columns = item.blocks.shape
        changed = {"block": 2 * item.blocks.block} if shard == "larger blocks" else {"shape": (rows + 1, *columns)}
        return replace(item, blocks=replace(item.blocks, **changed))

    monkeypatch.setattr(blockwise, "_item", other)
    with pytest.raises(SourceUnsupportedError, match="not all of its shards are whole blocks of that kind"):
        fsdpckpt.convert(saved / KINDS[0] / "dcp-4", tmp_path / "out", to="sharded", container="dcp", world_size=2)


def test_cuts_inside_of_blocks_are_refused_with_the_world_sizes_that_work(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(NeedsInformationError) as raised:
        fsdpckpt.convert(saved / "AdamW8bit" / "ranks-4", tmp_path / "three", world_size=3)
    message = raised.value.text
    assert raised.value.key == "1.exp_avg"
    assert "torchao's OptimState8bit in blocks of 256" in message
    assert "--world-size with a number that works for all states: 1..2, 4..5, 8, " in message
    assert not (tmp_path / "three").exists()
    fsdpckpt.convert(saved / "AdamW4bit" / "ranks-4", tmp_path / "of-4-bit", world_size=3)  # blocks of two rows


def test_what_would_quantize_again_is_refused(saved: Path, tmp_path: Path) -> None:
    source = saved / "AdamWFp8" / "ranks-4"
    with pytest.raises(UsageError, match=r"cannot cast 0\.exp_avg: it is torchao's OptimStateFp8"):
        fsdpckpt.convert(source, tmp_path / "cast", world_size=2, optim_dtype="bfloat16")
    with pytest.raises(SourceUnsupportedError, match="torchao's OptimStateFp8 in blocks of 256, which cannot"):
        fsdpckpt.convert(source, tmp_path / "flat", to="flattened", world_size=2)
    with pytest.raises(SourceUnsupportedError, match="a ShardedTensor does not hold torchao's OptimStateFp8"):
        fsdpckpt.convert(
            source, tmp_path / "sharded", to="sharded", container="torch", world_size=2, tensor="sharded-tensor"
        )


def test_cuts_by_columns_zeros_and_dcp_s_own_loading_are_refused(saved: Path, tmp_path: Path) -> None:
    source = saved / "AdamW8bit" / "ranks-4"
    (tmp_path / "by-columns.json").write_text(json.dumps({"bias": {"dp": "Shard(0)"}, "*": {"dp": "Shard(1)"}}))
    options: dict[str, Any] = {"mesh": "dp=2", "placements": tmp_path / "by-columns.json"}
    with pytest.raises(NeedsInformationError, match=r"Shard\(1\).* over 2 ranks cuts blocks apart"):
        fsdpckpt.convert(source, tmp_path / "columns", to="sharded", container="torch", **options)
    with pytest.raises(
        SourceUnsupportedError, match=r"(?s)torchao's OptimState8bit.*zeros in blocks are not made"
    ) as raised:
        fsdpckpt.convert(source, tmp_path / "zeros", world_size=2, missing_state="zeros")
    assert raised.value.next_step == "drop --missing-state zeros"
    assert not any((tmp_path / name).exists() for name in ("columns", "zeros"))
    state = {"optimizer": {"state": {0: {"exp_avg": torch.zeros(16, 1024)}}}}
    with pytest.raises(Exception, match=r"torchao's OptimState8bit.*StorageReader does not load"):
        dcp.load(state, storage_reader=fsdpckpt.StorageReader(saved / "AdamW8bit" / "ranks-2"))


def test_keys_and_shapes_are_those_of_the_parameters(saved: Path, tmp_path: Path) -> None:
    fsdpckpt.convert(saved / "AdamW4bit" / "ranks-4", tmp_path / "named.pt", to="full", key_type="name")
    rows = fsdpckpt.inspect(tmp_path / "named.pt").tensors
    found = {row.key: row.tensor.shape for row in rows}
    assert found["narrow.exp_avg.codes"] == (128, 64)  # two codes a byte, of two rows
    assert found["narrow.exp_avg.scale"] == (128, 1)
    assert found["bias.exp_avg"] == (10,)


def test_slices_of_flat_parameters_are_refused(saved: Path, tmp_path: Path) -> None:
    """The states of FSDP1's ranks, which are no DTensors."""
    (tmp_path / "two").mkdir()
    fsdpckpt.convert(saved / "AdamW8bit" / "ranks-4", tmp_path / "full.pt", to="full", only="optim")
    for rank in range(2):
        shutil.copy(tmp_path / "full.pt", tmp_path / "two" / f"optim_world_size_2_rank_{rank}.pt")
    (problem, *_) = opened(tmp_path / "two").problems
    assert (problem.kind, problem.fatal, problem.section, problem.key) == (
        "quantized",
        True,
        Section.OPTIM,
        "state.0.exp_avg",
    )
    assert "in blocks of 256, and a rank's slice of a flat parameter: it cannot be converted" in problem.message
    (tmp_path / "two" / "optim_world_size_2_rank_1.pt").unlink()
    (tmp_path / "two" / "optim_world_size_2_rank_0.pt").rename(tmp_path / "two" / "optim_world_size_1_rank_0.pt")
    assert opened(tmp_path / "two").problems == ()


@pytest.mark.parametrize("rank", [0, 3])
def test_blocks_that_ranks_cut_apart_are_refused(rank: int, saved: Path, tmp_path: Path) -> None:
    """torchao does not quantize the state of a shard whose elements are no whole blocks; without any it need not."""
    shutil.copytree(saved / "AdamW8bit" / "ranks-4", tmp_path / "four")
    with as_rank(rank, 4):
        mesh = init_device_mesh("cpu", (4,))

        def shards() -> list[torch.Tensor]:
            return [
                distribute_tensor(torch.ones(shape), mesh, [Shard(0)], src_data_rank=None) for shape in SHAPES.values()
            ]

        states = {
            number: {"step": torch.tensor(2.0), "exp_avg": mean, "exp_avg_sq": square}
            for number, (mean, square) in enumerate(zip(shards(), shards(), strict=True))
        }
        optimizer = {"state": states, "param_groups": [{"params": list(states)}]}
        model = dict(zip(SHAPES, shards(), strict=True))
        torch.save({"model": model, "optimizer": optimizer}, tmp_path / "four" / f"ckpt_world_size_4_rank_{rank}.pt")
    said = {str(problem.key): problem for problem in opened(tmp_path / "four").problems if problem.fatal}
    first = said["optimizer.state.0.exp_avg"]
    if rank == 0:
        assert first.kind == "rank-mismatch"
        assert "float32 in rank 0; torchao's OptimState8bit in blocks of 256 in ranks 1, 2, 3" in first.message
        return
    assert "in blocks of 256, and not quantized on rank 3" in first.message
    # the third parameter has three rows, and none of them is on rank 3
    keys = [f"optimizer.state.{number}.{name}" for number in (0, 1) for name in ("exp_avg", "exp_avg_sq")]
    assert [key for key in said if key.startswith("optimizer.state")] == keys
    assert {said[key].kind for key in keys} == {"quantized"}


def _same(found: Any, expected: Any, where: str) -> None:
    assert type(found) is type(expected), where
    if isinstance(found, dict):
        assert list(found) == list(expected), where
        for key in found:
            _same(found[key], expected[key], f"{where}.{key}")
    elif hasattr(found, "to_local"):
        assert (found.shape, found.placements) == (expected.shape, expected.placements), where
        _same(found.to_local(), expected.to_local(), where)
    elif hasattr(found, "block_size"):
        assert (found.shape, found.dtype, found.block_size) == (expected.shape, expected.dtype, expected.block_size)
        assert vars(found).keys() == vars(expected).keys(), where
        for name in found.tensor_attrs:
            _same(getattr(found, name), getattr(expected, name), f"{where}.{name}")
        assert [getattr(found, name, None) for name in ("signed", "_shape")] == [
            getattr(expected, name, None) for name in ("signed", "_shape")
        ]
    elif isinstance(found, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        assert bytes(found.detach().reshape(-1).view(torch.uint8).numpy()) == bytes(
            expected.detach().reshape(-1).view(torch.uint8).numpy()
        ), where


class TestWithTorchao:
    """The library itself loads what is written, and goes on as if it had trained there."""

    @pytest.fixture(autouse=True)
    def library(self) -> None:
        pytest.importorskip("torchao", reason="torchao is not installed: pip install torchao --no-deps")

    @pytest.mark.parametrize("kind", KINDS)
    def test_ranks_load_and_go_on(self, kind: str, tmp_path: Path) -> None:
        save_ranks(kind, 4, tmp_path / "four")
        fsdpckpt.convert(tmp_path / "four", tmp_path / "two", to="sharded", container="torch", world_size=2)
        for rank in range(2):
            with as_rank(rank, 2):
                expected = state_of(kind, 2)
                for section, key in (("model", "model"), ("optim", "optimizer")):
                    # torchao names its classes as safe: the default of torch.load takes them
                    found = torch.load(tmp_path / "two" / f"{section}_world_size_2_rank_{rank}.pt")
                    if section == "optim":
                        found["state"] = {number: found["state"][number] for number in expected[key]["state"]}
                    _same(dict(found), dict(expected[key]), section)
                model, optimizer = make(kind, 2)
                model.load_state_dict(torch.load(tmp_path / "two" / f"model_world_size_2_rank_{rank}.pt"))
                optimizer.load_state_dict(torch.load(tmp_path / "two" / f"optim_world_size_2_rank_{rank}.pt"))
                step(model, optimizer, 2)
                further = state_of(kind, 2, steps=3)
                _same(dict(model.state_dict()), dict(further["model"]), "model")
                _same(optimizer.state_dict()["state"], further["optimizer"]["state"], "state")

    @pytest.mark.parametrize("kind", KINDS)
    def test_full_and_dcp_load(self, kind: str, saved: Path, tmp_path: Path) -> None:
        source = saved / kind / "ranks-4"
        fsdpckpt.convert(source, tmp_path / "full.pt", to="full")
        fsdpckpt.convert(source, tmp_path / "dcp", container="dcp", world_size=2)
        with as_rank(0, 1):
            expected = state_of(kind, 1)
            whole = torch.load(tmp_path / "full.pt")["optimizer"]["state"]
            for number, states in expected["optimizer"]["state"].items():
                for name, state in states.items():
                    _same(whole[number][name], state.to_local() if name != "step" else state, f"{number}.{name}")
            target = state_of(kind, 1, steps=1)
            dcp.load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
            _same(target["optimizer"]["state"], expected["optimizer"]["state"], "state")
