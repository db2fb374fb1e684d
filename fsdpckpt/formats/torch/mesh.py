"""Parses the device meshes in a rank's file: which ranks a mesh has, and the coordinate of the saving rank.

Follows ``torch.distributed.device_mesh.DeviceMesh`` as torch 2.4 to 2.14 pickle it: up to 2.9 with a tensor of ranks,
later with a rank map and a layout of strides into it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from operator import lt, mul
from typing import NoReturn, cast

import numpy as np

from fsdpckpt.errors import damaged
from fsdpckpt.formats.pickle import StubInstance, arguments_of
from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.layouts import group_coordinate
from fsdpckpt.storage import ByteSource
from fsdpckpt.text import truncate

MAX_RANKS = 1 << 20  # more than any job has: a larger mesh is damaged, and not computed


@dataclass(frozen=True, slots=True)
class Mesh:
    """A device mesh from one rank's file. ``ranks``: all of its ranks, row-major, empty if not recorded.

    ``coordinate``: that of the saving rank in the process groups of the mesh, which say what shard it has, None if it
    was outside. ``rank``: the saving rank, None if not recorded.
    ``world``: the ranks of the mesh that this one was cut from (of itself if it was not). ``device``: the type of its
    devices, "" if not recorded. ``names``: its ``mesh_dim_names``, None without any. ``nesting``: its
    dimensions from outermost to innermost, in the order of ``init_device_mesh``; None if no order of them counts its
    ranks up, or they are not recorded.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    coordinate: tuple[int, ...] | None
    rank: int | None
    world: tuple[int, ...]
    device: str
    names: tuple[str, ...] | None
    nesting: tuple[int, ...] | None


def attributes_of(value: object) -> Mapping[object, object]:
    """The attributes of an object that is part of a distributed tensor."""
    return cast("Mapping[object, object]", vars(value)) if isinstance(value, StubInstance) else {}


def merge_states(pickled: object) -> Mapping[object, object]:
    """A pickled state: a dict, or a tuple of the dict of attributes and the dict of slots."""
    if isinstance(pickled, dict):
        return pickled
    states = pickled if isinstance(pickled, tuple) else ()
    attributes: dict[object, object] = {}
    for state in states:
        if isinstance(state, dict):
            attributes.update(state)
    return attributes


def as_int_tuple(value: object) -> tuple[int, ...] | None:
    """A list or tuple of ints as a tuple, an int as a tuple of one; None for anything else."""
    if type(value) is int:
        return (value,)
    if isinstance(value, (tuple, list)) and all(type(n) is int for n in value):
        return tuple(value)
    return None


class FileParser:
    """Parses the distributed tensors of one file."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source

    def _corrupt(self, key: str, what: str, expected: str, found: str) -> NoReturn:
        """Refuse the tensor ``key``, whose parts contradict each other."""
        why = "the file is damaged, or was written by a torch version that fsdpckpt does not know"
        raise damaged(self._source.path, f"{key}: {what}", expected, found, key=key, why=why)


@dataclass(frozen=True, slots=True, eq=False)
class Hole:
    """Takes the place of a number in a pickle: the rank's own, with index ``number`` (``formats.torch.alike``)."""

    number: int


