"""Pickles sharded tensors as DTensors, as in FSDP2's state dicts, in the form of one PyTorch version.

A DTensor's pickle holds private attributes of ``DTensorSpec`` and ``DeviceMesh``, which change with PyTorch: each
version loads only its own form. Sources: ``torch/distributed/device_mesh.py``,
``torch/distributed/tensor/_dtensor_spec.py`` of 2.4 to 2.15. Objects that torch's own state dicts share between tensors
(the mesh, placements) are shared here too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import TypeAlias

from fsdpckpt import flags
from fsdpckpt.errors import InternalError, UsageError
from fsdpckpt.formats.pickle.opcodes import flag, integer, integers, list_of, tuple_of
from fsdpckpt.ir.checkpoint import Note
from fsdpckpt.ir.dtypes import DTYPES, DType
from fsdpckpt.ir.placements import MeshShape, Placement, Replicate, Shard, Sharding, StridedShard
from fsdpckpt.ir.quantized import Blockwise
from fsdpckpt.ir.tensors import Tensor, contiguous_stride
from fsdpckpt.layouts import emptied, emptied_dimension, mesh_box, shard_order_of
from fsdpckpt.producers import MeshForm
from fsdpckpt.writers.rank_pickle import BUILD, NEW, RankPickle

TorchVersion: TypeAlias = tuple[int, int]

_NEWEST: TorchVersion = (2, 15)  # whose form was checked; later ones are assumed to have the same
_OLDEST: TorchVersion = (2, 4)

_LAYOUT = "torch.distributed._mesh_layout"
_WORLD_GROUP = "0"  # the name torch.distributed gives the default process group


class DTensorPickle(RankPickle):
    """Sharded tensors as DTensors on the mesh of their sharding. ``form``: further details of it.

    ``torch``: the version that loads them. ``meshes``: all meshes, in the order in which a job makes them.
    """

    def __init__(
        self, *, rank: int, world_size: int, shardings: Mapping[Tensor, Sharding], casts: Mapping[Tensor, DType],
        canonical: Mapping[Tensor, Tensor], form: MeshForm, torch: TorchVersion,
        meshes: Sequence[MeshShape],
    ) -> None:  # fmt: skip
        super().__init__(rank=rank, world_size=world_size, shardings=shardings, casts=casts, canonical=canonical)
        self._form = form
        self._torch = torch
        self._meshes = meshes
        if torch < (2, 5):
            self._class = ("torch.distributed._tensor.api", "DTensor")
            self._specs = self._placement_types = "torch.distributed._tensor.placement_types"
        else:
            self._class = ("torch.distributed.tensor", "DTensor")
            self._specs = "torch.distributed.tensor._dtensor_spec"
            self._placement_types = "torch.distributed.tensor.placement_types"

    def sharded(self, tensor: Tensor, dtype: DType, sharding: Sharding) -> None:
        box = mesh_box(tensor.shape, sharding, self.rank)
        size = self._local_size(box.sizes, sharding)

        def local() -> None:
            self.view(self.stored(tensor, dtype, box)._replace(shape=size))  # its strides stay those of the box

        self._dtensor(tensor.shape, dtype, sharding, local)

    def sharded_blocks(self, value: Blockwise, sharding: Sharding) -> None:
        blocks = value.blocks
        size = mesh_box(blocks.shape, sharding, self.rank).sizes

        def local() -> None:
            if prod(size):
                self.whole_blocks(value, self._part)
            else:  # as in torchao, which does not quantize so few elements
                empty = self._local_size(size, sharding)
                self.view(self.literal(blocks.dtype, b"")._replace(shape=empty, stride=contiguous_stride(size)))

        self._dtensor(blocks.shape, blocks.dtype, sharding, local)

    def _local_size(self, size: tuple[int, ...], sharding: Sharding) -> tuple[int, ...]:
        """The shape of the local tensor that holds a box of ``size``."""
        return emptied(size, emptied_dimension(sharding)) if has_fsdp_empties(self._torch) else size

    def _dtensor(self, shape: tuple[int, ...], dtype: DType, sharding: Sharding, local: Callable[[], None]) -> None:
        """A DTensor; ``local`` writes what this rank holds of it."""
        text, name, raw = self.text, self.name, self.raw
        self.wrapper(self._class, shape, dtype)
        raw(b"N}(" + text("_local_tensor"))
        local()
        raw(text("_spec") + name(self._specs, "DTensorSpec") + NEW + text("mesh"))
        dims = sharding.dims
        self._mesh(sharding.mesh, dims)
        placements = tuple(placed for dim in dims if (placed := sharding.placements[dim]) is not None)
        raw(
            text("placements")
            + self.once(placements, lambda: tuple_of([self._placement_of(each) for each in placements]))
        )
        raw(text("tensor_meta") + name(self._specs, "TensorMeta") + self.size(shape))
        raw(integers(contiguous_stride(shape)) + name("torch", dtype.name) + b"\x87\x81")
        if self._torch >= (2, 10):
            sizes = tuple(sharding.mesh.sizes[dim] for dim in dims)
            self._shard_order(placements, sizes)
        raw(text("_hash") + b"N" + BUILD + b"u\x86tR")

    def _placement_of(self, placement: Placement) -> bytes:
        text, types = self.text, self._placement_types
        match placement:
            case Replicate():
                return self.name(types, "Replicate") + b")\x81}b"
            case Shard(dim):
                return self.name(types, "Shard") + NEW + text("dim") + integer(dim) + BUILD
            case StridedShard(dim, factor):
                if self._torch < (2, 5):
                    raise UsageError(
                        "PyTorch 2.4 has no placement for FSDP2 over tensor parallelism",
                        expected=f"Shard(d) or Replicate() for {flags.torch_version('2.4')}",
                        found=str(placement),
                        next_step=f"give {flags.torch_version('2.5')} or a later one, or {flags.container('dcp')}",
                    )
                head = self.name(types, "_StridedShard") + NEW + text("dim") + integer(dim)
                return head + text("split_factor") + integer(factor) + BUILD

    def _shard_order(self, placements: tuple[Placement, ...], sizes: tuple[int, ...]) -> None:
        """``DTensorSpec.__post_init__``: from 2.11 on, the order follows from the split factors."""
        text, raw = self.text, self.raw
        is_strided = any(isinstance(placement, StridedShard) for placement in placements)
        raw(text("shard_order"))
        if is_strided and self._torch > (2, 10):
            raw(b"N")
        else:
            raw(self.once(("order", placements, sizes), lambda: self._order_entries(placements, sizes)))
        if self._torch > (2, 10):
            raw(text("use_strided_shard_as_shard_order") + flag(is_strided))

    def _order_entries(self, placements: Sequence[Placement], sizes: Sequence[int]) -> bytes:
        """Each cut tensor dimension with its mesh dimensions, in the order in which they cut it."""
        order = shard_order_of(sizes, placements, first_of_equals=True) or {}  # {}: one that PyTorch cannot express
        return tuple_of(
            [
                self.name(self._specs, "ShardOrderEntry") + integer(dim) + integers(mesh_dims) + b"\x86\x81"
                for dim, mesh_dims in sorted(order.items())
            ]
        )

    def _mesh(self, mesh: MeshShape, dims: tuple[int, ...]) -> None:
        """The mesh that ``init_device_mesh(device, sizes)`` makes, or its submesh of ``dims``."""
        key = ("mesh", mesh, dims)
        reference = self._once.get(key)
        if reference is not None:
            self.raw(reference)
            return
        self.raw(self.name("torch.distributed.device_mesh", "DeviceMesh") + NEW)
        if self._torch < (2, 10):
            self._mesh_of_ranks(mesh, dims)
        else:
            self._mesh_of_layout(mesh, dims)
        # The cached hash is of the process that saved: None makes the next one compute its own.
        self.raw(self.text("_hash") + b"N" + BUILD + self.once(key, lambda: b""))

    def _whole_mesh(self, mesh: MeshShape, dims: tuple[int, ...]) -> None:
        """The mesh that contains the submesh of ``dims``; None if that is the whole mesh."""
        whole = tuple(range(len(mesh.sizes)))
        if dims != whole:
            self._mesh(mesh, whole)
        else:
            self.raw(b"N")

    def _mesh_of_layout(self, mesh: MeshShape, dims: tuple[int, ...]) -> None:
        """The attributes of 2.10 and newer: all ranks of the job, and a layout of sizes and strides into them."""
        text, raw = self.text, self.raw
        raw(text("_device_type") + text(self._form.device))
        raw(text("_layout") + self.name(_LAYOUT, "_MeshLayout") + NEW)
        strides = contiguous_stride(mesh.sizes)
        if self._torch < (2, 13):
            raw(text("shape") + integers([mesh.sizes[dim] for dim in dims]))
            raw(text("stride") + integers([strides[dim] for dim in dims]))
        else:
            raw(text("axes") + tuple_of([self._axis(mesh.sizes[dim], strides[dim]) for dim in dims]))
        packed, ranks = _all_ranks(self.world_size)
        raw(BUILD + text("_rank_map"))
        self.view(self.literal(DTYPES["int32"], packed))
        raw(text("_mesh_dim_names") + self._dim_names(mesh, dims) + text("_root_mesh"))
        self._whole_mesh(mesh, dims)
        raw(text("_flatten_rank_map") + ranks + text("_thread_id") + b"N" + text("_flatten_mapping") + b"}")
        groups = self._group_names(mesh)
        raw(text("_dim_group_names") + list_of([text(groups[dim]) for dim in dims]))
        raw(text("_coordinate_on_dim"))
        if self._torch > (2, 10):
            self.write_rank_specific(lambda rank: integers(_coordinate(mesh, dims, rank)))
            raw(text("_rank"))
            self.write_rank_specific(integer)
        else:
            self.write_rank_specific(lambda rank: list_of(map(integer, _coordinate(mesh, dims, rank))))
        if self._torch >= (2, 15):
            raw(text("_preserve_rank_order") + b"\x89")

    def _axis(self, size: int, stride: int) -> bytes:
        extent, step = ((size,), (stride,)) if size > 1 else ((), ())  # torch drops an axis of one rank from its layout
        head = self.name(_LAYOUT, "_FlatLayout") + NEW + self.text("shape") + integers(extent)
        return head + self.text("stride") + integers(step) + BUILD

    def _mesh_of_ranks(self, mesh: MeshShape, dims: tuple[int, ...]) -> None:
        """The attributes of 2.4 to 2.9: a tensor of the ranks that the mesh spans."""
        text, raw = self.text, self.raw
        sizes, ranks = tuple(mesh.sizes[dim] for dim in dims), ranks_along(mesh, dims, self.rank)
        raw(text("device_type") + text(self._form.device) + text("mesh"))
        view = self.literal(DTYPES["int32"], struct.pack(f"<{len(ranks)}i", *ranks))
        self.view(view._replace(shape=sizes, stride=contiguous_stride(sizes)))
        raw(text("mesh_dim_names") + self._dim_names(mesh, dims))
        raw(text("_flatten_mesh_list") + integers(ranks) + text("_thread_id") + b"N")
        if self._torch < (2, 5):
            raw(text("_parent_mesh"))
            self._whole_mesh(mesh, dims)
        groups = self._group_names(mesh)
        if self._torch < (2, 8):
            raw(text("_dim_group_infos") + list_of([self._group_info(mesh, dim, groups[dim]) for dim in dims]))
        else:
            raw(text("_dim_group_names") + list_of([text(groups[dim]) for dim in dims]))
        raw(text("_coordinate_on_dim"))
        self.write_rank_specific(lambda rank: list_of(map(integer, _coordinate(mesh, dims, rank))))

    def _group_names(self, mesh: MeshShape) -> list[str]:
        """The names of this rank's process group along each dimension of ``mesh``.

        ``DeviceMesh._init_process_groups`` makes all groups of one dimension after those of the one before, and
        continues the numbers from mesh to mesh. A dimension of all ranks has the default group; before 2.10 only if it
        is the only one.
        """
        groups_before = 1
        for each in self._meshes:
            names, coordinate = [], each.coordinate(self.rank)
            for dim, size in enumerate(each.sizes):
                if size == each.world_size and (self._torch >= (2, 10) or len(each.sizes) == 1):
                    names.append(_WORLD_GROUP)
                    continue
                number = 0
                for other, extent in enumerate(each.sizes):
                    number = number * extent + coordinate[other] if other != dim else number
                names.append(str(groups_before + number))
                groups_before += each.world_size // size
            if each == mesh:
                return names
        raise InternalError(f"{mesh} is not among the target's meshes, {' and '.join(map(str, self._meshes))}")

    def _group_info(self, mesh: MeshShape, dim: int, name: str) -> bytes:
        """Tag, ranks and name of this rank's process group along ``dim``."""
        ranks = list_of([integer(rank) for rank in ranks_along(mesh, (dim,), self.rank)])
        return self.text(f"ptd:{name}") + ranks + self.text(name) + b"\x87"

    def _dim_names(self, mesh: MeshShape, dims: tuple[int, ...]) -> bytes:
        return b"N" if mesh.names is None else tuple_of([self.text(mesh.names[dim]) for dim in dims])


