"""The elements of one tensor in row-major order, in blocks of bounded size, whatever chunks hold them.

Memory is two buffers of at most ``limit`` bytes however large the tensor or a chunk of it is. Every element is
read once per pass; of replicas the one of the lowest rank is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

import numpy as np
import numpy.typing as npt

from fsdpckpt.errors import SourceIncompleteError
from fsdpckpt.ir.checkpoint import SourceFile
from fsdpckpt.ir.coverage import box_text, flaws
from fsdpckpt.ir.tensors import Chunks, Tensor, contiguous_stride
from fsdpckpt.storage.protocols import ByteSource
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.parallel import go_on

__all__ = ["BLOCK_BYTES", "BlockReader", "Boxes", "Bytes", "chosen", "slabs"]

BLOCK_BYTES = 8 * 1024 * 1024  # past this a request's cost is lost in its transfer
READ_THROUGH = 64 * 1024  # bytes: a gap this small costs less to read than another request
WASTE = 4  # read at most this many times what is needed, rather than asking for each row

Bytes = npt.NDArray[np.uint8]


def chosen(chunks: Chunks) -> list[int]:
    """The rows to read: of equal boxes the one of the lowest rank, none that is empty."""
    sizes = chunks.size.tolist()
    if len(sizes) == 1:
        return [] if 0 in sizes[0] else [0]
    best: dict[tuple[int, ...], tuple[int, int]] = {}
    rows = zip(chunks.start.tolist(), sizes, chunks.rank.tolist(), strict=True)
    for row, (start, size, rank) in enumerate(rows):
        if 0 in size:
            continue
        box = (*start, *size)
        if box not in best or (rank, row) < best[box]:
            best[box] = (rank, row)
    return sorted(row for _, row in best.values())


class BlockReader:
    """Reads tensors of one checkpoint. Not for sharing between threads: it owns its buffers."""

    def __init__(self, files: Sequence[SourceFile], sources: Sources, limit: int = BLOCK_BYTES) -> None:
        self._files = files
        self._sources = sources
        self._limit = limit
        self._block: Bytes = np.empty(0, np.uint8)
        self._scratch: Bytes = np.empty(0, np.uint8)

    def blocks(self, tensor: Tensor) -> Iterator[Bytes]:
        """Consecutive row-major bytes of ``tensor``, whole elements each; a block is valid until the next is asked for.

        Raises SourceIncompleteError when the chunks do not hold every element exactly once, SourceCorruptError
        when a file ends before a chunk does.
        """
        wrong = flaws(tensor)
        if wrong:
            raise SourceIncompleteError(
                f"a tensor of shape {list(tensor.shape)} cannot be read: {wrong[0].kind} at "
                f"{box_text(wrong[0].start, wrong[0].size)}"
            )
        return self._blocks(tensor, chosen(tensor.chunks))

    def chunk(self, tensor: Tensor, row: int) -> Iterator[Bytes]:
        """As ``blocks``, for the box of one chunk alone (row-major within the box)."""
        chunks = tensor.chunks
        size = tuple(chunks.size[row].tolist())
        alone = Chunks(
            chunks.rank[row : row + 1],
            chunks.file[row : row + 1],
            chunks.offset[row : row + 1],
            np.zeros((1, len(size)), np.int64),
            chunks.size[row : row + 1],
            chunks.stride[row : row + 1],
        )
        return self._blocks(Tensor(tensor.dtype, size, alone), [0] if 0 not in size else [])

    def _blocks(self, tensor: Tensor, rows: list[int]) -> Iterator[Bytes]:
        if not rows:
            return
        if len(rows) == 1 and _row_major(tensor.chunks, rows[0]):
            yield from self._straight(tensor, rows[0])
            return
        chunks = Boxes(tensor, rows)
        for start, size in slabs(tensor.shape, tensor.dtype.itemsize, self._limit):
            block = self._buffer(prod(size) * tensor.dtype.itemsize)
            chunks.fill(self, start, size, block)
            yield block
            go_on()

    def _straight(self, tensor: Tensor, row: int) -> Iterator[Bytes]:
        """One row-major chunk that is the whole tensor: its bytes as they lie in the file."""
        source = self.source(int(tensor.chunks.file[row]))
        offset, left = int(tensor.chunks.offset[row]), tensor.nbytes
        step = self._limit // tensor.dtype.itemsize * tensor.dtype.itemsize
        while left > 0:
            block = self._buffer(min(step, left))
            source.read_into(offset, block.data)
            yield block
            go_on()
            offset += len(block)
            left -= len(block)

    def source(self, number: int) -> ByteSource:
        return self._sources.open(self._files[number].path)

    def _buffer(self, nbytes: int) -> Bytes:
        if len(self._block) < nbytes:
            self._block = np.empty(min(max(nbytes, 1 << 16), max(self._limit, nbytes)), np.uint8)
        return self._block[:nbytes]

    def scratch(self, nbytes: int) -> Bytes:
        if len(self._scratch) < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch[:nbytes]

    @property
    def limit(self) -> int:
        return self._limit


def _row_major(chunks: Chunks, row: int) -> bool:
    size, stride = chunks.size[row].tolist(), chunks.stride[row].tolist()
    expected = contiguous_stride(size)
    return all(n == 1 or have == want for n, have, want in zip(size, stride, expected, strict=True))


def slabs(shape: tuple[int, ...], itemsize: int, limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes (start, size) that follow each other in row-major order, each contiguous and at most ``limit`` bytes."""
    cut = 0
    row = prod(shape[1:]) * itemsize
    while cut + 1 < len(shape) and row > limit:
        cut += 1
        row = prod(shape[cut + 1 :]) * itemsize
    if not shape:
        yield (), ()
        return
    step = max(limit // row, 1)
    rest = shape[cut + 1 :]
    for prefix in product(*(range(length) for length in shape[:cut])):
        for begin in range(0, shape[cut], step):
            count = min(step, shape[cut] - begin)
            yield (*prefix, begin, *(0 for _ in rest)), (*(1 for _ in prefix), count, *rest)


class Boxes:
    """The chunks of one tensor, in columns, asked which of them meet a box."""

    def __init__(self, tensor: Tensor, rows: list[int]) -> None:
        taken = tensor.chunks.take(np.asarray(rows, np.intp))
        self._tensor = tensor
        self._chunks = taken
        self._end = taken.start + taken.size

    def fill(self, reader: BlockReader, start: tuple[int, ...], size: tuple[int, ...], block: Bytes) -> None:
        """Put the elements of the box into ``block``, row-major."""
        itemsize = self._tensor.dtype.itemsize
        whole = block.reshape(*size, itemsize)
        low = np.maximum(self._chunks.start, np.asarray(start, np.int64))
        high = np.minimum(self._end, np.asarray(start, np.int64) + np.asarray(size, np.int64))
        for row in np.flatnonzero((low < high).all(axis=1)).tolist():
            begin, count = low[row].tolist(), (high[row] - low[row]).tolist()
            stride: list[int] = (self._chunks.stride[row] * itemsize).tolist()
            inner = (low[row] - self._chunks.start[row]).tolist()
            offset = int(self._chunks.offset[row]) + sum(at * step for at, step in zip(inner, stride, strict=True))
            place = tuple(slice(at - base, at - base + n) for at, base, n in zip(begin, start, count, strict=True))
            source = reader.source(int(self._chunks.file[row]))
            _read_box(reader, source, offset, stride, whole[place])


def _descending(size: tuple[int, ...], stride: list[int]) -> bool:
    """True when the dimensions lie in the file in their own order, slowest first."""
    steps = [step for n, step in zip(size, stride, strict=True) if n > 1]
    return steps == sorted(steps, reverse=True)


def _read_box(reader: BlockReader, source: ByteSource, offset: int, stride: list[int], place: Bytes) -> None:
    """Fill ``place`` (box plus a last axis of item bytes) from strided elements beginning at ``offset``.

    One read when the elements lie close together, else one a step of the slowest dimension, recursively.
    """
    size = place.shape[:-1]
    itemsize = place.shape[-1]
    span = itemsize + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    useful = place.nbytes
    if span == useful and place.flags.c_contiguous and _descending(size, stride):
        source.read_into(offset, place.reshape(-1).data)
        return
    if span <= READ_THROUGH or span <= min(reader.limit, WASTE * useful):
        scratch = reader.scratch(span)
        source.read_into(offset, scratch.data)
        view: Bytes = np.ndarray((*size, itemsize), np.uint8, scratch.data, 0, (*stride, 1))
        place[...] = view
        return
    slowest = max(range(len(size)), key=lambda k: stride[k] if size[k] > 1 else -1)
    # As many steps of the slowest dimension at once as stay within the bounds above.
    inner = itemsize + sum((n - 1) * step for k, (n, step) in enumerate(zip(size, stride, strict=True)) if k != slowest)
    dense = stride[slowest] <= WASTE * (useful // size[slowest])
    count = max(min((reader.limit - inner) // stride[slowest] + 1, size[slowest] - 1), 1) if dense else 1
    index: list[slice] = [slice(None)] * len(size)
    for begin in range(0, size[slowest], count):
        index[slowest] = slice(begin, begin + count)
        _read_box(reader, source, offset + begin * stride[slowest], stride, place[tuple(index)])
