"""Finds tensors by their stored items, when a reader may have joined or renamed what the metadata declares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from fsdpckpt.ir.tensors import Int64Array, Tensor, distinct
from fsdpckpt.readers.protocol import Items


def items_of(tensors: Iterable[Tensor]) -> Items:
    """All items of ``tensors``. A reader may have joined tensors of the directory, and left out chunks without
    elements: any of these may hold the first item of one.
    """
    stored = [(each.chunks.file, each.chunks.item) for each in tensors if each.chunks.item is not None]
    numbers = [_item_numbers(file, item) for file, item in stored]
    return distinct(np.concatenate(numbers)) if numbers else np.zeros(0, np.int64)


def have_items(stored: Sequence[tuple[Int64Array, Int64Array]], items: Items) -> list[bool]:
    """Whether each tensor, of which ``stored`` has the files and the items of its chunks, has one of ``items``."""
    if not len(items) or not stored:
        return [False] * len(stored)
    numbers = np.concatenate([_item_numbers(file, item) for file, item in stored])
    at = np.searchsorted(items, numbers)
    found = items[np.minimum(at, len(items) - 1)] == numbers
    before = np.concatenate([[0], np.cumsum(found)])
    ends = np.cumsum([0, *(len(file) for file, _ in stored)])
    has_one: list[bool] = (before[ends[1:]] > before[ends[:-1]]).tolist()
    return has_one


def _item_numbers(file: Int64Array, item: Int64Array) -> Int64Array:
    """One number for each item, by its file and where it begins. Several items of impossible places may have one."""
    return file * _MAX_BEGIN + item[:, 0]


_MAX_BEGIN = 1 << 46
