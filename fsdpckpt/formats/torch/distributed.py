"""Parses DTensor and ShardedTensor in a rank's file: which boxes of the global tensor it holds, and where.

Follows the pickled forms of ``torch.distributed.tensor`` (``DTensorSpec``, ``DeviceMesh`` of torch 2.4 to 2.14) and of
``torch.distributed._shard.sharded_tensor`` (2.1 to 2.14). Trusts shard offsets, but never the placements of a
ShardedTensor (HYBRID_SHARD writes the group's rank there).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from operator import mul
from typing import NamedTuple, TypeAlias

from fsdpckpt.errors import SourceUnsupportedError
from fsdpckpt.formats.pickle import StubInstance, arguments_of
from fsdpckpt.formats.torch.mesh import (
    MAX_RANKS,
    FileParser,
    Mesh,
    MeshParser,
    as_int_tuple,
    attributes_of,
    merge_states,
)
from fsdpckpt.formats.torch.tensors import StoredTensor, Wrapped, size_of
from fsdpckpt.formats.torch.torchao import StoredBlocks, stored_blocks
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.placements import (
    MeshShape,
    Placement,
    Replicate,
    Shard,
    Sharded,
    Sharding,
    StridedShard,
    TensorCut,
    placements_text,
)
from fsdpckpt.ir.tensors import Box, contiguous_stride
from fsdpckpt.ir.torchao import CODES, QMAP, SCALE, Blocks, is_blockwise
from fsdpckpt.layouts import (
    LocalBox,
    distribute_tensor_boxes,
    last_cuts_of_empty,
    local_boxes,
    local_shape,
    shard_order_of,
)
from fsdpckpt.storage import ByteSource
from fsdpckpt.text import truncate

BoxInLocal: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]
"""What a rank holds of a tensor: start and size of the box, and how many elements into the local tensor it begins."""

CutBoxes: TypeAlias = tuple[tuple[BoxInLocal, ...], Sharded, Sharding | None, frozenset[int | None] | None]
"""The boxes that a local tensor holds, its placements in words, its sharding, and ``Distributed.last_cuts``."""


class Cut(NamedTuple):
    """How the ``local`` tensor of one rank is cut from a tensor of ``shape``. ``order``: as ``DTensorSpec``'s."""

    shape: tuple[int, ...]
    mesh: Mesh
    placements: tuple[Placement, ...]
    order: Mapping[int, tuple[int, ...]] | None
    local: StoredTensor


