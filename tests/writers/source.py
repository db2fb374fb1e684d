"""Source checkpoints made by hand: torch tensors laid into raw bytes, as whole chunks, shards, replicas or views."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from fsdpckpt.ir.checkpoint import Checkpoint, Container, Layout, ModelState, Origin
from fsdpckpt.ir.dtypes import DTYPES, DType
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.placements import Shard, Sharded
from fsdpckpt.ir.tensors import Chunks, Tensor


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order, whatever the dtype."""
    if not tensor.numel():
        return b""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def random_tensor(dtype: torch.dtype, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Random bits that are no zeros, of any dtype (bools are 0 or 1)."""
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(
        0 if dtype is torch.bool else 1, 2 if dtype is torch.bool else 100, (count,), generator=generator
    )
    return data.to(torch.uint8).view(dtype).reshape(shape)


class Raw:
    """One source file growing in memory."""

    def __init__(self) -> None:
        self.data = bytearray()

    @property
    def files(self) -> list[bytes]:
        return [bytes(self.data)]

    def _append(self, data: bytes) -> int:
        self.data += b"\xaa" * 3  # so that nothing is aligned by luck
        offset = len(self.data)
        self.data += data
        return offset

    def whole(self, tensor: torch.Tensor, *, sharded: bool | None = None) -> Tensor:
        """A row-major copy."""
        shape = tuple(tensor.shape)
        chunks = Chunks.whole(file=0, offset=self._append(raw_bytes(tensor)), shape=shape)
        return Tensor(_dtype(tensor), shape, chunks, sharded=sharded)

    def views(self, *tensors: torch.Tensor) -> list[Tensor]:
        """Views of one torch storage, sharing memory here as they do there."""
        storage = tensors[0].untyped_storage()
        offset = self._append(bytes(torch.tensor([], dtype=torch.uint8).set_(storage).numpy()))
        found = []
        for tensor in tensors:
            shape = tuple(tensor.shape)
            at = offset + tensor.storage_offset() * tensor.dtype.itemsize
            found.append(
                Tensor(_dtype(tensor), shape, Chunks.whole(file=0, offset=at, shape=shape, stride=tensor.stride()))
            )
        return found

    def sharded(self, tensor: torch.Tensor, ranks: int, *, replicas: int = 1) -> Tensor:
        """Rows cut by torch.chunk over ``ranks``, the whole repeated ``replicas`` times."""
        rank, offset, start, size = [], [], [], []
        for number in range(ranks * replicas):
            chunks = tensor.chunk(ranks)
            index = number % ranks
            local = chunks[index] if index < len(chunks) else tensor[:0]
            rank.append(number)
            offset.append(self._append(raw_bytes(local)))
            start.append([sum(len(chunk) for chunk in chunks[:index]), *[0] * (tensor.ndim - 1)])
            size.append(list(local.shape))
        chunks = Chunks.rows(ndim=tensor.ndim, rank=rank, file=[0] * len(rank), offset=offset, start=start, size=size)
        return Tensor(_dtype(tensor), tuple(tensor.shape), chunks, sharded=True, cut=Sharded((Shard(0),)))


def _dtype(tensor: torch.Tensor) -> DType:
    return DTYPES[str(tensor.dtype).removeprefix("torch.")]


def checkpoint(
    model: dict[str, Any] | None = None,
    optim: Optimizer | None = None,
    extra: dict[Any, Any] | None = None,
    **more: Any,
) -> Checkpoint:
    metadata = more.pop("metadata", None)
    of_origin = {name: more.pop(name) for name in ("mesh_devices", "nesting") if name in more}
    return Checkpoint(
        Origin("made by hand", Layout.FULL, Container.TORCH, "plain", more.pop("world_size", 1), **of_origin),
        files=(),
        model=None if model is None else ModelState(model, metadata),
        optim=optim,
        extra={} if extra is None else extra,
        **more,
    )


class Trained:
    """A model and its Adam state, as torch holds them (``weights``, ``states``) and as a checkpoint over ``raw``."""

    SHAPES = {"emb.weight": (17, 9), "l.0.weight": (5, 3), "l.0.bias": (5,), "tiny": (1, 4), "head": (2, 3, 2)}  # noqa: RUF012

    def __init__(self, *, seed: int, key_type: str = "name", ranks: int | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.raw = Raw()
        self.weights: dict[str, torch.Tensor] = OrderedDict()
        self.states: dict[Any, dict[str, torch.Tensor]] = {}

        def store(tensor: torch.Tensor) -> Tensor:
            return self.raw.whole(tensor, sharded=True) if ranks is None else self.raw.sharded(tensor, ranks)

        params: dict[str, Any] = {}
        state: dict[Any, Any] = {}
        for number, (name, shape) in enumerate(self.SHAPES.items()):
            key = name if key_type == "name" else number
            self.weights[name] = torch.randn(shape, generator=generator).to(
                torch.bfloat16 if number == 1 else torch.float32
            )
            moments = {n: torch.randn(shape, generator=generator) for n in ("exp_avg", "exp_avg_sq")}
            self.states[key] = {"step": torch.tensor(float(number + 3)), **moments}
            params[name] = store(self.weights[name])
            step = self.raw.whole(self.states[key]["step"], sharded=False)
            state[key] = {"step": step, **{n: store(moment) for n, moment in moments.items()}}
        self.weights["steps_seen"] = torch.randint(1, 99, (3,), generator=generator)
        params["steps_seen"] = self.raw.whole(self.weights["steps_seen"], sharded=False)
        keys = list(self.states)
        self.groups = [
            {"params": keys[:2], "lr": 0.003, "betas": (0.9, 0.95), "foreach": None},
            {"params": keys[2:], "lr": 0.1, "betas": (0.8, 0.99), "foreach": True},
        ]
        optim = Optimizer.of(state, [dict(group) for group in self.groups])
        self.checkpoint = checkpoint(params, optim, {"epoch": 7}, world_size=ranks or 1)
