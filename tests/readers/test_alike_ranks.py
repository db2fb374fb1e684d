"""Files of ranks that are alike are parsed once: what comes of it is compared with parsing each of them.

Meshes that do not list their ranks in ascending order: FSDP2 and ``full_tensor`` go by the process group.
"""

from __future__ import annotations

import random
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import fsdpckpt
from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.formats.torch.loadable import ARRAY, array_of
from fsdpckpt.readers.torch_ranks import rank_files
from tests.formats.torch_saves import loaded, rewritten, saved
from tests.fuzz.layouts import pickle_in
from tests.fuzz.mutations import mutated
from tests.oracle.compare import differences, identical
from tests.oracle.fake_group import as_rank
from tests.readers.alike import Refusal, same_end
from tests.readers.played_ranks import StackOf, shard, shard_rows_twice

WORLD = 6


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The files that were parsed as any archive is."""
    paths: list[str] = []
    parse = rank_files.parse_archive

    def counting(opened: Any, *arguments: Any) -> Any:
        paths.append(opened.source.path)
        return parse(opened, *arguments)

    monkeypatch.setattr(rank_files, "parse_archive", counting)
    yield paths


def save(directory: Path, state_of: Callable[[int], Any], world: int = WORLD) -> dict[int, str]:
    for rank in range(world):
        with as_rank(rank, world), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.save(state_of(rank), directory / f"model_{rank}.pt")
    return {rank: str(directory / f"model_{rank}.pt") for rank in range(world)}


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape) + 0.5


def entry(weight: torch.Tensor) -> dict[str, Any]:
    return {"step": torch.tensor(3.0), "exp_avg": weight * 2, "exp_avg_sq": weight * 3}


def fsdp2(rows: int) -> Callable[[int], Any]:
    def state(_rank: int) -> dict[str, Any]:
        weights = shard({f"w{n}": numbered(rows, n) for n in (1, 5, 8)}, WORLD)
        states = {number: entry(weight.detach()) for number, weight in enumerate(weights.values())}
        groups = [{"lr": 0.5, "betas": (0.5, 0.75), "params": list(states)}]
        return {"model": {**weights, "mask": numbered(3)}, "optimizer": {"state": states, "param_groups": groups}}

    return state


def on_mesh(*placements: Any) -> Callable[[int], Any]:
    def state(_rank: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        inner = distribute_tensor(numbered(7, 6), mesh["tp"], [Shard(1)], src_data_rank=None)
        return {"w": distribute_tensor(numbered(8, 6), mesh, placements, src_data_rank=None), "inner": inner}

    return state


def interleaved(_rank: int) -> dict[str, Any]:
    """Every rank holds several boxes of each tensor, one behind the other in its file, in rows or in columns."""
    mesh = init_device_mesh("cpu", (WORLD,))
    whole = numbered(40, 3)
    tensors = {
        "w": numbered(24, 3),
        "half": numbered(24, 3).half(),
        "turned": numbered(3, 12).T,
        "cube": numbered(12, 2, 2),
    }
    state: dict[str, Any] = {
        name: distribute_tensor(tensor, mesh, [_StridedShard(0, split_factor=2)], src_data_rank=None)
        for name, tensor in tensors.items()
    }
    inside = distribute_tensor(numbered(24, 3), mesh, [Shard(0)], src_data_rank=None)
    inside._local_tensor = whole[7:11]  # this and the tail begin inside of a record
    return {**state, "inside": inside, "tail": whole[9:]}


def interleaved_unevenly(_rank: int) -> dict[str, Any]:
    """Of ranks with two rows each, the fifth has those that ``distribute_tensor`` alone gives it."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    cut = [_StridedShard(0, split_factor=2), Shard(0)]
    return {"w": distribute_tensor(numbered(13, 2), mesh, cut, src_data_rank=None)}


def interleaved_on_every_second(rank: int) -> dict[str, Any]:
    """Two groups of ranks that are alike, neither of which is numbered without gaps."""
    return {**interleaved(rank), "mask": numbered(2, 3).T, **({"more": numbered(2)} if rank % 2 else {})}


def lacking_on_the_last(rank: int) -> dict[str, Any]:
    """What only the second row of the mesh says: that the last rank should hold a part of it."""
    state: dict[str, Any] = on_mesh(Shard(0), Shard(1))(rank)
    return state if rank < WORLD - 1 else {"w": state["w"]}


def flat(_rank: int) -> dict[str, Any]:
    """FSDP1's own optimizer state: vectors of one length, by id."""
    states = {number: {"step": torch.tensor(1.0), "exp_avg": numbered(7 + number)} for number in range(3)}
    return {"state": states, "param_groups": [{"lr": float("nan"), "params": [0, 1, 2]}]}


