"""Describes device meshes and how tensors lie on them, in PyTorch's terms.

As ``torch.distributed.device_mesh.DeviceMesh`` and ``torch.distributed.tensor.placement_types`` have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Shard:
    """``Shard(dim)``: cut along tensor dimension ``dim``."""

    dim: int

    def __str__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """``Replicate()``: every rank of the mesh dimension holds the same."""

    def __str__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class StridedShard:
    """``_StridedShard(dim, split_factor)``: cut as if ``split_factor`` cuts by later mesh dimensions came before."""

    dim: int
    split_factor: int

    def __str__(self) -> str:
        return f"_StridedShard({self.dim}, sf={self.split_factor})"


Placement: TypeAlias = Shard | Replicate | StridedShard


def placements_text(placements: Sequence[Placement]) -> str:
    """As PyTorch's words, e.g. ``[Replicate(), Shard(0)]``."""
    return f"[{', '.join(map(str, placements))}]"


@dataclass(frozen=True, slots=True)
class MeshShape:
    """A mesh of all ranks, row-major, as ``init_device_mesh`` makes it: ``sizes`` in ranks, ``names`` the
    ``mesh_dim_names``, None without any."""

    sizes: tuple[int, ...]
    names: tuple[str, ...] | None = None

    def __str__(self) -> str:
        """As ``--mesh`` takes it: ``dp_shard=4,tp=2``; unnamed dimensions are sizes only: ``4,2``."""
        if self.names is None:
            return ",".join(map(str, self.sizes))
        return ",".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))

    @property
    def world_size(self) -> int:
        return prod(self.sizes)

    @property
    def dimension_names(self) -> tuple[str, ...]:
        """What each dimension is called: its name, in a mesh without names its number."""
        return self.names if self.names is not None else tuple(map(str, range(len(self.sizes))))

    def steps(self, names: Sequence[str]) -> tuple[tuple[int, int], ...]:
        """For each of the dimensions ``names``: how many ranks it has, and by how much neighbours differ."""
        dims = [self.dimension_names.index(name) for name in names]
        return tuple((self.sizes[dim], prod(self.sizes[dim + 1 :])) for dim in dims)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """The place of ``rank`` in the mesh."""
        found: list[int] = []
        for size in reversed(self.sizes):
            rank, at = divmod(rank, size)
            found.append(at)
        return tuple(reversed(found))


@dataclass(frozen=True, slots=True)
class Sharding:
    """How one tensor lies on ``mesh``: one placement for each mesh dimension.

    None: the tensor's own mesh lacks that dimension, as with FSDP2 beside tensor parallelism that leaves a parameter
    alone (it is a DTensor on the submesh of FSDP). All ranks along it hold the same.
    """

    mesh: MeshShape
    placements: tuple[Placement | None, ...]

    def __str__(self) -> str:
        return placements_text([placement for placement in self.placements if placement is not None])
