"""Says which tensors lie in a stretch of a file, and which tensors of a model are buffers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fsdpckpt.ir.checkpoint import Checkpoint, NamedTensor
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.tensors import Int64Array, Tensor


def chunk_ends(tensor: Tensor) -> Int64Array:
    """The offset behind the last byte of each chunk, in its file."""
    chunks = tensor.chunks
    ends: Int64Array = (
        chunks.offset + (((chunks.size - 1).clip(0) * chunks.stride).sum(axis=1) + 1) * tensor.dtype.itemsize
    )
    return ends


class TensorsInFiles:
    """The tensors of a checkpoint by the bytes that they are stored in. The first question builds the index."""

    def __init__(self, checkpoint: Checkpoint, named: Sequence[NamedTensor]) -> None:
        self._numbers = {file.path: number for number, file in enumerate(checkpoint.files)}
        self._named = named
        self._by_file: dict[int, Int64Array] | None = None

    def within(self, path: str, begin: int, end: int) -> list[NamedTensor]:
        """Those with bytes from ``begin`` to ``end`` of the file at ``path``, in the checkpoint's order."""
        if self._by_file is None:
            self._by_file = self._index()
        rows = self._by_file.get(self._numbers.get(path, -1))
        if rows is None:
            return []
        first, last = np.searchsorted(rows[3], begin, "right"), np.searchsorted(rows[0], end, "left")
        near = rows[:, first:last]
        return [self._named[at] for at in np.unique(near[2, near[1] > begin]).tolist()]

    def _index(self) -> dict[int, Int64Array]:
        """By file, its chunks as columns by offset: offset, end, number of the tensor, and the farthest end so far."""
        parts: list[Int64Array] = []
        for number, one in enumerate(self._named):
            chunks = one.tensor.chunks
            filled = (chunks.size != 0).all(axis=1)
            columns = (chunks.file, chunks.offset, chunk_ends(one.tensor), np.full(len(chunks), number))
            parts.append(np.stack(columns)[:, filled])
        table = np.concatenate(parts, axis=1) if parts else np.zeros((4, 0), np.int64)
        table = table[:, np.lexsort((table[1], table[0]))]
        files, begins = np.unique(table[0], return_index=True)
        by_file = zip(files.tolist(), np.split(table[1:], begins[1:], axis=1), strict=True) if len(files) else ()
        return {file: np.vstack((rows, np.maximum.accumulate(rows[1]))) for file, rows in by_file}


def named_text(tensors: Sequence[NamedTensor]) -> str:
    """``model a.weight``, ``model a.weight and 3 more tensors``."""
    first = f"{tensors[0].section} {tensors[0].key}"
    more = len(tensors) - 1
    return f"{first} and {more} more {'tensor' if more == 1 else 'tensors'}" if more else first


def buffer_keys(checkpoint: Checkpoint) -> frozenset[str]:
    """The model's keys that are no parameters, as far as something says so; frozen parameters may be among them.

    A parameter is what the optimizer lists by name, or what FSDP shards. Of the others, those are buffers that every
    rank holds whole although parameters are sharded, and, where nothing is sharded, those that the optimizer does not
    list. Without either (an optimizer by ids or none, in one full file) nothing counts as a buffer.
    """
    if checkpoint.model is None:
        return frozenset()
    tensors = {key: leaf for key, leaf in checkpoint.model.params.items() if isinstance(leaf, Tensor)}
    optim = checkpoint.optim
    listed: set[str] = set()
    if optim is not None:
        listed = {clean(name) for name in (*optim.grouped_keys(), *optim.state) if isinstance(name, str)}
    if listed.isdisjoint(map(clean, tensors)):  # by ids, or under other names than the model's
        listed = set()
    return frozenset(
        key
        for key, tensor in tensors.items()
        if clean(key) not in listed
        and tensor.sharded is not True
        and (bool(listed) or (tensor.sharded is False and tensor.ndim > 0))
    )
