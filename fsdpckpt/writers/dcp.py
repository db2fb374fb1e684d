"""A ``torch.distributed.checkpoint`` directory: what ``dcp.save({"model": ..., "optimizer": ..., **extra})`` writes.

Managed tensors are cut along dimension 0 by ``torch.chunk``'s rule and chunk r lies in rank r's ``__{r}_0.distcp``,
so that each of N loading ranks reads its own file only. What every rank holds whole lies once, in the file of the
rank with the fewest bytes (``torch.distributed.checkpoint._dedup_save_plans``). Each item is a ``torch.save`` archive.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from fsdpckpt.formats.dcp.metadata_write import DcpEntry, StoredChunk, metadata_pickle
from fsdpckpt.formats.pickle.opcodes import PickleOpcodes, StorageView
from fsdpckpt.formats.pickle.write import dumps
from fsdpckpt.formats.zip import ALIGNMENT, TorchZip
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.targets import Target, TargetFile, WriteItem
from fsdpckpt.ir.tensors import Tensor, contiguous_stride
from fsdpckpt.ir.values import Value, leaf_tensors
from fsdpckpt.layouts.chunks import Box, RankBoxes, chunk_boxes, source_boxes, whole_box
from fsdpckpt.producers.forms import PLAIN_NESTING, Nesting
from fsdpckpt.writers.dcp_flatten import Leaf, flatten
from fsdpckpt.writers.dtype_rule import DtypeRule
from fsdpckpt.writers.torch_full import lay_out_file

__all__ = ["lay_out"]

_STEM = "archive"  # the folder torch.save uses for a file object
_METADATA = ".metadata"


def lay_out(
    checkpoint: Checkpoint, *, world_size: int | None, dtypes: DtypeRule, nesting: Nesting = PLAIN_NESTING
) -> Target:
    """One data file for each rank that has an item, ``.metadata`` last.

    ``world_size`` ranks share the tensors whose ``sharded`` is True (0-dim ones are never cut). None keeps the
    source's own chunks and ranks, replicas written once. Raises SourceUnsupportedError when two keys flatten to one.
    """
    casts, notes = dtypes.casts(checkpoint)
    leaves, flattening = flatten(checkpoint, nesting)
    notes += flattening
    writer = _DataFiles(casts)
    entries = []
    cuts = [_cut(leaf.value, world_size) for leaf in leaves]
    ranks = max((rank + 1 for boxes in cuts for rank, _ in boxes or ()), default=1)
    for leaf, boxes in zip(leaves, _assign(leaves, cuts, max(ranks, world_size or 1)), strict=True):
        if isinstance(leaf.value, Tensor):
            dtype = casts.get(leaf.value, leaf.value.dtype)
            chunks = [writer.tensor(leaf.value, dtype, rank, box) for rank, box in boxes]
            entries.append(DcpEntry(leaf.key, leaf.path, dtype, leaf.value.shape, chunks))
        else:
            entries.append(DcpEntry(leaf.key, leaf.path, None, (), [writer.value(leaf.value, boxes[0][0])]))
    metadata = TargetFile(_METADATA)
    metadata.literal(metadata_pickle(entries))
    return Target([*writer.in_order(), metadata], notes=notes)


def _assign(leaves: list[Leaf], cuts: list[RankBoxes | None], ranks: int) -> Iterator[RankBoxes]:
    """For each leaf its (rank, box)es: what is not cut goes to the rank with the fewest bytes so far."""
    loads = [0] * ranks
    for leaf, boxes in zip(leaves, cuts, strict=True):
        if boxes is not None and isinstance(leaf.value, Tensor):
            for rank, box in boxes:
                loads[rank] += box.numel * leaf.value.dtype.itemsize
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for leaf, boxes in zip(leaves, cuts, strict=True):
        if boxes is not None:
            yield boxes
            continue
        load, rank = heap[0]
        shape, nbytes = (leaf.value.shape, leaf.value.nbytes) if isinstance(leaf.value, Tensor) else ((), 0)
        heapq.heapreplace(heap, (load + nbytes, rank))
        yield [(rank, whole_box(shape))]


def _cut(value: Value, world_size: int | None) -> RankBoxes | None:
    """The chunks of a tensor that ranks share, None for what is stored once."""
    if not isinstance(value, Tensor):
        return None
    if world_size is None:
        return source_boxes(value)
    return chunk_boxes(value.shape, world_size) if value.sharded and value.shape else None


class _Place(NamedTuple):
    """Where the bytes around one kind of tensor's data stand in a file's blob, and what they are counted from."""

    before: int
    before_nbytes: int
    after: int
    after_nbytes: int
    data_nbytes: int
    item_nbytes: int
    checksums: list[tuple[int, int, tuple[int, ...]]]


@dataclass(slots=True)
class _DataFiles:
    """The data files being laid out, by rank.

    Items begin at multiples of ``ALIGNMENT``, so that data is aligned in the file as well as in the item. Items of the
    same dtype and size differ in their data only: the rest stands in the blob once.
    """

    casts: Mapping[Tensor, DType]
    files: dict[int, TargetFile] = field(default_factory=dict)
    places: dict[tuple[int, str, tuple[int, ...]], _Place] = field(default_factory=dict)
    items: dict[bytes, bytes] = field(default_factory=dict)

    def in_order(self) -> list[TargetFile]:
        return [self.files[rank] for rank in sorted(self.files)]

    def _open(self, rank: int) -> TargetFile:
        file = self.files.get(rank)
        if file is None:
            file = self.files[rank] = TargetFile(f"__{rank}_0.distcp")
        return file

    def tensor(self, tensor: Tensor, dtype: DType, rank: int, box: Box) -> StoredChunk:
        """One box of a tensor as an item of rank's file."""
        file = self._open(rank)
        place = self.places.get((rank, dtype.name, box.size))
        if place is None:
            place = self.places[rank, dtype.name, box.size] = _place(file, dtype, box.size)
        begin = file.repeat(place.before, place.before_nbytes)
        if place.data_nbytes:
            data = file.nbytes
            file.write_items.append(WriteItem(data, place.data_nbytes, tensor, box.start, box.size, dtype))
            file.nbytes = data + place.data_nbytes
        file.repeat(place.after, place.after_nbytes)
        for first, end, (local, central) in place.checksums:
            file.checksums.append((begin + first, begin + end, (begin + local, begin + central)))
        return StoredChunk(box.start, box.size, file.path, begin, place.item_nbytes)

    def value(self, value: Value, rank: int) -> StoredChunk:
        """A value that is no tensor (it may hold some) as an item of rank's file."""
        file = self._open(rank)
        begin = file.nbytes
        if any(True for _ in leaf_tensors(value)):
            lay_out_file(file, value, casts=self.casts, sharers=[], stem=_STEM)
        else:
            pickled = dumps(value)
            item = self.items.get(pickled)
            if item is None:
                item = self.items[pickled] = _value_item(pickled)
            file.literal(item)
        end = file.nbytes
        file.literal(bytes(-end % ALIGNMENT))
        return StoredChunk((), (), file.path, begin, end - begin)


