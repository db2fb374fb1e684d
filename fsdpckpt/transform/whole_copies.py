"""Whole tensors that every rank has of its own, ``step`` above all: converting takes one of them, so all must be equal.

``_convert_all_state_info`` in ``torch/distributed/fsdp/_optim_utils.py`` refuses ranks that disagree on a state.

Buffers of the model may differ, as running statistics do. But where no rank's file says that it holds a part, matrices
that differ are parts all the same, of tensor parallelism that is recorded nowhere, or of several models.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fsdpckpt.ir.checkpoint import Checkpoint, Checksums, Layout, Problem, Section
from fsdpckpt.ir.tensors import Int64Array, Tensor

__all__ = ["differing_copies"]


def differing_copies(checkpoint: Checkpoint) -> Iterator[Problem]:
    """A fatal problem for each optimizer state of which two ranks have different copies, and for each matrix of a model
    of which nothing is sharded.

    Told by the CRC-32 that the source's files carry; what has none is left to ``fsdpckpt verify``, which reads it.
    """
    records = _Records(checkpoint.checksums)
    seen: set[tuple[bytes, bytes]] = set()
    for named in checkpoint.tensors():
        tensor = named.tensor
        matrix = named.section is Section.MODEL and checkpoint.layout is Layout.FULL and tensor.ndim > 1
        if len(tensor.chunks) < 2 or not (matrix or named.section is Section.OPTIM):
            continue
        place = tensor.chunks.file.tobytes(), tensor.chunks.offset.tobytes()
        if place in seen:  # the parameters of one unit share its ``step``
            continue
        seen.add(place)
        rows = _whole_copies(tensor)
        sums = records.of(tensor, rows)
        known = np.flatnonzero(sums >= 0)
        other = known[sums[known] != sums[known[0]]] if len(known) else known
        if len(other):
            one, two = (int(tensor.chunks.rank[rows[index]]) for index in (known[0], other[0]))
            what = (
                "nothing says whether they are parts (name one of the files to take it)"
                if matrix
                else "they are replicas"
            )
            message = f"{named.section} {named.key}: the copies of rank {one} and of rank {two} differ, and {what}"
            yield Problem("replica", message, key=named.key, rank=two, section=named.section)


def _whole_copies(tensor: Tensor) -> Int64Array:
    """The rows of the chunks that are the whole tensor, laid out like the first one."""
    chunks = tensor.chunks
    if not len(chunks):
        return np.empty(0, np.int64)
    alike = (chunks.size == np.asarray(tensor.shape, np.int64)).all(axis=1)
    return np.flatnonzero(alike & (chunks.stride == chunks.stride[0]).all(axis=1)).astype(np.int64)


class _Records:
    """The source's checksums by file and offset."""

    def __init__(self, checksums: Checksums) -> None:
        self._order = np.lexsort((checksums.offset, checksums.file))
        self._keys = self._key(checksums.file, checksums.offset)[self._order]
        self._checksums = checksums

    def of(self, tensor: Tensor, rows: Int64Array) -> Int64Array:
        """The CRC-32 of each of these chunks, -1 for one that is not exactly a record."""
        chunks = tensor.chunks
        keys = self._key(chunks.file[rows], chunks.offset[rows])
        at = np.searchsorted(self._keys, keys)
        found = np.full(len(rows), -1, np.int64)
        inside = np.flatnonzero(at < len(self._keys))
        inside = inside[self._keys[at[inside]] == keys[inside]]
        record = self._order[at[inside]]
        exact = self._checksums.nbytes[record] == tensor.nbytes
        found[inside[exact]] = self._checksums.crc[record[exact]]
        return found

    @staticmethod
    def _key(file: Int64Array, offset: Int64Array) -> Int64Array:
        # Files of less than 2**42 bytes, fewer than 2**21 of them: both fit into one number.
        return (file << np.int64(42)) + offset
