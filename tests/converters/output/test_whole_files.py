"""Workers that write to a store each have whole files: one writer for each, and about as many bytes for all."""

from __future__ import annotations

import random

import pytest

from fsdpckpt.plan.plan import Plan, _outline
from fsdpckpt.plan.transfer import partition_whole


@pytest.mark.parametrize("seed", range(20))
def test_each_file_has_one_writer_and_none_has_more_than_its_share_and_a_file(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 700, 1000, 9000]) for _ in range(rng.randrange(1, 30))]
    plan = Plan(tuple(_outline(str(number), nbytes) for number, nbytes in enumerate(sizes)), (), 0)
    workers = list(range(rng.randrange(1, 9)))
    lists = {number for number in range(len(sizes)) if rng.random() < 0.2}
    segments = partition_whole(plan, range(len(sizes)), workers, directory=0, first=lists)
    assert [(each.file, each.begin, each.end) for each in segments] == [(n, 0, size) for n, size in enumerate(sizes)]
    assert {each.owner for each in segments if each.file in lists} <= {0}
    others = [each for each in segments if each.file not in lists]
    assert [each.owner for each in others] == sorted(each.owner for each in others), "neighbours have one writer"
    for worker in workers:
        assert sum(e.end - e.begin for e in others if e.owner == worker) <= sum(sizes) / len(workers) + max(sizes)


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_equal_files_are_divided_equally(workers: int) -> None:
    plan = Plan(tuple(_outline(str(number), 100) for number in range(2 * workers)), (), 0)
    segments = partition_whole(plan, range(2 * workers), range(workers), directory=0, first=())
    assert [each.owner for each in segments] == [number // 2 for number in range(2 * workers)]
