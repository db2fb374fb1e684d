"""Who holds which stretch of a section, on a grid of rows of ranks and columns of bytes: pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fsdpckpt.ir.tensors import Int64Array, Tensor
from fsdpckpt.report.modules import Module

__all__ = ["COLUMNS", "Holdings", "holdings"]

COLUMNS = 600
MOST_ROWS = 128

FloatArray: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Holdings:
    """``share`` (rows, COLUMNS): which part of each column's bytes the ranks of a row hold together, 0 to 1.

    ``together`` (COLUMNS,): the same of all ranks. ``nbytes`` (ranks,), ``chunks`` (ranks,): what each rank holds.
    ``ranks_in_row``: ranks that share a row, 1 while there are few.
    """

    share: FloatArray
    together: FloatArray
    nbytes: FloatArray
    chunks: Int64Array
    ranks_in_row: int


@dataclass(frozen=True, slots=True, eq=False)
class _Leaf:
    """One tensor between ``left`` and ``right`` on the axis, in columns, of which it touches ``first`` .. ``last``."""

    tensor: Tensor
    left: float
    right: float
    first: int
    last: int


def holdings(root: Module, world_size: int) -> Holdings:
    """The grid of everything under ``root``. A replica counts for the rank that has it, and once for all together."""
    leaves = list(_leaves(root))
    ranks = max([world_size, 1, *(int(leaf.tensor.chunks.rank.max()) + 1 for leaf in leaves)])
    in_row = -(-ranks // MOST_ROWS)
    share, together = np.zeros((-(-ranks // in_row), COLUMNS)), np.zeros(COLUMNS)
    nbytes, chunks = np.zeros(ranks), np.zeros(ranks, np.int64)
    by_ndim: dict[int, list[_Leaf]] = {}
    for leaf in leaves:
        by_ndim.setdefault(leaf.tensor.ndim, []).append(leaf)
    for group in by_ndim.values():
        rank = np.concatenate([leaf.tensor.chunks.rank for leaf in group])
        counts = np.array([len(leaf.tensor.chunks) for leaf in group])
        itemsize = np.array([leaf.tensor.dtype.itemsize for leaf in group])
        held = np.concatenate([leaf.tensor.chunks.size for leaf in group]).prod(axis=1) * np.repeat(itemsize, counts)
        nbytes += np.bincount(rank, held, ranks)
        chunks += np.bincount(rank[held > 0], minlength=ranks)
        _add_narrow(group, rank // in_row, held * (COLUMNS / max(root.nbytes, 1)), counts, share, together)
    for leaf in leaves:
        if leaf.last - leaf.first > 1:
            parts = _parts(leaf)
            np.add.at(share[:, leaf.first : leaf.last], leaf.tensor.chunks.rank // in_row, parts)
            together[leaf.first : leaf.last] += np.minimum(parts.sum(axis=0), _overlap(leaf))
    return Holdings(np.minimum(share, 1.0), np.minimum(together, 1.0), nbytes, chunks, in_row)


def _leaves(root: Module) -> Iterator[_Leaf]:
    scale = COLUMNS / root.nbytes if root.nbytes else 0.0
    for leaf in root.leaves():
        if leaf.tensor is not None and len(leaf.tensor.chunks):
            left, right = leaf.begin * scale, leaf.end * scale
            first = min(int(left), COLUMNS - 1)
            yield _Leaf(leaf.tensor, left, right, first, min(max(ceil(right), first + 1), COLUMNS))


def _add_narrow(
    group: list[_Leaf],
    rows: Int64Array,
    width: FloatArray,
    counts: Int64Array,
    share: FloatArray,
    together: FloatArray,
) -> None:
    """Add the leaves of one column only, which most of very many are, all at once. ``width``: of each chunk."""
    narrow = np.array([leaf.last - leaf.first == 1 for leaf in group])
    first = np.array([leaf.first for leaf in group])
    number = np.repeat(np.arange(len(group)), counts)
    of_narrow = narrow[number]
    cell = rows[of_narrow] * COLUMNS + first[number[of_narrow]]
    share += np.bincount(cell, width[of_narrow], share.size).reshape(share.shape)
    held = np.bincount(number[of_narrow], width[of_narrow], len(group))
    whole = np.array([leaf.right - leaf.left for leaf in group])
    together += np.bincount(first, np.minimum(held, whole) * narrow, COLUMNS)


def _overlap(leaf: _Leaf) -> FloatArray:
    columns = np.arange(leaf.first, leaf.last, dtype=np.float64)
    overlap: FloatArray = np.clip(np.minimum(leaf.right, columns + 1) - np.maximum(leaf.left, columns), 0.0, None)
    return overlap


def _parts(leaf: _Leaf) -> FloatArray:
    """(chunks, columns): how much of each column every chunk fills.

    A chunk is drawn along the first dimension in which one is not whole, from its start to its end there.
    """
    tensor, chunks, width = leaf.tensor, leaf.tensor.chunks, leaf.right - leaf.left
    begin, end = np.zeros(len(chunks)), np.ones(len(chunks))
    cut = next((k for k, n in enumerate(tensor.shape) if (chunks.size[:, k] != n).any()), None)
    if cut is not None:
        begin = chunks.start[:, cut] / tensor.shape[cut]
        end = begin + chunks.size[:, cut] / tensor.shape[cut]
    columns = np.arange(leaf.first, leaf.last, dtype=np.float64)
    low = np.maximum((leaf.left + begin * width)[:, None], columns)
    high = np.minimum((leaf.left + end * width)[:, None], columns + 1)
    # Cut along another dimension as well, it fills its stretch only in part.
    filled = chunks.size.prod(axis=1) / np.maximum((end - begin) * prod(tensor.shape), 1.0)
    parts: FloatArray = np.clip(high - low, 0.0, None) * np.minimum(filled, 1.0)[:, None]
    return parts
