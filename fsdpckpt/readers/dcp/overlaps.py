"""Finds items of a DCP directory that share bytes: PyTorch writes one after the other, and none into another.

The metadata says where each item is. If one of these places is wrong, the item may be read whole and sound from where
another one is: only the place that both have shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fsdpckpt.ir.checkpoint import Problem
from fsdpckpt.ir.tensors import Int64Array

if TYPE_CHECKING:
    from fsdpckpt.formats.dcp import DcpMetadata


class _Places(NamedTuple):
    """The items that have bytes: their keys' numbers, files, first bytes and ends."""

    key: Int64Array
    file: Int64Array
    begin: Int64Array
    end: Int64Array


def shared_bytes(metadata: DcpMetadata) -> Iterator[Problem]:
    """A problem for each item that begins before the end of the one before it in its file.

    With ``SerializationFormat.SAFETENSORS`` all tensors of a file begin at one place: the file's own header says more.
    """
    keys = [*metadata.tensors, *metadata.items]
    places = _places(metadata)
    if _are_apart(places):
        return
    tensors = places.key < len(metadata.tensors)
    # Files in which all tensors begin at one place are left out.
    count = int(places.file.max()) + 1
    first, last = np.full(count, np.iinfo(np.int64).max, np.int64), np.full(count, -1, np.int64)
    np.minimum.at(first, places.file[tensors], places.begin[tensors])
    np.maximum.at(last, places.file[tensors], places.begin[tensors])
    alone = np.bincount(places.file[tensors], minlength=len(first)) < 2
    compared = ~tensors | ((first < last) | alone)[places.file]
    places = _Places(*(column[compared] for column in places))
    order = np.lexsort((places.end, places.begin, places.file))
    key, file, begin, end = (column[order] for column in places)
    for row in np.flatnonzero((file[1:] == file[:-1]) & (begin[1:] < end[:-1])).tolist():
        name, other = keys[key[row + 1]], keys[key[row]]
        where = f"bytes {begin[row + 1]} to {end[row + 1]} of one file"
        message = f"{name} is at {where}, and {other} at {begin[row]} to {end[row]}: one of them is somewhere else"
        yield Problem("overlap", message, key=name)


def _places(metadata: DcpMetadata) -> _Places:
    number = {path: index for index, path in enumerate(metadata.files)}
    chunks = [tensor.chunks for tensor in metadata.tensors.values()]
    counts = np.array([len(rows) for rows in chunks], np.int64)
    of_items = [
        (number.setdefault(item.relative_path, len(number)), item.offset, item.length)
        for item in metadata.items.values()
    ]
    table = np.array(of_items, np.int64).reshape(-1, 3)
    key = np.concatenate([np.repeat(np.arange(len(chunks)), counts), len(chunks) + np.arange(len(table))])
    file = np.concatenate([*(rows.file for rows in chunks), table[:, 0]])
    begin = np.concatenate([*(rows.item[:, 0] for rows in chunks), table[:, 1]])
    length = np.concatenate([*(rows.item[:, 1] for rows in chunks), table[:, 2]])
    filled = length > 0
    return _Places(key[filled], file[filled], begin[filled], (begin + length)[filled])


def _are_apart(places: _Places) -> bool:
    """Whether no two share a byte: in order, each then begins at or after the end of the one before it.

    That holds for the beginnings and the ends sorted each on their own, which is faster than sorting places.
    """
    if len(places.file) < 2:
        return True
    reach = int(places.end.max()) + 1
    if int(places.file.max() + 1) * reach >= 1 << 63:
        return False  # not known: let the places themselves be compared
    begins = np.sort(places.file * reach + places.begin)
    ends = np.sort(places.file * reach + places.end)
    return bool((begins[1:] >= ends[:-1]).all())
