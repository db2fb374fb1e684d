"""Compares two tensors element by element, streamed: of two checkpoints, of source and output, of replicas.

``without_repeats`` handles shards of two saves in one directory: PyTorch's writer of sharded safetensors replaces the
files of the ranks that write, and leaves those that an older save made for other ranks. If all chunks that overlap
hold the same bytes, the repeated ones are dropped; otherwise the overlap stays a problem, as nothing records which of
the two is newer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fsdpckpt.ir.checkpoint import (
    Checkpoint,
    Container,
    ModelState,
    NamedTensor,
    Note,
    Problem,
    Section,
    SourceFile,
    problem_of,
)
from fsdpckpt.ir.dtypes import DType, cast, numpy_dtype
from fsdpckpt.ir.invariants import coverage
from fsdpckpt.ir.tensors import Box, Tensor, first_equal
from fsdpckpt.ir.values import Value
from fsdpckpt.progress import NO_PROGRESS, Progress
from fsdpckpt.readers.protocol import file_name
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import listed, names_text, plural, size_text
from fsdpckpt.verify.blocks import BLOCK_BYTES, BlockReader, Bytes, ChunkReader, one_chunk, slabs
from fsdpckpt.verify.difference import Change
from fsdpckpt.verify.measures import sum_of_squares
from fsdpckpt.verify.repeated import collapsed, extent, is_endless, stored_nbytes


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Equal when |a - b| <= atol + rtol * |b|, as ``torch.allclose``; NaN equals NaN, part by part if complex."""

    rtol: float = 0.0
    atol: float = 0.0


@dataclass(frozen=True, slots=True)
class Compared:
    """How two values differ: ``text`` is "" if they do not."""

    text: str = ""
    change: Change | None = None  # of tensors of one shape and dtype
    numbers: tuple[float, float] | None = None  # where each is one number


SAME = Compared()


@dataclass(slots=True)
class _Differences:
    """The differences so far."""

    elements: int = 0
    first: int = -1  # a row-major index
    largest: float | None = None  # |a - b|; None if there is none that is a number
    squares: float = 0.0  # the sum of those of a - b
    squares_a: float = 0.0  # of all elements of a from the first block on in which any differs
    begin: int = 0  # the elements before that block


def compare_tensors(
    reader_a: BlockReader,
    a: Tensor,
    reader_b: BlockReader,
    b: Tensor,
    tolerance: Tolerance | None,
    progress: Progress = NO_PROGRESS,
) -> Compared:
    """How ``a`` and ``b`` differ. ``tolerance`` None compares bytes."""
    if a.shape != b.shape or a.dtype is not b.dtype:
        progress.advance(a.nbytes)
        shapes = f"shape {list(a.shape)} vs {list(b.shape)}" if a.shape != b.shape else ""
        dtypes = f"dtype {a.dtype.name} vs {b.dtype.name}" if a.dtype is not b.dtype else ""
        return Compared(", ".join(filter(None, (shapes, dtypes))))
    differences = _Differences()
    compared = 0  # elements
    numel = a.numel
    numbers = None
    (a, b), repeats = collapsed(a, b)
    if is_endless(a) and is_endless(b):
        return Compared(_compare_stored(reader_a, a, reader_b, b))
    for block_a, block_b in _blocks_of_both(reader_a.blocks(a), reader_b.blocks(b)):
        if not np.array_equal(block_a, block_b):
            _add_differences(differences, block_a, block_b, a.dtype, tolerance, compared)
        if differences.elements:
            differences.squares_a += sum_of_squares(block_a, a.dtype)
        if numel == 1 and a.dtype.kind in ("float", "int", "uint"):
            numbers = _number(block_a, a.dtype), _number(block_b, a.dtype)
        compared += len(block_a) // a.dtype.itemsize
        progress.advance(len(block_a))
    if not differences.elements:
        return SAME if numbers is None else Compared(numbers=numbers)
    squares_a = differences.squares_a + _squares_before(differences.begin, reader_a, a)
    differing, squares = differences.elements * repeats, differences.squares * repeats
    change = Change(differing, numel, differences.largest, squares, squares_a * repeats)
    index = [int(at) for at in np.unravel_index(differences.first, a.shape)] if a.shape else []
    text = f"{change.elements} of {numel} elements differ, first at {index}"
    if change.largest is not None:
        text += f", by up to {change.largest:.3g}"
    return Compared(text, change, numbers)


