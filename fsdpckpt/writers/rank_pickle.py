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
from fsdpckpt.ir.targets import TargetFile
from fsdpckpt.ir.tensors import Box, Tensor, contiguous_stride
from fsdpckpt.layouts.sharded import rank_box
from fsdpckpt.producers.forms import PLAIN_MESH, MeshForm

__all__ = ["DTensorPickle", "Filling", "RankPickle", "ShardList", "ShardedTensorPickle"]

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
    """Writes a section's dict for ``rank`` of ``world_size``; the ``sharded_tensors`` are cut.

    ``canonical`` maps a tied tensor to the tensor it shares its record with. Subclasses say what wraps
    the local rows.
    """

    def __init__(
        self, *, rank: int, world_size: int, sharded_tensors: frozenset[Tensor], casts: Mapping[Tensor, DType],
        canonical: Mapping[Tensor, Tensor], mesh: MeshForm = PLAIN_MESH,
    ) -> None:  # fmt: skip
        super().__init__()
        self.rank = rank
        self.world_size = world_size
        self.mesh = mesh
        self._sharded_tensors = sharded_tensors
        self._casts = casts
        self._canonical = canonical
        self._keys: dict[Hashable, str] = {}
        self._records: list[tuple[Content, DType, Box, int]] = []

    def tensor(self, value: Tensor) -> None:
        dtype = self._casts.get(value, value.dtype)
        if value in self._sharded_tensors:
            self.sharded(value, dtype, rank_box(value.shape, self.world_size, self.rank))
        else:
            self.view(self.stored(value, dtype, Box.whole(value.shape)))

    @abstractmethod
    def sharded(self, tensor: Tensor, dtype: DType, box: Box) -> None:
        """Write a sharded tensor of which this rank holds ``box``."""

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
    """Sharded tensors as DTensors on a 1-D mesh of all ranks, ``[Shard(0)]``, as FSDP2 holds them."""

    def sharded(self, tensor: Tensor, dtype: DType, box: Box) -> None:
        text, name, raw = self.text, self.name, self.raw
        self.wrapper((_TENSOR, "DTensor"), tensor.shape, dtype)
        raw(b"N}(" + text("_local_tensor"))
        self.view(self.stored(tensor, dtype, box))
        spec = f"{_TENSOR}._dtensor_spec"
        raw(text("_spec") + name(spec, "DTensorSpec") + _NEW + text("mesh"))
        self._mesh()
        raw(
            text("placements")
            + self.once("placements", self._placements)
            + text("tensor_meta")
            + name(spec, "TensorMeta")
        )
        raw(
            self.size(tensor.shape)
            + integers(contiguous_stride(tensor.shape))
            + name("torch", dtype.name)
            + b"\x87\x81"
        )
        raw(
            text("shard_order")
            + self.once("order", lambda: name(spec, "ShardOrderEntry") + b"K\x00K\x00\x85\x86\x81\x85")
        )
        raw(text("use_strided_shard_as_shard_order") + b"\x89" + text("_hash") + b"N" + _BUILD + b"u\x86tR")

    def _placements(self) -> bytes:
        shard = self.name(f"{_TENSOR}.placement_types", "Shard") + _NEW
        return shard + self.text("dim") + b"K\x00" + _BUILD + b"\x85"

    def _mesh(self) -> None:
        """The mesh ``init_device_mesh(device, (world_size,))`` makes: over the default process group."""
        known = self._once.get("mesh")
        if known is not None:
            self.raw(known)
            return
        text, raw, world = self.text, self.raw, self.world_size
        raw(self.name("torch.distributed.device_mesh", "DeviceMesh") + _NEW + text("_device_type"))
        raw(text(self.mesh.device))
        raw(text("_layout") + self.name(_LAYOUT, "_MeshLayout") + _NEW + text("axes"))
        axis, step = ((world,), (1,)) if world > 1 else ((), ())  # torch drops an axis of one rank from its layout
        raw(self.name(_LAYOUT, "_FlatLayout") + _NEW + text("shape") + integers(axis))
        raw(text("stride") + integers(step) + _BUILD + b"\x85" + _BUILD + text("_rank_map"))
        packed, ranks = _all_ranks(world)
        self.view(self.literal(DTYPES["int32"], packed))
        names = b"N" if self.mesh.names is None else b"(" + b"".join(map(text, self.mesh.names)) + b"t"
        raw(text("_mesh_dim_names") + names + text("_root_mesh") + b"N")
        raw(text("_flatten_rank_map") + ranks + text("_thread_id") + b"N")
        raw(text("_flatten_mapping") + b"}" + text("_dim_group_names") + b"](" + text(_WORLD_GROUP) + b"e")
        raw(text("_rank") + integer(self.rank) + text("_coordinate_on_dim") + integers((self.rank,)))
        # The cached hash is of the process that saved: None makes the next one compute its own.
        raw(text("_hash") + b"N" + _BUILD + self.once("mesh", lambda: b""))


