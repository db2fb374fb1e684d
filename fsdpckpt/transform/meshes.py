"""Resizes the meshes of a source for a different number of ranks, and writes meshes as options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from math import lcm, prod
from typing import TypeVar

from fsdpckpt import flags
from fsdpckpt.errors import NeedsInformationError, required
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.placements import MeshShape, Replicate, Sharding
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Value, leaf_tensors, with_tensors
from fsdpckpt.text import plural

_Value = TypeVar("_Value", bound=Value)
_MAX_CHOICES = 12  # meshes that a message proposes


def mesh_options(meshes: Iterable[MeshShape]) -> str:
    """The options for ``meshes``, as the user would type them."""
    return " ".join(f"{flags.mesh(mesh)}" for mesh in meshes)


def source_meshes(checkpoint: Checkpoint) -> list[MeshShape]:
    """The meshes of the source's DTensors in the order of the tensors, without those that are submeshes of another.

    There may be several: expert parallelism has two meshes of all ranks.
    """
    shardings = (tensor.sharding for tensor in checkpoint.leaves())
    meshes = dict.fromkeys(sharding.mesh for sharding in shardings if sharding is not None)
    submeshes = {mesh for mesh in meshes for other in meshes if mesh != other and is_submesh(mesh, other)}
    return [mesh for mesh in meshes if mesh not in submeshes]


def containing_mesh(mesh: MeshShape, meshes: Iterable[MeshShape]) -> MeshShape | None:
    """The first of ``meshes`` that equals ``mesh`` or contains it as a submesh."""
    return next((whole for whole in meshes if is_submesh(mesh, whole)), None)


def is_submesh(mesh: MeshShape, whole: MeshShape) -> bool:
    if mesh == whole:
        return True
    if mesh.names is None or whole.names is None:
        return False
    sizes = dict(zip(whole.names, whole.sizes, strict=True))
    part = dict(zip(mesh.names, mesh.sizes, strict=True))
    return [name for name in whole.names if name in part] == list(mesh.names) and part.items() <= sizes.items()


def resized(
    meshes: Mapping[MeshShape, Sequence[Sharding]], world_size: int, *, source: str
) -> dict[MeshShape, MeshShape]:
    """As ``find_resized``, with all replicas. Raises NeedsInformationError, with the possible meshes, if none fits."""
    return required(find_resized(meshes, world_size, source=source))


def find_resized(
    meshes: Mapping[MeshShape, Sequence[Sharding]], world_size: int, *, source: str, keep_replicas: bool = True
) -> dict[MeshShape, MeshShape] | NeedsInformationError:
    """Resize the dimension that FSDP shards over in each of ``meshes``, so that the mesh has ``world_size`` ranks.

    ``meshes``: those of ``source``, all of the same size, and the shardings of the tensors on each. Returns the new
    mesh for each.

    FSDP's dimension is the first that cuts every tensor: HSDP's replicas come before it and cut none, other parallelism
    comes after it. ``keep_replicas=False`` (DCP, which stores replicas once) drops replicas that do not divide
    ``world_size``. Returns the error to raise, with the possible meshes, if the other dimensions do not divide
    ``world_size`` or no dimension cuts every tensor.
    """
    if all(mesh.world_size == world_size for mesh in meshes):
        return {mesh: mesh for mesh in meshes}
    shard_dims = {mesh: shard_dimension(mesh, shardings) for mesh, shardings in meshes.items()}
    start = {mesh: mesh for mesh in meshes}  # what is resized
    if not keep_replicas and any(
        world_size % _other_ranks(mesh, dim) for mesh, dim in shard_dims.items() if dim is not None
    ):
        start = {mesh: _without_replicas(mesh, dim, meshes[mesh]) for mesh, dim in shard_dims.items()}
    other_ranks = {mesh: _other_ranks(start[mesh], dim) for mesh, dim in shard_dims.items() if dim is not None}
    undetermined = [mesh for mesh in meshes if mesh not in other_ranks]
    misfits: list[tuple[MeshShape, int]] = []  # of which no number of shards makes that many ranks
    fitting: dict[MeshShape, list[MeshShape]] = {}
    for mesh, dim in shard_dims.items():
        if dim is None:
            fitting[mesh] = _with_one_changed(mesh, world_size)
            continue
        fitting[mesh] = _fitting_meshes(start[mesh], dim, world_size)
        if world_size % other_ranks[mesh]:
            misfits.append((mesh, dim))
    if not undetermined and not misfits:
        return {mesh: first for mesh, (first, *_) in fitting.items()}
    choices = [mesh_options(chosen) for chosen in islice(_consistent_meshes(fitting), _MAX_CHOICES)]
    next_step = f"add {mesh_options(meshes)} with sizes for {plural(world_size, 'rank')}"
    if choices:
        next_step = f"add {choices[0]}" + (", or another of those above" if len(choices) > 1 else "")
    if undetermined:
        return NeedsInformationError(
            f"{source} is on the mesh {undetermined[0]}: cannot tell which of its dimensions changes for "
            f"{plural(world_size, 'rank')}",
            details=choices,
            why="FSDP's changes, and no dimension of this mesh cuts every tensor, as FSDP's does",
            next_step=next_step,
        )
    mesh, dim = misfits[0]
    sizes = " x ".join(str(size) for number, size in enumerate(start[mesh].sizes) if number != dim)
    name = mesh.names[dim] if mesh.names is not None else f"dimension {dim}"
    return NeedsInformationError(
        f"{flags.world_size(world_size)} does not fit the mesh of {source}, {mesh}",
        details=choices,
        why=f"only {name} changes, which FSDP shards over: {world_size} is not divisible by the {sizes} ranks of "
        "the other dimensions",
        next_step=next_step,
        expected=f"a multiple of {lcm(*other_ranks.values())}",
        found=str(world_size),
    )


def _other_ranks(mesh: MeshShape, dim: int) -> int:
    """The number of ranks in all dimensions but ``dim``."""
    return mesh.world_size // mesh.sizes[dim]


def _with_sizes(mesh: MeshShape, sizes: Mapping[int, int]) -> MeshShape:
    """``mesh`` with other sizes of some dimensions."""
    return replace(mesh, sizes=tuple(sizes.get(dim, size) for dim, size in enumerate(mesh.sizes)))


def _without_replicas(mesh: MeshShape, shard_dim: int | None, shardings: Sequence[Sharding]) -> MeshShape:
    """``mesh`` with one rank in the dimensions before FSDP's that cut nothing."""
    replicas = [
        dim
        for dim in range(shard_dim or 0)
        if all(isinstance(sharding.placements[dim], Replicate | None) for sharding in shardings)
    ]
    return _with_sizes(mesh, dict.fromkeys(replicas, 1))


