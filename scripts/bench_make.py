"""Write checkpoints of a given size in PyTorch's own formats, without training: ``bench_make.py FORM DIRECTORY BYTES``.

FORM is ``dcp`` (run under torchrun: each rank saves its own DTensor shards), ``ranks`` (four ranks' DTensor files),
``many-ranks`` (64 ranks' DTensor files of BYTES tensors each, not bytes),
``zero`` (four ranks of DeepSpeed's ZeRO 2), ``flat`` (four ranks of FSDP1's flat shards, use_orig_params=False, with a
units file), ``full`` (one torch file), ``one-tensor`` (a DCP directory of a single tensor, run under torchrun) or
``many`` (one torch file of BYTES tensors, not bytes), ``units`` (the units file that belongs to ``full`` of that size).

The tensors are maps of one file of random bytes, so that writing 16 GB takes no 16 GB of memory.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

Shape = tuple[int, ...]
Maker = Callable[[Shape], torch.Tensor]
RANKS = 4
MANY_RANKS = 64
STATES_AND_WEIGHT = 3  # float32 weight, exp_avg, exp_avg_sq


def layer(width: int) -> dict[str, Shape]:
    """A decoder layer of a language model: four square matrices, three wide ones, two norms."""
    hidden = width * 8 // 3 // 64 * 64
    square = {f"attention.{name}.weight": (width, width) for name in ("q", "k", "v", "o")}
    wide = {"mlp.gate.weight": (hidden, width), "mlp.up.weight": (hidden, width), "mlp.down.weight": (width, hidden)}
    return {**square, **wide, "norm1.weight": (width,), "norm2.weight": (width,)}


def shapes(nbytes: int) -> dict[str, Shape]:
    """Parameters whose weights and Adam state come to about ``nbytes``."""
    elements = nbytes // (4 * STATES_AND_WEIGHT)
    width = 2048 if elements > 150_000_000 else 256
    vocabulary = min(16_001, elements // (8 * width))  # no world size divides it
    one = layer(width)
    count = max(1, round((elements - vocabulary * width) / sum(map(prod, one.values()))))
    params = {"embed.weight": (vocabulary, width)}
    for number in range(count):
        params |= {f"layers.{number}.{name}": shape for name, shape in one.items()}
    return {**params, "norm.weight": (width,)}


class RandomFile:
    """Tensors mapped from one file of random float32."""

    def __init__(self, path: str, elements: int) -> None:
        self.path = path
        if os.path.exists(path) and os.path.getsize(path) >= 4 * elements:
            return
        generator = torch.Generator().manual_seed(1)
        with open(path, "wb") as file:
            for begin in range(0, elements, 1 << 24):
                block = torch.randn(min(1 << 24, elements - begin), generator=generator)
                file.write(memoryview(block.numpy()).cast("B"))

    def tensor(self, shape: Shape) -> torch.Tensor:
        if prod(shape) == 0:
            return torch.empty(shape)
        return torch.from_file(self.path, shared=False, size=prod(shape)).view(shape)


def state_dicts(params: dict[str, Shape], make: Callable[[Shape], torch.Tensor]) -> dict[str, Any]:
    def entry(shape: Shape) -> dict[str, torch.Tensor]:
        return {"step": torch.tensor(1000.0), "exp_avg": make(shape), "exp_avg_sq": make(shape)}

    group = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False}
    return {
        "model": {name: make(shape) for name, shape in params.items()},
        "optimizer": {
            "state": {name: entry(shape) for name, shape in params.items()},
            "param_groups": [{**group, "params": list(params)}],
        },
    }


def shard_maker(
    take: Callable[[Shape], torch.Tensor], rank: int, ranks: int = RANKS
) -> Callable[[Shape], torch.Tensor]:
    """Makes DTensors whose local chunk is the one that FSDP would give this rank."""
    mesh = init_device_mesh("cpu", (ranks,))

    def make(shape: Shape) -> torch.Tensor:
        chunk = -(-shape[0] // ranks)
        rows = max(0, min(chunk, shape[0] - rank * chunk))
        local = take((rows, *shape[1:]))
        stride = tuple(prod(shape[dimension + 1 :]) for dimension in range(len(shape)))
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)

    return make


def make_dcp(directory: str, params: dict[str, Shape], data_path: str, *, optimizer: bool) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    largest = max(map(prod, params.values()))
    if rank == 0:
        RandomFile(data_path, largest)
    dist.barrier()
    content = state_dicts(params, shard_maker(RandomFile(data_path, largest).tensor, rank))
    dcp.save(content if optimizer else {"model": content["model"]}, checkpoint_id=directory)
    dist.barrier()
    dist.destroy_process_group()


def make_ranks(directory: str, params: dict[str, Shape], take: Maker, ranks: int = RANKS) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.makedirs(directory, exist_ok=True)
    for rank in range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        content = state_dicts(params, shard_maker(take, rank, ranks))
        torch.save(content["model"], f"{directory}/model_world_size_{ranks}_rank_{rank}.pt")
        torch.save(content["optimizer"], f"{directory}/optim_world_size_{ranks}_rank_{rank}.pt")
        dist.destroy_process_group()


def make_zero(directory: str, params: dict[str, Shape], data_path: str) -> None:
    """A step of DeepSpeed's ZeRO 2 with bf16, as its ``save_checkpoint`` writes it, without DeepSpeed."""
    os.makedirs(directory, exist_ok=True)
    part = -(-sum(map(prod, params.values())) // (2 * RANKS)) * 2
    data = RandomFile(data_path, part)
    group = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": [0]}
    entry = {"step": torch.tensor(1000.0), "exp_avg": data.tensor((part,)), "exp_avg_sq": data.tensor((part,))}
    states = {
        "zero_stage": 2,
        "base_optimizer_state": {"state": {0: entry}, "param_groups": [group]},
        "single_partition_of_fp32_groups": [data.tensor((part,))],
        "group_paddings": [0],
        "partition_count": [RANKS],
        "ds_version": "0.19.8",
    }
    content = {"optimizer_state_dict": states, "ds_config": {}, "ds_version": "0.19.8"}
    for rank in range(RANKS):
        torch.save(content, f"{directory}/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    module = {
        "module": {name: data.tensor(shape).bfloat16() for name, shape in params.items()},
        "param_shapes": [{name: torch.Size(shape) for name, shape in params.items()}],
        **{key: {} for key in ("buffer_names", "frozen_param_shapes", "frozen_param_fragments", "shared_params")},
        "ds_version": "0.19.8",
    }
    torch.save(module, f"{directory}/mp_rank_00_model_states.pt")


def units_of(params: dict[str, Shape]) -> dict[str, list[str]]:
    """One unit per layer, and the root with the rest, as ModuleWrapPolicy makes them for the layer class."""
    units: dict[str, list[str]] = {"": []}
    for name in params:
        prefix = ".".join(name.split(".")[:2]) if name.startswith("layers.") else ""
        units.setdefault(prefix, []).append(name)
    return units


def make_flat(directory: str, params: dict[str, Shape], data_path: str) -> None:
    from torch.distributed._shard.sharded_tensor import Shard as LocalShard
    from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata, TensorProperties
    from torch.distributed._shard.sharding_spec import ShardMetadata
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.makedirs(directory, exist_ok=True)
    units = units_of(params)
    totals = {prefix: sum(prod(params[name]) for name in names) for prefix, names in units.items()}
    data = RandomFile(data_path, -(-max(totals.values()) // RANKS))
    for rank in range(RANKS):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        model: dict[str, Any] = {}
        state: dict[int, Any] = {}
        for number, (prefix, total) in enumerate(totals.items()):
            shard = -(-total // RANKS)
            sizes = [max(0, min(shard, total - other * shard)) for other in range(RANKS)]
            shards = [ShardMetadata([other * shard], [size], f"rank:{other}/cpu") for other, size in enumerate(sizes)]
            metadata = ShardedTensorMetadata(shards, torch.Size([total]), TensorProperties(dtype=torch.float32))
            local = [LocalShard(data.tensor((sizes[rank],)), shards[rank])]
            key = f"{prefix}._flat_param" if prefix else "_flat_param"
            model[key] = ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata)
            moments = {name: data.tensor((shard,)) for name in ("exp_avg", "exp_avg_sq")}
            state[number] = {"step": torch.tensor(1000.0), **moments}
        optimizer = {"state": state, "param_groups": [{"lr": 1e-4, "betas": (0.9, 0.95), "params": list(state)}]}
        torch.save(model, f"{directory}/model_world_size_{RANKS}_rank_{rank}.pt")
        torch.save(optimizer, f"{directory}/optim_world_size_{RANKS}_rank_{rank}.pt")
        dist.destroy_process_group()
    write_units(params, f"{directory}/units.json")


def write_units(params: dict[str, Shape], path: str) -> None:
    """What ``fsdpckpt.save_units`` would write for a model of these parameters."""
    from fsdpckpt.ir.dtypes import DTYPES
    from fsdpckpt.ir.parameters import Parameter
    from fsdpckpt.ir.unit_lists import units_of_lists
    from fsdpckpt.ir.units import Unit
    from fsdpckpt.ir.units_json import encode

    units = []
    for prefix, names in units_of(params).items():
        units.append(Unit(prefix, tuple(Parameter(name, params[name], DTYPES["float32"]) for name in names)))
    with open(path, "w") as file:
        json.dump(encode(units_of_lists(tuple(units), use_orig_params=False, parameters=tuple(params))), file)


def make_nanotron(directory: str, params: dict[str, Shape]) -> None:
    """A step of nanotron with ``RANKS`` tensor-parallel ranks, as its ``serialize`` writes it, without nanotron."""
    from safetensors.torch import save_file

    os.makedirs(f"{directory}/optimizer")
    for name, (rows, columns) in params.items():
        folder = f"{directory}/model/{name.rpartition('.')[0].replace('.', '/')}"
        os.makedirs(folder, exist_ok=True)
        for rank in range(RANKS):
            begin, end = rank * rows, (rank + 1) * rows
            slices = {
                "version": "1.4",
                "local_global_slices_pairs": f"0,{rows},None|None,None,None#{begin},{end},None|None,None,None",
                "unsharded_shape": str((RANKS * rows, columns)),
            }
            path = f"{folder}/model_weight_pp-rank-0-of-1_tp-rank-{rank}-of-{RANKS}.safetensors"
            save_file({"data": torch.randn(rows, columns)}, path, metadata=slices)
    for rank in range(RANKS):
        states = {
            number: {"step": torch.tensor(9.0), "exp_avg": torch.randn(shape), "exp_avg_sq": torch.rand(shape)}
            for number, shape in enumerate(params.values())
        }
        group = {"lr": 1e-4, "params": list(states)}
        saved = {"state": states, "param_groups": [group], "names": dict(enumerate(params))}
        torch.save(saved, f"{directory}/optimizer/optimizer_pp-0-of-1_tp-{rank}-of-{RANKS}_exp-0-of-1.pt")
    with open(f"{directory}/checkpoint_metadata.json", "w") as file:
        json.dump({"version": "1.4", "tp": RANKS, "dp": 1, "metas": {"last_train_step": 9}}, file)


def many(count: int) -> Iterator[tuple[str, Shape]]:
    for number in range(count // (STATES_AND_WEIGHT + 1)):  # and a 0-dim step
        yield f"layers.{number // 10}.part{number % 10}.weight", (5 + number % 7, 16)


def main() -> None:
    form, path, amount = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    data_path = os.path.join(os.path.dirname(os.path.abspath(path)), "random.bin")
    if form == "one-tensor":
        make_dcp(path, {"huge.weight": (int(amount) // 4096, 1024)}, data_path, optimizer=False)
    elif form == "many":
        torch.save(state_dicts(dict(many(int(amount))), torch.randn), path)
    elif form == "nanotron":
        make_nanotron(path, dict(many(int(amount))))
    elif form == "many-ranks":
        make_ranks(
            path, {name: (MANY_RANKS * rows, 16) for name, (rows, _) in many(int(amount))}, torch.randn, MANY_RANKS
        )
    elif form == "dcp":
        make_dcp(path, shapes(int(amount)), data_path, optimizer=True)
    else:
        params = shapes(int(amount))
        data = RandomFile(data_path, max(map(prod, params.values())))
        if form == "units":
            write_units(params, path)
        elif form == "flat":
            make_flat(path, params, data_path)
        elif form == "zero":
            make_zero(path, params, data_path)
        elif form == "ranks":
            make_ranks(path, params, data.tensor)
        else:
            torch.save(state_dicts(params, data.tensor), path)


if __name__ == "__main__":
    main()
