"""torchao's states in blocks: carried where blocks stay whole, as torchao itself has them there; refused elsewhere."""

from __future__ import annotations

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
from tests.converters.jobs import RANK_FILES, refused
from tests.converters.meshes import on_each_rank, rules, to_ranks
from tests.golden.torchao.net import KINDS, SHAPES, make, save_ranks, state_of, step
from tests.oracle.compare import require_identical
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
def test_two_ranks_get_what_torchao_has_on_two(kind: str, source: str, container: str, saved: Path) -> None:
    fsdpckpt.convert(saved / kind / source, "two", to="sharded", container=container, world_size=2, verify="full")
    assert fsdpckpt.diff(saved / kind / "ranks-2", "two").same
    assert not fsdpckpt.verify("two").problems


BETWEEN: dict[str, dict[str, Any]] = {
    "full.pt": {"to": "full"},
    "full": {"to": "full", "container": "dcp"},
    "mesh": {"mesh": "dp_replicate=2,dp_shard=2", **RANK_FILES},
    "whole.safetensors": {"to": "full"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("between", BETWEEN)
def test_there_and_back(kind: str, between: str, saved: Path) -> None:
    source, options = saved / kind / "ranks-4", dict(BETWEEN[between])
    first: Path | str = source
    if between == "mesh":  # the ranks are on a mesh of one dimension without a name
        fsdpckpt.convert(source, "one.pt", to="full")
        first = "one.pt"
        options["placements"] = rules({"*": {"dp_replicate": "Replicate()", "dp_shard": "Shard(0)"}})
    fsdpckpt.convert(first, between, **options)
    to_ranks(between, "again", world_size=4, mesh="dp=4")
    assert fsdpckpt.diff(source, "again").same


@pytest.mark.parametrize("shard", ["plain", "larger blocks", "another shape"])
def test_shards_that_are_not_alike_are_refused(shard: str, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = blockwise._item

    def other(directory: Any, tensor: Any, row: int, *arguments: Any) -> StoredBlocks | None:
        item = read(directory, tensor, row, *arguments)
        if row != 1 or item is None or shard == "plain":
            return None if row == 1 else item
        rows, *columns = item.blocks.shape
        changed = {"block": 2 * item.blocks.block} if shard == "larger blocks" else {"shape": (rows + 1, *columns)}
        return replace(item, blocks=replace(item.blocks, **changed))

    monkeypatch.setattr(blockwise, "_item", other)
    words = "not all of its shards are whole blocks of that kind"
    refused(
        SourceUnsupportedError, words, saved / KINDS[0] / "dcp-4", "out", to="sharded", container="dcp", world_size=2
    )


def test_cuts_inside_of_blocks_are_refused_with_the_world_sizes_that_work(saved: Path) -> None:
    error = refused(NeedsInformationError, "", saved / "AdamW8bit" / "ranks-4", "three", world_size=3)
    assert error.key == "1.exp_avg"
    assert "torchao's OptimState8bit in blocks of 256" in error.text
    assert "--world-size with a number that works for all states: 1..2, 4..5, 8, " in error.text
    fsdpckpt.convert(saved / "AdamW4bit" / "ranks-4", "of-4-bit", world_size=3)  # blocks of two rows


BY_COLUMNS = {"bias": {"dp": "Shard(0)"}, "*": {"dp": "Shard(1)"}}


@pytest.mark.parametrize(
    ("kind", "options", "error", "words"),
    [
        ("AdamWFp8", {"optim_dtype": "bfloat16"}, UsageError, r"cannot cast 0\.exp_avg: it is torchao's OptimStateFp8"),
        ("AdamWFp8", {"to": "flattened"}, SourceUnsupportedError,
         "torchao's OptimStateFp8 in blocks of 256, which cannot"),
        ("AdamWFp8", {**RANK_FILES, "tensor": "sharded-tensor"}, SourceUnsupportedError,
         "a ShardedTensor does not hold torchao's OptimStateFp8"),
        ("AdamW8bit", {**RANK_FILES, "mesh": "dp=2", "placements": BY_COLUMNS}, NeedsInformationError,
         r"Shard\(1\).* over 2 ranks cuts blocks apart"),
        ("AdamW8bit", {"missing_state": "zeros"}, SourceUnsupportedError,
         r"(?s)torchao's OptimState8bit.*zeros in blocks are not made"),
    ],
)  # fmt: skip
def test_what_would_quantize_again_or_cut_blocks_is_refused(
    kind: str, options: dict[str, Any], error: Any, words: str, saved: Path
) -> None:
    if "placements" in options:
        options = {**options, "placements": rules(options["placements"])}
    found = refused(error, words, saved / kind / "ranks-4", "out", world_size=2, **options)
    assert "missing_state" not in options or found.next_step == "drop --missing-state zeros"


def test_dcp_s_own_loading_is_refused(saved: Path) -> None:
    state = {"optimizer": {"state": {0: {"exp_avg": torch.zeros(16, 1024)}}}}
    with pytest.raises(Exception, match=r"torchao's OptimState8bit.*StorageReader does not load"):
        dcp.load(state, storage_reader=fsdpckpt.StorageReader(saved / "AdamW8bit" / "ranks-2"))


def test_keys_and_shapes_are_those_of_the_parameters(saved: Path) -> None:
    fsdpckpt.convert(saved / "AdamW4bit" / "ranks-4", "named.pt", to="full", key_type="name")
    found = {row.key: row.tensor.shape for row in fsdpckpt.inspect("named.pt").tensors}
    assert found["narrow.exp_avg.codes"] == (128, 64)  # two codes a byte, of two rows
    assert found["narrow.exp_avg.scale"] == (128, 1)
    assert found["bias.exp_avg"] == (10,)


def test_slices_of_flat_parameters_are_refused(saved: Path) -> None:
    """The states of FSDP1's ranks, which are no DTensors."""
    fsdpckpt.convert(saved / "AdamW8bit" / "ranks-4", "full.pt", to="full", only="optim")
    for ranks in (2, 1):
        Path(str(ranks)).mkdir()
        for rank in range(ranks):
            shutil.copy("full.pt", f"{ranks}/optim_world_size_{ranks}_rank_{rank}.pt")
    (problem, *_) = opened(Path("2")).problems
    about = (problem.kind, problem.fatal, problem.section, problem.key)
    assert about == ("quantized", True, Section.OPTIM, "state.0.exp_avg")
    assert "in blocks of 256, and a rank's slice of a flat parameter: it cannot be converted" in problem.message
    assert opened(Path("1")).problems == ()


@pytest.mark.parametrize("rank", [0, 3])
def test_blocks_that_ranks_cut_apart_are_refused(rank: int, saved: Path) -> None:
    """torchao does not quantize the state of a shard whose elements are no whole blocks; without any it need not."""
    shutil.copytree(saved / "AdamW8bit" / "ranks-4", "four")
    for _ in on_each_rank(4, [rank]):
        mesh = init_device_mesh("cpu", (4,))
        model, means, squares = (
            [distribute_tensor(torch.ones(shape), mesh, [Shard(0)], src_data_rank=None) for shape in SHAPES.values()]
            for _ in range(3)
        )
        states = {
            number: {"step": torch.tensor(2.0), "exp_avg": mean, "exp_avg_sq": square}
            for number, (mean, square) in enumerate(zip(means, squares, strict=True))
        }
        optimizer = {"state": states, "param_groups": [{"params": list(states)}]}
        torch.save(
            {"model": dict(zip(SHAPES, model, strict=True)), "optimizer": optimizer},
            f"four/ckpt_world_size_4_rank_{rank}.pt",
        )
    said = {str(problem.key): problem for problem in opened(Path("four")).problems if problem.fatal}
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
        for name in ("signed", "_shape"):
            assert getattr(found, name, None) == getattr(expected, name, None)
    elif isinstance(found, torch.Tensor):
        require_identical(found, expected, where)


class TestWithTorchao:
    """The library itself loads what is written, and goes on as if it had trained there."""

    @pytest.fixture(autouse=True)
    def library(self) -> None:
        pytest.importorskip("torchao", reason="torchao is not installed: pip install torchao --no-deps")

    @pytest.mark.parametrize("kind", KINDS)
    def test_ranks_load_and_go_on(self, kind: str) -> None:
        save_ranks(kind, 4, Path("four"))
        to_ranks("four", "two", world_size=2)
        for rank in on_each_rank(2):
            expected = state_of(kind, 2)
            # torchao names its classes as safe: the default of torch.load takes them
            weights, states = (torch.load(f"two/{part}_world_size_2_rank_{rank}.pt") for part in ("model", "optim"))
            _same(dict(weights), dict(expected["model"]), "model")
            held = {number: states["state"][number] for number in expected["optimizer"]["state"]}
            _same({**states, "state": held}, dict(expected["optimizer"]), "optim")
            model, optimizer = make(kind, 2)
            model.load_state_dict(weights)
            optimizer.load_state_dict(states)
            step(model, optimizer, 2)
            further = state_of(kind, 2, steps=3)
            _same(dict(model.state_dict()), dict(further["model"]), "model")
            _same(optimizer.state_dict()["state"], further["optimizer"]["state"], "state")

    @pytest.mark.parametrize("kind", KINDS)
    def test_full_and_dcp_load(self, kind: str, saved: Path) -> None:
        source = saved / kind / "ranks-4"
        fsdpckpt.convert(source, "full.pt", to="full")
        fsdpckpt.convert(source, "dcp", container="dcp", world_size=2)
        for _ in on_each_rank(1):
            expected = state_of(kind, 1)
            whole = torch.load("full.pt")["optimizer"]["state"]
            for number, states in expected["optimizer"]["state"].items():
                for name, state in states.items():
                    _same(whole[number][name], state.to_local() if name != "step" else state, f"{number}.{name}")
            target = state_of(kind, 1, steps=1)
            dcp.load(target, checkpoint_id="dcp", no_dist=True)
            _same(target["optimizer"]["state"], expected["optimizer"]["state"], "state")
