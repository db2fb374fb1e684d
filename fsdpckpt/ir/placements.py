"""How a tensor is cut over ranks: device meshes and placements, and the other ways in which a source holds one.

Meshes and placements are in PyTorch's terms, of ``torch.distributed.device_mesh`` and
``torch.distributed.tensor.placement_types``.
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
    """In PyTorch's words, e.g. ``[Replicate(), Shard(0)]``."""
    return f"[{', '.join(map(str, placements))}]"


@dataclass(frozen=True, slots=True)
class MeshShape:
    """A mesh of all ranks, row-major, as ``init_device_mesh`` makes it. ``sizes``: in ranks; ``names``: the
    ``mesh_dim_names``, None without any.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...] | None = None

    def __str__(self) -> str:
        """In the form ``--mesh`` takes: ``dp_shard=4,tp=2``; for unnamed dimensions the sizes only: ``4,2``."""
        if self.names is None:
            return ",".join(map(str, self.sizes))
        return ",".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))

    @property
    def world_size(self) -> int:
        return prod(self.sizes)

    @property
    def dimension_names(self) -> tuple[str, ...]:
        """The name of each dimension; in a mesh without names its number."""
        return self.names if self.names is not None else tuple(map(str, range(len(self.sizes))))

    def steps(self, names: Sequence[str]) -> tuple[tuple[int, int], ...]:
        """For each of the dimensions ``names``: its number of ranks, and the difference between neighbouring ranks."""
        dims = [self.dimension_names.index(name) for name in names]
        return tuple((self.sizes[dim], prod(self.sizes[dim + 1 :])) for dim in dims)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """The coordinate of ``rank`` in the mesh."""
        reversed_coordinate: list[int] = []
        for size in reversed(self.sizes):
            rank, at = divmod(rank, size)
            reversed_coordinate.append(at)
        return tuple(reversed(reversed_coordinate))


@dataclass(frozen=True, slots=True)
class Sharding:
    """One tensor's placements on ``mesh``, one for each mesh dimension.

    None: the tensor is a DTensor on a submesh without that dimension, as FSDP2 makes of a parameter that tensor
    parallelism does not cut. All ranks along it hold the same. ``by_fsdp``: FSDP2 cut it last; False for DTensor's cuts
    alone, which differ in the shape of a local tensor without elements (``layouts.emptied``). ``order``: the mesh
    dimensions as the DTensor's own mesh lists them, if that is not their order in ``mesh``: FSDP2 over tensor
    parallelism lists its own first, wherever they are. ``fsdp``: FSDP2's mesh dimension, if it is not the first that
    cuts (``fully_shard(dp_mesh_dims=...)`` on a mesh with tensor parallelism outside).
    """

    mesh: MeshShape
    placements: tuple[Placement | None, ...]
    by_fsdp: bool = True
    order: tuple[int, ...] | None = None
    fsdp: int | None = None

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions of the DTensor's own mesh, in its order."""
        if self.order is not None:
            return self.order
        return tuple(dim for dim, placement in enumerate(self.placements) if placement is not None)

    @property
    def fsdp_dimension(self) -> int | None:
        """The mesh dimension of FSDP2's cut; None if nothing is cut, or not by FSDP2."""
        if not self.by_fsdp:
            return None
        dims = self.dims if self.fsdp is None else (self.fsdp, *self.dims)
        return next((dim for dim in dims if isinstance(self.placements[dim], Shard | StridedShard)), None)

    def __str__(self) -> str:
        """The placements as the DTensor lists them."""
        placements = (self.placements[dim] for dim in self.dims)
        return placements_text([placement for placement in placements if placement is not None])


@dataclass(frozen=True, slots=True)
class Whole:
    """Not cut: each rank that has the tensor has all of it, as a plain tensor."""

    def __str__(self) -> str:
        return "whole"


@dataclass(frozen=True, slots=True)
class Sharded:
    """Cut along its dimensions.

    ``form``: the type that says so, ``DTensor`` or ``ShardedTensor``. ``placements``: for a DTensor one for each mesh
    dimension; for chunks without a type (DCP) one for each dimension that is cut; empty if they are not known.
    """

    placements: tuple[Placement, ...]
    form: str = "DTensor"

    def __str__(self) -> str:
        if self.form == "DTensor":
            return placements_text(self.placements)
        return f"{self.form}({', '.join(map(str, self.placements)) or 'shards'})"


@dataclass(frozen=True, slots=True)
class Slices:
    """Made of the ranks' 1-D slices of flat parameters, joined but not yet named."""

    def __str__(self) -> str:
        return "slices"


@dataclass(frozen=True, slots=True)
class Flattened:
    """Made of parts of flat parameters (or of other flat tensors), under its own name."""

    def __str__(self) -> str:
        return "flattened"


@dataclass(frozen=True, slots=True)
class OneSlice:
    """A vector that DCP saved beside flat parameters: a whole buffer, or one rank's slice of a parameter, whose data is
    in the flat parameter. Only units tell them apart.
    """

    def __str__(self) -> str:
        return "whole, or one rank's slice"


@dataclass(frozen=True, slots=True)
class PerRank:
    """What each rank saved under one name of a model of which other tensors are parts: copies of all of it, or each
    rank's own part. Nothing in the source says which.

    ``differing``: two ranks whose copies are known to differ. ``buffer``: whether the user says that it is a buffer, of
    which ranks have their own copies.
    """

    differing: tuple[int, int] | None = None
    buffer: bool = False

    def __str__(self) -> str:
        return "whole" if self.buffer else "whole, or each rank's part"


TensorCut: TypeAlias = Whole | Sharded | Slices | Flattened | OneSlice | PerRank
"""How the source held a tensor. As text it is the ``placement`` of ``--json``."""
