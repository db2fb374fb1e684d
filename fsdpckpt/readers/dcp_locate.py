"""Locates single pieces of a DCP checkpoint that was opened with ``locate=False``: those that somebody reads.

A rank that loads its share of a checkpoint of many ranks needs few of its items. Opening them all would cost each of N
ranks as many small reads as there are items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from fsdpckpt.containers.torch_items import ItemReader
from fsdpckpt.errors import SourceUnrecognisedError
from fsdpckpt.ir.checkpoint import SourceFile
from fsdpckpt.ir.tensors import Int64Array, Tensor
from fsdpckpt.storage.sources import Sources

__all__ = ["is_located", "locate_rows"]


def is_located(tensor: Tensor) -> bool:
    """Whether every piece with elements has its place in a file."""
    pieces = tensor.pieces
    return pieces.item is None or bool((pieces.offset >= 0).all())


def locate_rows(
    wanted: Sequence[tuple[Tensor, npt.NDArray[np.intp]]], files: Sequence[SourceFile], sources: Sources
) -> list[Tensor] | None:
    """Each tensor with those rows of its pieces alone, located. Items are opened in the order of their file.

    None when an item holds something else than the metadata declares: a correction takes all of them (``dcp_items``),
    so the checkpoint has to be opened with ``locate=True``. Raises what ``ItemReader.tensor`` raises.
    """
    found = [replace(tensor, pieces=tensor.pieces.take(rows)) for tensor, rows in wanted]
    jobs: list[tuple[int, int, int, int, int]] = []
    for number, tensor in enumerate(found):
        pieces = tensor.pieces
        if pieces.item is None:
            continue
        for row, (file, (begin, length), offset) in enumerate(
            zip(pieces.file.tolist(), pieces.item.tolist(), pieces.offset.tolist(), strict=True)
        ):
            if offset < 0:
                jobs.append((file, begin, length, number, row))
    if not jobs:
        return found
    jobs.sort()
    places = {number: _columns(found[number]) for *_, number, _ in jobs}
    readers: dict[int, ItemReader] = {}
    for file, begin, length, number, row in jobs:
        if file not in readers:
            readers = {file: ItemReader(sources.open(files[file].path))}
        offsets, strides = places[number]
        place = _place(readers[file], begin, length, found[number], row)
        if place is None:
            return None
        offsets[row], strides[row] = place
    for number, (offsets, strides) in places.items():
        located = replace(found[number].pieces, offset=offsets, stride=strides)
        found[number] = replace(found[number], pieces=located)
    return found


def _columns(tensor: Tensor) -> tuple[Int64Array, Int64Array]:
    return tensor.pieces.offset.copy(), tensor.pieces.stride.copy()


def _place(reader: ItemReader, begin: int, length: int, tensor: Tensor, row: int) -> tuple[int, tuple[int, ...]] | None:
    """Offset and strides of one piece; None when its item is not a torch archive of just that box."""
    size = tensor.pieces.size[row].tolist()
    if begin < 0 or length <= tensor.dtype.itemsize * int(np.prod(size, dtype=np.int64)):
        return None  # a blob of the safetensors format: only its header says where the data lies
    try:
        item = reader.tensor(begin, begin + length)
    except SourceUnrecognisedError:
        return None
    if item.dtype is not tensor.dtype or list(item.shape) != size:
        return None
    return item.offset, item.stride
