"""Names the tensors that a problem affects, and finds them by the bytes of a file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fsdpckpt.ir.checkpoint import Checkpoint, NamedTensor, Problem, ProblemKind
from fsdpckpt.ir.tensors import Int64Array, Tensor


def problem_of(
    kind: ProblemKind,
    tensors: Sequence[NamedTensor],
    what: str,
    *,
    file: str | None = None,
    rank: int | None = None,
    fatal: bool = True,
) -> Problem:
    """The problem ``what`` of ``tensors``, under the name of the first; of a file if there are none."""
    if not tensors:
        return Problem(kind, what, fatal, file, rank=rank)
    first, more = tensors[0], len(tensors) - 1
    names = f"{first.section} {first.key}"
    if more:
        names += f" and {more} more {'tensor' if more == 1 else 'tensors'}"
    return Problem(kind, f"{names}: {what}", fatal, file, first.key, rank, first.section)


def chunk_ends(tensor: Tensor) -> Int64Array:
    """The offset behind the last byte of each chunk, in its file."""
    chunks = tensor.chunks
    ends: Int64Array = (
        chunks.offset + (((chunks.size - 1).clip(0) * chunks.stride).sum(axis=1) + 1) * tensor.dtype.itemsize
    )
    return ends


class TensorsInFiles:
    """The tensors of a checkpoint by the bytes that they are stored in. The first question builds the index."""

    def __init__(self, checkpoint: Checkpoint, tensors: Sequence[NamedTensor]) -> None:
        self._numbers = {file.path: number for number, file in enumerate(checkpoint.files)}
        self._tensors = tensors
        self._by_file: dict[int, Int64Array] | None = None

    def overlapping(self, path: str, begin: int, end: int) -> list[NamedTensor]:
        """The tensors with bytes from ``begin`` to ``end`` of the file at ``path``, in the checkpoint's order."""
        if self._by_file is None:
            self._by_file = self._index()
        rows = self._by_file.get(self._numbers.get(path, -1))
        if rows is None:
            return []
        first, last = np.searchsorted(rows[3], begin, "right"), np.searchsorted(rows[0], end, "left")
        near = rows[:, first:last]
        return [self._tensors[number] for number in np.unique(near[2, near[1] > begin]).tolist()]

    def _index(self) -> dict[int, Int64Array]:
        """For each file its chunks as columns sorted by offset: offset, end, number of the tensor, and the farthest end
        so far.
        """
        parts: list[Int64Array] = []
        for number, named in enumerate(self._tensors):
            chunks = named.tensor.chunks
            filled = (chunks.size != 0).all(axis=1)
            columns = (chunks.file, chunks.offset, chunk_ends(named.tensor), np.full(len(chunks), number))
            parts.append(np.stack(columns)[:, filled])
        table = np.concatenate(parts, axis=1) if parts else np.zeros((4, 0), np.int64)
        table = table[:, np.lexsort((table[1], table[0]))]
        files, begins = np.unique(table[0], return_index=True)
        by_file = zip(files.tolist(), np.split(table[1:], begins[1:], axis=1), strict=True) if len(files) else ()
        return {file: np.vstack((rows, np.maximum.accumulate(rows[1]))) for file, rows in by_file}
