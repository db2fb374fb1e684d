"""What the ranks of ``scripts/demo`` do: ``torchrun scripts/demo_worker.py train|check|train1|check1 DIRECTORY``.

train: a few steps of a small transformer under FSDP, saved to DIRECTORY/dcp, DIRECTORY/ranks and, gathered by PyTorch
itself, DIRECTORY/truth.pt.
check: load DIRECTORY/checked/on-3 into FSDP on any number of ranks; compare it, and DIRECTORY/full.pt, with truth.pt.
train1, check1: the same with FSDP1's flat parameters: saves DIRECTORY/flat; loads the weights of
DIRECTORY/flat-full.pt and each rank's optimizer of DIRECTORY/checked/flat-on-3.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdpckpt

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 1003, 96, 4, 4, 32  # 1003 rows: neither 4 nor 3 ranks divide them


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.before(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(self.after(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.norm(x))


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"  {text}", flush=True)


def sharded(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Transformer()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def flat(seed: int) -> tuple[FullyShardedDataParallel, torch.optim.Optimizer]:
    """FSDP1: the parameters of each block, and those of the rest, are one flat parameter cut over the ranks."""
    torch.manual_seed(seed)
    wrap, device = ModuleWrapPolicy({Block}), torch.device("cpu")
    model = FullyShardedDataParallel(Transformer(), auto_wrap_policy=wrap, device_id=device)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def full1(model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    settings = FullStateDictConfig(offload_to_cpu=False), FullOptimStateDictConfig(offload_to_cpu=False)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, *settings):
        return {"model": model.state_dict(), "optimizer": FullyShardedDataParallel.optim_state_dict(model, optimizer)}


def local(model: FullyShardedDataParallel) -> Any:
    return FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig())


def train1(directory: str) -> None:
    model, optimizer = flat(seed=0)
    rank, world = dist.get_rank(), dist.get_world_size()
    fit(model, optimizer)
    os.makedirs(f"{directory}/flat", exist_ok=True)
    with local(model):
        torch.save(model.state_dict(), f"{directory}/flat/model_world_size_{world}_rank_{rank}.pt")
    torch.save(optimizer.state_dict(), f"{directory}/flat/optim_world_size_{world}_rank_{rank}.pt")
    fsdpckpt.save_units(model, optimizer, f"{directory}/flat/units.json")
    truth = full1(model, optimizer)
    if rank == 0:
        torch.save(truth, f"{directory}/truth1.pt")
    say(f"saved {directory}/flat (and {directory}/truth1.pt, for the comparison at the end)")


def check1(directory: str) -> bool:
    model, optimizer = flat(seed=99)
    rank, world = dist.get_rank(), dist.get_world_size()
    name = f"world_size_{world}_rank_{rank}.pt"
    full = torch.load(f"{directory}/flat-full.pt", weights_only=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(full["model"])
    optimizer.load_state_dict(torch.load(f"{directory}/checked/flat-on-3/optim_{name}", weights_only=True))
    say(f"loaded flat-full.pt (weights) and checked/flat-on-3 (optimizer) into FSDP1 on {world} ranks; gathering both")
    truth = torch.load(f"{directory}/truth1.pt", weights_only=True)
    return compare("what 3 ranks hold against what 4 ranks held", full1(model, optimizer), truth)


def train(directory: str) -> None:
    model, optimizer = sharded(seed=0)
    rank, world = dist.get_rank(), dist.get_world_size()
    fit(model, optimizer)
    save(directory, model, optimizer, rank, world)


def fit(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    count = sum(p.numel() for p in Transformer().parameters())
    say(f"{count:,} parameters, {type(model).__name__} on {dist.get_world_size()} ranks, AdamW")
    for number in range(1, 6):
        start = torch.randint(VOCABULARY, (8, 1), generator=generator)
        tokens = (start + 7 * torch.arange(LENGTH + 1)) % VOCABULARY  # counting in sevens can be learnt
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(f"step {number}: loss {loss.item():.4f}")


def save(directory: str, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int) -> None:
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=f"{directory}/dcp")
    os.makedirs(f"{directory}/ranks", exist_ok=True)
    torch.save(weights, f"{directory}/ranks/model_world_size_{world}_rank_{rank}.pt")
    torch.save(states, f"{directory}/ranks/optim_world_size_{world}_rank_{rank}.pt")
    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        torch.save({"model": weights, "optimizer": states}, f"{directory}/truth.pt")
    say(f"saved {directory}/dcp and {directory}/ranks (and {directory}/truth.pt, for the comparison at the end)")


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, value
        return
    for key, child in items:
        yield from leaves(child, f"{path}.{key}" if path else str(key))


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b


def compare(what: str, found: dict[str, Any], truth: dict[str, Any]) -> bool:
    ours, theirs = dict(leaves(found)), dict(leaves(truth))
    unequal = sorted(key for key in ours.keys() | theirs.keys() if not equal(ours.get(key), theirs.get(key, ...)))
    tensors = [value for value in theirs.values() if isinstance(value, Tensor)]
    values = sum(value.numel() for value in tensors)
    verdict = "every one equal" if not unequal else f"{len(unequal)} DIFFER, first {unequal[0]}"
    say(f"{what}: {len(tensors)} tensors with {values:,} values, {len(theirs) - len(tensors)} settings: {verdict}")
    return not unequal


def check(directory: str) -> bool:
    truth = torch.load(f"{directory}/truth.pt", weights_only=True)
    model, optimizer = sharded(seed=99)  # other weights, and an optimizer that has never stepped
    weights, states = get_state_dict(model, optimizer)
    content = {"model": weights, "optimizer": states}
    dcp.load(content, checkpoint_id=f"{directory}/checked/on-3")
    set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
    say(f"loaded {directory}/checked/on-3 into FSDP on {dist.get_world_size()} ranks; now gathering it again")
    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    same = compare("what 3 ranks hold against what 4 ranks held", {"model": weights, "optimizer": states}, truth)
    full = torch.load(f"{directory}/full.pt", weights_only=True)
    return compare("full.pt against what 4 ranks held", full, truth) and same


def main() -> int:
    action, directory = sys.argv[1:]
    faulthandler.enable()
    faulthandler.dump_traceback_later(150, exit=True)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    began = time.monotonic()
    good = True
    if action in ("check", "check1"):
        good = check(directory) if action == "check" else check1(directory)
    else:
        train(directory) if action == "train" else train1(directory)
    say(f"({time.monotonic() - began:.1f} s)")
    dist.barrier()
    dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of Gloo may outlive the group, and abort the interpreter's end: "terminate called"
