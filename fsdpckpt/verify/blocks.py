"""Reads a tensor in row-major blocks of bounded size, however it is divided into chunks.

A reader has two buffers of at most ``limit`` bytes, however large the tensor or a chunk is. It reads every element
once; of replicas, it reads the one on the lowest rank. ``for_each`` works on many items in several threads, each with
its own reader: while one thread reads, which releases the interpreter's lock, another computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import product
from math import prod
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from fsdpckpt.errors import SourceIncompleteError
from fsdpckpt.ir.checkpoint import Checkpoint, SourceFile
from fsdpckpt.ir.coverage import box_text, flaws
from fsdpckpt.ir.tensors import Box, Chunks, Tensor, contiguous_stride
from fsdpckpt.ir.values import Value
from fsdpckpt.storage import ByteSource, is_remote

BLOCK_BYTES = 8 * 1024 * 1024  # beyond this size the cost of a request is negligible beside its transfer
LARGEST_GAP = 64 * 1024  # bytes: reading a gap of this size costs less than another request
MAX_READ_AMPLIFICATION = 4  # up to this many times the bytes needed are read, rather than one request for each row
GAP_PER_ROW = 4096  # bytes that are read between two rows beyond this, rather than one more request

Bytes = npt.NDArray[np.uint8]


def rows_to_read(chunks: Chunks) -> list[int]:
    """The rows of ``chunks`` to read: of equal boxes the one on the lowest rank, and no empty ones."""
    sizes = chunks.size.tolist()
    if len(sizes) == 1:
        return [] if 0 in sizes[0] else [0]
    lowest: dict[tuple[int, ...], tuple[int, int]] = {}  # by box: rank and row
    rows = zip(chunks.start.tolist(), sizes, chunks.rank.tolist(), strict=True)
    for row, (start, size, rank) in enumerate(rows):
        if 0 in size:
            continue
        box = (*start, *size)
        if box not in lowest or (rank, row) < lowest[box]:
            lowest[box] = (rank, row)
    return sorted(row for _, row in lowest.values())


class FileOpener(Protocol):
    """What opens the files of a checkpoint: ``Sources``, or something that watches what is read."""

    def open_file(self, file: SourceFile) -> ByteSource: ...


class BlockReader:
    """Reads tensors of one checkpoint. It owns its buffers: each thread needs its own."""

    def __init__(self, files: Sequence[SourceFile], sources: FileOpener, limit: int = BLOCK_BYTES) -> None:
        self._files = files
        self._sources = sources
        self._limit = limit
        self._block: Bytes = np.empty(0, np.uint8)
        self._scratch: Bytes = np.empty(0, np.uint8)

    def blocks(self, tensor: Tensor) -> Iterator[Bytes]:
        """The row-major bytes of ``tensor`` in blocks of whole elements. A block is valid until the next is requested.

        Raises SourceIncompleteError when the chunks do not hold every element exactly once, SourceCorruptError
        when a file ends before a chunk does.
        """
        require_whole(tensor)
        return self._blocks(tensor, rows_to_read(tensor.chunks))

    def _blocks(self, tensor: Tensor, rows: list[int]) -> Iterator[Bytes]:
        if not rows:
            return
        size, stride = tensor.chunks.size[rows[0]].tolist(), tensor.chunks.stride[rows[0]].tolist()
        if len(rows) == 1 and _is_row_major(size, stride):
            yield from self._contiguous(tensor, rows[0])
            return
        chunks = ChunkReader(self, tensor, rows)
        for box in slabs(tensor.shape, tensor.dtype.itemsize, self._limit):
            block = self._buffer(box.numel * tensor.dtype.itemsize)
            chunks.read_into(box, block)
            yield block
            raise_if_cancelled()

    def _contiguous(self, tensor: Tensor, row: int) -> Iterator[Bytes]:
        """The bytes of one row-major chunk that is the whole tensor, in the order of the file."""
        source = self.source(int(tensor.chunks.file[row]))
        offset, left = int(tensor.chunks.offset[row]), tensor.nbytes
        step = self._limit // tensor.dtype.itemsize * tensor.dtype.itemsize
        while left > 0:
            block = self._buffer(min(step, left))
            source.read_into(offset, block.data)
            yield block
            raise_if_cancelled()
            offset += len(block)
            left -= len(block)

    def source(self, number: int) -> ByteSource:
        """The file ``number`` of the checkpoint."""
        return self._sources.open_file(self._files[number])

    def _buffer(self, nbytes: int) -> Bytes:
        if len(self._block) < nbytes:
            self._block = np.empty(min(max(nbytes, 1 << 16), max(self._limit, nbytes)), np.uint8)
        return self._block[:nbytes]

    def scratch(self, nbytes: int) -> Bytes:
        """A buffer that is valid until the next call."""
        if len(self._scratch) < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch[:nbytes]

    @property
    def limit(self) -> int:
        return self._limit


def one_chunk(tensor: Tensor, row: int) -> Tensor:
    """The chunk in ``row`` as a tensor by itself."""
    chunks = tensor.chunks.take(np.array([row], np.intp))
    alone = chunks.with_boxes(start=np.zeros_like(chunks.size))
    return Tensor(tensor.dtype, tuple(chunks.size[0].tolist()), alone)


def require_whole(tensor: Tensor) -> None:
    """Raises SourceIncompleteError if the chunks do not hold every element exactly once."""
    for flaw in flaws(tensor)[:1]:
        raise SourceIncompleteError(
            f"a tensor of shape {list(tensor.shape)} cannot be read: {flaw.kind} at {box_text(flaw.start, flaw.size)}"
        )


def _is_row_major(size: Sequence[int], stride: Sequence[int], itemsize: int = 1) -> bool:
    """Whether the elements of a box follow each other in row-major order. ``itemsize``: 1 for strides in elements."""
    steps = zip(size, stride, contiguous_stride(size), strict=True)
    return all(length == 1 or step == contiguous * itemsize for length, step, contiguous in steps)


def slabs(shape: tuple[int, ...], itemsize: int, limit: int) -> Iterator[Box]:
    """Boxes that tile ``shape`` in row-major order, each contiguous and at most ``limit`` bytes."""
    if not shape:
        yield Box((), ())
        return
    cut = 0  # the dimension that is cut into several rows at once
    while cut + 1 < len(shape) and prod(shape[cut + 1 :]) * itemsize > limit:
        cut += 1
    rest = shape[cut + 1 :]
    step = max(limit // (prod(rest) * itemsize), 1)
    for prefix in product(*(range(length) for length in shape[:cut])):
        for begin in range(0, shape[cut], step):
            count = min(step, shape[cut] - begin)
            yield Box((*prefix, begin, *(0 for _ in rest)), (*(1 for _ in prefix), count, *rest))


class ChunkReader:
    """Reads boxes of one tensor through ``reader``, from the chunks in ``rows`` (None: all that hold data)."""

    def __init__(self, reader: BlockReader, tensor: Tensor, rows: list[int] | None = None) -> None:
        rows = rows if rows is not None else rows_to_read(tensor.chunks)
        self._reader = reader
        self._tensor = tensor
        self._chunks = tensor.chunks.take(np.asarray(rows, np.intp))
        self._end = self._chunks.start + self._chunks.size

    def read_into(self, box: Box, block: Bytes) -> None:
        """Put the elements of ``box`` into ``block``, row-major."""
        itemsize = self._tensor.dtype.itemsize
        whole = block.reshape(*box.sizes, itemsize)
        offsets = np.asarray(box.offsets, np.int64)
        low = np.maximum(self._chunks.start, offsets)
        high = np.minimum(self._end, offsets + np.asarray(box.sizes, np.int64))
        for row in np.flatnonzero((low < high).all(axis=1)).tolist():
            stride: list[int] = (self._chunks.stride[row] * itemsize).tolist()
            inner = (low[row] - self._chunks.start[row]).tolist()
            offset = int(self._chunks.offset[row]) + sum(at * step for at, step in zip(inner, stride, strict=True))
            begin, end = (low[row] - offsets).tolist(), (high[row] - offsets).tolist()
            source = self._reader.source(int(self._chunks.file[row]))
            _read_box(self._reader, source, offset, stride, whole[tuple(map(slice, begin, end))])


def _read_box(reader: BlockReader, source: ByteSource, offset: int, stride: list[int], target: Bytes) -> None:
    """Fill ``target`` (a box and a last axis of item bytes) from strided elements that begin at ``offset``.

    One read if the elements are close together, else one for each step of the slowest dimension, recursively.
    """
    size = target.shape[:-1]
    itemsize = target.shape[-1]
    if target.flags.c_contiguous and _is_row_major(size, stride, itemsize):
        source.read_into(offset, target.reshape(-1).data)
        return
    reach = [(length - 1) * step for length, step in zip(size, stride, strict=True)]  # from the first to the last step
    span = sum(reach) + itemsize
    slowest = max(range(len(size)), key=lambda dim: stride[dim] if size[dim] > 1 else -1)
    rows = size[slowest]
    worth_reading = min(reader.limit, MAX_READ_AMPLIFICATION * target.nbytes + GAP_PER_ROW * rows)
    if span <= LARGEST_GAP or span <= worth_reading:
        scratch = reader.scratch(span)
        source.read_into(offset, scratch.data)
        view: Bytes = np.ndarray((*size, itemsize), np.uint8, scratch.data, 0, (*stride, 1))
        target[...] = view
        return
    # As many steps of the slowest dimension at once as stay within the bounds above.
    row_span = span - reach[slowest]
    dense = stride[slowest] <= MAX_READ_AMPLIFICATION * (target.nbytes // rows) + GAP_PER_ROW
    count = max(min((reader.limit - row_span) // stride[slowest] + 1, rows - 1), 1) if dense else 1
    index: list[slice] = [slice(None)] * len(size)
    for begin in range(0, rows, count):
        index[slowest] = slice(begin, begin + count)
        _read_box(reader, source, offset + begin * stride[slowest], stride, target[tuple(index)])


DEFAULT_THREADS = 2
REMOTE_THREADS = 8  # a store answers slowly, and many requests at once

T = TypeVar("T")
R = TypeVar("R")
W = TypeVar("W")


class Cancelled(Exception):
    """The work was cancelled: another item failed, or the user interrupted it."""


_thread = threading.local()


def raise_if_cancelled() -> None:
    """Raises Cancelled if the work was cancelled; called between two blocks of one item."""
    stop: threading.Event | None = getattr(_thread, "stop", None)
    if stop is not None and stop.is_set():
        raise Cancelled


def threads_for(*checkpoints: Checkpoint) -> int:
    """The number of threads for reading ``checkpoints`` if the user gives none."""
    remote = any(is_remote(file) for checkpoint in checkpoints for file in checkpoint.files)
    return REMOTE_THREADS if remote else DEFAULT_THREADS


def for_each(
    items: Sequence[T],
    work: Callable[[W, T], R],
    *,
    make_reader: Callable[[], W],
    threads: int = DEFAULT_THREADS,
    order: Sequence[int] | None = None,
) -> list[R]:
    """The results of ``work(reader, item)`` in the order of ``items``. The first error cancels all.

    ``order``: the order in which the items are started. ``make_reader()`` is called once in each thread.
    """
    results: dict[int, R] = {}
    numbers: Iterator[int] = iter(order if order is not None else range(len(items)))
    lock = threading.Lock()
    stop = threading.Event()

    def run() -> None:
        outer = getattr(_thread, "stop", None)
        _thread.stop = stop
        try:
            reader = make_reader()
            while not stop.is_set():
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                results[number] = work(reader, items[number])
        except BaseException:
            stop.set()
            raise
        finally:
            _thread.stop = outer

    count = max(min(threads, len(items)), 1)
    if count == 1:
        run()
    else:
        with ThreadPoolExecutor(count, thread_name_prefix="fsdpckpt-verify") as pool:
            futures = [pool.submit(run) for _ in range(count)]
            try:
                wait(futures)
            finally:  # also after a signal: leaving the pool waits for its threads
                stop.set()
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:  # one failed, the others may only have been cancelled
            raise next((error for error in errors if not isinstance(error, Cancelled)), errors[0])
    return [results[number] for number in range(len(items))]


def in_file_order(values: Sequence[Value]) -> list[int]:
    """The order of the first chunks of ``values`` in their files, so that reads run forward."""
    return sorted(range(len(values)), key=lambda number: _position(values[number]))


def _position(value: Value) -> tuple[int, int]:
    if isinstance(value, Tensor) and len(value.chunks):
        return int(value.chunks.file[0]), int(value.chunks.offset[0])
    return -1, -1
