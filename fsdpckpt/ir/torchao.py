"""Describes torchao's optimizer states, which are quantized in blocks: 8-bit, 4-bit and fp8 ones.

A state is a code for each element and a scale for each block: a fixed number of consecutive elements of a rank's shard,
row by row (``torchao.optim.subclass_8bit``, ``subclass_4bit``, ``subclass_fp8``). Its parts are

    codes   uint8 or float8_e4m3fn, of the parameter's shape; of 4-bit codes, two a byte, (rows / group, bytes)
    scale   float32 (rows / group, blocks of a group)
    qmap    float32 (256,) or (16,), what each code stands for; not of fp8

A *group* is the fewest rows that are whole blocks. Where every cut lies between two groups, the ranks' codes and scales
are exact slices of the whole, and cutting their first dimension cuts rows.

In a file a state is a tensor subclass that wraps its parts: ``stored_shapes`` and ``settings`` say how it is pickled,
to the reader (``formats.torch.torchao``) and the writer (``formats.pickle.write``) alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd, prod
from typing import TypeVar

from fsdpckpt.ir.dtypes import DTYPES, DType
from fsdpckpt.ir.tensors import Box
from fsdpckpt.ir.values import Global, Object

_Name = TypeVar("_Name")  # of an entry: a key or a value, as the caller types its dicts

TORCHAO = "torchao"
CODES, SCALE, QMAP = "codes", "scale", "qmap"
BLOCK_SIZE, SIGNED, SHAPE = "block_size", "signed", "_shape"  # the other attributes of a pickled state
_BITS = {"OptimState8bit": 8, "OptimState4bit": 4, "OptimStateFp8": 8}
CLASSES = {
    (f"torchao.{package}.{module}", name)
    for package in ("optim", "prototype.low_bit_optim")  # the second up to torchao 0.8
    for module, name in zip(("subclass_8bit", "subclass_4bit", "subclass_fp8"), _BITS, strict=True)
}


@dataclass(frozen=True, slots=True)
class Blocks:
    """How one state is quantized."""

    kind: Global  # torchao's class
    dtype: DType  # the one that the state shows
    shape: tuple[int, ...]  # the parameter's
    block: int  # how many elements have one scale
    signed: bool | None  # whether the codes have a sign; None for fp8, whose class does not say

    @property
    def packed(self) -> bool:
        """Whether a byte holds two codes."""
        return _BITS[self.kind.name] == 4

    @property
    def parts(self) -> tuple[str, ...]:
        return (CODES, SCALE) if self.kind.name == "OptimStateFp8" else (CODES, SCALE, QMAP)

    def dtype_of(self, part: str) -> DType:
        if part != CODES:
            return DTYPES["float32"]
        return DTYPES["float8_e4m3fn" if self.kind.name == "OptimStateFp8" else "uint8"]

    @property
    def group(self) -> int:
        """The number of rows in a group."""
        return self.block // gcd(self.block, prod(self.shape[1:]))

    def shape_of(self, part: str) -> tuple[int, ...]:
        """The shape in the IR of the codes or the scale for all rows."""
        elements = self.group * prod(self.shape[1:])
        if part == SCALE:
            return self.shape[0] // self.group, elements // self.block
        return (self.shape[0] // self.group, elements // 2) if self.packed else self.shape

    def boxes_of(self, box: Box) -> dict[str, Box] | None:
        """The box of the whole codes and the one of the whole scale that belong to ``box`` (elements of the
        parameter); None if a block extends beyond it.
        """
        whole = box.offsets[1:] == (0,) * (len(self.shape) - 1) and box.sizes[1:] == self.shape[1:]
        if not whole or box.offsets[0] % self.group or box.sizes[0] % self.group:
            return None
        return {part: self._rows_of(part, box) for part in (CODES, SCALE)}

    def _rows_of(self, part: str, box: Box) -> Box:
        shape = self.shape_of(part)
        rows = self.group if shape != self.shape or part == SCALE else 1  # of the parameter, to one of the part
        zeros = (0,) * (len(shape) - 1)
        return Box((box.offsets[0] // rows, *zeros), (box.sizes[0] // rows, *shape[1:]))

    def stored_shapes(self, shard: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The shapes that the codes and the scale of a shard of this shape have in a file."""
        numel = prod(shard)
        return {CODES: (numel // 2,) if self.packed else shard, SCALE: (numel // self.block,)}

    def shard_of(self, scale: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the shard whose scale has the shape ``scale``, in a file or in the IR."""
        return prod(scale) * self.block // prod(self.shape[1:]), *self.shape[1:]

    def settings(self, shard: tuple[int, ...]) -> dict[str, bool | int | tuple[int, ...]]:
        """The attributes that a pickled shard of this shape has after its parts, in torchao's order."""
        made: dict[str, bool | int | tuple[int, ...]] = {}
        if self.signed is not None:
            made[SIGNED] = self.signed
        if self.packed:
            made[SHAPE] = shard
        made[BLOCK_SIZE] = self.block
        return made

    def record(self) -> Object:
        """What stands for the state in the IR, beside its parts. ``blocks_of`` reads it."""
        return Object(self.kind, (Global("torch", self.dtype.name), self.shape, self.block, self.signed))

    def __str__(self) -> str:
        return f"{TORCHAO}'s {self.kind.name} in blocks of {self.block}"


def is_blockwise(kind: Global) -> bool:
    """Whether tensors of this class are states quantized in blocks."""
    return (kind.module, kind.name) in CLASSES


def blocks_of(value: object) -> Blocks | None:
    """What ``Blocks.record`` stored; None for any other value."""
    if type(value) is not Object or not is_blockwise(value.function):
        return None
    match value.args:
        case (Global("torch", name), tuple(shape), int(block), bool() | None as signed) if name in DTYPES and block > 0:
            if shape and all(type(size) is int for size in shape):
                return Blocks(value.function, DTYPES[name], shape, block, signed)  # type: ignore[arg-type]
    return None


def states_in_blocks(entry: Mapping[_Name, object]) -> Iterator[tuple[_Name, Blocks]]:
    """The names in ``entry`` that have a record, and how each state is quantized."""
    for name, value in entry.items():
        if type(value) is Object and (blocks := blocks_of(value)) is not None:
            yield name, blocks


def part_name(name: object, part: str) -> str:
    """The name in the IR of one part of the state ``name``."""
    return f"{name!s}.{part}"