def _squares_before(end: int, reader: BlockReader, tensor: Tensor) -> float:
    """The sum of the squares of the first ``end`` elements. They are read again: most tensors that differ do so from
    their first block on, and those that do not differ need no sum.
    """
    left, total = end * tensor.dtype.itemsize, 0.0
    for block in reader.blocks(tensor) if left else ():
        total += sum_of_squares(block[:left], tensor.dtype)
        left -= min(len(block), left)
        if not left:
            break
    return total


def _number(block: Bytes, dtype: DType) -> float:
    """The one element of ``block``."""
    return float(block.view(numpy_dtype(dtype))[0])


def _compare_stored(reader_a: BlockReader, a: Tensor, reader_b: BlockReader, b: Tensor) -> str:
    """``compare_tensors`` for two tensors of which too many elements would be read: by what is stored of them."""
    many = (
        f"{size_text(a.nbytes)} of elements from {size_text(stored_nbytes(a))} are too many to be compared one by one"
    )
    if len(a.chunks) > 1 or len(b.chunks) > 1 or not np.array_equal(a.chunks.stride, b.chunks.stride):
        return f"stored in different ways, and {many}"
    pairs = _blocks_of_both(reader_a.blocks(extent(a)), reader_b.blocks(extent(b)))
    return "" if all(np.array_equal(*pair) for pair in pairs) else f"the stored bytes differ, and {many}"


def _add_differences(
    differences: _Differences, block_a: Bytes, block_b: Bytes, dtype: DType, tolerance: Tolerance | None, compared: int
) -> None:
    """Add the differences of two blocks. ``compared``: the number of elements before them."""
    raw_a, raw_b = block_a.reshape(-1, dtype.itemsize), block_b.reshape(-1, dtype.itemsize)
    unequal: npt.NDArray[np.bool_] = (raw_a != raw_b).any(axis=1)
    where = np.flatnonzero(unequal)
    if not differences.elements:
        differences.begin = compared
    if dtype.numpy is not None:
        a, b = (np.ascontiguousarray(raw[where]).view(numpy_dtype(dtype)).reshape(-1) for raw in (raw_a, raw_b))
        with np.errstate(all="ignore"):
            distance = _distances(a, b, dtype)
            if tolerance is not None:
                differ = ~_are_close(a, b, dtype, tolerance)
                where, distance = where[differ], distance[differ]
        numbers = distance[~np.isnan(distance)]
        if len(numbers):
            differences.largest = max(differences.largest or 0.0, float(numbers.max()))
            with np.errstate(all="ignore"):
                differences.squares += float(np.square(numbers[np.isfinite(numbers)]).sum())
    if len(where):
        differences.elements += len(where)
        if differences.first < 0:
            differences.first = compared + int(where[0])


def _are_close(
    a: npt.NDArray[np.generic], b: npt.NDArray[np.generic], dtype: DType, tolerance: Tolerance
) -> npt.NDArray[np.bool_]:
    """Which pairs of elements are equal within ``tolerance``. Changes both: equal infinities and NaNs, also in one part
    of complex elements, become zeros.
    """
    parts_a, parts_b = (elements.view(elements.real.dtype) for elements in (a, b))
    equal = ((parts_a == parts_b) & ~np.isfinite(parts_a)) | (np.isnan(parts_a) & np.isnan(parts_b))
    parts_a[equal] = parts_b[equal] = 0
    distance, magnitude = _distances(a, b, dtype), _distances(b, np.zeros_like(b), dtype)
    allowed = tolerance.atol + tolerance.rtol * magnitude
    close: npt.NDArray[np.bool_] = np.isfinite(distance) & (distance <= allowed)
    return close


def _distances(a: npt.NDArray[np.generic], b: npt.NDArray[np.generic], dtype: DType) -> npt.NDArray[np.float64]:
    """|a - b| of each pair of elements."""
    if dtype.kind in ("int", "uint"):  # exact before it is rounded: float64 does not hold every 64-bit integer
        larger, smaller = np.maximum(a, b), np.minimum(a, b)
        exact: npt.NDArray[np.uint64] = larger.astype(np.uint64) - smaller.astype(np.uint64)
        return exact.astype(np.float64)
    wide = np.complex128 if dtype.kind == "complex" else np.float64
    distance: npt.NDArray[np.float64] = np.abs(a.astype(wide) - b.astype(wide))
    return distance


