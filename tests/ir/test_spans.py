"""How many bytes of each file tensors cover."""

from __future__ import annotations

from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.spans import tensor_bytes_by_file
from fsdpckpt.ir.tensors import Chunks, Tensor


def tensor(dtype: str, shape: tuple[int, ...], chunks: Chunks) -> Tensor:
    return Tensor(DTYPES[dtype], shape, chunks)


def test_bytes_that_several_tensors_have_count_once_in_each_file() -> None:
    rows = Chunks.rows(
        ndim=2, rank=[0, 1, 2], file=[0, 1, 1], offset=[100, 0, 48], start=[(0, 0), (2, 0), (4, 0)],
        size=[(2, 3), (2, 3), (0, 3)],
    )  # fmt: skip
    shared = rows.boxes
    held = [
        tensor("float32", (4, 3), rows),  # 24 bytes of file 0, 24 of file 1
        tensor("float64", (4, 3), Chunks(rows.rank, rows.file, rows.offset + 8, shared)),  # the same boxes, wider
        tensor("int8", (), Chunks.whole(file=2, offset=5, shape=())),
        tensor("int16", (3, 2), Chunks.whole(file=2, offset=6, shape=(3, 2), stride=(1, 3))),
    ]
    assert tensor_bytes_by_file(held) == {0: 8 + 48, 1: 8 + 48, 2: 1 + 12}


def test_nothing_is_known_of_what_has_not_been_located_unless_it_is_empty() -> None:
    empty = tensor("float32", (0, 4), Chunks.whole(file=0, offset=-1, shape=(0, 4)))
    assert tensor_bytes_by_file([empty, tensor("int8", (7,), Chunks.whole(file=0, offset=3, shape=(7,)))]) == {0: 7}
    assert tensor_bytes_by_file([tensor("int8", (7,), Chunks.whole(file=0, offset=-1, shape=(7,)))]) is None
    assert tensor_bytes_by_file([]) == {}