class ShardedTensorPickle(RankPickle):
    """Sharded tensors as ShardedTensors, as FSDP1's ``_create_chunk_sharded_tensor`` makes them.

    Ranks without rows are no shards: they hold an empty list.
    """

    def sharded(self, tensor: Tensor, dtype: DType, box: Box) -> None:
        shape = tensor.shape
        shards = _shards(shape, self.world_size)
        shard = (self.rank, self.stored(tensor, dtype, box)) if self.rank < len(shards.ranks) else None
        self.sharded_tensor(shape, dtype, shards, shard)

    def sharded_tensor(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        shards: ShardList,
        own: tuple[int, StorageView] | None,
        *,
        requires_grad: bool = False,
    ) -> None:
        """Write a ShardedTensor of which this rank holds the shard ``own`` (index in ``shards``, view), or none."""
        name, raw = self.name, self.raw
        self.wrapper((f"{_SHARD}.sharded_tensor.api", "ShardedTensor"), shape, dtype, requires_grad=requires_grad)
        raw(b"(]")
        if own is not None:
            index, view = own
            raw(name(f"{_SHARD}.sharded_tensor.shard", "Shard") + b")\x81N}(" + self.text("tensor"))
            self.view(view, requires_grad=requires_grad)
            raw(self.text("metadata") + self._shard_metadata(shards.ranks[index], shards.boxes[index]) + b"u\x86ba")
        metadata = f"{_SHARD}.sharded_tensor.metadata"
        raw(name(metadata, "ShardedTensorMetadata") + _NEW + self.text("shards_metadata"))
        raw(self.once(("shards", shards.key), lambda: self._shard_list(shards)) + self.text("size") + self.size(shape))
        raw(self.text("tensor_properties") + name(metadata, "TensorProperties") + b")\x81(" + name("torch", dtype.name))
        raw(self.layout() + _flag(requires_grad) + self.once("format", self._memory_format) + b"\x89tb" + _BUILD)
        raw(self.once("group", self._process_group) + self._spec(shards) + b"\x89ttR")

    def group(self) -> tuple[int, int]:
        """This rank's place in the process group that shards, and how many ranks that has."""
        return self.rank, self.world_size

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
def _shards(shape: tuple[int, ...], world_size: int) -> ShardList:
    """The shards of ranks with rows, or rank 0's when there are none."""
    rows = -(-shape[0] // world_size)
    filled = -(-shape[0] // rows) if rows else 1
    return ShardList(shape, tuple(range(filled)), [rank_box(shape, world_size, rank) for rank in range(filled)])


@lru_cache(maxsize=4)
def _all_ranks(world_size: int) -> tuple[bytes, bytes]:
    """0 .. world_size - 1 as int32 and as the opcodes of a tuple: every rank's file holds both, for each mesh."""
    return struct.pack(f"<{world_size}i", *range(world_size)), integers(range(world_size))


def _flag(value: bool) -> bytes:  # noqa: FBT001 - a pickled bool
    return b"\x88" if value else b"\x89"


def _list(values: tuple[int, ...]) -> bytes:
    return b"](" + b"".join(map(integer, values)) + b"e"
