"""Write tiny files of real PyTorch, one of each kind: ``python -m tests.fuzz.tiny ARCHIVE.zip`` makes ``tiny.zip``.

Damage spreads over all of a file: in one of 500 bytes nearly each change hits what a parser decides by, and a parser
reads thousands of those in a second. The archives are packed without alignment, with checksums and without any (as
after ``torch.serialization.set_crc32_options(False)``): behind a checksum no damage would reach the pickle.
"""

from __future__ import annotations

import collections
import io
import json
import pickle
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.fuzz import tiny_parallel
from tests.fuzz.layouts import contents, pickle_in

_EXTRAS = ("version", ".data/", ".format_version", ".storage_alignment")


def _values() -> Iterator[object]:
    row = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    yield {"w": row}
    yield {"w": row.t(), "b": torch.tensor(2.5, dtype=torch.bfloat16)}
    yield torch.nn.Linear(3, 2, bias=False).state_dict()
    yield {"p": torch.nn.Parameter(row), "n": [1, None, (2.5, "x")], "o": collections.OrderedDict(k=True)}
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    yield optimizer.state_dict()
    yield {
        "model": {"w": row},
        "optimizer": {"state": {0: {"step": 1.0}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
    }
    yield {"s": torch.zeros(2, 2).to_sparse(), "d": torch.device("cpu"), "t": torch.float16, "z": torch.Size([1, 2])}
    yield {"flat": {"_flat_param": row.reshape(-1)}, "conj": torch.tensor([1j]).conj()}


def _distributed() -> Iterator[object]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    local = torch.arange(3, dtype=torch.float32).reshape(1, 3)
    yield {"d": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    shard = LocalShard(local, ShardMetadata([0, 0], [1, 3], "rank:0/cpu"))
    yield {"s": init_from_local_shards([shard], 1, 3)}


def _saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def packed(archive: bytes, *, checked: bool) -> bytes:
    """The records of ``archive`` that count, packed tightly; all checksums zero unless ``checked``."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            stem, _, record = name.partition("/")
            if not record.startswith(_EXTRAS):
                new.writestr(zipfile.ZipInfo(f"{stem[:1]}/{record}"), old.read(name))
        rows = [(info.header_offset + 14, info.CRC) for info in new.infolist()]
    data = bytearray(stream.getvalue())
    if not checked:
        for at, _ in rows:
            data[at : at + 4] = bytes(4)
        at = data.find(b"PK\1\2")
        while at >= 0:
            data[at + 16 : at + 20] = bytes(4)
            at = data.find(b"PK\1\2", at + 4)
    return bytes(data)


def _metadata() -> Iterator[bytes]:
    properties = TensorProperties(dtype=torch.float32)
    halves = [ChunkStorageMetadata(torch.Size([at, 0]), torch.Size([1, 3])) for at in (0, 1)]
    whole = [ChunkStorageMetadata(torch.Size([]), torch.Size([]))]
    entries = {"model.w": TensorStorageMetadata(properties, torch.Size([2, 3]), halves)}
    stored = {
        MetadataIndex("model.w", torch.Size([at, 0]), at): _StorageInfo(f"__{at}_0.distcp", 0, 500) for at in (0, 1)
    }
    nesting = {"model.w": ("model", "w")}
    yield pickle.dumps(Metadata(entries, nesting, stored))
    entries["optimizer.step"] = TensorStorageMetadata(properties, torch.Size([]), whole)
    entries["lr"] = BytesStorageMetadata()
    stored[MetadataIndex("optimizer.step", torch.Size([]), 0)] = _StorageInfo("__0_0.distcp", 500, 400)
    stored[MetadataIndex("lr")] = _StorageInfo("__0_0.distcp", 900, 300)
    nesting |= {"optimizer.step": ("optimizer", 0, "step"), "lr": ("lr",)}
    yield pickle.dumps(Metadata(entries, nesting, stored))
    yield pickle.dumps(
        Metadata({"lr": BytesStorageMetadata()}, None, {MetadataIndex("lr"): stored[MetadataIndex("lr")]})
    )


def _directory() -> Iterator[tuple[str, bytes]]:
    """What ``dcp.save`` writes from one rank."""
    value = {
        "model": {"w": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.tensor([1.5])},
        "optimizer": {"state": {"w": {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]},
    }
    with tempfile.TemporaryDirectory() as directory:
        dcp.save(value, checkpoint_id=directory, no_dist=True)
        yield from contents(Path(directory)).items()


def _megatron() -> Iterator[tuple[str, bytes]]:
    """A ``torch_dist`` directory as Megatron-core 0.15 lays it out, of two layers; the state is in flattened ranges."""
    entries: dict[str, object] = {}
    stored: dict[object, object] = {}
    items: list[WriteItem] = []
    file = b""
    cells = [(layer, 0, 0, at) for layer in (0, 1) for at in (0, 3)]
    for name, size, part, starts in (
        ("w", (2, 2, 3), (1, 2, 3), [(0, 0, 0), (1, 0, 0)]),
        ("optimizer.state.exp_avg.w", (2, 1, 1, 6), (1, 1, 1, 3), cells),
    ):
        chunks = [ChunkStorageMetadata(torch.Size(start), torch.Size(part)) for start in starts]
        properties = TensorProperties(dtype=torch.float32)
        entries[name] = TensorStorageMetadata(properties, torch.Size(size), chunks)
        for chunk in chunks:
            data = packed(_saved(torch.arange(float(chunk.sizes.numel())).reshape(part)), checked=True)
            index = MetadataIndex(name, chunk.offsets)
            stored[index] = _StorageInfo("__0_0.distcp", len(file), len(data))
            written = TensorWriteData(chunk, properties, torch.Size(size))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=written))
            file += data
    metadata = Metadata(entries, None, stored)  # type: ignore[arg-type]
    metadata.mcore_data = {"optimizer.state.exp_avg.w": {"nd_reformulated_orig_global_shape": (2, 2, 3)}}  # type: ignore[attr-defined]
    metadata.all_local_plans = [SavePlan(items[:1]), SavePlan(items[1:2])]  # type: ignore[attr-defined]
    group = {"lr": 0.1, "step": 3}
    yield "megatron/.metadata", pickle.dumps(metadata)
    yield "megatron/__0_0.distcp", file
    yield "megatron/metadata.json", b'{"sharded_backend": "torch_dist"}'
    common = {"iteration": 3, "optimizer": {"optimizer": {"param_groups": [group]}}}
    yield "megatron/common.pt", packed(_saved(common), checked=True)


def _deepspeed() -> Iterator[tuple[str, object]]:
    """A ZeRO step of one rank, and the universal checkpoint of the same."""
    row = torch.arange(6, dtype=torch.float32)
    module = {"module": {"w": row[:0], "mask": row}, "param_shapes": [{"w": torch.Size([2, 3])}], "global_steps": 3}
    groups = [{"lr": 0.1, "params": [0]}]
    base = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": row / 2}}, "param_groups": groups}
    states = {"base_optimizer_state": base, "single_partition_of_fp32_groups": [row], "group_paddings": [0]}
    yield "zero/mp_rank_00_model_states.pt", module
    yield "zero/zero_pp_rank_0_mp_rank_00_optim_states.pt", {"optimizer_state_dict": {**states, "zero_stage": 2}}
    yield "universal/mp_rank_00_model_states.pt", module
    yield "universal/zero/optimizer_state.pt", {"ds_version": "0.19.8", "param_groups": groups}
    yield "universal/zero/w/fp32.pt", {"param": row.reshape(2, 3), "cat_dim": 0}
    yield "universal/zero/w/step.pt", torch.tensor(3.0)


def _nanotron() -> Iterator[tuple[str, bytes]]:
    """A step of two tensor-parallel ranks, with one weight that is cut and one that is whole."""
    row = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    for rank in (0, 1):
        slices = {
            "version": "1.4",
            "local_global_slices_pairs": f"0,1,None|None,None,None#{rank},{rank + 1},None|None,None,None",
            "unsharded_shape": "(2, 3)",
        }
        name = f"nanotron/model/a/model_w_pp-rank-0-of-1_tp-rank-{rank}-of-2.safetensors"
        yield name, safetensors.torch.save({"data": row[rank : rank + 1].clone()}, slices)
        state = {"step": torch.tensor(3.0), "exp_avg": row[rank : rank + 1].clone()}
        optimizer = {
            "state": {0: state, 1: {"step": torch.tensor(3.0), "exp_avg": row[0].clone()}},
            "param_groups": [{"lr": 0.1, "params": [0, 1]}],
            "names": {0: "a.w", 1: "b"},
        }
        path = f"nanotron/optimizer/optimizer_pp-0-of-1_tp-{rank}-of-2_exp-0-of-1.pt"
        yield path, packed(_saved(optimizer), checked=True)
    yield "nanotron/model/model_b.safetensors", safetensors.torch.save({"data": row[0].clone()}, {})
    yield "nanotron/checkpoint_metadata.json", b'{"version": "1.4", "tp": 2, "dp": 1, "metas": {"last_train_step": 7}}'


def _torch_checkpointing() -> Iterator[tuple[str, bytes]]:
    """Two ranks: a model in safetensors, an item that ``metadata.pkl`` does not describe, and one as JSON."""
    row = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    mesh = {"device_type": "cpu", "mesh_shape": (2,), "mesh_data": (0, 1), "mesh_dim_names": ("dp",)}
    cut = {"dtype": "torch.float32", "global_shape": (2, 3), "mesh_spec": mesh}
    cut["placements"] = [{"type": "Shard", "dim": 0}]
    boxes = {"dtype": "torch.float32", "global_shape": (3,), "global_offsets": [(0,)], "local_offsets": [(0,)]}
    boxes["local_sizes"] = [(3,)]
    described = {
        '["w"]': [{"ranks": [0, 1], "sharding_metadata": {"type": "DTensorShardingMetadata", "data": cut}}],
        '["b", 0]': [{"ranks": [0], "sharding_metadata": {"type": "default_tensor_v1", "data": boxes}}],
    }
    model = {"rank_to_layout_info": {}, "nested_path_to_metadata": described}
    config = {"rank_to_layout_info": {}, "nested_path_to_metadata": {}}
    for rank in (0, 1):
        for item, ending, form in ((model, "model_{}.safetensors", "Safetensors"), (config, "c_{}.json", "Json")):
            layout = {"file_path": ending.format(rank), "serialization_format": {"type": f"{form}Serialization"}}
            item["rank_to_layout_info"][rank] = layout  # type: ignore[index]
        tensors = {"w": row[rank : rank + 1].clone(), **({"b.0": row[0].clone()} if rank == 0 else {})}
        yield f"torch_checkpointing/model_{rank}.safetensors", safetensors.torch.save(tensors, {})
        yield f"torch_checkpointing/c_{rank}.json", b'{"a": 1}'
        yield f"torch_checkpointing/step_{rank}.pt", packed(_saved(7), checked=True)
    metadata = {"version": "2.0", "world_size": 2, "metadata": {"model": model, "c": config}}
    yield "torch_checkpointing/metadata.pkl", pickle.dumps(metadata)
    paths = {
        json.dumps(["model", *json.loads(path)], separators=(",", ":")): groups for path, groups in described.items()
    }
    layouts = {rank: {"model": layout} for rank, layout in model["rank_to_layout_info"].items()}
    first = {"version": "1.0", "world_size": 2, "metadata": paths, "rank_to_layout_info_mappings": layouts}
    yield "torch-checkpointing-checkpoint/1.0", pickle.dumps(first)


def main(target: str) -> None:
    torch.manual_seed(5)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:

        def add(name: str, data: bytes) -> None:
            out.writestr(zipfile.ZipInfo(name), data, compress_type=zipfile.ZIP_DEFLATED)

        tensors = [torch.arange(4.0), torch.tensor(3), torch.ones(2, 2, dtype=torch.bfloat16).t()]
        for number, value in enumerate([*_values(), *_distributed()]):
            saved = _saved(value)
            add(f"pickle/{number}", pickle_in(saved))
            add(f"torch/{number}", packed(saved, checked=False))
            add(f"torch/{number}-checked", packed(saved, checked=True))
        for number, tensor in enumerate(tensors):
            add(f"dcp-item/{number}", packed(_saved(tensor), checked=False))
            add(f"dcp-item/{number}-checked", packed(_saved(tensor), checked=True))
            add(f"dcp-item/{number}-whole", _saved(tensor))
        for number, data in enumerate(_metadata()):
            add(f"dcp-metadata/{number}", data)
        for name, data in _directory():
            add(f"directory/{name}", data)
        for name, data in _megatron():
            add(name, data)
        for name, value in (*_deepspeed(), *tiny_parallel.files()):
            add(name, packed(_saved(value), checked=True))
        for name, data in (*_nanotron(), *_torch_checkpointing()):
            add(name, data)


if __name__ == "__main__":
    main(sys.argv[1])
