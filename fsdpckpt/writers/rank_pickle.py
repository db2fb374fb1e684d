"""Writes the pickle of one rank's file: sharded tensors as DTensor or ShardedTensor, holding this rank's rows only.

The forms are those torch 2.13 pickles (``torch.distributed.tensor``, ``torch.distributed._shard``): what FSDP2's state
dicts and FSDP1's ``SHARDED_STATE_DICT`` hold on that rank, on a CPU device. Objects that torch's own state dicts
share between tensors (the device mesh, placements) are shared here; so is what depends on the shape only (shard
metadata), which keeps a file from growing with the world size times the number of tensors.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol, TypeAlias

from fsdpckpt.formats.pickle.write import PickleWriter, StorageView, integer, integers
from fsdpckpt.formats.zip import TorchZip
from fsdpckpt.ir.dtypes import DTYPES, DType
from fsdpckpt.ir.mesh import MeshShape, Placement, Replicate, Shard, Sharding, StridedShard
from fsdpckpt.ir.targets import TargetFile
from fsdpckpt.ir.tensors import Box, Tensor, contiguous_stride
from fsdpckpt.layouts.sharded import mesh_box, rank_box
from fsdpckpt.producers.forms import PLAIN_MESH, MeshForm

_NEW = b")\x81}("  # an empty argument tuple, __new__, and the start of the attributes
_BUILD = b"ub"
_SHARD = "torch.distributed._shard"
_TENSOR = "torch.distributed.tensor"
_LAYOUT = "torch.distributed._mesh_layout"
_WORLD_GROUP = "0"  # the name torch.distributed gives the default process group


class Filling(Protocol):
    """Content of a record that is more than one box of one tensor."""

    def fill(self, file: TargetFile, dtype: DType) -> None:
        """Append write items and literals, elements of ``dtype``, to ``file``."""


Content: TypeAlias = Tensor | bytes | Filling


class ShardList(NamedTuple):
    """The shards of one ShardedTensor that are not empty: ``boxes[i]`` is on ``ranks[i]``.

    Lists of equal ``key`` are written once.
    """

    key: Hashable
    ranks: tuple[int, ...]
    boxes: Sequence[Box]


class RankPickle(PickleWriter, ABC):
    """Writes a section's dict for ``rank`` of ``world_size``; the tensors of ``shardings`` are cut as they say.

    ``canonical`` maps a tied tensor to the tensor it shares its record with. Subclasses say what wraps
    the local rows.
    """

    def __init__(
        self, *, rank: int, world_size: int, shardings: Mapping[Tensor, Sharding], casts: Mapping[Tensor, DType],
        canonical: Mapping[Tensor, Tensor], mesh: MeshForm = PLAIN_MESH,
    ) -> None:  # fmt: skip
        super().__init__()
        self.rank = rank
        self.world_size = world_size
        self.mesh = mesh
        self._shardings = shardings
        self._casts = casts
        self._canonical = canonical
        self._keys: dict[Hashable, str] = {}
        self._records: list[tuple[Content, DType, Box, int]] = []

    def tensor(self, value: Tensor) -> None:
        dtype = self._casts.get(value, value.dtype)
        sharding = self._shardings.get(value)
        if sharding is not None:
            self.sharded(value, dtype, sharding)
        else:
            self.view(self.stored(value, dtype, Box.whole(value.shape)))

    @abstractmethod
    def sharded(self, tensor: Tensor, dtype: DType, sharding: Sharding) -> None:
        """Write what this rank holds of a sharded tensor."""

    def stored(self, tensor: Tensor, dtype: DType, box: Box) -> StorageView:
        """A compact record of ``box``, the same one for tied tensors."""
        tensor = self._canonical.get(tensor, tensor)
        nbytes = box.numel * dtype.itemsize
        key = self._keys.get(tensor)
        if key is None:
            key = self._keys[tensor] = self.record(tensor, dtype, box, nbytes)
        return StorageView(key, dtype, 0, box.sizes, contiguous_stride(box.sizes), nbytes)

    def literal(self, dtype: DType, data: bytes) -> StorageView:
        """A 1-D tensor of values that are known now."""
        shape = (len(data) // dtype.itemsize,)
        key = self.record(data, dtype, Box.whole(shape), len(data))
        return StorageView(key, dtype, 0, shape, (1,), len(data))

    def record(self, content: Content, dtype: DType, box: Box, nbytes: int) -> str:
        self._records.append((content, dtype, box, nbytes))
        return str(len(self._records) - 1)

    def write(self, file: TargetFile, *, stem: str) -> None:
        """Append the whole archive: the pickle and the records it asked for."""
        archive = TorchZip(file, stem=stem)
        archive.pickle(self.finish())
        for key, (content, dtype, box, nbytes) in enumerate(self._records):
            if isinstance(content, bytes):
                archive.record(f"data/{key}", content)
                continue
            archive.begin_data(str(key), nbytes)
            if isinstance(content, Tensor):
                file.write_item(content, start=box.offsets, size=box.sizes, dtype=dtype)
            else:
                content.fill(file, dtype)
        archive.finish()

    def wrapper(
        self, cls: tuple[str, str], shape: tuple[int, ...], dtype: DType, *, requires_grad: bool = False
    ) -> None:
        """The call that rebuilds a tensor subclass, up to its state."""
        name = self.name
        self.raw(
            name("torch._tensor", "_rebuild_from_type_v2") + b"(" + name("torch._utils", "_rebuild_wrapper_subclass")
        )
        self.raw(name(*cls) + b"(" + name(*cls) + name("torch", dtype.name))
        self.raw(integers(shape) + integers(contiguous_stride(shape)) + b"K\x00" + self.layout() + self.cpu())
        self.raw(_flag(requires_grad) + b"t")

    def layout(self) -> bytes:
        return self.once(
            "layout", lambda: self.name("torch.serialization", "_get_layout") + self.text("torch.strided") + b"\x85R"
        )

    def cpu(self) -> bytes:
        return self.once("cpu", lambda: self.name("torch", "device") + self.text("cpu") + b"\x85R")

    def size(self, shape: tuple[int, ...]) -> bytes:
        return self.name("torch", "Size") + integers(shape) + b"\x85R"


class DTensorPickle(RankPickle):
    """Sharded tensors as DTensors on the mesh of their sharding, as FSDP2 holds them."""

    def sharded(self, tensor: Tensor, dtype: DType, sharding: Sharding) -> None:
        text, name, raw = self.text, self.name, self.raw
        self.wrapper((_TENSOR, "DTensor"), tensor.shape, dtype)
        raw(b"N}(" + text("_local_tensor"))
        self.view(self.stored(tensor, dtype, mesh_box(tensor.shape, sharding, self.rank)))
        spec = f"{_TENSOR}._dtensor_spec"
        raw(text("_spec") + name(spec, "DTensorSpec") + _NEW + text("mesh"))
        self._mesh(sharding.mesh, tuple(dim for dim, placed in enumerate(sharding.placements) if placed is not None))
        placements = tuple(placement for placement in sharding.placements if placement is not None)
        raw(text("placements") + self.once(placements, lambda: self._placements(placements)))
        raw(text("tensor_meta") + name(spec, "TensorMeta") + self.size(tensor.shape))
        raw(integers(contiguous_stride(tensor.shape)) + name("torch", dtype.name) + b"\x87\x81")
        # DTensorSpec.__post_init__: split factors say the order themselves, and shard_order is None beside them.
        is_strided = any(isinstance(placement, StridedShard) for placement in placements)
        raw(text("shard_order"))
        raw(b"N" if is_strided else self.once(("order", placements), lambda: self._shard_order(placements)))
        raw(text("use_strided_shard_as_shard_order") + _flag(is_strided) + text("_hash") + b"N" + _BUILD + b"u\x86tR")

    def _placements(self, placements: Sequence[Placement]) -> bytes:
        return _tuple([self._placement_of(placement) for placement in placements])

    def _placement_of(self, placement: Placement) -> bytes:
        text, types = self.text, f"{_TENSOR}.placement_types"
        match placement:
            case Replicate():
                return self.name(types, "Replicate") + b")\x81}b"
            case Shard(dim):
                return self.name(types, "Shard") + _NEW + text("dim") + integer(dim) + _BUILD
            case StridedShard(dim, factor):
                head = self.name(types, "_StridedShard") + _NEW + text("dim") + integer(dim)
                return head + text("split_factor") + integer(factor) + _BUILD

    def _shard_order(self, placements: Sequence[Placement]) -> bytes:
        """``DTensorSpec.compute_default_shard_order``: each cut tensor dimension with its mesh dimensions."""
        order: dict[int, list[int]] = {}
        for mesh_dim, placement in enumerate(placements):
            if isinstance(placement, Shard):
                order.setdefault(placement.dim, []).append(mesh_dim)
        entries: list[bytes] = []
        for dim, mesh_dims in sorted(order.items()):  # the name is memoised where it is used first, and only if it is
            entry = self.name(f"{_TENSOR}._dtensor_spec", "ShardOrderEntry")
            entries.append(entry + integer(dim) + integers(mesh_dims) + b"\x86\x81")
        return _tuple(entries)

    def _mesh(self, mesh: MeshShape, dims: tuple[int, ...]) -> None:
        """The mesh that ``init_device_mesh(device, sizes)`` makes, or its submesh of ``dims``."""
        key = ("mesh", mesh, dims)
        known = self._once.get(key)
        if known is not None:
            self.raw(known)
            return
        text, raw = self.text, self.raw
        raw(self.name("torch.distributed.device_mesh", "DeviceMesh") + _NEW + text("_device_type"))
        raw(text(self.mesh.device))
        raw(text("_layout") + self.name(_LAYOUT, "_MeshLayout") + _NEW + text("axes"))
        strides = contiguous_stride(mesh.sizes)
        raw(_tuple([self._axis(mesh.sizes[dim], strides[dim]) for dim in dims]) + _BUILD + text("_rank_map"))
        packed, ranks = _all_ranks(self.world_size)
        self.view(self.literal(DTYPES["int32"], packed))
        names = b"N" if mesh.names is None else _tuple([text(mesh.names[dim]) for dim in dims])
        raw(text("_mesh_dim_names") + names + text("_root_mesh"))
        if len(dims) < len(mesh.sizes):
            self._mesh(mesh, tuple(range(len(mesh.sizes))))
        else:
            raw(b"N")
        raw(text("_flatten_rank_map") + ranks + text("_thread_id") + b"N" + text("_flatten_mapping") + b"}")
        groups = group_names(mesh, self.rank)
        raw(text("_dim_group_names") + b"](" + b"".join([text(groups[dim]) for dim in dims]) + b"e")
        coordinate = mesh.coordinate(self.rank)
        raw(text("_rank") + integer(self.rank) + text("_coordinate_on_dim"))
        raw(integers(tuple(coordinate[dim] for dim in dims)))
        # The cached hash is of the process that saved: None makes the next one compute its own.
        raw(text("_hash") + b"N" + _BUILD + self.once(key, lambda: b""))

    def _axis(self, size: int, stride: int) -> bytes:
        extent, step = ((size,), (stride,)) if size > 1 else ((), ())  # torch drops an axis of one rank from its layout
        head = self.name(_LAYOUT, "_FlatLayout") + _NEW + self.text("shape") + integers(extent)
        return head + self.text("stride") + integers(step) + _BUILD


def group_names(mesh: MeshShape, rank: int) -> list[str]:
    """The names of this rank's process group along each mesh dimension, where ``mesh`` is the first that a job makes.

    ``DeviceMesh._init_process_groups`` makes all groups of one dimension after those of the one before, numbered on;
    a dimension that spans all ranks has the default group.
    """
    coordinate, made, names = mesh.coordinate(rank), 0, []
    for dim, size in enumerate(mesh.sizes):
        if size == mesh.world_size:
            names.append(_WORLD_GROUP)
            continue
        number = 0
        for other, extent in enumerate(mesh.sizes):
            number = number * extent + coordinate[other] if other != dim else number
        names.append(str(1 + made + number))
        made += mesh.world_size // size
    return names


def _tuple(items: Sequence[bytes]) -> bytes:
    if len(items) > 3:
        return b"(" + b"".join(items) + b"t"
    return b"".join(items) + (b")", b"\x85", b"\x86", b"\x87")[len(items)]


class ShardedTensorPickle(RankPickle):
    """Sharded tensors as ShardedTensors, as FSDP1's ``_create_chunk_sharded_tensor`` makes them.

    Ranks without rows are no shards: they hold an empty list. On a mesh of two dimensions (HYBRID_SHARD) each row of
    ranks holds the whole: metadata and specification name the ranks of this row, the rank's own shard its place in it.
    """

    def sharded(self, tensor: Tensor, dtype: DType, sharding: Sharding) -> None:
        shape = tensor.shape
        place, ranks = self.group()
        shards = _shards(shape, ranks, self.rank - place)
        shard = None
        if place < len(shards.ranks):
            shard = (place, self.stored(tensor, dtype, mesh_box(shape, sharding, self.rank)))
        self.sharded_tensor(shape, dtype, shards, shard, placed=place)

    def sharded_tensor(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        shards: ShardList,
        own: tuple[int, StorageView] | None,
        *,
        placed: int | None = None,
        requires_grad: bool = False,
    ) -> None:
        """Write a ShardedTensor of which this rank holds the shard ``own`` (index in ``shards``, view), or none.

        ``placed``: the rank that the shard says it is on, None for that of ``shards``.
        """
        name, raw = self.name, self.raw
        self.wrapper((f"{_SHARD}.sharded_tensor.api", "ShardedTensor"), shape, dtype, requires_grad=requires_grad)
        raw(b"(]")
        if own is not None:
            index, view = own
            raw(name(f"{_SHARD}.sharded_tensor.shard", "Shard") + b")\x81N}(" + self.text("tensor"))
            self.view(view, requires_grad=requires_grad)
            on = shards.ranks[index] if placed is None else placed
            raw(self.text("metadata") + self._shard_metadata(on, shards.boxes[index]) + b"u\x86ba")
        metadata = f"{_SHARD}.sharded_tensor.metadata"
        raw(name(metadata, "ShardedTensorMetadata") + _NEW + self.text("shards_metadata"))
        raw(self.once(("shards", shards.key), lambda: self._shard_list(shards)) + self.text("size") + self.size(shape))
        raw(self.text("tensor_properties") + name(metadata, "TensorProperties") + b")\x81(" + name("torch", dtype.name))
        raw(self.layout() + _flag(requires_grad) + self.once("format", self._memory_format) + b"\x89tb" + _BUILD)
        raw(self.once("group", self._process_group) + self._spec(shards) + b"\x89ttR")

    def group(self) -> tuple[int, int]:
        """This rank's place in the process group that shards, and how many ranks that has."""
        mesh = next((sharding.mesh for sharding in self._shardings.values()), None)
        ranks = mesh.sizes[-1] if mesh is not None else self.world_size
        return self.rank % ranks, ranks

    def _shard_list(self, shards: ShardList) -> bytes:
        metadata = [self._shard_metadata(shards.ranks[0], shards.boxes[0])]
        # From here on every name is a memo reference, the same for each: lists are as long as the world is large.
        head = self.name(f"{_SHARD}.metadata", "ShardMetadata") + b")\x81N}(" + self.text("shard_offsets")
        sizes, placement = self.text("shard_sizes"), self.text("placement")
        for rank, box in zip(shards.ranks[1:], shards.boxes[1:], strict=True):
            where = self._placement(rank)
            metadata.append(
                b"%b%b%b%b%b%bu\x86b" % (head, _list(box.offsets), sizes, _list(box.sizes), placement, where)
            )
        return b"](" + b"".join(metadata) + b"e"

    def _shard_metadata(self, rank: int, box: Box) -> bytes:
        text = self.text
        head = self.name(f"{_SHARD}.metadata", "ShardMetadata") + b")\x81N}("
        head += text("shard_offsets") + _list(box.offsets) + text("shard_sizes") + _list(box.sizes)
        return head + text("placement") + self._placement(rank) + b"u\x86b"

    def _placement(self, rank: int) -> bytes:
        """``rank:<rank>/cpu``."""
        return self.once(("placement", rank), lambda: self._remote_device(rank))

    def _remote_device(self, rank: int) -> bytes:
        text = self.text
        head = self.name("torch.distributed.remote_device", "_remote_device") + _NEW + text("_worker_name") + b"N"
        return head + text("_rank") + integer(rank) + text("_device") + self.cpu() + _BUILD

    def _memory_format(self) -> bytes:
        return self.name(f"{_SHARD}.sharded_tensor.metadata", "MEM_FORMAT_ENCODING") + b"K\x00\x85R"

    def _process_group(self) -> bytes:
        text = self.text
        head = self.name("builtins", "getattr") + self.name(f"{_SHARD}.sharded_tensor.api", "ShardedTensor")
        head += text("ProcessGroupState") + b"\x86R" + _NEW
        place, ranks = self.group()
        for scope, number in (("local", place), ("global", self.rank)):
            head += text(f"{scope}_rank") + integer(number)
        for scope, number in (("local", ranks), ("global", self.world_size)):
            head += text(f"{scope}_world_size") + integer(number)
        return head + _BUILD

    def _spec(self, shards: ShardList) -> bytes:
        """``_infer_sharding_spec_from_shards_metadata``: one shard alone does not say along which dimension."""
        if len(shards.ranks) > 1:
            return self.once(("spec", shards.ranks), lambda: self._chunk_spec(shards.ranks))
        head = self.name(f"{_SHARD}.sharding_spec.api", "EnumerableShardingSpec") + _NEW + self.text("shards")
        return head + self._shard_list(shards) + _BUILD

    def _chunk_spec(self, ranks: Sequence[int]) -> bytes:
        text = self.text
        spec = self.name(f"{_SHARD}.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec") + _NEW + text("dim")
        spec += b"K\x00" + text("placements") + b"](" + b"".join([self._placement(rank) for rank in ranks])
        return spec + b"e" + _BUILD


@lru_cache(maxsize=4096)
def _shards(shape: tuple[int, ...], ranks: int, first: int) -> ShardList:
    """The shards of those with rows among ``ranks`` ranks from rank ``first`` on; that one's when there are none."""
    rows = -(-shape[0] // ranks)
    filled = -(-shape[0] // rows) if rows else 1
    boxes = [rank_box(shape, ranks, place) for place in range(filled)]
    return ShardList(shape, tuple(range(first, first + filled)), boxes)


@lru_cache(maxsize=4)
def _all_ranks(world_size: int) -> tuple[bytes, bytes]:
    """0 .. world_size - 1 as int32 and as the opcodes of a tuple: every rank's file holds both, for each mesh."""
    return struct.pack(f"<{world_size}i", *range(world_size)), integers(range(world_size))


def _flag(value: bool) -> bytes:  # noqa: FBT001 - a pickled bool
    return b"\x88" if value else b"\x89"


def _list(values: tuple[int, ...]) -> bytes:
    return b"](" + b"".join(map(integer, values)) + b"e"
