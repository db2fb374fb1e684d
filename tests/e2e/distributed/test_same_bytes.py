"""However many workers there are and whatever each of them sees: the files are those of one process.

Every case is tried once by workers that see everything and once by workers with disks of their own, by few or by
many; ``tests.execute.test_distributed_routes`` divides random plans between any number.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.distributed.cases import CASES, case, disks, unequal, write_plan
from tests.e2e.distributed.disks import can_bind
from tests.oracle.launch import torchrun

LIMIT = 200.0  # seconds; 15 to 30 on two idle cores
needs_disks = pytest.mark.skipif(not can_bind(), reason="this machine allows no mount namespaces")


def _require_same_bytes(base: Path, out: Path, names: list[str], workers: int, *, apart: bool, **more: Any) -> None:
    """``apart``: each worker has a disk of its own."""
    machines = disks(base, out, workers) if apart else []
    plan = write_plan(out / "plan.json", [case(base, out, name) for name in names], machines, **more)
    torchrun("tests.e2e.distributed.work", plan, world_size=workers, limit=LIMIT)
    found = {name: unequal(base / "local" / CASES[name][1], out / CASES[name][1]) for name in names}
    assert {name: files for name, files in found.items() if files} == {}


@pytest.mark.parametrize(
    ("workers", "turn", "apart"),
    [
        (1, 1, False),
        (2, 0, False),
        (4, 1, False),
        pytest.param(2, 1, True, marks=needs_disks),
        pytest.param(3, 0, True, marks=needs_disks),
    ],
)
def test_workers_write_what_one_process_writes(
    base: Path, tmp_path: Path, workers: int, turn: int, apart: bool
) -> None:
    names = [name for name in list(CASES)[turn::2] if not apart or name != "links"]  # to another machine there is none
    _require_same_bytes(base, tmp_path, names, workers, apart=apart)


@needs_disks
def test_only_tensor_bytes_take_the_data_plane_and_only_while_data_is_copied(base: Path, tmp_path: Path) -> None:
    """Over NCCL a small message occupies a GPU on each side: plans, counts, headers and errors take the other plane."""
    planes = tmp_path / "planes"
    planes.mkdir()
    _require_same_bytes(base, tmp_path, ["gather", "all to all", "rekey"], 3, apart=True, planes=str(planes))
    ranks = [json.loads((planes / f"{rank}.json").read_text()) for rank in range(3)]
    steps = {step for rank in ranks for step, _ in rank["data"]}
    assert steps and all("copy" in step for step in steps), steps
    planned = {step for rank in ranks for step, _ in rank["control"] if "plan" in step}
    assert planned, "rank 0 asked the others for headers"
    moved = sum(nbytes for rank in ranks for _, nbytes in rank["data"])
    said = max(nbytes for rank in ranks for step, nbytes in rank["control"] if "copy" in step)
    assert moved > 1_000_000 and said < 1000
