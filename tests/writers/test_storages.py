from __future__ import annotations

import pytest

from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.writers.torch_full import memory_order, shared_views


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [
        ((3, 4), (4, 1), (None, (4, 1))),
        ((4, 3), (1, 4), ((1, 0), (1, 4))),
        ((2, 3, 4, 5), (60, 1, 15, 3), ((0, 2, 3, 1), (60, 1, 15, 3))),  # channels_last
        ((3, 4), (8, 1), (None, (4, 1))),  # every second row: not dense
        ((3, 4), (4, 2), (None, (4, 1))),  # overlapping
        ((3, 4), (0, 1), (None, (4, 1))),  # expanded
        ((3, 1, 4), (4, 99, 1), (None, (4, 4, 1))),  # the stride of one element says nothing
        ((4, 1, 3), (1, 7, 4), ((1, 2, 0), (1, 12, 4))),
        ((0, 3), (1, 9), (None, (3, 1))),
        ((1, 1), (5, 7), (None, (1, 1))),
    ],
)
def test_a_compact_copy_keeps_the_order_of_dense_memory_only(shape, stride, expected):
    assert memory_order(shape, stride) == expected


def at(offset: int, file: int = 0) -> Tensor:
    return Tensor(DTYPES["float32"], (3,), Chunks.whole(file=file, offset=offset, shape=(3,)))


def test_tensors_that_overlap_by_parts_of_an_element_are_copied_apart_and_noted():
    views, notes = shared_views([at(64), at(70)], {})
    assert not views and [note.kind for note in notes] == ["unshared"]


def test_equal_places_in_different_files_are_not_shared():
    assert shared_views([at(64), at(64, file=1), at(80)], {}) == ({}, [])