class BoxInFile(NamedTuple):
    """A box of the global tensor: ``start``, ``size`` in elements, ``offset`` in bytes, ``stride`` in elements."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Distributed:
    """What one rank's file holds of a tensor that is distributed over ranks.

    ``form``: ``DTensor`` or ``ShardedTensor``. ``rank``: the rank that saved it, according to the file (None: not
    recorded). ``holders``: the ranks that together hold it; ``world``: all ranks of the job, as far as the file shows.
    ``device``: the device type of a DTensor's mesh, "" if not recorded. ``sharding``: a DTensor's placements on its own
    mesh; None if its ranks hold interleaved boxes, or the mesh has an order that ``init_device_mesh`` does not make.
    ``last_cuts``: which mesh dimensions may be FSDP2's, as the shape of a local tensor without elements shows it (see
    ``layouts.last_cuts_of_empty``); None for one with elements.
    """

    form: str
    dtype: DType
    shape: tuple[int, ...]
    cut: TensorCut
    rank: int | None
    holders: tuple[int, ...]
    world: tuple[int, ...]
    boxes: tuple[BoxInFile, ...]
    device: str = ""
    sharding: Sharding | None = None
    last_cuts: frozenset[int | None] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DistributedBlocks:
    """What one rank's file holds of a state quantized in blocks: ``blocks`` with the shape of the whole, its codes and
    its scale, and the value of each code.
    """

    blocks: Blocks
    parts: Mapping[str, Distributed | StoredTensor]


@lru_cache(maxsize=16)
def all_ranks(world_size: int) -> tuple[int, ...]:
    """Every rank; one tuple for all tensors."""
    return tuple(range(world_size))


class DistributedParser(FileParser):
    """Parses the wrapped tensors of one file; meshes and boxes are computed once and reused."""

    def __init__(self, source: ByteSource, meshes: MeshParser | None = None) -> None:
        super().__init__(source)
        self._meshes = MeshParser(source) if meshes is None else meshes
        self._placements_by_form: dict[object, tuple[Placement, ...]] = {}
        self._boxes_by_cut: dict[object, CutBoxes] = {}

    def parse(self, wrapped: Wrapped, key: str) -> Distributed | DistributedBlocks | StoredBlocks:
        """Parse ``wrapped``; ``key``: its name in messages.

        Raises SourceUnsupportedError for placements that cannot be joined (Partial, blocks cut apart),
        SourceCorruptError if the local tensor contradicts its placement.
        """
        if wrapped.kind.name == "DTensor":
            return self._dtensor(wrapped, key)
        if is_blockwise(wrapped.kind):
            return stored_blocks(wrapped, self._source.path, key)
        if wrapped.kind.name == "ShardedTensor":
            return self._sharded_tensor(wrapped, key)
        raise SourceUnsupportedError(
            f"{key} is a {wrapped.kind}, a tensor type that fsdpckpt does not read",
            key=key,
            file=self._source.path,
        )

    # DTensor

    def _dtensor(self, wrapped: Wrapped, key: str) -> Distributed | DistributedBlocks:
        attributes = merge_states(wrapped.state)
        local = attributes.get("_local_tensor")
        if isinstance(local, Wrapped) and is_blockwise(local.kind):
            stored = stored_blocks(local, self._source.path, key)
            codes = replace(stored.parts[CODES], shape=local.shape, stride=contiguous_stride(local.shape))
            return self._in_blocks(stored, self._of_local(wrapped, attributes, codes, key), key)
        return self._of_local(wrapped, attributes, local, key)

    def _in_blocks(self, local: StoredBlocks, codes: Distributed, key: str) -> DistributedBlocks:
        """The parts of a state in blocks. ``codes``: where its codes would be if there were one for each element."""
        blocks = replace(local.blocks, shape=codes.shape)
        boxes = [blocks.boxes_of(Box(box.start, box.size)) for box in codes.boxes]
        if len(boxes) > 1 or None in boxes:
            raise SourceUnsupportedError(
                f"{key} is {blocks}, which {codes.cut} on this mesh cuts apart",
                key=key,
                file=self._source.path,
                expected=f"shards of whole rows, {blocks.group} or a multiple of it",
                found=", ".join(f"{box.size} from {box.start}" for box in codes.boxes),
                why="only whole blocks have a place in the whole tensor",
            )
        parts: dict[str, Distributed | StoredTensor] = {}
        for part in (CODES, SCALE):
            stored = local.parts[part]
            held = [of_parts[part] for of_parts in boxes if of_parts is not None]
            at = [BoxInFile(box.offsets, box.sizes, stored.offset, contiguous_stride(box.sizes)) for box in held]
            parts[part] = replace(codes, dtype=stored.dtype, shape=blocks.shape_of(part), boxes=tuple(at))
        if QMAP in local.parts:
            parts[QMAP] = local.parts[QMAP]
        return DistributedBlocks(blocks, parts)

    def _of_local(self, wrapped: Wrapped, attributes: Mapping[object, object], local: object, key: str) -> Distributed:
        spec = attributes_of(attributes.get("_spec"))
        if not isinstance(local, StoredTensor) or not spec:
            self._corrupt(key, "a DTensor without local tensor or spec", "both", type(local).__name__)
        mesh = self._meshes.mesh(spec.get("mesh"), key)
        placements = self._placements(spec.get("placements"), key)
        if len(placements) != len(mesh.shape):
            self._corrupt(key, "placements do not fit the mesh", f"{len(mesh.shape)}", f"{len(placements)}")
        if any(not isinstance(p, Replicate) and not 0 <= p.dim < len(wrapped.shape) for p in placements):
            self._corrupt(key, f"placements do not fit shape {wrapped.shape}", "dimensions", str(placements))
        order = self._shard_order(spec.get("shard_order"), placements, key) if len(placements) > 1 else None
        cut = Cut(wrapped.shape, mesh, placements, order, local)
        held, how, sharding, last_cuts = self.boxes_of(cut, key)
        first, itemsize, stride = local.offset, local.dtype.itemsize, local.stride
        boxes = tuple([BoxInFile(start, size, first + at * itemsize, stride) for start, size, at in held])
        return Distributed(
            "DTensor",
            local.dtype,
            wrapped.shape,
            how,
            mesh.rank,
            mesh.ranks,
            mesh.world,
            boxes,
            mesh.device,
            sharding,
            last_cuts,
        )

    def boxes_of(self, cut: Cut, key: str) -> CutBoxes:
        """The boxes of ``cut.local``; ``key``: the tensor's name in messages."""
        shape, mesh, placements, order, local = cut
        # Placements are one object for equal ones (see _placements): their id stands for them.
        cut_order = id(placements), order and tuple(order.items())
        form = shape, mesh.shape, mesh.names, mesh.coordinate, mesh.nesting, cut_order, local.shape, local.stride
        known = self._boxes_by_cut.get(form)
        if known is None:
            known = self._boxes_by_cut[form] = self._cut(cut, key)
        return known

    def _cut(self, cut: Cut, key: str) -> CutBoxes:
        shape, mesh, placements, order, local = cut
        if mesh.coordinate is None:
            return (), Sharded(placements), None, None
        decoded = shard_order_of(mesh.shape, placements)
        sharding = None
        if decoded is not None and order in (None, decoded) and mesh.nesting is not None:
            sharding = _sharding(MeshShape(mesh.shape, mesh.names), placements, mesh.nesting)
        boxes = local_boxes(shape, mesh.shape, placements, mesh.coordinate, order)
        # distribute_tensor itself and fully_shard over a cut tensor differ for uneven sizes, with the same placements.
        if not _fits(boxes, shape, local.shape) and any(isinstance(p, StridedShard) for p in placements):
            boxes = distribute_tensor_boxes(shape, mesh.shape, placements, mesh.coordinate)
            sharding = None
        if not _fits(boxes, shape, local.shape):
            self._corrupt(
                key,
                f"the local tensor is not what {placements_text(placements)} on a mesh of {mesh.shape} gives the rank "
                f"at {mesh.coordinate}",
                f"{local_shape(boxes) or 'no elements'}",
                f"{local.shape}",
            )
        held = [(part.box.offsets, part.box.sizes, sum(map(mul, part.local_offsets, local.stride))) for part in boxes]
        last_cuts = None
        if not boxes and sharding is not None:
            last_cuts = last_cuts_of_empty(shape, mesh.shape, placements, mesh.coordinate, local.shape)
        return tuple(held), Sharded(placements), sharding, last_cuts

    def _placements(self, pickled: object, key: str) -> tuple[Placement, ...]:
        if not isinstance(pickled, (tuple, list)):
            self._corrupt(key, "a DTensor without placements", "a tuple", type(pickled).__name__)
        written: list[tuple[str, object, object]] = []
        for item in pickled:
            name = type(item).__name__
            attributes = attributes_of(item)
            dim, factor = attributes.get("dim"), attributes.get("split_factor")
            written.append((name, dim if type(dim) is int else None, factor if type(factor) is int else None))
        known = self._placements_by_form.get(tuple(written))
        if known is None:
            known = self._placements_by_form[tuple(written)] = self._parse_placements(written, key)
        return known

    def _parse_placements(self, written: Sequence[tuple[str, object, object]], key: str) -> tuple[Placement, ...]:
        placements: list[Placement] = []
        for name, dim, factor in written:
            if name == "Replicate":
                placements.append(Replicate())
            elif name == "Shard" and type(dim) is int:
                placements.append(Shard(dim))
            elif name == "_StridedShard" and type(dim) is int and type(factor) is int and 0 < factor <= MAX_RANKS:
                placements.append(StridedShard(dim, factor))
            else:
                raise SourceUnsupportedError(
                    f"{key} is placed as {name}, which is not a cut or a copy",
                    key=key,
                    file=self._source.path,
                    why="partial sums are values in the middle of a computation, not a checkpoint's state",
                    next_step="redistribute the tensor to Shard or Replicate before saving",
                )
        return tuple(placements)

    def _shard_order(
        self, pickled: object, placements: Sequence[Placement], key: str
    ) -> Mapping[int, tuple[int, ...]] | None:
        """``DTensorSpec.shard_order`` (torch 2.10+): the mesh dimensions that cut each tensor dimension, in order."""
        if not isinstance(pickled, (tuple, list)) or not pickled:
            return None
        order: dict[int, tuple[int, ...]] = {}
        for entry in pickled:
            values = arguments_of(entry) if isinstance(entry, StubInstance) else entry
            dim, written = values if isinstance(values, tuple) and len(values) == 2 else (None, None)
            mesh_dims = as_int_tuple(written)
            if type(dim) is not int or mesh_dims is None:
                self._corrupt(key, "an unknown shard order", "(dimension, mesh dimensions)", truncate(entry))
            order[dim] = mesh_dims
        named = {(dim, mesh_dim) for dim, mesh_dims in order.items() for mesh_dim in mesh_dims}
        cuts = {(p.dim, mesh_dim) for mesh_dim, p in enumerate(placements) if not isinstance(p, Replicate)}
        if named != cuts:
            self._corrupt(key, "the shard order contradicts the placements", str(sorted(cuts)), str(sorted(named)))
        return order

    # ShardedTensor

    def _sharded_tensor(self, wrapped: Wrapped, key: str) -> Distributed:
        state = wrapped.state
        if not (isinstance(state, tuple) and len(state) >= 3 and isinstance(state[0], list)):
            self._corrupt(key, "an unknown form of ShardedTensor", "shards, metadata, group", type(state).__name__)
        metadata, group = attributes_of(state[1]), attributes_of(state[2])
        shape = size_of(metadata.get("size"))
        rank, world_size = group.get("global_rank"), group.get("global_world_size")
        if shape is None or type(rank) is not int or type(world_size) is not int or not 0 < world_size <= MAX_RANKS:
            self._corrupt(key, "an unknown form of ShardedTensor", "a size and a group", truncate(group))
        boxes = tuple(self._shard(shard, shape, key) for shard in state[0])
        world = all_ranks(world_size)
        dim = attributes_of(state[3]).get("dim") if len(state) > 3 else None
        return Distributed("ShardedTensor", wrapped.dtype, shape, _sharded_rows(dim), rank, world, world, boxes)

    def _shard(self, pickled: object, shape: tuple[int, ...], key: str) -> BoxInFile:
        attributes = attributes_of(pickled)
        local, metadata = attributes.get("tensor"), attributes_of(attributes.get("metadata"))
        start, size = size_of(metadata.get("shard_offsets")), size_of(metadata.get("shard_sizes"))
        if not isinstance(local, StoredTensor) or start is None or size is None or len(start) != len(size):
            self._corrupt(key, "a shard without tensor or place", "both", truncate(metadata))
        if local.shape != size:
            self._corrupt(key, "a shard's tensor is not of the size its metadata says", f"{size}", f"{local.shape}")
        is_outside = any(begin + extent > whole for begin, extent, whole in zip(start, size, shape, strict=False))
        if is_outside or len(size) != len(shape):
            self._corrupt(key, "a shard is outside its tensor", f"inside {shape}", f"{start} + {size}")
        return BoxInFile(start, size, local.offset, local.stride)


