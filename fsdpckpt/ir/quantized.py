"""The codec of quantized optimizer states: torchao's (``ir.torchao``) and bitsandbytes' (``ir.bitsandbytes``).

In the IR a quantized state is several entries among the states of its parameter, so that all other code sees ordinary
tensors. One of torchao is the record of how it is quantized under the state's name, and each part beside it:

    exp_avg         ``Blocks.record()``: an ``Object`` with torchao's class and the fields of ``Blocks``
    exp_avg.codes   and so on: the tensors

Readers split it (``split_state``), writers join it (``joined_states``). What is between them asks ``quantized_parts``:
which entries are parts of a quantized state, and what each is of it, whichever library made them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeVar, cast

from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.ir.bitsandbytes import MAPS, SCALES, unwrapped
from fsdpckpt.ir.counters import is_counter
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.torchao import CODES, QMAP, SCALE, Blocks, blocks_of
from fsdpckpt.ir.values import Key, Object, Value

_Item = TypeVar("_Item")
_Name = TypeVar("_Name")  # of an entry: a key or a value, as the caller types its dicts


class Role(Enum):
    """What an entry is of a quantized state."""

    CODES = "codes"
    SCALE = "scale"  # one for each block of codes
    MAP = "map"  # what each code stands for: equal on all ranks


_ROLES = {CODES: Role.CODES, SCALE: Role.SCALE, QMAP: Role.MAP}


class StatePart(NamedTuple):
    """One entry among the states of a parameter that is no state of its own."""

    role: Role
    state: str  # the one that it belongs to; of bitsandbytes, the one with the codes
    shape: tuple[int, ...] | None = None  # the shape that it shows for its parameter; None if it shows none


@dataclass(frozen=True, slots=True, eq=False)
class Blockwise:
    """One state: how it is quantized, and its tensors by part."""

    blocks: Blocks
    tensors: Mapping[str, Tensor]


def quantized_parts(entry: Mapping[_Name, object]) -> dict[str, StatePart]:
    """The names in ``entry``, the states of one parameter, that are parts of quantized ones.

    bitsandbytes' codes are not among them: they have the name and the shape of the state itself.
    """
    states = unwrapped(entry)
    parts: dict[str, StatePart] = {}
    if not SCALES.keys().isdisjoint(states):  # as in few checkpoints: this is asked of every parameter
        scaled = {codes for scale, codes in SCALES.items() if scale in states and codes in states}
        parts = {scale: StatePart(Role.SCALE, codes) for scale, codes in SCALES.items() if codes in scaled}
        if scaled:
            parts |= {name: StatePart(Role.MAP, codes) for name, codes in MAPS.items() if name in states}
    for name, blocks in states_in_blocks(states):
        for part in blocks.parts:
            shape = None if part == QMAP else blocks.shape
            parts[part_name(name, part)] = StatePart(_ROLES[part], str(name), shape)
    return parts


def parts_with(role: Role, parts: Mapping[str, StatePart]) -> dict[str, str]:
    """The parts with this role, each with its state."""
    return {name: part.state for name, part in parts.items() if part.role is role}


def states_in_blocks(entry: Mapping[_Name, object]) -> Iterator[tuple[_Name, Blocks]]:
    """The names in ``entry`` that are states of torchao."""
    for name, value in entry.items():
        if type(value) is Object and (blocks := blocks_of(value)) is not None:
            yield name, blocks


class ShownShape(NamedTuple):
    """A tensor among the states of a parameter that shows a shape for it."""

    name: str
    state: str  # that it is or belongs to
    tensor: Tensor
    shape: tuple[int, ...]


def shown_shapes(entry: Mapping[str, object]) -> Iterator[ShownShape]:
    """Each tensor in ``entry`` that has dimensions, with the shape that its parameter would have.

    For torchao's codes and scales that is the shape of their state. Counters, maps and bitsandbytes' scales show none.
    """
    parts = quantized_parts(entry)
    for name, leaf in entry.items():
        if not isinstance(leaf, Tensor) or not leaf.ndim or is_counter(name, leaf):
            continue
        part = parts.get(name)
        if part is None:
            yield ShownShape(name, name, leaf, leaf.shape)
        elif part.shape is not None:
            yield ShownShape(name, part.state, leaf, part.shape)


def part_name(name: object, part: str) -> str:
    return f"{name!s}.{part}"


def split_state(name: Key, blocks: Blocks, parts: Mapping[str, _Item]) -> dict[Key, _Item | Object]:
    """The entries of a dict for one state with the name ``name``."""
    return {name: blocks.record(), **{part_name(name, part): item for part, item in parts.items()}}


def joined_states(entry: Mapping[_Name, Value]) -> Iterator[tuple[_Name, Value | Blockwise]]:
    """The inverse of ``split_state`` for the items of ``entry``. Raises SourceCorruptError for a state that lacks a
    part.
    """
    states = dict(states_in_blocks(entry))
    if not states:
        yield from entry.items()
        return
    parts = {part_name(name, part) for name, blocks in states.items() for part in blocks.parts}
    for name, value in entry.items():
        blocks = states.get(name)
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
