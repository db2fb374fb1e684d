"""Writes the pickle of one rank's file: plain tensors, and sharded ones as ShardedTensor with this rank's rows.

The forms are those that torch 2.4 to 2.15 pickle (``torch.distributed._shard``): what FSDP1's ``SHARDED_STATE_DICT``
holds on that rank, on a CPU device. Parts that depend only on the shape (shard metadata) are shared between tensors;
otherwise a file would grow with the world size times the number of tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from fsdpckpt import flags
from fsdpckpt.errors import SourceUnsupportedError
from fsdpckpt.formats.pickle.opcodes import StorageView, flag, integer, list_of
from fsdpckpt.formats.pickle.write import PickleWriter
from fsdpckpt.formats.zip_write import CastBox, Records, TorchZip
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.placements import Sharding
from fsdpckpt.ir.quantized import Blockwise
from fsdpckpt.ir.targets import TargetFile, WrittenTensor
from fsdpckpt.ir.tensors import Box, Tensor, contiguous_stride
from fsdpckpt.ir.torchao import CODES, TORCHAO
from fsdpckpt.layouts import mesh_box, row_sharding

NEW = b")\x81}("  # an empty argument tuple, __new__, and the start of the attributes
BUILD = b"ub"
_SHARD = "torch.distributed._shard"


class ShardList(NamedTuple):
    """The shards of one ShardedTensor that are not empty: ``boxes[i]`` is on ``ranks[i]``.

    Lists with equal ``key`` are written once.
    """

    key: Hashable
    ranks: tuple[int, ...]
    boxes: Sequence[Box]


class RankPickle(PickleWriter, ABC):
    """Writes a section's dict for ``rank`` of ``world_size``; the tensors of ``shardings`` are cut by these.

    ``canonical`` maps a tied tensor to the tensor whose record it shares. ``rank_patches``: the
    positions in the pickle where another rank with boxes of the same sizes has other opcodes, and what makes them.
    Subclasses decide what wraps the local rows.
    """

    def __init__(
        self, *, rank: int, world_size: int, shardings: Mapping[Tensor, Sharding], casts: Mapping[Tensor, DType],
        canonical: Mapping[Tensor, Tensor],
    ) -> None:  # fmt: skip
        super().__init__()
        self.rank = rank
        self.world_size = world_size
        self._shardings = shardings
        self._casts = casts
        self._canonical = canonical
        self._keys: dict[Hashable, str] = {}
        self.records = Records()
        self.rank_patches: list[tuple[int, Callable[[int], bytes]]] = []

    def tensor(self, value: Tensor) -> None:
        dtype = self._casts.get(value, value.dtype)
        sharding = self._shardings.get(value)
        if sharding is not None:
            self.sharded(value, dtype, sharding)
        else:
            self.view(self.stored(value, dtype, Box.whole(value.shape)))

    @abstractmethod
    def sharded(self, tensor: Tensor, dtype: DType, sharding: Sharding) -> None:
        """Write this rank's part of a sharded tensor."""

    def blockwise(self, value: Blockwise) -> None:
        sharding = self._shardings.get(value.tensors[CODES])
        if sharding is not None:
            self.sharded_blocks(value, sharding)
        else:
            self.whole_blocks(value, self._part)

    def sharded_blocks(self, value: Blockwise, sharding: Sharding) -> None:
        """Write this rank's part of a state in blocks. Raises SourceUnsupportedError if the form cannot hold one."""
        raise SourceUnsupportedError(
            f"a ShardedTensor does not hold {value.blocks}",
            why=f"{TORCHAO}'s optimizers keep DTensors",
            next_step=f"drop {flags.tensor('sharded-tensor')}",
        )

    def _part(self, tensor: Tensor) -> StorageView:
        """This rank's part of one tensor of a state in blocks."""
        sharding = self._shardings.get(tensor)
        box = mesh_box(tensor.shape, sharding, self.rank) if sharding is not None else Box.whole(tensor.shape)
        return self.stored(tensor, tensor.dtype, box)

    def stored(self, tensor: Tensor, dtype: DType, box: Box) -> StorageView:
        """A compact record of ``box``, the same one for tied tensors."""
        tensor = self._canonical.get(tensor, tensor)
        content = WrittenTensor(tensor, dtype) if box.sizes == tensor.shape else CastBox(tensor, dtype, box)
        key = self._keys.get(tensor)
        if key is None:
            key = self._keys[tensor] = self.records.add(content)
        return StorageView(key, dtype, 0, box.sizes, contiguous_stride(box.sizes), content.nbytes)

    def literal(self, dtype: DType, data: bytes) -> StorageView:
        """A 1-D tensor of values that are known already."""
        return StorageView(self.records.add(data), dtype, 0, (len(data) // dtype.itemsize,), (1,), len(data))

    def write_rank_specific(self, make: Callable[[int], bytes]) -> None:
        """Write what ``make`` returns for this rank: opcodes of equal length on similar ranks, without texts and
        names.
        """
        self.rank_patches.append((len(self.out), make))
        self.raw(make(self.rank))

    def write(self, file: TargetFile, *, stem: str) -> TorchZip:
        """Append the whole archive: the pickle and the records it uses."""
        return self.records.write(file, self.finish(), stem=stem)


class ShardedTensorPickle(RankPickle):
    """Sharded tensors as ShardedTensors, as FSDP1's ``_create_chunk_sharded_tensor`` makes them.

    Ranks without rows have no shards: they hold an empty list. On a mesh of two dimensions (HYBRID_SHARD) each row of
    ranks holds the whole: metadata and specification name the ranks of this row, the shard the rank in the row's group.
    """

    def sharded(self, tensor: Tensor, dtype: DType, sharding: Sharding) -> None:
        shape = tensor.shape
        group_rank, ranks = self.group()
        shards = _shards(shape, ranks, self.rank - group_rank)
        shard = None
        if group_rank < len(shards.ranks):
            shard = (group_rank, self.stored(tensor, dtype, mesh_box(shape, sharding, self.rank)))
        self.sharded_tensor(shape, dtype, shards, shard, recorded_rank=group_rank)

    def sharded_tensor(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        shards: ShardList,
        local: tuple[int, StorageView] | None,
        *,
        recorded_rank: int | None = None,
        requires_grad: bool = False,
    ) -> None:
        """Write a ShardedTensor of which this rank holds the shard ``local`` (index in ``shards``, view), or none.

        ``recorded_rank``: the rank in the shard's metadata, None for that of ``shards``.
        """
        name, raw = self.name, self.raw
        self.wrapper((f"{_SHARD}.sharded_tensor.api", "ShardedTensor"), shape, dtype, requires_grad=requires_grad)
        raw(b"(]")
        if local is not None:
            index, view = local
            raw(name(f"{_SHARD}.sharded_tensor.shard", "Shard") + b")\x81N}(" + self.text("tensor"))
            self.view(view, requires_grad=requires_grad)
            rank = shards.ranks[index] if recorded_rank is None else recorded_rank
            raw(self.text("metadata") + self._shard_metadata(rank, shards.boxes[index]) + b"u\x86ba")
        metadata = f"{_SHARD}.sharded_tensor.metadata"
        raw(name(metadata, "ShardedTensorMetadata") + NEW + self.text("shards_metadata"))
        raw(self.once(("shards", shards.key), lambda: self._shard_list(shards)) + self.text("size") + self.size(shape))
        raw(self.text("tensor_properties") + name(metadata, "TensorProperties") + b")\x81(" + name("torch", dtype.name))
        raw(self.layout() + flag(requires_grad) + self.once("format", self._memory_format) + b"\x89tb" + BUILD)
        raw(self.once(("group", *self.group()), self._process_group) + self._spec(shards) + b"\x89ttR")

    def group(self) -> tuple[int, int]:
        """This rank's rank in the process group that shards, and the size of that group."""
        mesh = next((sharding.mesh for sharding in self._shardings.values()), None)
        ranks = mesh.sizes[-1] if mesh is not None else self.world_size
        return self.rank % ranks, ranks

    def _shard_list(self, shards: ShardList) -> bytes:
        metadata = [self._shard_metadata(shards.ranks[0], shards.boxes[0])]
        # From here on every name is a memo reference, the same for each: lists are as long as the world is large.
        head = self.name(f"{_SHARD}.metadata", "ShardMetadata") + b")\x81N}(" + self.text("shard_offsets")
        sizes, placement = self.text("shard_sizes"), self.text("placement")
        for rank, box in zip(shards.ranks[1:], shards.boxes[1:], strict=True):
            device = self._placement(rank)
            metadata.append(
                b"%b%b%b%b%b%bu\x86b" % (head, _list(box.offsets), sizes, _list(box.sizes), placement, device)
            )
        return list_of(metadata)

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
        head = self.name("torch.distributed.remote_device", "_remote_device") + NEW + text("_worker_name") + b"N"
        return head + text("_rank") + integer(rank) + text("_device") + self.cpu() + BUILD

    def _memory_format(self) -> bytes:
        return self.name(f"{_SHARD}.sharded_tensor.metadata", "MEM_FORMAT_ENCODING") + b"K\x00\x85R"

    def _process_group(self) -> bytes:
        text = self.text
        head = self.name("builtins", "getattr") + self.name(f"{_SHARD}.sharded_tensor.api", "ShardedTensor")
        head += text("ProcessGroupState") + b"\x86R" + NEW
        group_rank, ranks = self.group()
        for scope, number in (("local", group_rank), ("global", self.rank)):
            head += text(f"{scope}_rank") + integer(number)
        for scope, number in (("local", ranks), ("global", self.world_size)):
            head += text(f"{scope}_world_size") + integer(number)
        return head + BUILD

    def _spec(self, shards: ShardList) -> bytes:
        """``_infer_sharding_spec_from_shards_metadata``: a single shard does not show the dimension."""
        if len(shards.ranks) > 1:
            return self.once(("spec", shards.ranks), lambda: self._chunk_spec(shards.ranks))
        head = self.name(f"{_SHARD}.sharding_spec.api", "EnumerableShardingSpec") + NEW + self.text("shards")
        return head + self._shard_list(shards) + BUILD

    def _chunk_spec(self, ranks: Sequence[int]) -> bytes:
        text = self.text
        spec = self.name(f"{_SHARD}.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec") + NEW + text("dim")
        return spec + b"K\x00" + text("placements") + list_of([self._placement(rank) for rank in ranks]) + BUILD


@lru_cache(maxsize=4096)
def _shards(shape: tuple[int, ...], ranks: int, first: int) -> ShardList:
    """The shards with rows among ``ranks`` ranks from rank ``first`` on; that rank's if there are none."""
    rows = -(-shape[0] // ranks)
    filled = -(-shape[0] // rows) if rows else 1
    boxes = [mesh_box(shape, row_sharding(ranks), group_rank) for group_rank in range(filled)]
    return ShardList(shape, tuple(range(first, first + filled)), boxes)


def _list(values: tuple[int, ...]) -> bytes:
    return list_of(map(integer, values))
