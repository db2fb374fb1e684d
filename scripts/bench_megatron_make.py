"""Makes the ``torch_dist`` directory that Megatron-core leaves of a mixture of experts, with holes for its data.

    bench_megatron_make.py DIRECTORY RANKS [--layers N] [--experts N]

Every layer and expert is a chunk of one tensor for each weight and each of its three optimizer states. ``.metadata`` is
what the coordinator pickles: torch's own objects, those of other ranks as they arrive from them, and the plans of all
ranks (``megatron/core/dist_checkpointing/strategies/state_dict_saver.py``).
"""

from __future__ import annotations

import argparse
import json
import os
import pickle

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

WIDTH, INNER = 64, 32
WEIGHTS = {"linear_fc1.weight": (2 * INNER, WIDTH), "linear_fc2.weight": (WIDTH, INNER)}
STATES = ("fp32_param", "exp_avg", "exp_avg_sq")


def arrived(text: str) -> str:
    """As it comes from another rank: equal, and another object, which the pickle writes again."""
    return text.encode().decode()


def tensors(layers: int, experts: int) -> dict[str, tuple[int, ...]]:
    weights = {
        f"decoder.layers.mlp.experts.experts.{name}": (layers, experts, *shape) for name, shape in WEIGHTS.items()
    }
    return weights | {f"optimizer.state.{state}.{name}": shape for state in STATES for name, shape in weights.items()}


def plan_of(rank: int, ranks: int, shapes: dict[str, tuple[int, ...]]) -> SavePlan:
    """What one rank writes, as it comes from there: its share of the experts of every layer."""
    items, properties = [], TensorProperties(dtype=torch.float32)
    for own, (layers, experts, *rest) in shapes.items():
        name = arrived(own)
        for layer in range(layers):
            for expert in range(rank, experts, ranks):
                start = torch.Size((layer, expert, *[0] * len(rest)))
                chunk = ChunkStorageMetadata(torch.Size(start), torch.Size((1, 1, *rest)))
                data = TensorWriteData(chunk, properties, torch.Size((layers, experts, *rest)))
                items.append(WriteItem(MetadataIndex(name, start), WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items)


def make(directory: str, ranks: int, *, layers: int, experts: int, plans: bool = True) -> None:
    os.makedirs(directory)
    shapes = tensors(layers, experts)
    planned = [plan_of(rank, ranks, shapes) for rank in range(ranks)]
    entries: dict[str, TensorStorageMetadata] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for rank, plan in enumerate(planned):
        at, path = 0, f"__{rank}_0.distcp"
        names = {name: arrived(name) for name in shapes}  # what was written is sent after the plan
        for item in plan.items:
            name, data = item.index.fqn, item.tensor_data
            entry = entries.setdefault(name, TensorStorageMetadata(data.properties, data.size, []))
            entry.chunks.append(data.chunk)
            nbytes = 1024 + 4 * data.chunk.sizes.numel()
            index = MetadataIndex(names[name], torch.Size(data.chunk.offsets))
            stored[index] = _StorageInfo(path, at, nbytes)
            at += nbytes
        with open(os.path.join(directory, path), "wb") as file:
            file.truncate(at)
    metadata = Metadata(entries, None, stored)
    if plans:
        metadata.all_local_plans = planned  # type: ignore[attr-defined]  # as Megatron-core does
    with open(os.path.join(directory, ".metadata"), "wb") as file:
        pickle.dump(metadata, file)
    with open(os.path.join(directory, "metadata.json"), "w") as file:
        json.dump({"sharded_backend": "torch_dist", "sharded_backend_version": 1}, file)
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 3}
    common = {"iteration": 3, "optimizer": {"optimizer": {"param_groups": [group]}}}
    torch.save(common, os.path.join(directory, "common.pt"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("ranks", type=int)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--experts", type=int, default=256)
    given = parser.parse_args()
    make(given.directory, given.ranks, layers=given.layers, experts=given.experts)
