"""Write items against chunks: every target byte once, at any number of ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fsdpckpt.errors import InternalError
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.targets import Target, TargetFile
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.plan import check_file, make_plan


def _rows(count: int, ranks: int, width: int = 3) -> Tensor:
    """``count`` rows cut over ``ranks`` files by torch.chunk's rule, and a replica of each chunk on a second rank."""
    step = -(-count // ranks)
    first = [min(rank * step, count) for rank in range(ranks)]
    size = [min(step, count - row) for row in first]
    columns = {
        "rank": [*range(ranks), *range(ranks, 2 * ranks)],
        "file": [*range(ranks), *range(ranks, 2 * ranks)],
        "offset": [64] * (2 * ranks),
        "start": [(row, 0) for row in first] * 2,
        "size": [(rows, width) for rows in size] * 2,
    }
    return Tensor(DTYPES["float32"], (count, width), Chunks.rows(ndim=2, **columns))


@pytest.mark.parametrize(("before", "after"), [(4, 3), (1, 8), (8, 1), (3, 16), (2048, 300), (300, 2048)])
def test_resharding_reads_each_row_from_the_lowest_rank_that_holds_it(before: int, after: int) -> None:
    count = 5003
    tensor = _rows(count, before)
    step = -(-count // after)
    files = []
    for rank in range(after):
        file = TargetFile(f"rank{rank}")
        low = min(rank * step, count)
        file.add_write_item(tensor, start=(low, 0), size=(min(step, count - low), 3))
        files.append(file)
    plan = make_plan(Target(files))
    old = -(-count // before)
    seen = np.zeros(count, int)
    for rank, file in enumerate(plan.files):
        for number, source, target, width in zip(
            file.copies.file.tolist(), file.copies.source, file.copies.target, file.copies.width, strict=True
        ):
            assert number < before
            row = number * old + (source - 64) // 12
            assert row == rank * step + target // 12
            seen[row : row + width // 12] += 1
    assert (seen == 1).all()


@pytest.mark.timeout(60)  # a second; the quadratic way takes minutes
def test_planning_thousands_of_ranks_is_not_quadratic() -> None:
    tensor = _rows(5003, 2048)
    files = [TargetFile(f"rank{rank}") for rank in range(2048)]
    for rank, file in enumerate(files):
        low = min(rank * 3, 5003)
        file.add_write_item(tensor, start=(low, 0), size=(min(3, 5003 - low), 3))
    plan = make_plan(Target(files))
    assert plan.bytes_written == 5003 * 12


def test_a_chunk_that_was_never_located_is_an_internal_error() -> None:
    tensor = Tensor(DTYPES["float32"], (3,), Chunks.whole(file=0, offset=-1, shape=(3,)))
    file = TargetFile("out")
    file.add_write_item(tensor)
    with pytest.raises(InternalError, match="never located"):
        make_plan(Target([file]))


def test_a_write_item_that_no_chunk_fills_is_an_internal_error() -> None:
    tensor = Tensor(DTYPES["float32"], (4,), Chunks.whole(file=0, offset=0, shape=(3,)))
    file = TargetFile("out")
    file.add_write_item(tensor)
    with pytest.raises(InternalError, match="does not fill"):
        make_plan(Target([file]))


def test_a_gap_between_literals_and_write_items_is_an_internal_error() -> None:
    file = TargetFile("out")
    file.add_literal(b"abc")
    plan = make_plan(Target([file]))
    with pytest.raises(InternalError, match="gap"):
        check_file(replace(plan.files[0], nbytes=5))


def test_chunks_that_tile_a_tensor_without_being_a_grid_all_find_their_place() -> None:
    """The left column is one tall chunk, the right one is cut into single rows: ends do not grow with starts."""
    count = 50
    columns = {
        "rank": range(count + 1),
        "file": [0] * (count + 1),
        "offset": [8 * row for row in range(count + 1)],
        "start": [(0, 0), *((row, 1) for row in range(count))],
        "size": [(count, 1), *((1, 1) for _ in range(count))],
    }
    tensor = Tensor(DTYPES["float32"], (count, 2), Chunks.rows(ndim=2, **columns))
    file = TargetFile("rows")
    for row in range(count):
        file.add_write_item(tensor, start=(row, 0), size=(1, 2))
    copies = make_plan(Target([file])).files[0].copies
    assert copies.source.tolist() == [place for row in range(count) for place in (4 * row, 8 * (row + 1))]
    assert copies.target.tolist() == list(range(0, 8 * count, 4))