class MeshParser(FileParser):
    """Parses the meshes of one file, each once.

    ``numbers``: what holes stand for. ``moved``: returns the offset of a tensor's bytes from its offset in the pickle.
    """

    def __init__(
        self,
        source: ByteSource,
        numbers: Sequence[int | None] = (),
        moved: Callable[[int], int] = lambda offset: offset,
    ) -> None:
        super().__init__(source)
        self._numbers = numbers
        self._moved = moved
        self._meshes: dict[int, tuple[object, Mesh]] = {}

    @property
    def parsed(self) -> list[tuple[object, Mesh]]:
        """Every mesh, as it was pickled and parsed."""
        return list(self._meshes.values())

    def _fill_holes(self, value: object) -> object:
        """A number, or several, with this rank's numbers in place of holes."""
        if isinstance(value, Hole):
            return self._numbers[value.number]
        if isinstance(value, (list, tuple)) and any(isinstance(item, Hole) for item in value):
            return [self._fill_holes(item) for item in value]
        return value

    def mesh(self, pickled: object, key: str) -> Mesh:
        """The mesh that ``pickled`` describes; ``key``: the tensor's name in messages."""
        known = self._meshes.get(id(pickled))
        if known is None:
            known = self._meshes[id(pickled)] = (pickled, self._parse(pickled, key))
        return known[1]

    def _parse(self, pickled: object, key: str) -> Mesh:
        attributes = attributes_of(pickled)
        coordinate = as_int_tuple(self._fill_holes(attributes.get("_coordinate_on_dim")))
        pickled_root = attributes.get("_root_mesh", attributes.get("_parent_mesh"))
        root = self.mesh(pickled_root, key) if isinstance(pickled_root, StubInstance) else None
        rank = attributes.get("_rank", root.rank if root is not None else None)  # torch 2.10 does not have it
        rank = self._fill_holes(rank)
        rank = rank if type(rank) is int else None
        if "mesh" in attributes:  # torch 2.4 to 2.9: the mesh's own ranks
            shape, ranks = self._tensor_ranks(attributes["mesh"], key)
            world = ranks
        else:
            shape, ranks, world = self._layout_ranks(attributes, coordinate, rank, key)
        self._check_coordinate(coordinate, shape, key)
        if coordinate is not None and ranks:
            rank_there = ranks[_position(coordinate, shape)]
            if rank is not None and rank != rank_there:
                what = f"the mesh has a different rank at {coordinate}"
                self._corrupt(key, what, f"rank {rank}", f"rank {rank_there}")
            rank = rank_there
            coordinate = group_coordinate(coordinate, shape, ranks)
        if root is not None:
            world = root.world
        device = attributes.get("_device_type", attributes.get("device_type"))
        names = attributes.get("_mesh_dim_names", attributes.get("mesh_dim_names"))
        named = isinstance(names, (tuple, list)) and len(names) == len(shape) and all(type(n) is str for n in names)
        own_names = tuple(cast("Sequence[str]", names)) if named else None
        return Mesh(
            shape,
            ranks,
            coordinate,
            rank,
            world,
            device if isinstance(device, str) else "",
            own_names,
            nesting_of(shape, ranks, own_names or (), (root.names if root is not None else None) or ()),
        )

    def _layout_ranks(
        self, attributes: Mapping[object, object], coordinate: tuple[int, ...] | None, rank: int | None, key: str
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """(shape, ranks, world) of a mesh of torch 2.10+: a rank map, and axes with strides into it."""
        world, stored = as_int_tuple(attributes.get("_flatten_rank_map")), attributes.get("_rank_map")
        if world is None or isinstance(stored, StoredTensor):
            ranks = self._tensor_ranks(stored, key)[1]
            if world is not None and world != ranks:  # torch makes the one from the other
                self._corrupt(key, "the mesh has two rank maps", f"{world}", f"{ranks}")
            world = ranks
        axes = self._axes(attributes.get("_layout"), key)
        shape = tuple(len(axis) for axis in axes)
        whole = prod(shape) == len(world)
        base = 0
        if not whole:
            if rank not in world or coordinate is None:
                return shape, (), world
            self._check_coordinate(coordinate, shape, key)
            base = world.index(rank) - sum(axis[c] for axis, c in zip(axes, coordinate, strict=True))
        positions = [base + sum(steps) for steps in product(*axes)]
        if any(not 0 <= p < len(world) for p in positions):
            self._corrupt(key, "a mesh reaches outside its rank map", f"below {len(world)}", str(max(positions)))
        return shape, tuple(world[p] for p in positions), world

    def _check_coordinate(self, coordinate: tuple[int, ...] | None, shape: tuple[int, ...], key: str) -> None:
        inside = coordinate is None or (
            len(coordinate) == len(shape) and all(0 <= c < n for c, n in zip(coordinate, shape, strict=True))
        )
        if not inside:
            self._corrupt(key, "a coordinate outside its mesh", f"a coordinate in {shape}", f"{coordinate}")

    def _axes(self, layout: object, key: str) -> list[list[int]]:
        """For each mesh dimension the steps into the rank map for its indexes."""
        attributes = attributes_of(layout)
        arguments = arguments_of(layout)
        if len(arguments) == 2:
            attributes = {"shape": arguments[0], "stride": arguments[1]}
        pairs: list[tuple[object, object]] = []
        flat = attributes.get("axes")
        if isinstance(flat, (tuple, list)):
            pairs = [(attributes_of(axis).get("shape"), attributes_of(axis).get("stride")) for axis in flat]
        else:
            sizes, steps = attributes.get("shape"), attributes.get("stride")
            if isinstance(sizes, (tuple, list)) and isinstance(steps, (tuple, list)):
                pairs = list(zip(sizes, steps, strict=False))
            else:
                pairs = [(sizes, steps)]
        axes: list[list[int]] = []
        total = 1
        for size, step in pairs:
            counts, strides = as_int_tuple(size), as_int_tuple(step)
            if counts is None or strides is None or len(counts) != len(strides):
                self._corrupt(key, "an unknown mesh layout", "sizes and strides", f"{truncate(size)}, {truncate(step)}")
            total *= prod(counts)
            if not 0 < total <= MAX_RANKS:
                self._corrupt(key, "an impossible mesh", f"up to {MAX_RANKS} ranks", f"{counts}")
            axes.append([sum(map(mul, index, strides)) for index in product(*map(range, counts))])
        return axes

    def _tensor_ranks(self, pickled: object, key: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(shape, values) of the small integer tensor that lists a mesh's ranks."""
        if not isinstance(pickled, StoredTensor) or pickled.dtype.name not in ("int32", "int64"):
            self._corrupt(key, "a mesh without ranks", "an integer tensor", type(pickled).__name__)
        count = prod(pickled.shape)
        if not 0 < count <= MAX_RANKS:
            self._corrupt(key, "an impossible mesh", f"up to {MAX_RANKS} ranks", f"{pickled.shape}")
        extent = 1 + sum((n - 1) * step for n, step in zip(pickled.shape, pickled.stride, strict=True))
        raw = np.frombuffer(
            self._source.read(self._moved(pickled.offset), extent * pickled.dtype.itemsize), pickled.dtype.name
        )
        strides = [step * raw.itemsize for step in pickled.stride]
        values = np.lib.stride_tricks.as_strided(raw, pickled.shape, strides)
        return pickled.shape, tuple(int(n) for n in values.reshape(-1))


def nesting_of(
    shape: tuple[int, ...], ranks: tuple[int, ...], names: tuple[str, ...], root: tuple[str, ...]
) -> tuple[int, ...] | None:
    """As ``Mesh.nesting``. ``names``: of the mesh; ``root``: of the mesh that it was cut from, which knows the order of
    dimensions of one rank too.
    """
    if not ranks:
        return None
    dims = tuple(range(len(shape)))
    grid = np.array(ranks).reshape(shape)
    if names and set(names) <= set(root):
        nesting = tuple(names.index(name) for name in root if name in names)
    elif all(map(lt, ranks, ranks[1:])):
        nesting = dims
    else:
        steps = [int(grid.take(min(1, n - 1), dim).flat[0]) - ranks[0] for dim, n in enumerate(shape)]
        nesting = tuple(sorted(dims, key=lambda dim: (shape[dim] > 1, -steps[dim])))
    counted = grid.transpose(nesting).ravel().tolist()
    return nesting if all(map(lt, counted, counted[1:])) else None


def _position(coordinate: Sequence[int], shape: Sequence[int]) -> int:
    """The row-major index of ``coordinate`` in ``shape``."""
    position = 0
    for c, n in zip(coordinate, shape, strict=True):
        position = position * n + c
    return position
