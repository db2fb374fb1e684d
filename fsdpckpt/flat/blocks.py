"""The blocks of bitsandbytes' 8-bit states in slices of flat parameters: one scale for each block of a rank's slice.

If every slice begins with a block of its parameter, the scales of other slices are slices of these. Otherwise the
states would have to be quantized again, and are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fsdpckpt import flags
from fsdpckpt.errors import NeedsInformationError, SourceUnsupportedError
from fsdpckpt.ir.bitsandbytes import BITSANDBYTES, block_of
from fsdpckpt.ir.optimizer import ParamKey
from fsdpckpt.ir.state_parts import state_parts
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import Unit
from fsdpckpt.ir.values import Value
from fsdpckpt.layouts.flattened import FlatLayout, layout_of
from fsdpckpt.text import listed

_WHY = (
    f"{BITSANDBYTES} keeps one scale for each block of a rank's slice: other blocks would have to be quantized again, "
    "which changes values"
)
_OTHERS = (
    f"{flags.only('model')} converts the model alone; {BITSANDBYTES}' 32-bit optimizers can be converted for any "
    "number of ranks"
)


def require_aligned_blocks(
    unit: Unit, layout: FlatLayout, params: Collection[str], lengths: Sequence[tuple[int, int]], *, orig: bool
) -> int:
    """The number of codes in a block of the states of ``params``, from ``lengths``: codes and scales of each slice.

    Raises SourceUnsupportedError if slices begin inside blocks.
    """
    block = block_of(lengths)
    wrong = [_no_block(unit)] if block is None else list(_misaligned_slices(unit, layout, block, params, orig=orig))
    if wrong or block is None:
        raise SourceUnsupportedError(
            f"slices begin inside blocks of {BITSANDBYTES}' 8-bit states",
            details=wrong,
            why=_WHY,
            next_step=_OTHERS,
        )
    return block


def _no_block(unit: Unit) -> str:
    return f"{unit}: the numbers of codes and of scales fit no size of a block"


def _misaligned_slices(
    unit: Unit, layout: FlatLayout, block: int, params: Collection[str], *, orig: bool
) -> Iterator[str]:
    """Each slice of ``params`` that does not begin with a block of its parameter and of the rank's vector.

    ``orig``: use_orig_params=True, where each parameter is a separate vector.
    """
    slices = layout.slices()
    for rank, index, begin, offset in zip(
        slices.rank.tolist(), slices.param.tolist(), slices.begin.tolist(), slices.offset.tolist(), strict=True
    ):
        param = unit.params[index]
        if param.name not in params:
            continue
        if param.order is not None:
            yield f"{param.name} is not row-major"
        elif begin % block:
            yield f"{param.name}: the slice of rank {rank} begins at element {begin}, no multiple of {block}"
        elif offset % block and not orig:
            yield f"{param.name}: begins at element {offset} of the slice of rank {rank}, no multiple of {block}"


_TRIED = 256  # how many numbers of ranks a message proposes


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedUnit:
    """The parameters of one unit that have 8-bit states, and the number of codes in a block; None if no size fits."""

    unit: Unit
    params: frozenset[str]
    block: int | None

    @classmethod
    def of(cls, unit: Unit, state: Mapping[ParamKey, Mapping[str, Tensor | Value]]) -> QuantizedUnit:
        lengths: list[tuple[int, int]] = []
        params: set[str] = set()
        for param in unit.params:
            states = state.get(param.name, {})
            for scale in state_parts(states).scales:
                leaf = states.get(scale)
                if isinstance(leaf, Tensor):
                    lengths.append((param.numel, leaf.numel))
                    params.add(param.name)
        return cls(unit, frozenset(params), block_of(lengths))

    def partial_blocks(self, layout: FlatLayout, *, orig: bool) -> Iterator[str]:
        """The slices of ``layout`` that begin or end inside a block."""
        if not self.params:
            return
        if self.block is None:
            yield _no_block(self.unit)
            return
        yield from _misaligned_slices(self.unit, layout, self.block, self.params, orig=orig)
        for rank in range(layout.shard_count) if not orig else ():
            begin, end = layout.shard_range(rank)
            if end - begin < layout.shard_numel and (end - begin) % self.block:  # a code of zero is not a value of zero
                yield f"{self.unit}: padding of rank {rank} begins inside a block"


def require_aligned_slices(
    quantized: Sequence[QuantizedUnit], layouts: Mapping[str, FlatLayout], *, orig: bool, source: str
) -> None:
    """Raises NeedsInformationError if slices of a target with ``layouts`` (by unit) would cut a block."""
    wrong = [text for of_unit in quantized for text in of_unit.partial_blocks(layouts[of_unit.unit.key], orig=orig)]
    if not wrong:
        return

    def works(size: int) -> bool:
        parts = (
            of_unit.partial_blocks(
                layout_of(of_unit.unit, use_orig_params=orig, world_size=size, shard_size=size), orig=orig
            )
            for of_unit in quantized
        )
        return all(next(texts, None) is None for texts in parts)

    sizes = [size for size in range(1, _TRIED + 1) if works(size)]
    raise NeedsInformationError(
        f"{source}: slices of the target would cut blocks of {BITSANDBYTES}' 8-bit states",
        details=wrong,
        why=_WHY,
        next_step=f"{flags.world_size} with a number that works for all states: {listed(sizes)}" if sizes else _OTHERS,
    )
