"""Flattened checkpoints in memory, made the naive way: numpy concatenates, pads and cuts, as formats of FSDP1 say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from fsdpckpt.ir.checkpoint import Checkpoint, Container, Layout, ModelState, Origin
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.files import Stored
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.placements import Shard, Sharded, Slices
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.unit_lists import units_of_lists
from fsdpckpt.ir.units import Strategy, Unit, Units

FLOAT = DTYPES["float32"]


def unit(prefix: str, shapes: Mapping[str, tuple[int, ...]], **more: object) -> Unit:
    lead = f"{prefix}." if prefix else ""
    return Unit(prefix, tuple(Parameter(lead + name, shape, FLOAT) for name, shape in shapes.items()), **more)


def units_of(*units: Unit, use_orig_params: bool, **more: object) -> Units:
    names = tuple(param.name for one in units for param in one.params)
    return units_of_lists(units, more.pop("parameters", names), use_orig_params=use_orig_params, **more)  # type: ignore[arg-type]


@dataclass
class Played:
    """Per-rank bytes, and a description of them as the reader gives it. ``files`` are bytes, one a rank."""

    units: Units
    world_size: int
    seed: int = 7
    data: list[bytearray] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = np.random.default_rng(self.seed)
        self.data = [bytearray(self.generator.bytes(64)) for _ in range(self.world_size)]

    def values(self, param: Parameter) -> np.ndarray:
        return self.generator.standard_normal(param.shape).astype(np.float32)

    def put(self, rank: int, array: np.ndarray) -> int:
        """Append an array to a rank's file; where it begins."""
        offset = len(self.data[rank])
        self.data[rank] += np.ascontiguousarray(array).tobytes() + self.generator.bytes(3)
        return offset

    def files(self) -> list[bytes]:
        return [bytes(one) for one in self.data]

    # How FSDP1 cuts, written from its rules with nothing of the package.

    def _flat(self, one: Unit, whole: Mapping[str, np.ndarray]) -> tuple[np.ndarray, dict[str, tuple[int, int]]]:
        ranks = self.ranks_of(one)
        aligned = 16 // (one.param_dtype or FLOAT).itemsize if self.units.use_orig_params else 1
        parts: list[np.ndarray] = []
        places = {}
        at = 0
        for param in one.params:
            gap = -at % aligned
            parts.append(np.full(gap, 42, np.float32))
            at += gap
            memory = whole[param.name] if param.order is None else whole[param.name].transpose(param.order)
            parts.append(memory.reshape(-1))
            places[param.name] = (at, at + memory.size)
            at += memory.size
        if self.units.use_orig_params:
            parts.append(np.full(-at % ranks, 42, np.float32))
        return np.concatenate(parts), places

    def ranks_of(self, one: Unit) -> int:
        sharded = one.strategy is not Strategy.NO_SHARD
        return (self.units.shard_size or self.world_size) if sharded else self.world_size

    def is_cut(self, one: Unit) -> bool:
        return one.strategy is not Strategy.NO_SHARD and self.ranks_of(one) > 1

    def shard_of(self, one: Unit, flat: np.ndarray, rank: int) -> tuple[np.ndarray, int]:
        """The rank's shard, zeros behind its end included, and where it begins."""
        size = self.ranks_of(one)
        if not self.is_cut(one):
            return flat, 0
        step = -(-len(flat) // size)
        begin = rank % size * step
        own = flat[begin : begin + step]
        return np.concatenate([own, np.zeros(step - len(own), np.float32)]), begin

    def slices(self, chunks: Mapping[int, np.ndarray]) -> Tensor:
        ranks = list(chunks)
        sizes = [len(chunks[rank]) for rank in ranks]
        starts = np.cumsum([0, *sizes])[:-1].tolist()
        columns = Chunks.rows(
            ndim=1,
            rank=ranks,
            file=ranks,
            offset=[self.put(rank, chunks[rank]) for rank in ranks],
            start=[(start,) for start in starts],
            size=[(size,) for size in sizes],
        )
        return Tensor(FLOAT, (sum(sizes),), columns, sharded=True, cut=Slices())

    def replicas(self, array: np.ndarray) -> Tensor:
        ranks = range(self.world_size)
        columns = Chunks.rows(
            ndim=array.ndim,
            rank=list(ranks),
            file=list(ranks),
            offset=[self.put(rank, array) for rank in ranks],
            start=[(0,) * array.ndim] * self.world_size,
            size=[array.shape] * self.world_size,
        )
        return Tensor(FLOAT, array.shape, columns, sharded=False)

    def moment(self, whole: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """One state of all sharded parameters by optimizer key, as the ranks hold it."""
        found: dict[str, Tensor] = {}
        for one in self.units.units:
            flat, places = self._flat(one, whole)
            if not self.units.use_orig_params:
                shards = {rank: self.shard_of(one, flat, rank)[0] for rank in range(self.world_size)}
                found[one.key] = self.slices(shards)
                continue
            for param in one.params:
                begin, end = places[param.name]
                held: dict[int, np.ndarray] = {}
                for rank in range(self.world_size):
                    own, start = self.shard_of(one, flat, rank)
                    low, high = max(begin, start), min(end, start + len(own))
                    if low < high:
                        held[rank] = own[low - start : high - start]
                found[param.name] = self.slices(held)
        return found

    def flat_parameters(self, whole: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """The model as LOCAL_STATE_DICT saves it."""
        found = {}
        for one in self.units.units:
            flat, _ = self._flat(one, whole)
            rows = []
            for rank in range(self.world_size):
                own, start = self.shard_of(one, flat, rank)
                own = own[: max(0, len(flat) - start)]
                if len(own):
                    rows.append((rank, self.put(rank, own), start, len(own)))
            columns = Chunks.rows(
                ndim=1,
                rank=[row[0] for row in rows],
                file=[row[0] for row in rows],
                offset=[row[1] for row in rows],
                start=[(row[2],) for row in rows],
                size=[(row[3],) for row in rows],
            )
            found[one.key] = Tensor(FLOAT, (len(flat),), columns, sharded=True, cut=Sharded((Shard(0),)))
        return found

    def optimizer(self, states: Mapping[str, Mapping[str, object]], order: list[str]) -> Optimizer:
        """Keyed by id in the order given; ``states``: state name -> optimizer key -> value."""
        state = {}
        for number, key in enumerate(order):
            entry = {name: values[key] for name, values in states.items() if key in values}
            if entry:
                state[number] = entry
        return Optimizer.of(state, [{"lr": 0.1, "params": list(range(len(order)))}])  # type: ignore[arg-type]

    def checkpoint(self, *, model: ModelState | None = None, optim: Optimizer | None = None) -> Checkpoint:
        files = tuple(Stored(f"rank{rank}", len(data)) for rank, data in enumerate(self.data))
        return Checkpoint(
            Origin("ranks", Layout.FLATTENED, Container.TORCH, "plain", self.world_size),
            files=files,
            model=model,
            optim=optim,
            extra={},
        )
