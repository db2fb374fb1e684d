"""A worker of a conversion goes wrong: all end soon, it is reported once, and DST is not half-made."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.distributed.processes import trouble
from tests.oracle.forked import processes_in, run

LIMIT = 4.0  # seconds, so that the tests do not take 15 each
COPY, READ = "fsdpckpt.execute.run:write_window", "fsdpckpt.converters.pipeline:prepare"
COMPARE = "fsdpckpt.converters.check:first_difference"
FINISH, COMMIT = "fsdpckpt.execute.output:Output.export", "fsdpckpt.storage.staging:Staging.commit"


def _run(
    base: Path, tmp_path: Path, rank: int, place: str, kind: str, call: int = 1
) -> tuple[int, dict[str, Any], float]:
    """Exit code, the error document, and seconds from the trouble to the end."""
    when = tmp_path / "when"
    command = ["-m", "fsdpckpt", "convert", str(base / "disk" / "ranks"), str(tmp_path / "out.pt")]
    command += ["--nproc-per-node", "3", "--max-memory", "1MiB", "--fault-limit", str(LIMIT), "--json"]
    command += ["--verify", "full"]
    ended = run(command, kind="torch", env=trouble(rank, place, kind, when, call), cwd=str(tmp_path), timeout=150)
    seconds = time.time() - float(when.read_text())
    assert "Traceback" not in ended.stderr
    return ended.returncode, json.loads(ended.stdout)["error"], seconds


@pytest.mark.parametrize(
    ("rank", "place", "kind", "step", "cause"),
    [
        (1, COPY, "fail", "copy", "RuntimeError: the lights went out"),
        (2, COPY, "kill", "copy", "killed by SIGKILL"),
        (0, COPY, "kill", "copy", "killed by SIGKILL"),
        (1, COPY, "stop", "copy", "no progress"),
        (0, READ, "hang", "read and plan", "no progress"),
        (2, FINISH, "hang", "finish", "no progress"),
        (1, COMPARE, "kill", "compare the output", "killed by SIGKILL"),
        (0, COMMIT, "fail", "commit", "RuntimeError: the lights went out"),
    ],
)
def test_a_worker_that_is_lost_ends_all_with_one_error_that_names_it(
    base: Path, tmp_path: Path, rank: int, place: str, kind: str, step: str, cause: str
) -> None:
    code, error, seconds = _run(base, tmp_path, rank, place, kind)
    assert code == error["exit_code"] == 6, error
    assert str(error["what"]).startswith(f"worker {rank} failed in step '{step}': {cause}"), error
    assert error["rank"] == rank
    assert seconds < LIMIT + 20, "workers ended too late"  # starting and ending processes takes its time on busy cores
    assert not (tmp_path / "out.pt").exists()
    staged = any(path.name.startswith(".out.pt.fsdpckpt-staging") for path in tmp_path.iterdir())
    assert staged is (place != READ), "what was staged is kept"
    assert processes_in(tmp_path) == []


def test_an_error_that_any_worker_meets_is_the_one_that_a_lone_process_would_end_with(
    base: Path, tmp_path: Path
) -> None:
    ended, error, _ = _run(base, tmp_path, 1, COPY, "damage")
    assert ended == error["exit_code"] == 3, error
    assert "a record is damaged" in str(error["what"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["when"], "something was left"


def test_a_full_disk_leaves_what_was_written_and_says_how_to_go_on(base: Path, tmp_path: Path) -> None:
    ended, error, _ = _run(base, tmp_path, 2, COPY, "full", 3)
    assert ended == error["exit_code"] == 5, error
    assert "full.pt" in str(error["what"])
    root = str(tmp_path / ".out.pt.fsdpckpt-staging")
    assert str(error["details"][0]).endswith(
        f"B done, kept in {root} (delete it to give up): the same command continues from there"
    ), error
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.pt.fsdpckpt-staging", "when"]
