"""Lets a DCP target use data files of a DCP source as they are.

An item of a data file carries neither names nor the place of its box: ``.metadata`` says both. Where a target wants the
boxes that the source has, in their dtypes, its ``.metadata`` can point to the source's items, and the files are linked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.targets import LinkedFile
from fsdpckpt.ir.tensors import Int64Array, Tensor, first_equal
from fsdpckpt.layouts import RankBoxes


class Linked(NamedTuple):
    """Where those boxes of one tensor lie that are in linked files, one row each. ``boxes``: which of all these are.

    ``file``: a number of the source's; ``offset``, ``nbytes``: of the item in it.
    """

    boxes: npt.NDArray[np.bool_]
    file: Int64Array
    offset: Int64Array
    nbytes: Int64Array


class LinkedItems:
    """The items of the source that a target points to. False where there are none.

    ``values``: the target's tensors, None for other values, with the boxes of each; ``casts``: the new dtypes.
    ``linkable``: the source's files that may be linked. Of these, a file is linked when most bytes that the target
    takes from it are items that stay as they are.
    """

    def __init__(
        self, values: Sequence[tuple[Tensor | None, RankBoxes]], casts: Mapping[Tensor, DType], linkable: frozenset[int]
    ) -> None:
        files = max(linkable, default=-1) + 1
        kept, copied = np.zeros(files, np.int64), np.zeros(files, np.int64)
        rank = np.zeros(files, np.int64)  # the one that wrote each file
        found: dict[int, tuple[Int64Array, Int64Array, Int64Array]] = {}
        for number, (tensor, boxes) in enumerate(values if linkable else ()):
            if tensor is not None and tensor.chunks.item is not None:
                chunks, item = tensor.chunks, tensor.chunks.item
                stored, rows = _stored_boxes(tensor, boxes)
                usable = stored[np.isin(chunks.file[stored], list(linkable))]
                wanted = np.isin(usable, rows) & (tensor not in casts)
                for used, total in ((wanted, kept), (~wanted, copied)):
                    np.add.at(total, chunks.file[usable[used]], item[usable[used], 1])
                rank[chunks.file[usable]] = chunks.rank[usable]
                if tensor not in casts:
                    found[number] = (rows, np.where(rows < 0, -1, chunks.file[rows]), item[rows])
        linked = [file for file in sorted(linkable) if kept[file] > copied[file]]
        self._named: Counter[int] = Counter()
        self._names = {file: self.free_name(int(rank[file])) for file in linked}
        self._used: Counter[int] = Counter()
        self._linked: dict[int, Linked] = {}
        for number, (_, file, item) in found.items():
            taken = np.isin(file, linked)
            if taken.any():
                self._linked[number] = Linked(taken, file[taken], item[taken, 0], item[taken, 1])
                for each, nbytes in zip(file[taken].tolist(), item[taken, 1].tolist(), strict=True):
                    self._used[each] += nbytes

    def __bool__(self) -> bool:
        return bool(self._names)

    def free_name(self, rank: int) -> str:
        """The name of one more data file of ``rank``, as ``FileSystemWriter`` numbers them."""
        number = self._named[rank]
        self._named[rank] += 1
        return f"__{rank}_{number}.distcp"

    def of(self, number: int) -> Linked | None:
        """The boxes of value ``number`` that linked files hold, None where all have to be written."""
        return self._linked.get(number)

    def names(self) -> Mapping[int, str]:
        """The name of each linked file by its number in the source."""
        return self._names

    def files(self, path: str) -> list[LinkedFile]:
        """The linked files, with the bytes of them that were taken; their names begin with ``path``."""
        return [LinkedFile(path + name, file, self._used[file]) for file, name in self._names.items()]


def _stored_boxes(tensor: Tensor, wanted: RankBoxes) -> tuple[Int64Array, Int64Array]:
    """The chunks that the source stores in items of their own, of replicas the first; and for each box of ``wanted``
    the one that is it, -1 for none.

    Not those of data files in the safetensors format, which hold one blob for all.
    """
    chunks, item = tensor.chunks, tensor.chunks.item
    if item is None:
        return np.zeros(0, np.int64), np.full(len(wanted.rank), -1)
    nbytes = chunks.size.prod(axis=1) * tensor.dtype.itemsize
    archives = np.flatnonzero(item[:, 1] > nbytes)
    start = np.concatenate([chunks.start[archives], wanted.start])
    equal = first_equal(np.concatenate([start, np.concatenate([chunks.size[archives], wanted.size])], axis=1))
    count = len(archives)
    found = equal[count:]
    stored = archives[equal[:count] == np.arange(count)]
    return stored, np.where(found < count, archives[np.minimum(found, max(count - 1, 0))] if count else -1, -1)
