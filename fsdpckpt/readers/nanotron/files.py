"""The files of a nanotron checkpoint, as their names describe them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelRank:
    """A rank of the model: its pipeline stage, its tensor-parallel rank, and that of its experts, None for all."""

    pp: int
    tp: int
    exp: int | None


@dataclass(frozen=True, slots=True)
class WeightFile:
    """``place``: None for a weight that is whole."""

    name: str
    path: str
    place: ModelRank | None


@dataclass(frozen=True, slots=True)
class StateFile:
    """``dp``: the data-parallel rank under ZeRO, else None."""

    path: str
    place: ModelRank
    dp: int | None
    dp_size: int