def sharded_tensor(rank: int) -> dict[str, Any]:
    """FSDP1's: which rank saved it is in the tensor itself."""
    group, device = dist.distributed_c10d._get_default_group(), torch.device("cpu")
    return {"w": _create_chunk_sharded_tensor(numbered(12, 3), rank, WORLD, 8, group, device)}


def own_extra(rank: int) -> dict[str, Any]:
    return {**fsdp2(6)(rank), "seed": rank, "rng": torch.tensor([rank], dtype=torch.uint8)}


def otherwise_on_the_last(rank: int) -> dict[str, Any]:
    """A vector of another length is each rank's own, a plain tensor in place of a DTensor a contradiction."""
    weight = distribute_tensor(numbered(12, 3), init_device_mesh("cpu", (WORLD,)), [Shard(0)], src_data_rank=None)
    last = rank == WORLD - 1
    return {**fsdp2(12)(rank), "own": numbered(3 if last else 2), "w": numbered(2, 3) if last else weight}


def empty_behind_its_record(_rank: int) -> dict[str, Any]:
    """It does not move with another."""
    return {"a": numbered(3), "none": numbered(2).as_strided((0,), (1,), 100), "z": numbered(40)}


def arrays(rank: int) -> dict[str, Any]:
    """Arrays in files that this program writes stand in records: equal pickles do not say that they are equal."""
    known = array_of(loaded(saved({"a": np.array([1.0, 2.0])}))["a"])
    assert known is not None
    tensor = torch.tensor([float(rank), 2.0], dtype=torch.float64)
    setattr(tensor, ARRAY, known.call)
    return {"w": numbered(4), "a": tensor}


# What is saved, and how many of the six files are parsed as any archive is
LAYOUTS: dict[str, tuple[Callable[[int], Any], int]] = {
    "fsdp2": (fsdp2(12), 1),
    "fsdp2-last-rank-shorter": (fsdp2(11), 2),
    "fsdp2-last-ranks-empty": (fsdp2(4), 2),
    "hsdp": (on_mesh(Replicate(), Shard(0)), 2),
    "two-dimensions": (on_mesh(Shard(0), Shard(1)), 1),
    "two-dimensions-a-rank-lacks-one": (lacking_on_the_last, 2),
    "interleaved": (interleaved, 1),
    "interleaved-unevenly": (interleaved_unevenly, 4),
    "interleaved-in-two-groups": (interleaved_on_every_second, 2),
    "fsdp2-over-tp": (lambda _: shard_rows_twice({"a": numbered(12, 4), "b": numbered(6, 2)}, 2, 3), 1),
    "flat": (flat, 1),
    "sharded-tensor": (sharded_tensor, 6),
    "plain": (lambda _: {"w": numbered(3, 4), "b": numbered(0)}, 1),
    "own-values": (own_extra, 6),
    "own-values-of-every-second": (lambda rank: {"w": numbered(2), "at": "odd" if rank % 2 else "even"}, 2),
    "own-set": (lambda rank: {"w": numbered(2), "s": {rank}}, 6),
    "own-number-in-a-text": (lambda rank: {"w": numbered(2), f"stage{rank}": 1, "n": {"rank": rank}}, 6),
    "own-number-in-a-key": (lambda rank: {"w": numbered(2), (1, rank): 3}, 6),
    "own-keys": (lambda rank: {f"w{rank}": numbered(2)}, 6),
    "own-lengths": (lambda rank: {"w": numbered(2 + rank)}, 6),
    "own-arrays": (arrays, 6),
    "records-elsewhere": (fsdp2(12), 1),
    "otherwise-on-the-last": (otherwise_on_the_last, 2),
    "empty-behind-its-record": (empty_behind_its_record, 6),
}


