"""Reads boxes of tensors into memory, each rank only what it asks for: no whole tensor, and no whole stored chunk."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.targets import TargetFile
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Value
from fsdpckpt.readers.dcp.items import locate_rows
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.blocks import BLOCK_BYTES, BlockReader, Boxes, Bytes, chosen, slabs
from fsdpckpt.verify.parallel import for_each, in_file_order
from fsdpckpt.writers.torch_full import lay_out_file

__all__ = ["Box", "read_boxes", "saved"]

Put = Callable[[tuple[int, ...], tuple[int, ...], Bytes], None]


@dataclass(frozen=True, slots=True)
class Box:
    """Elements ``start`` .. ``start + size`` of ``tensor``, row-major, into ``memory``.

    Without memory of the host to read into they go to ``put``, in parts (start and size within the box, bytes).
    """

    tensor: Tensor
    start: tuple[int, ...]
    size: tuple[int, ...]
    memory: Bytes | None
    put: Put

    @property
    def nbytes(self) -> int:
        return prod(self.size) * self.tensor.dtype.itemsize


def read_boxes(boxes: Sequence[Box], checkpoint: Checkpoint, sources: Sources, *, threads: int) -> bool:
    """Fill every box, in the order of the files. False, with nothing read, when chunks cannot be located one by one.

    Raises SourceCorruptError when a file ends too early or an item is damaged.
    """
    wanted = [(box.tensor, _rows(box)) for box in boxes]
    located = locate_rows(wanted, checkpoint.files, sources)
    if located is None:
        return False

    def work(reader: BlockReader, number: int) -> None:
        _read(reader, boxes[number], located[number])

    for_each(
        range(len(boxes)),
        work,
        reader=lambda: BlockReader(checkpoint.files, sources),
        threads=threads,
        order=in_file_order(located),
    )
    return True


def _rows(box: Box) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """The chunks that hold something of the box; of equal ones the one that ``chosen`` reads."""
    chunks = box.tensor.chunks
    start = np.asarray(box.start, np.int64)
    low = np.maximum(chunks.start, start)
    high = np.minimum(chunks.start + chunks.size, start + np.asarray(box.size, np.int64))
    rows = np.flatnonzero((low < high).all(axis=1))
    return rows[chosen(chunks.take(rows))]


def _read(reader: BlockReader, box: Box, located: Tensor) -> None:
    held = Boxes(located, list(range(len(located.chunks))))
    if box.memory is not None:
        held.fill(reader, box.start, box.size, box.memory)
        return
    itemsize = box.tensor.dtype.itemsize
    for start, size in slabs(box.size, itemsize, BLOCK_BYTES):
        block = np.empty(prod(size) * itemsize, np.uint8)
        held.fill(reader, tuple(map(sum, zip(box.start, start, strict=True))), size, block)
        box.put(start, size, block)


def saved(value: Value, checkpoint: Checkpoint, sources: Sources) -> io.BytesIO:
    """What ``torch.save`` would write for a value, written anew: names of the allow-list and nothing else."""
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
