"""Describes optimizer states that are quantized in blocks: torchao's 8-bit, 4-bit and fp8 ones, and bitsandbytes'.

A state of torchao is a code for each element and a scale for each block: a fixed number of consecutive elements of a
rank's shard, row by row (``torchao.optim.subclass_8bit``, ``subclass_4bit``, ``subclass_fp8``). In the IR it is several
entries of one dict, so that all other code sees ordinary tensors:

    exp_avg         ``Blocks.record()``: an ``Object`` with torchao's class and the fields of ``Blocks``
    exp_avg.codes   uint8 or float8_e4m3fn, of the parameter's shape; of 4-bit codes, two a byte, (rows / group, bytes)
    exp_avg.scale   float32 (rows / group, blocks of a group)
    exp_avg.qmap    float32 (256,) or (16,), what each code stands for; not of fp8

A *group* is the fewest rows that are whole blocks. Where every cut lies between two groups, the ranks' codes and scales
are exact slices of the whole, and cutting their first dimension cuts rows.

The states of bitsandbytes (``bitsandbytes/optim/optimizer.py``, 0.50) are ordinary tensors:

    state1, state2    one element for each of the parameter: float32, or uint8 codes of 8 bits
    absmax1, absmax2  float32, with 8 bits: the scale of each block of codes, in memory order; the last may be shorter
    qmap1, qmap2      float32 (256,), with 8 bits: what each code stands for

Newer versions put them into one dict under each parameter, which hides them from FSDP; ``load_state_dict`` takes them
with and without that dict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd, prod
from typing import Any, TypeVar, cast

from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.ir.dtypes import DTYPES, DType
from fsdpckpt.ir.tensors import Box, Tensor
from fsdpckpt.ir.values import Global, Key, Object, Value

TORCHAO, BITSANDBYTES = "torchao", "bitsandbytes"
CODES, SCALE, QMAP = "codes", "scale", "qmap"
_BITS = {"OptimState8bit": 8, "OptimState4bit": 4, "OptimStateFp8": 8}
CLASSES = {
    (f"torchao.{package}.{module}", name)
    for package in ("optim", "prototype.low_bit_optim")  # the second up to torchao 0.8
    for module, name in zip(("subclass_8bit", "subclass_4bit", "subclass_fp8"), _BITS, strict=True)
}

_WRAPPER = "__bnb_optimizer_quant_state__"
_CODES = {"absmax1": "state1", "absmax2": "state2"}
_MAPS = ("qmap1", "qmap2")
_BLOCK_SIZES = (2048, 256)  # of bitsandbytes' older versions, and since

_Item = TypeVar("_Item")
_Name = TypeVar("_Name")  # of an entry: a key or a value, as the caller types its dicts


@dataclass(frozen=True, slots=True)
class Blocks:
    """How one state is quantized: torchao's class, the dtype it shows, the parameter's shape, the elements in a block,
    and whether the codes have a sign (None for fp8, whose class does not say).
    """

    kind: Global
    dtype: DType
    shape: tuple[int, ...]
    block: int
    signed: bool | None

    @property
    def packed(self) -> bool:
        """Whether a byte holds two codes."""
        return _BITS[self.kind.name] == 4

    @property
    def parts(self) -> tuple[str, ...]:
        return (CODES, SCALE) if self.kind.name == "OptimStateFp8" else (CODES, SCALE, QMAP)

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

    def box_of(self, part: str, box: Box) -> Box | None:
        """The box of the whole codes or scale that belongs to ``box`` (elements of the parameter); None if a block
        extends beyond it.
        """
        whole = box.offsets[1:] == (0,) * (len(self.shape) - 1) and box.sizes[1:] == self.shape[1:]
        if not whole or box.offsets[0] % self.group or box.sizes[0] % self.group:
            return None
        shape = self.shape_of(part)
        rows = self.group if shape != self.shape or part == SCALE else 1
        zeros = (0,) * (len(shape) - 1)
        return Box((box.offsets[0] // rows, *zeros), (box.sizes[0] // rows, *shape[1:]))

    def record(self) -> Object:
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


@dataclass(frozen=True, slots=True, eq=False)
class Blockwise:
    """One state: how it is quantized, and its tensors by part."""

    blocks: Blocks
    tensors: Mapping[str, Tensor]


def part_name(name: object, part: str) -> str:
    return f"{name!s}.{part}"


def split_state(name: Key, blocks: Blocks, parts: Mapping[str, _Item]) -> dict[Key, _Item | Object]:
    """The entries of a dict for one state with the name ``name``."""
    return {name: blocks.record(), **{part_name(name, part): item for part, item in parts.items()}}


def parts_in(entry: Mapping[_Name, object]) -> dict[str, tuple[Blocks, str]]:
    """The names in ``entry`` that are parts of a state, each with the ``Blocks`` of the state and which part it is."""
    return {
        part_name(name, part): (blocks, part)
        for name, value in entry.items()
        if (blocks := blocks_of(value)) is not None
        for part in blocks.parts
    }


def parameter_shapes(entry: Mapping[_Name, object]) -> Iterator[tuple[_Name, Tensor, tuple[int, ...]]]:
    """Each tensor in ``entry`` that has dimensions, with its name and the shape that its parameter would have.

    For codes and scales that is the shape of their state; a ``qmap`` says nothing and is left out.
    """
    parts = parts_in(entry)
    for name, leaf in entry.items():
        blocks, part = parts.get(str(name), (None, ""))
        if isinstance(leaf, Tensor) and leaf.ndim and part != QMAP:
            yield name, leaf, leaf.shape if blocks is None else blocks.shape


def joined_states(entry: Mapping[_Name, Value]) -> Iterator[tuple[_Name, Value | Blockwise]]:
    """The inverse of ``split_state`` for the items of ``entry``. Raises SourceCorruptError for a state that lacks a
    part.
    """
    parts = parts_in(entry) if any(type(value) is Object for value in entry.values()) else {}
    for name, value in entry.items():
        blocks = blocks_of(value) if parts else None
        if blocks is not None:
            yield name, Blockwise(blocks, {part: _tensor(entry, name, blocks, part) for part in blocks.parts})
        elif name not in parts:
            yield name, value


def _tensor(entry: Mapping[_Name, Value], name: _Name, blocks: Blocks, part: str) -> Tensor:
    tensor = cast("Mapping[object, Value]", entry).get(part_name(name, part))
    if not isinstance(tensor, Tensor) or (part != QMAP and tensor.shape != blocks.shape_of(part)):
        raise SourceCorruptError(
            f"{name!s} is {blocks}, and {part_name(name, part)} is not its {part}",
            key=str(name),
            expected="a tensor" if part == QMAP else f"a tensor of shape {blocks.shape_of(part)}",
            found=f"one of shape {tensor.shape}" if isinstance(tensor, Tensor) else type(tensor).__name__,
            why="the source was edited by hand",
        )
    return tensor


def unwrapped(entry: Any) -> Any:
    """The states of one parameter without the dict that hides them from FSDP; anything else unchanged."""
    if not isinstance(entry, dict) or not isinstance(entry.get(_WRAPPER), dict):
        return entry
    return {**{name: item for name, item in entry.items() if name != _WRAPPER}, **entry[_WRAPPER]}


def is_codes(name: object) -> bool:
    """Whether a state with this name may be quantized."""
    return name in _CODES.values()


def scales_in(entry: Mapping[str, object]) -> dict[str, str]:
    """The states in ``entry`` that are scales, each with the state that has its codes."""
    return {scale: codes for scale, codes in _CODES.items() if scale in entry and codes in entry}


def maps_in(entry: Mapping[str, object]) -> tuple[str, ...]:
    """The states in ``entry`` that map codes to values, equal on all ranks."""
    return tuple(name for name in _MAPS if name in entry) if scales_in(entry) else ()


def block_of(lengths: Iterable[tuple[int, int]]) -> int | None:
    """The number of codes in a block, from the numbers of codes and scales; None if no block size of the
    library fits.
    """
    pairs = list(lengths)
    return next((size for size in _BLOCK_SIZES if all(-(-codes // size) == scales for codes, scales in pairs)), None)