def _place(file: TargetFile, dtype: DType, size: tuple[int, ...]) -> _Place:
    """Put what surrounds the data of such tensors into the blob of ``file``, which it does not lengthen."""
    before, after, nbytes, checksums = _tensor_item(dtype, size)
    item = len(before) + nbytes + len(after)
    padding = bytes(-item % ALIGNMENT)
    begin = len(file.blob)
    file.blob += before + after + padding
    return _Place(begin, len(before), begin + len(before), len(after) + len(padding), nbytes, item, checksums)


def _value_item(pickled: bytes) -> bytes:
    file = TargetFile("")
    archive = TorchZip(file, stem=_STEM)
    archive.pickle(pickled)
    archive.finish()
    return bytes(file.blob)


@lru_cache(maxsize=16384)
def _tensor_item(
    dtype: DType, size: tuple[int, ...]
) -> tuple[bytes, bytes, int, list[tuple[int, int, tuple[int, ...]]]]:
    """One row-major tensor's archive: the bytes before and after the data, their number, checksums from its begin."""
    nbytes = dtype.itemsize
    for extent in size:
        nbytes *= extent
    writer = PickleOpcodes()
    writer.view(StorageView("0", dtype, 0, size, contiguous_stride(size), nbytes))
    file = TargetFile("")
    archive = TorchZip(file, stem=_STEM)
    archive.pickle(writer.finish())
    archive.begin_data("0", nbytes)
    split = len(file.blob)
    file.nbytes += nbytes
    archive.finish()
    return bytes(file.blob[:split]), bytes(file.blob[split:]), nbytes, file.checksums
