"""Workers that write to a store divide its objects: no part has two senders, and about as many bytes go to each."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from fsdpckpt.converters.output.division import assign_parts
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.plan.plan import Copies, Plan, _outline
from fsdpckpt.storage.upload import UPLOADED_LAST


@pytest.mark.parametrize("seed", range(20))
def test_no_part_has_two_senders_and_no_worker_has_much_more_than_its_share(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 700, 1000, 9000, 50_000]) for _ in range(rng.randrange(1, 30))]
    names = [f"x{number}{rng.choice(UPLOADED_LAST) if rng.random() < 0.2 else ''}" for number in range(len(sizes))]
    plan = Plan(tuple(_outline(name, nbytes) for name, nbytes in zip(names, sizes, strict=True)), (), 0)
    workers, part = list(range(rng.randrange(1, 9))), rng.choice([64, 100, 1000])
    segments = assign_parts(plan, workers, part)
    for number, (name, nbytes) in enumerate(zip(names, sizes, strict=True)):
        own = sorted((each.begin, each.end, each.owner) for each in segments if each.file == number)
        assert [begin for begin, _, _ in own] == [0, *(end for _, end, _ in own[:-1])], "each byte has one sender"
        assert own[-1][1] == nbytes
        assert all(begin % part == 0 for begin, _, _ in own)
        if name.endswith(UPLOADED_LAST):
            assert own == [(0, nbytes, 0)], "the first worker sends the lists"
    data = [each for each in segments if not names[each.file].endswith(UPLOADED_LAST)]
    assert [each.owner for each in data] == sorted(each.owner for each in data), "neighbours have one writer"
    share = sum(each.end - each.begin for each in data) / len(workers)
    for worker in workers:
        assert sum(each.end - each.begin for each in data if each.owner == worker) <= share * 1.8 + part


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_equal_files_are_divided_equally_and_each_has_one_sender(workers: int) -> None:
    plan = Plan(tuple(_outline(str(number), 100) for number in range(2 * workers)), (), 0)
    segments = assign_parts(plan, range(workers), 10)
    assert [(each.begin, each.end) for each in segments] == [(0, 100)] * (2 * workers)
    assert [each.owner for each in segments] == [number // 2 for number in range(2 * workers)]


@pytest.mark.parametrize(("offset", "cut"), [(16, 100), (18, 0), (118, 100)])
def test_no_element_that_is_cast_has_two_senders(offset: int, cut: int) -> None:
    """A tensor that is not aligned to its elements is cut by all ends of parts: it has one sender."""
    columns = [0, 0, 0, offset, 4 * 90, 4 * 90, 1, 0]
    file = replace(
        _outline("x", offset + 4 * 90),
        write_items=np.array([[offset, 4 * 90]], np.int64),
        first_copy=np.array([0, 1]),
        copies=Copies(*np.array(columns, np.int64)[:, None]),
    )
    plan = Plan((file,), ((DTYPES["bfloat16"], DTYPES["float32"]),), 0)
    segments = assign_parts(plan, range(2), 100)
    assert [each.begin for each in segments] == ([0, cut] if cut else [0])
