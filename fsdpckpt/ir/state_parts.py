"""Which of a parameter's states are states of their own, and which are only parts of a quantized one.

In the IR a quantized state is several entries among the states of its parameter, so that all code sees ordinary
tensors:

    torchao's ``exp_avg``          a record (``ir.torchao``) with the name of the state, and ``exp_avg.codes``,
                                   ``exp_avg.scale``, ``exp_avg.qmap``
    bitsandbytes' ``state1``       its codes, with ``absmax1``, the scales, and ``qmap1``, the map (``ir.bitsandbytes``)

Everything between the readers and the writers asks ``state_parts``, and need not know which library made a state.
What a part is follows from the entries alone, so nothing can contradict them. A mark on the tensors would be lost
wherever tensors are cut or joined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from fsdpckpt.ir.bitsandbytes import MAPS, SCALES, unwrapped
from fsdpckpt.ir.torchao import CODES, QMAP, SCALE, part_name, states_in_blocks

_Name = TypeVar("_Name")  # of an entry: a key or a value, as the caller types its dicts


@dataclass(frozen=True, slots=True)
class StateParts:
    """The entries among the states of one parameter that are no states of their own, each with its state.

    bitsandbytes' codes are not among them: they have the name and the shape of the state itself.
    """

    codes: Mapping[str, str] = field(default_factory=dict)
    scales: Mapping[str, str] = field(default_factory=dict)  # one number for each block of codes
    maps: Mapping[str, str] = field(default_factory=dict)  # what each code stands for: equal on all ranks
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of the states in torchao's blocks

    @property
    def names(self) -> frozenset[str]:
        return frozenset((*self.codes, *self.scales, *self.maps))


_NO_PARTS = StateParts()


def state_parts(states: Mapping[_Name, object]) -> StateParts:
    """The parts of quantized states among ``states``, those of one parameter."""
    entries = unwrapped(states)
    codes: dict[str, str] = {}
    scales: dict[str, str] = {}
    maps: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    if not SCALES.keys().isdisjoint(entries):  # as in few checkpoints: this is asked of every parameter
        scales = {scale: state for scale, state in SCALES.items() if scale in entries and state in entries}
        maps = {name: state for name, state in MAPS.items() if name in entries} if scales else {}
    by_part = {CODES: codes, SCALE: scales, QMAP: maps}
    for name, blocks in states_in_blocks(entries):
        state = str(name)
        shapes[state] = blocks.shape
        for part in blocks.parts:
            by_part[part][part_name(name, part)] = state
    if not scales and not codes:
        return _NO_PARTS
    return StateParts(codes, scales, maps, shapes)
