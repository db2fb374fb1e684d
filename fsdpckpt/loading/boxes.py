"""Reads boxes of tensors into memory: never a whole tensor or a whole stored chunk, unless that is the box."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.targets import TargetFile
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Value
from fsdpckpt.layouts.boxes import Box
from fsdpckpt.readers.dcp.items import locate_rows
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.blocks import BLOCK_BYTES, BlockReader, Bytes, ChunkReader, rows_to_read, slabs
from fsdpckpt.verify.parallel import for_each, in_file_order
from fsdpckpt.writers.torch_full import lay_out_file

__all__ = ["BoxToRead", "as_saved", "read_boxes"]


@dataclass(frozen=True, slots=True)
class BoxToRead:
    """``box`` of ``tensor``, to be read row-major into ``memory``.

    Without host memory to read into, its bytes go to ``put`` in parts (the part's box within the box, its bytes).
    """

    tensor: Tensor
    box: Box
    memory: Bytes | None
    put: Callable[[Box, Bytes], None]


def read_boxes(boxes: Sequence[BoxToRead], checkpoint: Checkpoint, sources: Sources, *, threads: int) -> bool:
    """Read every box, in file order. False, with nothing read, when chunks cannot be located one by one.

    Raises SourceCorruptError when a file ends too early or an item is damaged.
    """
    located = locate_rows([(each.tensor, _rows(each)) for each in boxes], checkpoint.files, sources)
    if located is None:
        return False

    def work(reader: BlockReader, number: int) -> None:
        _read(reader, boxes[number], located[number])

    for_each(
        range(len(boxes)),
        work,
        make_reader=lambda: BlockReader(checkpoint.files, sources),
        threads=threads,
        order=in_file_order(located),
    )
    return True


def _rows(wanted: BoxToRead) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """The chunks that hold something of the box; of replicas only the one that is read."""
    chunks, offsets = wanted.tensor.chunks, np.asarray(wanted.box.offsets, np.int64)
    low = np.maximum(chunks.start, offsets)
    high = np.minimum(chunks.start + chunks.size, offsets + np.asarray(wanted.box.sizes, np.int64))
    rows = np.flatnonzero((low < high).all(axis=1))
    return rows[rows_to_read(chunks.take(rows))]


def _read(reader: BlockReader, wanted: BoxToRead, located: Tensor) -> None:
    chunks = ChunkReader(reader, located, list(range(len(located.chunks))))
    if wanted.memory is not None:
        chunks.read_into(wanted.box, wanted.memory)
        return
    itemsize = wanted.tensor.dtype.itemsize
    for part in slabs(wanted.box.sizes, itemsize, BLOCK_BYTES):
        block = np.empty(part.numel * itemsize, np.uint8)
        offsets = tuple(map(sum, zip(wanted.box.offsets, part.offsets, strict=True)))
        chunks.read_into(Box(offsets, part.sizes), block)
        wanted.put(part, block)


def as_saved(value: Value, checkpoint: Checkpoint, sources: Sources) -> io.BytesIO:
    """What ``torch.save`` would write for ``value``, made from scratch: it names allow-listed classes only."""
    file = TargetFile("")
    lay_out_file(file, value, casts={}, sharers=[], stem="archive")
    content = bytearray(file.nbytes)
    for offset, begin, nbytes in file.literals:
        content[offset : offset + nbytes] = file.blob[begin : begin + nbytes]
    reader = BlockReader(checkpoint.files, sources)
    for write_item in file.write_items:
        memory = np.frombuffer(content, np.uint8, write_item.nbytes, write_item.offset)
        held = Boxes(write_item.tensor, chosen(write_item.tensor.chunks))
        held.fill(reader, write_item.start, write_item.size, memory)
        del memory
    for begin, end, places in file.checksums:
        crc = zlib.crc32(memoryview(content)[begin:end]).to_bytes(4, "little")
        for place in places:
            content[place : place + 4] = crc
    return io.BytesIO(bytes(content))
