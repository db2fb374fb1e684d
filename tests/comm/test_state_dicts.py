"""Gather, shard, scatter, broadcast and exchange between real Gloo workers, against PyTorch's own functions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.comm.checks import WORLD_SIZES, situations


@pytest.mark.parametrize(
    ("situation", "world_size"), [(name, size) for size in WORLD_SIZES for name in situations(size)]
)
def test_as_pytorch_on_every_rank(checks: Path, situation: str, world_size: int) -> None:
    for rank in range(world_size):
        results = json.loads((checks / str(world_size) / f"rank-{rank}.json").read_text())
        assert results.get(situation, "never came so far") == "", f"rank {rank}: {results.get(situation)}"


def test_tasks_that_srun_started_find_each_other(checks: Path) -> None:
    for rank in range(2):
        assert json.loads((checks / f"srun-{rank}.json").read_text()) == {"ranks": [0, 1], "backend": "gloo"}


def test_several_runs_in_one_process_find_each_other_also_beside_a_process_group(checks: Path) -> None:
    for rank in range(2):
        row = json.loads((checks / f"row-{rank}.json").read_text())
        assert row["gathered"] == [*([[0, number], [1, number]] for number in range(4)), ["fails"]]
        own = [number != 2 for number in range(5)]  # in one run both see the same GPU, by its identity
        assert row["votes"] == [[each, True] for each in own], "votes of an earlier run were counted"
        assert row["total"] == 1