# Ranks whose files are packed anew, by another writer, with a folder name of another length
REWRITTEN = {"records-elsewhere": (1, 4), "otherwise-on-the-last": (1, 4), "empty-behind-its-record": (1,)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_alike_files_come_to_the_same_end_as_parsing_each(name: str, tmp_path: Path, parsed: list[str]) -> None:
    state_of, expected = LAYOUTS[name]
    paths = save(tmp_path, state_of)
    for rank in REWRITTEN.get(name, ()):
        Path(paths[rank]).write_bytes(rewritten(Path(paths[rank]), {}))
    same_end(paths)
    assert len(parsed) - WORLD == expected


def test_the_number_of_a_gpu_is_no_difference(
    tmp_path: Path, parsed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank's storages are on its own GPU, which the pickle says as a text."""

    def state(rank: int) -> dict[str, Any]:
        monkeypatch.setattr(torch.serialization, "location_tag", lambda _: f"cuda:{rank}")
        return fsdp2(12)(rank)

    paths = save(tmp_path, state)
    same_end(paths)
    assert len(parsed) == WORLD + 1


@pytest.mark.parametrize("name", ["fsdp2", "two-dimensions", "flat"])
def test_damage_comes_to_the_same_end(name: str, tmp_path: Path) -> None:
    """A number, a text, an opcode of one rank's pickle is changed; above all where the ranks differ."""
    generator = random.Random(7)
    paths = save(tmp_path, LAYOUTS[name][0])
    files = {rank: Path(path).read_bytes() for rank, path in paths.items()}
    pickles = [pickle_in(files[rank]) for rank in (0, 1)]
    near = [at + step for at, (a, b) in enumerate(zip(*pickles, strict=True)) if a != b for step in (-2, -1, 0, 1, 2)]
    refused = 0
    for number in range(60):
        rank = generator.choice((0, 1, 3))
        data = bytearray(pickle_in(files[rank]))
        if number % 3 == 0:
            data = bytearray(mutated(generator, [bytes(data)]))
        else:
            at = generator.choice(near) if near and number % 3 == 1 else generator.randrange(len(data))
            data[at] = generator.choice((data[at] ^ 1, data[at] + 1 & 0xFF, generator.randrange(256)))
        Path(paths[rank]).write_bytes(rewritten(files[rank], {"data.pkl": bytes(data)}))
        once = same_end(paths)
        refused += isinstance(once, Refusal)
        Path(paths[rank]).write_bytes(files[rank])
    assert refused


def test_a_record_of_another_name_is_no_record_of_the_pickle(tmp_path: Path) -> None:
    """Nothing else of the file differs: neither its pickle nor the length of any record."""
    paths = save(tmp_path, lambda _: {"a": numbered(4), "b": numbered(4) + 1})
    with zipfile.ZipFile(paths[3]) as old, zipfile.ZipFile(tmp_path / "new", "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            new.writestr(name.replace("data/1", "data/7"), old.read(name))
    (tmp_path / "new").replace(paths[3])
    assert isinstance(same_end(paths), Refusal)


def test_a_rank_with_rows_that_its_place_does_not_give_it_is_refused(tmp_path: Path) -> None:
    """All ranks saved the rows of rank 0, of a tensor whose last rank has fewer: only the mesh says who is who."""

    def state(_rank: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (WORLD,))
        stride = (3, 1)
        local = numbered(2, 3)
        return {
            "w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((11, 3)), stride=stride)
        }

    paths = save(tmp_path, state)
    once = same_end(paths)
    assert isinstance(once, Refusal)
    assert isinstance(once.error, SourceCorruptError)


ORDERS: dict[str, Any] = {
    "turned": [3, 2, 1, 0],
    "mixed": [2, 0, 3, 1],
    "replicas": [[3, 1], [0, 2]],
    "transposed": [[0, 2], [1, 3]],
}
WEIGHTS = {
    "even": torch.arange(24.0).reshape(8, 3),
    "uneven": torch.arange(100.0, 114.0).reshape(7, 2),
    "few": torch.arange(200.0, 206.0).reshape(3, 2),
}


def held_by(order: Any) -> dict[str, Any]:
    model = StackOf(WEIGHTS)
    names = None if isinstance(order[0], int) else ("replicate", "shard")
    fully_shard(model, mesh=DeviceMesh("cpu", order, mesh_dim_names=names))
    return model.state_dict()


def ranks(order: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    for rank in range(4):
        with as_rank(rank, 4):
            yield rank, held_by(order)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_files_of_ranks_in_any_order_are_put_together_as_fsdp2_cut_them(tmp_path: Path, order: Any) -> None:
    (tmp_path / "ranks").mkdir()
    for rank, state in ranks(order):
        torch.save(state, tmp_path / "ranks" / f"model_world_size_4_rank_{rank}.pt")
    assert fsdpckpt.verify(tmp_path / "ranks").whole
    fsdpckpt.convert(tmp_path / "ranks", tmp_path / "full.pt", to="full", only="model")
    found = torch.load(tmp_path / "full.pt")
    assert all(identical(found[f"{name}.weight"], weight) for name, weight in WEIGHTS.items())


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_ranks_in_any_order_are_filled_as_fsdp2_cuts_them(tmp_path: Path, order: Any) -> None:
    torch.save({"model": {f"{name}.weight": weight for name, weight in WEIGHTS.items()}}, tmp_path / "full.pt")
    for _, expected in ranks(order):
        state = {"model": {name: torch.zeros_like(value) for name, value in expected.items()}}
        dcp.load(state, storage_reader=fsdpckpt.StorageReader(tmp_path / "full.pt"), no_dist=True)
        assert not differences(state["model"], expected)
