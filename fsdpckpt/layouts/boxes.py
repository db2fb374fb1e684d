"""A box of a tensor: ``sizes`` elements a dimension from ``offsets`` on, as in ``ChunkStorageMetadata``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

__all__ = ["Box", "RankBoxes"]


@dataclass(frozen=True, slots=True)
class Box:
    """``offsets`` and ``sizes`` in elements of the whole tensor, one number a dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """All of a tensor of ``shape``."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        return prod(self.sizes)


RankBoxes: TypeAlias = Sequence[tuple[int, Box]]
"""Which rank stores which box of one tensor."""
