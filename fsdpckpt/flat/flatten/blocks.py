"""Write the scales of bitsandbytes' 8-bit states for slices of flat parameters; see ``flat.blocks``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fsdpckpt.errors import NeedsInformationError
from fsdpckpt.flat.blocks import OTHERS, WHY, blocks_apart
from fsdpckpt.flat.flatten.pickle import FlatShard
from fsdpckpt.ir.checkpoint import ParamKey
from fsdpckpt.ir.quantized import BITSANDBYTES, block_of, scales_in
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import Unit, UnitParam
from fsdpckpt.ir.values import Value
from fsdpckpt.layouts.flattened import FlatLayout, FlatPart, layout_of
from fsdpckpt.text import listed

_TRIED = 256  # ranks, of those that a message proposes


@dataclass(frozen=True, slots=True, eq=False)
class FlatScales:
    """The scales of the parameters of one unit, or of one alone; ``block``: codes of each."""

    tensors: Sequence[Tensor]
    block: int

    def shard(self, parts: Iterable[FlatPart]) -> FlatShard:
        """Those of the slice that ``parts`` are."""
        own = [replace(part, begin=part.begin // self.block, count=-(-part.count // self.block)) for part in parts]
        params = [UnitParam("", tensor.shape, tensor.dtype) for tensor in self.tensors]
        return FlatShard(params, self.tensors, own, self.tensors[0].dtype, sum(part.count for part in own))


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """The parameters of one unit that have 8-bit states, and the codes of a block; None where no size fits."""

    unit: Unit
    params: frozenset[str]
    block: int | None

    @classmethod
    def of(cls, unit: Unit, state: Mapping[ParamKey, Mapping[str, Tensor | Value]]) -> Quantized:
        lengths = {
            param.name: [
                (param.numel, leaf.numel) for scale in scales_in(states) if isinstance(leaf := states[scale], Tensor)
            ]
            for param in unit.params
            if (states := state.get(param.name, {}))
        }
        block = block_of(pair for pairs in lengths.values() for pair in pairs)
        return cls(unit, frozenset(name for name, pairs in lengths.items() if pairs), block)

    def apart(self, layout: FlatLayout, *, orig: bool) -> Iterator[str]:
        """What lies inside of a block in ``layout``."""
        if not self.params:
            return
        if self.block is None:
            yield f"unit {self.unit.prefix or 'root'!r}: the numbers of codes and of scales fit no size of a block"
            return
        yield from blocks_apart(self.unit, layout, self.block, self.params, orig=orig)
        for rank in range(layout.shards) if not orig else ():
            begin, end = layout.held(rank)
            if end - begin < layout.shard and (end - begin) % self.block:  # a code of zero is no value of zero
                yield f"unit {self.unit.prefix or 'root'!r}: padding of rank {rank} begins inside of a block"


def require_whole_blocks(
    quantized: Sequence[Quantized], layouts: Mapping[str, FlatLayout], *, orig: bool, source: str
) -> None:
    """Raises NeedsInformationError where slices of a target with ``layouts`` (by unit) would cut a block."""
    wrong = [text for one in quantized for text in one.apart(layouts[one.unit.key], orig=orig)]
    if not wrong:
        return
    works = [
        size
        for size in range(1, _TRIED + 1)
        if not any(
            next(
                one.apart(layout_of(one.unit, use_orig_params=orig, world_size=size, shard_size=size), orig=orig), None
            )
            for one in quantized
        )
    ]
    raise NeedsInformationError(
        f"{source}: slices of the target would cut blocks of {BITSANDBYTES}' 8-bit states",
        details=wrong,
        why=f"{WHY}, which changes values",
        next_step=f"--world-size with a number that works for all states: {listed(works)}" if works else OTHERS,
    )