def target_version(given: str | None) -> tuple[TorchVersion, list[Note]]:
    """The PyTorch version that loads the files: the one ``given``, else the one installed here, else the newest known.

    The note says which one was inferred. Raises UsageError for a version that is too old.
    """
    text, installed = given or "", True
    if given is None:
        from importlib import metadata  # it imports the parser of e-mails

        try:
            text = metadata.version("torch")
        except metadata.PackageNotFoundError:
            text, installed = ".".join(map(str, _NEWEST)), False
    major, minor = text.split(".")[:2]
    version = int(major), int(minor)
    if version < _OLDEST:
        raise UsageError(
            f"DTensors cannot be written for PyTorch {text}",
            expected=f"{'.'.join(map(str, _OLDEST))} or newer",
            found=text,
            next_step=f"give {flags.torch_version} a newer one, or add {flags.container('dcp')}, which every version "
            "loads",
        )
    note = f"DTensors are pickled for PyTorch {major}.{minor}, which is installed ({flags.torch_version} changes it)"
    if not installed:  # each version loads its own form only, and this one is a guess
        note = (
            f"DTensors are pickled for PyTorch {major}.{minor}, the newest known version, as none is installed: if the "
            f"job uses another, add {flags.torch_version('VERSION')}"
        )
    return version, [] if given is not None else [Note("inferred", note, warning=not installed)]


def has_fsdp_empties(torch: TorchVersion) -> bool:
    """Whether FSDP2 of this version gives local tensors without elements a shape of its own (``layouts``)."""
    return torch >= (2, 6)


def ranks_along(mesh: MeshShape, dims: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """The ranks of the submesh of ``dims`` that ``rank`` is in, row-major."""
    strides, coordinate = contiguous_stride(mesh.sizes), mesh.coordinate(rank)
    first = rank - sum(coordinate[dim] * strides[dim] for dim in dims)
    steps = [range(0, mesh.sizes[dim] * strides[dim], strides[dim]) for dim in dims]
    return tuple(first + sum(offsets) for offsets in product(*steps))


def _coordinate(mesh: MeshShape, dims: Sequence[int], rank: int) -> list[int]:
    coordinate = mesh.coordinate(rank)
    return [coordinate[dim] for dim in dims]


@lru_cache(maxsize=4)
def _all_ranks(world_size: int) -> tuple[bytes, bytes]:
    """0 .. world_size - 1 as int32 and as the opcodes of a tuple: every rank's file has both, for each mesh."""
    return struct.pack(f"<{world_size}i", *range(world_size)), integers(range(world_size))
