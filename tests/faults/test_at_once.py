"""Several conversions at the same time, and the trial that kills them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.faults.conftest import DCP, FULL
from tests.faults.runs import convert, hidden, same
from tests.oracle.forked import run

Whole = Callable[..., Path]
KILL_TEST = str(Path(__file__).parents[2] / "scripts" / "kill_moments.py")


def test_eight_conversions_from_one_source_at_once(source: Path, tmp_path: Path, whole: Whole) -> None:
    before = source.stat()
    targets = [(tmp_path / f"target{number}", (FULL, DCP)[number % 2]) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda pair: convert(source, pair[0], *pair[1], limit=200), targets))
    assert [run.code for run in runs] == [0] * 8, runs
    for target, options in targets:
        assert same(whole(*options), target)
    after = source.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)


def test_of_many_runs_into_one_target_one_writes_it(source: Path, tmp_path: Path, whole: Whole) -> None:
    target = tmp_path / "target"
    with ThreadPoolExecutor(5) as pool:
        runs = list(pool.map(lambda _: convert(source, target, *DCP, limit=200), range(5)))
    assert sorted(run.code for run in runs) == [0, 5, 5, 5, 5], runs
    assert same(whole(*DCP), target)
    assert not hidden(target).exists()


def test_a_run_that_is_going_on_is_not_resumed_by_another(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(convert, source, target, *FULL, hook=(15, "import time; time.sleep(4)"))
        while not (hidden(target) / "journal").exists():
            assert not first.done(), first.result()
        second = convert(source, target, *FULL, "--resume")
        assert second.code == 5
        assert "another fsdpckpt is writing" in second.err
        assert first.result().code == 0


def test_kill_9_at_random_moments_over_all_containers(tmp_path: Path) -> None:
    command = [KILL_TEST, "--moments", "6", "--size", "8000000", "--directory", str(tmp_path)]
    done = run(command, kind="torch", timeout=280, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no promise broken" in done.stdout
