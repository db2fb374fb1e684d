"""Lets a DCP target use data files of a DCP source as they are.

An item of a data file carries neither names nor the place of its box: ``.metadata`` says both. Where a target wants the
boxes that the source has, in their dtypes, its ``.metadata`` can point to the source's items, and the files are linked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fsdpckpt.formats.dcp.metadata import StoredChunk
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.targets import LinkedFile
from fsdpckpt.ir.tensors import Box, RankBoxes, Tensor
from fsdpckpt.ir.values import Value


class _Item(NamedTuple):
    """An archive in file number ``file`` of the source, from byte ``offset`` on. ``rank``: the one that wrote it."""

    file: int
    rank: int
    offset: int
    nbytes: int


class LinkedItems:
    """The items of the source that a target points to. False where there are none.

    ``values``: the target's, with the boxes of each that is a tensor; ``casts``: the new dtypes. ``linkable``: the
    source's files that may be linked. Of these, a file is linked when most bytes that the target takes from it are
    items that stay as they are.
    """

    def __init__(
        self, values: Sequence[tuple[Value, RankBoxes]], casts: Mapping[Tensor, DType], linkable: frozenset[int]
    ) -> None:
        self._items: dict[Tensor, dict[Box, _Item]] = {}
        self._used: Counter[int] = Counter()
        kept: Counter[int] = Counter()
        copied: Counter[int] = Counter()
        for tensor, boxes in values if linkable else ():
            if isinstance(tensor, Tensor):
                wanted = {box for _, box in boxes} if tensor not in casts else set()
                stored = _stored_items(tensor)
                for box, item in stored.items():
                    (kept if box in wanted else copied)[item.file] += item.nbytes
                self._items[tensor] = {box: item for box, item in stored.items() if box in wanted}
        linked = {file for file in linkable if kept[file] > copied[file]}
        ranks: dict[int, int] = {}
        for tensor, items in self._items.items():
            self._items[tensor] = {box: item for box, item in items.items() if item.file in linked}
            ranks |= {item.file: item.rank for item in items.values() if item.file in linked}
        self._named: Counter[int] = Counter()
        self._names = {file: self.free_name(ranks[file]) for file in sorted(ranks)}

    def __bool__(self) -> bool:
        return bool(self._names)

    def free_name(self, rank: int) -> str:
        """The name of one more data file of ``rank``, as ``FileSystemWriter`` numbers them."""
        number = self._named[rank]
        self._named[rank] += 1
        return f"__{rank}_{number}.distcp"

    def take(self, tensor: Tensor, box: Box) -> StoredChunk | None:
        """The item of a linked file that holds ``box`` of ``tensor``, None where it has to be written."""
        item = self._items.get(tensor, {}).get(box)
        if item is None:
            return None
        self._used[item.file] += item.nbytes
        return StoredChunk(box.offsets, box.sizes, self._names[item.file], item.offset, item.nbytes)

    def files(self, path: str) -> list[LinkedFile]:
        """The linked files, with the bytes of them that were taken; their names begin with ``path``."""
        return [LinkedFile(path + name, file, self._used[file]) for file, name in self._names.items()]


def _stored_items(tensor: Tensor) -> dict[Box, _Item]:
    """The item of each box that the source stores in one of its own, of replicas the first.

    Not those of data files in the safetensors format, which hold one blob for all.
    """
    chunks = tensor.chunks
    if chunks.item is None:
        return {}
    found: dict[Box, _Item] = {}
    nbytes = chunks.size.prod(axis=1) * tensor.dtype.itemsize
    columns = (chunks.file, chunks.rank, chunks.item, chunks.start, chunks.size, nbytes)
    for file, rank, (offset, length), start, size, data in zip(*(column.tolist() for column in columns), strict=True):
        if length > data:  # an archive
            found.setdefault(Box(tuple(start), tuple(size)), _Item(file, rank, offset, length))
    return found
