"""The promise of 15 seconds: one worker is killed, stopped or cut off inside each step, and all others end in time.

``scripts/lost_test`` plays every step, trouble, rank and number of workers; here is a part of them in which a worker is
killed, stopped and cut off in each step, and rank 0, which plans and serves the store, as often as the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.distributed.disks import can_bind
from tests.e2e.distributed.lost import LOST, STEPS, TROUBLES, Lost, make, play_all, unkept

pytestmark = pytest.mark.skipif(not can_bind(), reason="this machine allows no mount namespaces")

LIMIT = 15.0  # seconds: what users are promised, so that a slow machine fails only where a user would be failed
AT_ONCE = 9  # most of each is waiting

PLAYED = [
    Lost("read and plan", "kill", 0, 2),
    Lost("read and plan", "stop", 1, 3),
    Lost("read and plan", "unreachable", 0, 2),
    Lost("read and plan", "cut off", 1, 3),
    Lost("read back", "kill", 2, 3),
    Lost("read back", "stop", 0, 2),
    Lost("read back", "cut off", 1, 2),
    Lost("copy", "kill", 1, 2),
    Lost("copy", "stop", 0, 3),
    Lost("copy", "cut off", 2, 3),
    Lost("exchange", "kill", 0, 3),
    Lost("exchange", "stop", 1, 2),
    Lost("exchange", "cut off", 0, 2),
    Lost("exchange", "unreachable", 1, 3),
    Lost("finish", "kill", 1, 3),
    Lost("finish", "stop", 0, 2),
    Lost("finish", "cut off", 1, 2),
    Lost("verify", "kill", 0, 3),
    Lost("verify", "cut off", 1, 3),
    Lost("verify", "unreachable", 0, 2),
    Lost("verify", "stop", 1, 2),
    Lost("publish", "kill", 1, 2),
    Lost("publish", "stop", 0, 3),
    Lost("publish", "cut off", 0, 2),
    Lost("publish", "unreachable", 2, 3),
]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("lost")
    make(out / "base")
    return out, play_all(PLAYED, out, limit=LIMIT, at_once=AT_ONCE)


@pytest.mark.parametrize("lost", PLAYED, ids=lambda lost: lost.name)
def test_all_others_end_in_time_and_name_the_worker_that_was_lost(
    played: tuple[Path, dict[str, Any]], lost: Lost
) -> None:
    out, results = played
    ended = results[lost.name]
    assert unkept(lost, ended, LIMIT) == [], ended
    assert not (out / lost.directory / "target" / "out").exists(), "published"


def test_each_step_meets_each_trouble() -> None:
    for step in STEPS:
        assert {"kill", "stop", "cut off"} <= {lost.trouble for lost in PLAYED if lost.step == step}, step
    assert {lost.trouble for lost in PLAYED} == set(TROUBLES)
    assert set(PLAYED) <= set(LOST)