def _fits(boxes: Sequence[LocalBox], shape: Sequence[int], local: Sequence[int]) -> bool:
    wanted = local_shape(boxes)
    if wanted is None:
        return prod(local) == 0 and len(local) == len(shape)
    return wanted == tuple(local)


@lru_cache(maxsize=1024)
def _sharding(mesh: MeshShape, placements: tuple[Placement, ...], nesting: tuple[int, ...]) -> Sharding:
    """Those placements, with the dimensions of ``mesh`` as ``init_device_mesh`` had them. Cached: one object for all
    files and tensors.
    """
    if nesting == tuple(range(len(nesting))):
        return Sharding(mesh, placements)
    sizes, names = tuple(mesh.sizes[dim] for dim in nesting), mesh.names
    outermost_first = MeshShape(sizes, None if names is None else tuple(names[dim] for dim in nesting))
    order = tuple(nesting.index(dim) for dim in range(len(nesting)))
    return Sharding(outermost_first, tuple(placements[dim] for dim in nesting), order=order)


@lru_cache(maxsize=64)
def _sharded_rows(dim: object) -> Sharded:
    """How a ShardedTensor is cut along ``dim``, which may be anything that a file says."""
    return Sharded((Shard(dim),) if type(dim) is int else (), "ShardedTensor")