def _with_one_changed(mesh: MeshShape, world_size: int) -> list[MeshShape]:
    """``mesh`` resized to ``world_size`` ranks, in every way that changes one dimension alone."""
    other_ranks = [_other_ranks(mesh, dim) for dim in range(len(mesh.sizes))]
    return [
        _with_sizes(mesh, {dim: world_size // ranks})
        for dim, ranks in enumerate(other_ranks)
        if world_size % ranks == 0
    ]


def _consistent_meshes(fitting: Mapping[MeshShape, Sequence[MeshShape]]) -> Iterator[tuple[MeshShape, ...]]:
    """One mesh for each of the source's, in which dimensions that two of them share (replicas) stay equal."""
    for chosen in product(*fitting.values()):
        sizes: dict[tuple[str, int], set[int]] = {}
        for before, after in zip(fitting, chosen, strict=True):
            for name, size, new in zip(before.dimension_names, before.sizes, after.sizes, strict=True):
                sizes.setdefault((name, size), set()).add(new)
        if all(len(new) == 1 for new in sizes.values()):
            yield chosen


def shard_dimension(mesh: MeshShape, shardings: Sequence[Sharding], *, cuts_all: bool = False) -> int | None:
    """The first dimension of ``mesh`` that cuts every tensor; if there is only one dimension, that one, unless it has
    to be certain (``cuts_all``).
    """
    if len(mesh.sizes) == 1 and not cuts_all:
        return 0
    # FSDP2 lists its own dimensions before those of other parallelism, even if tensor parallelism is outermost.
    orders = [sharding.order for sharding in shardings if sharding.order is not None]
    dims: list[int] = [*max(orders, key=len, default=()), *range(len(mesh.sizes))]
    for dim in dict.fromkeys(dims):
        placements = [sharding.placements[dim] for sharding in shardings]
        if placements and all(not isinstance(placement, Replicate | None) for placement in placements):
            return dim
    return None


def with_fsdp_dimensions(value: _Value, *, by_fsdp: bool) -> _Value:
    """``value`` with the shardings of its DTensors saying which mesh dimension is FSDP2's, if it is not the first that
    cuts a tensor; ``by_fsdp=False``: that FSDP2 did not cut them.
    """
    by_mesh: dict[MeshShape, dict[Sharding, Sharding]] = {}  # and what each sharding becomes
    for _, tensor in leaf_tensors(value):
        if tensor.sharding is not None:
            by_mesh.setdefault(tensor.sharding.mesh, {})[tensor.sharding] = tensor.sharding
    changed: dict[Sharding, Sharding] = {}
    for mesh, shardings in by_mesh.items():
        dim = shard_dimension(mesh, list(shardings), cuts_all=True)
        for sharding in shardings:
            other = dim is not None and sharding.fsdp_dimension != dim
            if other or not by_fsdp:
                changed[sharding] = replace(sharding, by_fsdp=by_fsdp, fsdp=dim if other else None)
    if not changed:
        return value

    def change(tensor: Tensor) -> Tensor:
        new = changed.get(tensor.sharding) if tensor.sharding is not None else None
        return tensor if new is None else replace(tensor, sharding=new)

    return with_tensors(value, change)


def _fitting_meshes(mesh: MeshShape, shard_dim: int, world_size: int) -> list[MeshShape]:
    """Every mesh of ``world_size`` ranks in which the size of each dimension but ``shard_dim``, FSDP's, divides its
    size in ``mesh``.

    First those that keep most of the parallelism after FSDP's dimension, then those that keep most replicas.
    """
    others = [*range(shard_dim + 1, len(mesh.sizes)), *range(shard_dim)]
    fitting: list[MeshShape] = []
    for sizes in product(*(_divisors(mesh.sizes[dim]) for dim in others)):
        if world_size % prod(sizes) == 0:
            new_sizes = {**dict(zip(others, sizes, strict=True)), shard_dim: world_size // prod(sizes)}
            fitting.append(_with_sizes(mesh, new_sizes))
    return fitting


def _divisors(number: int) -> list[int]:
    """The largest first."""
    return [each for each in range(number, 0, -1) if number % each == 0]
