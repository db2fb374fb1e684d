"""Every reader of the table keeps the contract, in every form that its checkpoints have."""

from __future__ import annotations

import json
import pickle
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fsdpckpt.readers import READERS
from fsdpckpt.readers.dcp import DcpReader
from fsdpckpt.readers.safetensors import SafetensorsReader
from fsdpckpt.readers.torch_checkpointing import TorchCheckpointingReader
from fsdpckpt.readers.torch_ranks import TorchReader
from fsdpckpt.readers.torch_shards import TorchShardsReader
from fsdpckpt.testing import WEIGHTS, ReaderContract
from tests.oracle.fake_group import as_rank
from tests.readers.played_ranks import save_as_ranks, shard

MODEL = {name: torch.from_numpy(weight) for name, weight in WEIGHTS.items()}
MATRICES = {name.rpartition(".")[0]: weight for name, weight in MODEL.items() if weight.ndim == 2}


class TestDcp(ReaderContract):
    reader = DcpReader()

    def save(self, directory: Path) -> Path:
        save_as_ranks(directory, lambda rank: {"model": dict(MODEL)}, 1)
        return directory


class TestDcpOfSeveralRanks(ReaderContract):
    reader = DcpReader()

    def save(self, directory: Path) -> Path:
        save_as_ranks(directory, _state_of_rank, 2)
        return directory


class TestSafetensorsFile(ReaderContract):
    reader = SafetensorsReader()

    def save(self, directory: Path) -> Path:
        save_file(MODEL, directory / "model.safetensors")
        return directory / "model.safetensors"


class TestSafetensorsShards(ReaderContract):
    reader = SafetensorsReader()
    index = False

    def save(self, directory: Path) -> Path:
        where = {}
        for number, (name, weight) in enumerate(MODEL.items(), 1):
            where[name] = f"model-{number:05d}-of-{len(MODEL):05d}.safetensors"
            save_file({name: weight}, directory / where[name])
        if self.index:
            (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        return directory


class TestSafetensorsIndex(TestSafetensorsShards):
    index = True
    harmless = frozenset({"model.safetensors.index.json"})  # the numbers in the names say the same


class TestTorchShards(ReaderContract):
    reader = TorchShardsReader()
    index = False

    def save(self, directory: Path) -> Path:
        where = {}
        for number, (name, weight) in enumerate(MODEL.items(), 1):
            where[name] = f"pytorch_model-{number:05d}-of-{len(MODEL):05d}.bin"
            torch.save({name: weight}, directory / where[name])
        if self.index:
            (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
        return directory


class TestTorchShardsIndex(TestTorchShards):
    index = True
    harmless = frozenset({"pytorch_model.bin.index.json"})  # the numbers in the names say the same


class TestTorchFile(ReaderContract):
    reader = TorchReader()

    def save(self, directory: Path) -> Path:
        torch.save({"model": MODEL}, directory / "any name")
        return directory / "any name"


class TestTorchRanks(ReaderContract):
    reader = TorchReader()

    def save(self, directory: Path) -> Path:
        for rank in range(2):
            with as_rank(rank, 2):
                torch.save(_state_of_rank(rank), directory / f"model_world_size_2_rank_{rank}.pt")
        return directory


class TestTorchCheckpointing(ReaderContract):
    reader = TorchCheckpointingReader()
    harmless = frozenset({"metadata.pkl"})  # the DTensors in the files say the same

    def save(self, directory: Path) -> Path:
        mesh = {"device_type": "cpu", "mesh_shape": (2,), "mesh_data": (0, 1), "mesh_dim_names": None}
        tensors = {}
        for rank in range(2):
            with as_rank(rank, 2):
                state = _state_of_rank(rank)["model"]
                torch.save(state, directory / f"model_{rank}.pt")
            for name, tensor in state.items():
                placements = [{"type": "Shard", "dim": 0} if tensor.ndim > 1 else {"type": "Replicate"}]
                data = {"global_shape": list(tensor.shape), "dtype": str(tensor.dtype), "mesh_spec": mesh}
                sharding = {"type": "DTensorShardingMetadata", "data": {**data, "placements": placements}}
                tensors[json.dumps([name])] = [{"sharding_metadata": sharding, "ranks": (0, 1)}]
        item = {"nested_path_to_metadata": tensors, "rank_to_layout_info": {0: None, 1: None}}
        metadata = {"metadata": {"model": item}, "world_size": 2, "version": "2.0"}
        (directory / "metadata.pkl").write_bytes(pickle.dumps(metadata))
        return directory


def _state_of_rank(_rank: int) -> dict[str, Any]:
    return {"model": {**shard(MATRICES, 2), "head.bias": MODEL["head.bias"].clone()}}


def test_no_reader_is_without_these_tests() -> None:
    for file in Path(__file__).parent.glob("test_*.py"):
        if "(ReaderContract)" in file.read_text():
            import_module(f"tests.readers.{file.stem}")
    tested = {type(case.reader) for case in ReaderContract.__subclasses__()}
    assert {type(reader) for reader in READERS} <= tested
