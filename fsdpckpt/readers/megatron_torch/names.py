"""Names parameters of Megatron's ranks as a job of one rank has them.

Every pipeline stage counts its layers from 0, and of an interleaved pipeline every chunk of the model (``model0``,
``model1``, ...). Layers are numbered along the pipeline: the first chunk of every stage, then the second of every stage
(``get_transformer_layer_offset`` of ``megatron/core/transformer/transformer_layer.py``), however many layers each has.
An expert-parallel rank counts its experts from 0, too, and those of rank 1 follow those of rank 0. The last stage has a
copy of tied word embeddings as its output layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from fsdpckpt.ir.values import Key
from fsdpckpt.readers.megatron_torch.layout import LayoutError, RunArguments
from fsdpckpt.readers.megatron_torch.places import Grid, RankPlace
from fsdpckpt.readers.recorded_parts import EXPERT

StateDict = dict[Key, object]
_Entry = TypeVar("_Entry")
Chunk = tuple[int, int]
"""A part of the model that is one behind the other along the pipeline: which of its stage's, then the stage."""

_LAYER = re.compile(r"^(decoder\.layers\.)(\d{1,6})(\..+)$", re.DOTALL)
_EXPERT = re.compile(rf"^(.*\.mlp\.{EXPERT})(\d{{1,6}})(\..+)?$", re.DOTALL)
WORDS, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_UNTIED = "untie_embeddings_and_output_weights"


@dataclass(frozen=True, slots=True)
class NamesInModel:
    """What every chunk calls its entries in the model. ``offsets``: the layers before each chunk's."""

    offsets: Mapping[Chunk, int]
    local_experts: int
    tied: bool

    def of(self, key: str, chunk: Chunk, place: RankPlace) -> str:
        """The model's name of ``key``."""
        if self.tied and key == _OUTPUT:
            return WORDS
        layer = _LAYER.match(key)
        name = f"{layer[1]}{int(layer[2]) + self.offsets[chunk]}{layer[3]}" if layer else key
        expert = _EXPERT.match(name)
        if expert is None:
            return name
        return f"{expert[1]}{int(expert[2]) + place.expert * self.local_experts}{expert[3] or ''}"


def is_of_expert(name: str) -> bool:
    """Whether only some expert-parallel ranks have the entry."""
    return _EXPERT.match(name) is not None


def of_optimizer(entries: Mapping[str, _Entry], number: int, count: int) -> dict[str, _Entry]:
    """The ``entries`` that the optimizer ``number`` of ``count`` has in Megatron's list: experts are in the second."""
    if count == 1:
        return dict(entries)
    return {name: entry for name, entry in entries.items() if is_of_expert(name) is (number == 1)}


def is_buffer(name: str) -> bool:
    """Whether it is no parameter, which a state dict does not show."""
    return name.endswith(".mlp.router.expert_bias")


def names_of(chunks: Mapping[RankPlace, Sequence[StateDict]], grid: Grid, arguments: RunArguments) -> NamesInModel:
    """The names of the entries of ``chunks``, the chunks of the model at each place. Raises LayoutError if they are not
    all layers and experts of a model.
    """
    layers: dict[Chunk, int] = {}
    for place, own in chunks.items():
        for number, state in enumerate(own):
            count = _count({int(match[2]) for key in state if (match := _LAYER.match(str(key)))}, "layers")
            if layers.setdefault((number, place.stage), count) != count:
                raise LayoutError(f"ranks of pipeline stage {place.stage} have {layers[number, place.stage]} layers, "
                                  f"others {count}")  # fmt: skip
    total = sum(layers.values())
    if (grid.stages > 1 or arguments.values.get("num_layers") is not None) and total != arguments.count("num_layers"):
        raise LayoutError(
            f"the pipeline stages have {total} layers, and args.num_layers is {arguments.count('num_layers')}"
        )
    order = sorted(layers)
    starts = accumulate((layers[chunk] for chunk in order), initial=0)
    offsets = dict(zip(order, starts, strict=False))
    return NamesInModel(offsets, _local_experts(chunks, grid, arguments), _is_tied(chunks, grid, arguments))


def _local_experts(chunks: Mapping[RankPlace, Sequence[StateDict]], grid: Grid, arguments: RunArguments) -> int:
    """How many experts of a layer each expert-parallel rank has."""
    if grid.experts == 1:
        return 0  # they have their numbers
    counts = {_experts_in(state) for own in chunks.values() for state in own} - {frozenset()}
    count = arguments.count("num_experts")
    expected = frozenset({count // grid.experts})
    if count % grid.experts or counts - {expected}:
        found = sorted(number for numbers in counts for number in numbers)
        raise LayoutError(
            f"layers have {found} experts on each of {grid.experts} ranks, and args.num_experts is {count}"
        )
    return count // grid.experts


def _experts_in(state: StateDict) -> frozenset[int]:
    """The numbers of experts that the layers of one rank's chunk have."""
    numbers: dict[str, set[int]] = {}
    for key in state:
        match = _EXPERT.match(str(key))
        if match is not None:
            numbers.setdefault(match[1] + (match[3] or ""), set()).add(int(match[2]))
    return frozenset(_count(found, "experts") for found in numbers.values())


def _count(numbers: set[int], what: str) -> int:
    if numbers != set(range(len(numbers))):
        raise LayoutError(f"a rank's {what} have the numbers {sorted(numbers)[:6]}, which do not count from 0")
    return len(numbers)


def _is_tied(chunks: Mapping[RankPlace, Sequence[StateDict]], grid: Grid, arguments: RunArguments) -> bool:
    """Whether the output layer of the last stage is a copy of the word embeddings."""
    if grid.stages == 1 or not any(_OUTPUT in state for own in chunks.values() for state in own):
        return False
    return not arguments.flag(_UNTIED)


def in_order(chunks: Mapping[RankPlace, Sequence[StateDict]], names: NamesInModel) -> list[str]:
    """All names in the order in which a job of one rank has them: layer after layer, and in a layer the experts of all
    ranks where the first rank has its own.
    """
    found: dict[str, None] = {}
    for chunk in sorted(names.offsets):
        at_stage = [place for place in sorted(chunks) if place.stage == chunk[1]]
        listed: dict[RankPlace, list[str]] = {}
        for place in at_stage:
            if chunk[0] < len(chunks[place]):
                listed[place] = [names.of(str(key), chunk, place) for key in chunks[place][chunk[0]]]
        experts: dict[str, list[str]] = {}
        for name in (name for own in listed.values() for name in own):
            match = _EXPERT.match(name)
            if match is not None:
                experts.setdefault(match[1], []).append(name)
        for name in (name for own in listed.values() for name in own):
            match = _EXPERT.match(name)
            found.update(dict.fromkeys(experts[match[1]] if match else [name]))
    return list(found)
