"""The scales of bitsandbytes' 8-bit states in slices of flat parameters: one scale for each block of a rank's slice.

If every slice begins with a block of its parameter, the scales of other slices are slices of these. Otherwise the
states would have to be quantized again, and are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fsdpckpt.errors import NeedsInformationError, SourceUnsupportedError
from fsdpckpt.ir.checkpoint import ParamKey
from fsdpckpt.ir.quantized import BITSANDBYTES, block_of, scales_in
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.units import Unit, UnitParam
from fsdpckpt.ir.values import Value
from fsdpckpt.layouts.flattened import FlatLayout, layout_of
from fsdpckpt.text import listed

_WHY = f"{BITSANDBYTES} keeps one scale for each block of a rank's slice: other blocks would have to be quantized again"
_OTHERS = (
    f"--only model converts the model alone; {BITSANDBYTES}' 32-bit optimizers are carried for every number of ranks"
)


def _blocks_apart(unit: Unit, layout: FlatLayout, block: int, params: Collection[str], *, orig: bool) -> Iterator[str]:
    """Each slice of ``params`` that does not begin with a block of its parameter and of the rank's vector.

    ``orig``: use_orig_params=True, where each parameter is a separate vector.
    """
    slices = layout.slices()
    for rank, index, begin, at in zip(
        slices.rank.tolist(), slices.param.tolist(), slices.begin.tolist(), slices.offset.tolist(), strict=True
    ):
        param = unit.params[index]
        if param.name not in params:
            continue
        if param.order is not None:
            yield f"{param.name} is not row-major"
        elif begin % block:
            yield f"{param.name}: the slice of rank {rank} begins at element {begin}, no multiple of {block}"
        elif at % block and not orig:
            yield f"{param.name}: begins at element {at} of the slice of rank {rank}, no multiple of {block}"


def read_scales(
    unit: Unit, layout: FlatLayout, params: Sequence[UnitParam], leaf: Tensor, codes: Tensor, *, orig: bool
) -> dict[str, Tensor]:
    """The scales of each of ``params`` from the slices ``leaf`` of all of them. Raises SourceUnsupportedError."""
    held = dict(zip(codes.chunks.rank.tolist(), codes.chunks.size.prod(axis=1).tolist(), strict=True))
    rows = list(
        zip(*(column.tolist() for column in (leaf.chunks.rank, leaf.chunks.file, leaf.chunks.offset)), strict=True)
    )
    sizes = leaf.chunks.size[:, 0].tolist()
    block = block_of((held.get(row[0], 0), size) for row, size in zip(rows, sizes, strict=True))
    names = {param.name for param in params}
    wrong = (
        [f"{unit}: the numbers of codes and of scales fit no size of a block"]
        if block is None
        else list(_blocks_apart(unit, layout, block, names, orig=orig))
    )
    if wrong or block is None:
        raise SourceUnsupportedError(
            f"slices begin inside of blocks of {BITSANDBYTES}' 8-bit states",
            details=wrong,
            why=f"{_WHY}, which changes values",
            next_step=_OTHERS,
        )
    slices = layout.slices()
    slice_of = {
        (rank, index): place
        for rank, index, *place in zip(
            *(c.tolist() for c in (slices.rank, slices.param, slices.begin, slices.count, slices.offset)), strict=True
        )
    }
    made: dict[str, Tensor] = {}
    for index, param in enumerate(unit.params):
        if param.name not in names:
            continue
        located = []
        for rank, file, offset in rows:
            begin, count, at = slice_of.get((rank % layout.shards, index), (0, 0, 0))
            if count:
                skipped = 0 if orig else at // block
                located.append((rank, file, offset + skipped * leaf.dtype.itemsize, begin // block, -(-count // block)))
        columns = list(zip(*located, strict=True)) or [()] * 5
        chunks = Chunks.rows(
            ndim=1, rank=columns[0], file=columns[1], offset=columns[2],
            start=[(start,) for start in columns[3]], size=[(size,) for size in columns[4]],
        )  # fmt: skip
        made[param.name] = Tensor(leaf.dtype, (-(-param.numel // block),), chunks, sharded=True, placement="flattened")
    return made


_TRIED = 256  # how many numbers of ranks a message proposes


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """The parameters of one unit that have 8-bit states, and the number of codes in a block; None if no size fits."""

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

    def partial_blocks(self, layout: FlatLayout, *, orig: bool) -> Iterator[str]:
        """The slices of ``layout`` that begin or end inside a block."""
        if not self.params:
            return
        if self.block is None:
            yield f"{self.unit}: the numbers of codes and of scales fit no size of a block"
            return
        yield from _blocks_apart(self.unit, layout, self.block, self.params, orig=orig)
        for rank in range(layout.shards) if not orig else ():
            begin, end = layout.held(rank)
            if end - begin < layout.shard and (end - begin) % self.block:  # a code of zero is not a value of zero
                yield f"{self.unit}: padding of rank {rank} begins inside of a block"


def require_whole_blocks(
    quantized: Sequence[Quantized], layouts: Mapping[str, FlatLayout], *, orig: bool, source: str
) -> None:
    """Raises NeedsInformationError if slices of a target with ``layouts`` (by unit) would cut a block."""
    wrong = [text for one in quantized for text in one.partial_blocks(layouts[one.unit.key], orig=orig)]
    if not wrong:
        return
    works = [
        size
        for size in range(1, _TRIED + 1)
        if not any(
            next(
                one.partial_blocks(
                    layout_of(one.unit, use_orig_params=orig, world_size=size, shard_size=size), orig=orig
                ),
                None,
            )
            for one in quantized
        )
    ]
    raise NeedsInformationError(
        f"{source}: slices of the target would cut blocks of {BITSANDBYTES}' 8-bit states",
        details=wrong,
        why=f"{_WHY}, which changes values",
        next_step=f"--world-size with a number that works for all states: {listed(works)}" if works else _OTHERS,
    )
