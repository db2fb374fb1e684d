"""The codec of torchao's optimizer states, for what reads and writes checkpoints and nothing else.

In a checkpoint such a state is one tensor subclass. In the IR it is several entries among the states of its parameter,
so that all other code sees ordinary tensors: the record of how it is quantized under the state's name, and each part
beside it:

    exp_avg         ``Blocks.record()``: an ``Object`` with torchao's class and the fields of ``Blocks``
    exp_avg.codes   and so on: the tensors

Readers split it (``split_state``), writers join it (``joined_states``). bitsandbytes' states are several tensors in a
checkpoint, too, and need no codec. What is between readers and writers asks ``ir.state_parts``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.torchao import QMAP, Blocks, part_name, states_in_blocks
from fsdpckpt.ir.values import Key, Object, Value

_Item = TypeVar("_Item")
_Name = TypeVar("_Name")  # of an entry: a key or a value, as the caller types its dicts


@dataclass(frozen=True, slots=True, eq=False)
class Blockwise:
    """One state: how it is quantized, and its tensors by part."""

    blocks: Blocks
    tensors: Mapping[str, Tensor]


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