def _blocks_of_both(blocks_a: Iterator[Bytes], blocks_b: Iterator[Bytes]) -> Iterator[tuple[Bytes, Bytes]]:
    """Both streams in blocks of equal length. They must have the same total length."""
    a = b = np.empty(0, np.uint8)
    while True:
        if not len(a):
            a = next(blocks_a, a[:0])
        if not len(b):
            b = next(blocks_b, b[:0])
        count = min(len(a), len(b))
        if count == 0:
            return
        yield a[:count], b[:count]
        a, b = a[count:], b[count:]


_BUFFERS = 8  # at most: on each side a block, its scratch buffer, and a block cast to a wider dtype
_MIN_BLOCK_BYTES = 16 * 1024  # many times the widest element

Located: TypeAlias = tuple[Tensor, Sequence[SourceFile], Sources]
"""A tensor, the files that its chunks index, and the sources that open them."""


def first_difference(
    source: Located, written: Located, digest: hashlib._Hash | None = None, *, max_memory: int | None = None
) -> int | None:
    """The row-major index of the first element in which ``written`` is not ``source`` cast to its dtype; None if equal.

    Elements are compared as bytes: NaN equals the same NaN, and 0.0 differs from -0.0. ``digest`` is updated with the
    bytes of ``written`` in the same pass. All buffers together take at most ``max_memory`` bytes.
    """
    from_dtype, to_dtype = source[0].dtype, written[0].dtype
    compared = 0  # bytes
    limit = BLOCK_BYTES
    if max_memory is not None:
        limit = min(max(max_memory // _BUFFERS, _MIN_BLOCK_BYTES), BLOCK_BYTES)
    blocks = _cast(_blocks(source, limit), from_dtype, to_dtype)
    for expected, actual in _blocks_of_both(blocks, _blocks(written, limit)):
        if not np.array_equal(actual, expected):
            return (compared + int(np.flatnonzero(actual != expected)[0])) // to_dtype.itemsize
        if digest is not None:
            digest.update(actual.data)
        compared += len(actual)
    return None


def _blocks(located: Located, limit: int) -> Iterator[Bytes]:
    tensor, files, sources = located
    return BlockReader(files, sources, limit).blocks(tensor)


def _cast(blocks: Iterator[Bytes], from_dtype: DType, to_dtype: DType) -> Iterator[Bytes]:
    if from_dtype is to_dtype:
        return blocks
    return (cast(block.view(numpy_dtype(from_dtype)), numpy_dtype(to_dtype)).view(np.uint8) for block in blocks)


def replica_sets(tensor: Tensor) -> list[list[int]]:
    """Sets of rows of ``tensor.chunks`` that hold the same box in different places, lowest rank first."""
    chunks = tensor.chunks
    first = first_equal(np.concatenate([chunks.start, chunks.size], axis=1))
    rows = np.flatnonzero(np.bincount(first)[first] > 1)  # of boxes that appear more than once
    sets: dict[tuple[int, ...], dict[tuple[int, ...], int]] = {}
    columns = (chunks.start, chunks.size, chunks.file, chunks.offset, chunks.stride)
    repeated = zip(rows.tolist(), *(column[rows].tolist() for column in columns), strict=True)
    for row, start, size, file, offset, stride in repeated:
        if 0 not in size:
            sets.setdefault((*start, *size), {}).setdefault((file, offset, *stride), row)
    several = [places for places in sets.values() if len(places) > 1]
    return [sorted(places.values(), key=chunks.rank.__getitem__) for places in several]


def replica_bytes(tensor: Tensor, sets: list[list[int]]) -> int:
    """How many bytes comparing ``sets`` reads, counting each pair once."""
    sizes = tensor.chunks.size
    return sum((len(rows) - 1) * int(np.prod(sizes[rows[0]])) for rows in sets) * tensor.dtype.itemsize


def check_replicas(
    readers: tuple[BlockReader, BlockReader],
    named: NamedTensor,
    sets: list[list[int]],
    progress: Progress = NO_PROGRESS,
) -> list[Problem]:
    """A problem for each set of replicas that are not all equal: HYBRID_SHARD parameters, buffers, ``step``.

    It names the ranks that differ from the lowest.
    """
    problems: list[Problem] = []
    tensor = named.tensor
    ranks = tensor.chunks.rank.tolist()
    for rows in sets:
        differing = [row for row in rows[1:] if not _equal(readers, tensor, rows[0], row, progress)]
        if differing:
            others = f"rank{'s' if len(differing) > 1 else ''} {listed([ranks[row] for row in differing])}"
            message = f"the copies of rank {ranks[rows[0]]} and of {others} differ, and they should be replicas"
            problems.append(problem_of("replica", [named], message, rank=ranks[differing[0]]))
    return problems


def _equal(readers: tuple[BlockReader, BlockReader], tensor: Tensor, a: int, b: int, progress: Progress) -> bool:
    """Whether the chunks in rows ``a`` and ``b`` hold the same bytes."""
    alone = (one_chunk(tensor, a), one_chunk(tensor, b))
    return not compare_tensors(readers[0], alone[0], readers[1], alone[1], None, progress).text


def without_repeats(checkpoint: Checkpoint, sources: Sources) -> Checkpoint:
    """Drop chunks of ``checkpoint`` whose bytes other chunks hold too. Unchanged if chunks overlap in any other way.

    Reads only the overlaps. Raises SourceCorruptError if a file ends too early.
    """
    model = checkpoint.model
    if checkpoint.container != Container.SAFETENSORS or not checkpoint.problems or model is None:
        return checkpoint
    overlapping = [problem for flaw, problem in coverage(checkpoint) if flaw.kind == "overlap"]
    if not overlapping:
        return checkpoint
    if any(problem.section is not Section.MODEL for problem in overlapping):
        return checkpoint
    reader = BlockReader(checkpoint.files, sources)
    params: dict[str, Tensor | Value] = {}
    dropped: list[int] = []  # the files of the dropped chunks
    for name, value in model.params.items():
        params[name] = value
        if isinstance(value, Tensor) and len(value.chunks) > 1:
            rows = _distinct_rows(value, reader)
            if rows is None:
                return checkpoint
            params[name] = replace(value, chunks=value.chunks.take(np.asarray(rows, np.intp)))
            dropped += (file for row, file in enumerate(value.chunks.file.tolist()) if row not in rows)
    problems = tuple(problem for problem in checkpoint.problems if problem not in overlapping)
    names = names_text(sorted({file_name(f"{checkpoint.files[file]}") for file in dropped}), 3)
    message = (
        f"{plural(len(dropped), 'chunk')} in {names} skipped: larger chunks hold the same bytes. Saving into a "
        "directory that already holds a checkpoint leaves such files"
    )
    ledger = replace(checkpoint.ledger, problems=problems).with_notes(Note("repeated", message))
    return replace(checkpoint, model=ModelState(params, model.metadata), ledger=ledger)


def _distinct_rows(tensor: Tensor, reader: BlockReader) -> list[int] | None:
    """Rows of chunks that do not overlap and together hold the bytes of all others; None if there are none."""
    starts, sizes = tensor.chunks.start, tensor.chunks.size
    chosen: list[int] = []
    for row in np.argsort(-sizes.prod(axis=1), kind="stable").tolist():
        low = np.maximum(starts[chosen], starts[row])
        high = np.minimum(starts[chosen] + sizes[chosen], starts[row] + sizes[row])
        covered = int((high - low).clip(0).prod(axis=1).sum())
        if covered == 0:
            chosen.append(row)
        elif covered < sizes[row].prod() or not _is_duplicate(tensor, chosen, row, reader):
            return None
    return sorted(chosen)


def _is_duplicate(tensor: Tensor, chosen: list[int], row: int, reader: BlockReader) -> bool:
    """Whether the chunks ``chosen`` hold the same bytes as the chunk ``row`` in its box."""
    others, duplicate = ChunkReader(reader, tensor, chosen), ChunkReader(reader, tensor, [row])
    start, itemsize = tensor.chunks.start[row].tolist(), tensor.dtype.itemsize
    for slab in slabs(tuple(tensor.chunks.size[row].tolist()), itemsize, reader.limit):
        box = Box(tuple(map(sum, zip(start, slab.offsets, strict=True))), slab.sizes)
        expected, actual = (np.empty(slab.numel * itemsize, np.uint8) for _ in range(2))
        others.read_into(box, expected)
        duplicate.read_into(box, actual)
        if not np.array_equal(expected, actual):
            return False
    return True
