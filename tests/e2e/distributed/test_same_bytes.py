"""However many workers there are and whatever each of them sees: the files are those of one process.

Every case is tried once by workers that see everything and once by workers with disks of their own, by few or by
many; ``tests.execute.test_distributed_routes`` divides random plans between any number.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.distributed.cases import CASES, disks, unequal, write_plan
from tests.e2e.distributed.disks import can_bind
from tests.oracle.launch import torchrun

LIMIT = 200.0  # seconds; 15 to 30 on two idle cores


def _differences(base: Path, out: Path, names: list[str]) -> dict[str, list[str]]:
    found = {name: unequal(base / "local" / CASES[name][1], out / CASES[name][1]) for name in names}
    return {name: files for name, files in found.items() if files}


@pytest.mark.parametrize(("workers", "turn"), [(1, 1), (2, 0), (4, 1)])
def test_workers_that_see_everything_write_what_one_process_writes(
    base: Path, tmp_path: Path, workers: int, turn: int
) -> None:
    names = list(CASES)[turn::2]
    write_plan(tmp_path / "plan.json", base, tmp_path, [], names)
    torchrun("tests.e2e.distributed.work", str(tmp_path / "plan.json"), world_size=workers, limit=LIMIT)
    assert _differences(base, tmp_path, names) == {}


@pytest.mark.skipif(not can_bind(), reason="this machine allows no mount namespaces")
@pytest.mark.parametrize(("workers", "turn"), [(2, 1), (3, 0)])
def test_workers_of_which_each_has_a_disk_of_its_own_write_what_one_process_writes(
    base: Path, tmp_path: Path, workers: int, turn: int
) -> None:
    (tmp_path / "disk").symlink_to(base / "disk")
    machines = disks_of(base, tmp_path, workers)
    names = [name for name in list(CASES)[turn::2] if name != "links"]  # a file on another machine cannot be linked
    write_plan(tmp_path / "plan.json", base, tmp_path, machines, names)
    torchrun("tests.e2e.distributed.work", str(tmp_path / "plan.json"), world_size=workers, limit=LIMIT)
    assert _differences(base, tmp_path, names) == {}


@pytest.mark.skipif(not can_bind(), reason="this machine allows no mount namespaces")
def test_only_tensor_bytes_take_the_data_plane_and_only_while_data_is_copied(base: Path, tmp_path: Path) -> None:
    """Over NCCL a small message occupies a GPU on each side: plans, counts, headers and errors take the other plane."""
    (tmp_path / "disk").symlink_to(base / "disk")
    machines, names = disks_of(base, tmp_path, 3), ["gather", "all to all", "rekey"]
    write_plan(tmp_path / "plan.json", base, tmp_path, machines, names)
    plan = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "planes").mkdir()
    (tmp_path / "plan.json").write_text(json.dumps({**plan, "planes": str(tmp_path / "planes")}))
    torchrun("tests.e2e.distributed.work", str(tmp_path / "plan.json"), world_size=3, limit=LIMIT)
    assert _differences(base, tmp_path, names) == {}
    ranks = [json.loads((tmp_path / "planes" / f"{rank}.json").read_text()) for rank in range(3)]
    steps = {step for rank in ranks for step, _ in rank["data"]}
    assert steps and all("copy" in step for step in steps), steps
    planned = {step for rank in ranks for step, _ in rank["control"] if "plan" in step}
    assert planned, "rank 0 asked the others for headers"
    moved = sum(nbytes for rank in ranks for _, nbytes in rank["data"])
    said = max(nbytes for rank in ranks for step, nbytes in rank["control"] if "copy" in step)
    assert moved > 1_000_000 and said < 1000


def disks_of(base: Path, tmp_path: Path, workers: int) -> list[dict[str, str]]:
    """The disks in ``tmp_path``, shown at the path of the sources."""
    found = disks(tmp_path, workers)
    return [{str(base / "disk"): directory for directory in disk.values()} for disk in found]
